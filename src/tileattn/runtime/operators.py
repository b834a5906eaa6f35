"""The operators of ``torch.library``: attention as torch.compile, torch.export and fake tensors see it.

Eager calls do not come this way (an operator's own overhead is as long as the launch of a kernel); see
``api/attention.py`` and ``autograd.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call.dropout import Dropout
from ..call.facts import AttentionCall, BackwardCall, Packed, device_arch, is_aligned, sizes
from ..call.fp8 import FP8, accumulator, complete, output_dtype
from ..tuner import state
from ..variant.key import Operands
from ..variant.program import with_alignment
from .dispatch import prepare_backward, prepare_forward


def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    variant: str,
    tensors: Sequence[torch.Tensor] = (),
    *,
    needs_grad: bool = False,
    return_lse: bool = True,
    dropout: bool = False,
    packed: bool = False,
) -> AttentionCall:
    """The static facts of a call with these tensors (bshd); `tensors` are the variant's."""
    look = _asks_for_alignment(q)
    return AttentionCall(
        dtype=q.dtype,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        variant=with_alignment(variant, tensors) if look and tensors else variant,
        sink=sink is not None,
        aligned=not look or (is_aligned(q) and is_aligned(k) and is_aligned(v)),
        needs_grad=needs_grad,
        return_lse=return_lse,
        arch=device_arch(q.device),
        dropout=dropout,
        packed=packed,
    )


def _asks_for_alignment(q: torch.Tensor) -> bool:
    """Only GPU kernels do; and tensors that are being traced have no memory to look at."""
    return q.is_cuda and not torch.compiler.is_compiling()


def options(p: float, seed: torch.Tensor | None, packed: Packed | None) -> dict[str, Any]:
    """The keywords of a call that drops probabilities, and of a packed one; other calls do not have them."""
    found: dict[str, Any] = {} if seed is None else {"dropout": Dropout(p, seed)}
    return found if packed is None else found | {"packed": packed}


def as_packed(
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> Packed | None:
    """What the operators' arguments mean: None where there are none."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def is_traced(tensor: Any) -> bool:
    """Whether an operator is to be seen: by torch.compile, export, a dispatch mode or a subclass.

    Meta tensors, which have shapes and no values, take the operator as well: its fake computes shapes.
    torch.func does not: its transforms are over once its wrapped tensors are unwrapped. Ask again then.
    """
    return torch.compiler.is_compiling() or (
        (type(tensor) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0 or _has_no_values(tensor))
        and not torch._C._are_functorch_transforms_active()
    )


def _has_no_values(tensor: torch.Tensor) -> bool:
    """A function of its own for benchmarks/precompile.py, which takes meta tensors for a GPU's."""
    return tensor.is_meta


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    variant: str,
    tensors: Sequence[torch.Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    scale: float,
    backend: str | None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = False,
    needs_grad: bool = False,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, seqlen_q, heads, head_dim_v), contiguous, and lse (batch, heads, seqlen_q).

    o has q's dtype, or bfloat16 for fp8; descales, broadcastable to (batch, kv_heads), are for fp8 only. Differentiable
    in q, k, v, sink and tensors; deterministic says how. A compiled graph does not know whether a gradient will be
    asked for, which decides about the backend: needs_grad says so. With a seed (:mod:`tileattn.call.dropout`)
    probabilities are dropped. With cu_seqlens the call is packed (:class:`tileattn.call.facts.Packed`).
    """
    packed = as_packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flags = {"dropout": seed is not None, "packed": packed is not None}
    call = make_call(q, k, v, sink, variant, tensors, needs_grad=needs_grad, **flags)
    operands = Operands(list(tensors), list(ints), list(floats))
    run = prepare_forward(call, backend, *sizes(q, k, packed), scale)
    given = options(dropout_p, seed, packed)
    if call.dtype == FP8:
        given["descales"] = complete(q_descale, k_descale, v_descale, k)
    o, lse = run(q, k, v, sink, operands, **given)
    assert lse is not None
    return o, lse


forward = torch.library.custom_op("tileattn::forward", run_forward, mutates_args=())


@forward.register_fake
def _(
    q,
    k,
    v,
    sink,
    variant,
    tensors,
    ints,
    floats,
    scale,
    backend,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    deterministic=False,
    needs_grad=False,
    dropout_p=0.0,
    seed=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
):
    state.refuse_tracing()
    batch, seqlen_q, heads, _ = q.shape
    return (
        q.new_empty(batch, seqlen_q, heads, v.shape[3], dtype=output_dtype(q.dtype)),
        q.new_empty(batch, heads, seqlen_q, dtype=accumulator(q.dtype)),
    )


def _readable(do: torch.Tensor) -> torch.Tensor:
    """A gradient may have any strides, such as 0 where o was summed: copied where no kernel could read it well."""
    reads = do.stride(3) == 1 and 0 not in do.stride() and (is_aligned(do) or not _asks_for_alignment(do))
    return do if reads else do.contiguous()


def _deterministic() -> bool:
    """Whether `torch.use_deterministic_algorithms` asks for it; where it only warns, it does not."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def run_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
    variant: str,
    tensors: Sequence[torch.Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    scale: float,
    backend: str | None,
    deterministic: bool,
    needs: Sequence[bool],
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> list[torch.Tensor]:
    """The gradients of q, k, v, sink and tensors, in this order: those that `needs` asks for, contiguous.

    do and dlse are the gradients of o and lse, which the forward pass returned; its other arguments are as they were.
    """
    do = _readable(do)
    packed = as_packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flags = {"dropout": seed is not None, "packed": packed is not None}
    call = BackwardCall(
        make_call(q, k, v, sink, variant, tensors, needs_grad=True, **flags),
        needs=tuple(needs),
        dlse=dlse is not None,
        deterministic=deterministic or _deterministic(),
        aligned=not _asks_for_alignment(q) or (is_aligned(o) and is_aligned(do)),
    )
    operands = Operands(list(tensors), list(ints), list(floats))
    run = prepare_backward(call, backend, *sizes(q, k, packed), scale)
    *found, of_tensors = run(do, dlse, q, k, v, o, lse, sink, operands, **options(dropout_p, seed, packed))
    return [x.contiguous() for x in (*found, *of_tensors) if x is not None]


backward = torch.library.custom_op("tileattn::backward", run_backward, mutates_args=())


@backward.register_fake
def _(
    do,
    dlse,
    q,
    k,
    v,
    o,
    lse,
    sink,
    variant,
    tensors,
    ints,
    floats,
    scale,
    backend,
    deterministic,
    needs,
    dropout_p=0.0,
    seed=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
):
    return [x.new_empty(x.shape) for x, need in zip((q, k, v, sink, *tensors), needs) if need]
