"""How dispatch reaches the TileLang kernels: what they refuse, and the launch."""

from __future__ import annotations

import functools
import importlib.util

import torch

from ...call import AttentionCall
from ...variant import Operands, program
from .config import ARCHITECTURES
from .launch import forward_function

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Keys and values of the heads that run at the same time should stay in the L2 cache.
L2_BYTES = 32 * 2**20


def refusal(call: AttentionCall) -> str | None:
    """Why the kernels do not run a call, or None where they do."""
    if call.arch not in ARCHITECTURES:
        return f"device {call.arch!r} is not one of {', '.join(ARCHITECTURES)}"
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed (pip install tilelang)"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, not {call.dtype}"
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if size % 8 or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"{name} must be a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if call.needs_grad:
        return "the kernels have no backward pass yet (an input requires grad)"
    if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):
        return "tensors of masks and score modifications must not be float64"
    return None


def forward(
    call: AttentionCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    operands: Operands,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`tileattn.dispatch.Forward`."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    o = torch.empty((batch, seqlen_q, heads, call.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if batch == 0 or seqlen_q == 0:
        return o, lse
    if seqlen_k == 0:
        o.zero_()
        return o, lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[None, :, None].expand_as(lse))
    group = _group(call, seqlen_k, kv_heads, heads)
    sinks = () if sink is None else (sink.float(),)
    tensors = [_as_bytes(tensor) for tensor in operands.tensors] if operands.tensors else ()
    forward_function(call)(q, k, v, o, lse, *sinks, *tensors, scale, group, *operands.ints, *operands.floats)
    return o, lse


@functools.lru_cache(maxsize=4096)
def _group(call: AttentionCall, seqlen_k: int, kv_heads: int, heads: int) -> int:
    """How many query heads run side by side so that their keys and values fit into the L2 cache."""
    bytes_per_kv_head = 2 * seqlen_k * (call.head_dim + call.head_dim_v)
    return max(L2_BYTES // bytes_per_kv_head, 1) * (heads // kv_heads)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
