"""The static facts of an attention call: exactly the facts that kernels are specialised on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .fp8 import output_dtype

# Scales below this are negative, 0, or may be flushed to 0 in float32. Masked scores of -inf times such a scale would
# not be -inf.
SMALLEST_SCALE = 2.0**-126
CAUSAL = "Causal()"  # the variant key of a causal mask without score modifications


@dataclass(frozen=True)
class AttentionCall:
    """The static facts of one call. Batch, lengths, head counts, strides and scalars are run-time values of a kernel.

    Attributes:
        dtype: the dtype of q, k and v.
        head_dim: elements per head of q and k.
        head_dim_v: elements per head of v and o.
        variant: the key of the mask and the score modifications (see :mod:`tileattn.variant.key`), ``""`` for none.
        sink: whether a sink logit per head joins the softmax.
        aligned: whether the addresses and strides of q, k and v are multiples of 16 bytes.
        needs_grad: whether gradients may be asked for. A backend that accepts such a call must have a backward pass.
        return_lse: whether lse is written.
        arch: ``"cpu"``, or a GPU architecture in the compiler's spelling: ``"sm_80"``, ``"sm_90a"``, ``"gfx942"``, ...
        dropout: whether probabilities are dropped.
        packed: whether several sequences are packed into one batch element (see :class:`Packed`).
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    variant: str = ""
    sink: bool = False
    aligned: bool = True
    needs_grad: bool = False
    return_lse: bool = True
    arch: str = "cpu"
    dropout: bool = False
    packed: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of o: that of q, k and v, or bfloat16 for fp8."""
        return output_dtype(self.dtype)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        flags = ["sink"] * self.sink + ["lse"] * self.return_lse + ["needs_grad"] * self.needs_grad
        flags += ["packed"] * self.packed + ["dropout"] * self.dropout + ["unaligned"] * (not self.aligned)
        parts = [str(self.dtype).removeprefix("torch."), f"d{dims}", self.variant or "full", *flags, self.arch]
        return " ".join(parts)


class Packed(NamedTuple):
    """The sequences of a packed call: sequence ``i`` has the rows ``cu_seqlens[i] : cu_seqlens[i + 1]``.

    In a packed call, q, k, v and o have one batch element, (1, total, heads, head_dim), and lse is (1, heads, total_q).
    Masks and modifications see the sequences as the batch: ``b`` is the number of a sequence, and positions count
    within the sequence.

    Attributes:
        cu_seqlens_q: int32 (sequences + 1,), contiguous, on q's device: 0, then the cumulative lengths of the queries.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q: an upper bound of the queries' lengths, as an int on the host.
        max_seqlen_k: the same for keys and values.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def sizes(q: Tensor, k: Tensor, packed: Packed | None) -> tuple[torch.Size, torch.Size]:
    """The shapes of the queries and the keys that a backend is prepared for: (batch, seqlen, heads, head_dim).

    For a packed call they are (sequences, max_seqlen, heads, head_dim).
    """
    if packed is None:
        return q.shape, k.shape
    sequences = packed.cu_seqlens_q.shape[0] - 1
    of_q, of_k = (sequences, packed.max_seqlen_q, *q.shape[2:]), (sequences, packed.max_seqlen_k, *k.shape[2:])
    return torch.Size(of_q), torch.Size(of_k)


@dataclass(frozen=True)
class BackwardCall:
    """The static facts of one backward pass.

    Attributes:
        forward: the facts of the forward pass, with `needs_grad` and `return_lse`.
        needs: whether each gradient is wanted: those of q, k, v, the sink, then the variant's tensors in the operands'
            order.
        dlse: whether lse has a gradient.
        deterministic: whether the gradients must be bitwise equal from run to run.
        aligned: whether o and its gradient are aligned (see :func:`is_aligned`).
    """

    forward: AttentionCall
    needs: tuple[bool, ...]
    dlse: bool = False
    deterministic: bool = False
    aligned: bool = True

    def __str__(self) -> str:
        names = ("dq", "dk", "dv", "dsink", *(f"dt{index}" for index in range(len(self.needs) - 4)))
        wanted = [name for name, need in zip(names, self.needs) if need]
        flags = ["from_lse"] * self.dlse + ["deterministic"] * self.deterministic
        flags += ["unaligned_o"] * (not self.aligned)
        return " ".join([f"backward ({self.forward}):", *wanted, *flags])


class Gradients(NamedTuple):
    """The result of a backward pass. Each gradient has its tensor's shape and dtype; None if it is not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sink: Tensor | None
    tensors: tuple[Tensor | None, ...]
    """The gradients of the variant's tensors, in the operands' order."""


@functools.cache
def device_arch(device: torch.device) -> str:
    """The architecture of a device, in the spelling of :class:`AttentionCall`."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether each row of a bshd tensor begins at a multiple of 16 bytes, as 128-bit and TMA copies need.

    False, too, if seqlen or heads are expanded (stride 0). The batch may be.
    """
    step = 16 // tensor.element_size()
    batch, seqlen, heads, _ = tensor.stride()
    if seqlen == 0 or heads == 0 or tensor.data_ptr() % 16:
        return False
    return not (batch % step or seqlen % step or heads % step)


# torch.compile of 2.11 cannot trace the question, so it is asked when this module is imported.
_WITH_AUTOCAST = frozenset(
    device for device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla") if torch.amp.is_autocast_available(device)
)


def has_autocast(device: str) -> bool:
    """Whether torch.autocast takes a type of device, as "cuda". For others, such as "meta", its functions raise."""
    if device in _WITH_AUTOCAST:
        return True
    return not torch.compiler.is_compiling() and torch.amp.is_autocast_available(device)
