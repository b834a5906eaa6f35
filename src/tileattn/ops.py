"""The operator of ``torch.library``: attention as torch.compile, torch.export and fake tensors see it.

Eager calls do not come this way (the operator's own overhead is as long as the launch of a kernel); see ``api.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .call import AttentionCall, device_arch, is_aligned
from .dispatch import prepare_forward
from .fp8 import FP8, accumulator, complete, output_dtype
from .variant import Operands, with_alignment


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
    )


def _asks_for_alignment(q: torch.Tensor) -> bool:
    """Only GPU kernels do; and tensors that are being traced have no memory to look at."""
    return q.is_cuda and not torch.compiler.is_compiling()


@torch.library.custom_op("tileattn::forward", mutates_args=())
def forward(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, seqlen_q, heads, head_dim_v), contiguous, and lse (batch, heads, seqlen_q).

    o has q's dtype, or bfloat16 for fp8; descales, broadcastable to (batch, kv_heads), are for fp8 only.
    """
    call = make_call(q, k, v, sink, variant, tensors)
    operands = Operands(list(tensors), list(ints), list(floats))
    run = prepare_forward(call, backend, q.shape, k.shape, scale)
    if call.dtype == FP8:
        descales = complete(q_descale, k_descale, v_descale, k)
        o, lse = run(q, k, v, sink, operands, descales=descales)
    else:
        o, lse = run(q, k, v, sink, operands)
    assert lse is not None
    return o, lse


@forward.register_fake
def _(q, k, v, sink, variant, tensors, ints, floats, scale, backend, q_descale=None, k_descale=None, v_descale=None):
    batch, seqlen_q, heads, _ = q.shape
    return (
        q.new_empty(batch, seqlen_q, heads, v.shape[3], dtype=output_dtype(q.dtype)),
        q.new_empty(batch, heads, seqlen_q, dtype=accumulator(q.dtype)),
    )
