"""The facts of an attention call on which a kernel is specialised, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .fp8 import output_dtype

# Smaller scales are negative, or may be flushed to 0 in float32: hidden scores of -inf times those are not -inf.
SMALLEST_SCALE = 2.0**-126
CAUSAL = "Causal()"  # the variant of a causal mask and nothing else


@dataclass(frozen=True)
class AttentionCall:
    """Static facts of one call. Batch, lengths, head counts, strides and scalars are run-time values of a kernel.

    Attributes:
        dtype: of q, k and v.
        head_dim: elements per head of q and k.
        head_dim_v: elements per head of v and o.
        variant: the key of the mask and the score modifications (see :mod:`tileattn.variant.key`), ``""`` for none.
        sink: whether a sink logit per head joins the softmax.
        aligned: whether q, k and v begin at, and step by, multiples of 16 bytes.
        needs_grad: whether a gradient will be asked for. A backend that refuses no such call has a backward pass.
        return_lse: whether lse is written.
        dropout: whether probabilities are dropped.
        packed: whether sequences lie one behind the other in one batch element, as :class:`Packed` says.
        arch: ``"cpu"``, or a GPU architecture in the compiler's spelling: ``"sm_80"``, ``"sm_90a"``, ``"gfx942"``, ...
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
        """Of o: that of q, k and v, but bfloat16 for fp8."""
        return output_dtype(self.dtype)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        flags = ["sink"] * self.sink + ["lse"] * self.return_lse + ["needs_grad"] * self.needs_grad
        flags += ["packed"] * self.packed + ["dropout"] * self.dropout + ["unaligned"] * (not self.aligned)
        parts = [str(self.dtype).removeprefix("torch."), f"d{dims}", self.variant or "full", *flags, self.arch]
        return " ".join(parts)


class Packed(NamedTuple):
    """Where the sequences of a packed call lie: sequence ``i`` has the rows ``cu_seqlens[i] : cu_seqlens[i + 1]``.

    A packed call's q, k, v and o have one batch element, (1, total, heads, head_dim), its lse is (1, heads, total_q).
    To masks and modifications the sequences are the batch: ``b`` is the number of a sequence, and positions count
    within it.

    Attributes:
        cu_seqlens_q: int32 (sequences + 1,), contiguous, on q's device, from 0 upwards; of the queries.
        cu_seqlens_k: the same of keys and values.
        max_seqlen_q: an upper bound of the lengths, known to the host.
        max_seqlen_k: the same of keys and values.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def sizes(q: Tensor, k: Tensor, packed: Packed | None) -> tuple[torch.Size, torch.Size]:
    """What a backend is prepared for: (batch, seqlen, heads, head_dim) of the queries and of the keys (bshd).

    Of a packed call: (sequences, max_seqlen, heads, head_dim).
    """
    if packed is None:
        return q.shape, k.shape
    sequences = packed.cu_seqlens_q.shape[0] - 1
    of_q, of_k = (sequences, packed.max_seqlen_q, *q.shape[2:]), (sequences, packed.max_seqlen_k, *k.shape[2:])
    return torch.Size(of_q), torch.Size(of_k)


@dataclass(frozen=True)
class BackwardCall:
    """Static facts of one backward pass.

    Attributes:
        forward: of the forward pass, with `needs_grad` and `return_lse`.
        needs: which gradients are wanted: of q, k, v, the sink, then the variant's tensors in the operands' order.
        dlse: whether lse has a gradient.
        deterministic: whether the gradients must be bitwise equal from run to run.
        aligned: whether o and its gradient are aligned, too, as :func:`is_aligned` says.
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
    """What a backward pass returns: each in its tensor's shape and dtype, None where it is not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sink: Tensor | None
    tensors: tuple[Tensor | None, ...]
    """Of the variant's tensors, in the operands' order."""


@functools.cache
def device_arch(device: torch.device) -> str:
    """The architecture of a device, as :class:`AttentionCall` spells it."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether rows (bshd) begin at multiples of 16 bytes, as 128-bit and TMA copies need, and none repeats another.

    Only the batch may be expanded (stride 0).
    """
    step = 16 // tensor.element_size()
    batch, seqlen, heads, _ = tensor.stride()
    if seqlen == 0 or heads == 0 or tensor.data_ptr() % 16:
        return False
    return not (batch % step or seqlen % step or heads % step)
