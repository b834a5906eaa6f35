"""Checks of the arguments of :func:`tileattn.decode`. Each error names the argument, what was given and what is needed.

All checks here read metadata only: shapes, dtypes, devices, strides and addresses. The values of `seqlens_k`,
`cu_seqlens_q` and the page table are on the device. Kernels clamp them and report wrong ones afterwards
(:mod:`tileattn.call.cache_status`); the torch backend checks them at once on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .decoding import DecodeInputs, DecodePlan, FixedSplit, Splits
from .fp8 import FP8
from .memory import is_expanded, overlap
from .scalars import as_int
from .sequences import check_cu_seqlens, check_max_seqlen
from .validation import check_dense, check_heads, check_int32, check_scale, check_sink

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_SPLITS = 256


def check_decode_arguments(
    q: Any, k_cache: Any, v_cache: Any, seqlens_k: Any, page_table: Any, cu_seqlens_q: Any, max_seqlen_q: Any
) -> None:
    """Raises TypeError, ValueError or NotImplementedError unless the tensors make one decode call.

    q is as at the API: (batch, q_len, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q.
    """
    _check_queries(q, cu_seqlens_q, max_seqlen_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    _check_caches(q, k_cache, v_cache)
    check_int32("seqlens_k", seqlens_k, {"batch": batch}, q.device)
    if page_table is not None:
        _check_page_table(page_table, batch, k_cache, q.device)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache must have one row per sequence, {batch}, got {k_cache.shape[0]} (shape {tuple(k_cache.shape)}); "
            f"a cache of pages needs page_table="
        )


def _check_queries(q: Any, cu_seqlens_q: Any, max_seqlen_q: Any) -> None:
    if cu_seqlens_q is None:
        check_dense("q", q, 4, "4 dimensions, (batch, q_len, heads, head_dim), or 3 with cu_seqlens_q")
        if max_seqlen_q is not None:
            raise ValueError("max_seqlen_q is for packed queries: it needs cu_seqlens_q, got None")
        return
    check_dense("q", q, 3, "3 dimensions, (total_q, heads, head_dim), with cu_seqlens_q")
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    if max_seqlen_q is None:
        raise TypeError("max_seqlen_q must be given with cu_seqlens_q: the longest length or an upper bound of it")
    check_max_seqlen("max_seqlen_q", max_seqlen_q)


def _check_caches(q: Tensor, k_cache: Any, v_cache: Any) -> None:
    if v_cache is None:
        raise NotImplementedError("v_cache is None: a latent cache (MLA) is not taken yet")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache, 4, "4 dimensions, (batch, capacity, kv_heads, head_dim) or (pages, page_size, ...)")
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype == FP8:
            raise NotImplementedError(f"{name} is in float8_e4m3fn, which decode does not take yet")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise TypeError(
            f"q, k_cache and v_cache must have one dtype, got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if k_cache.device != q.device or v_cache.device != q.device:
        raise ValueError(
            f"q, k_cache and v_cache must be on one device, got {q.device}, {k_cache.device} and {v_cache.device}"
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must have one shape but for head_dim, got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    check_heads(q.shape[-2:], k_cache.shape[2:], v_cache.shape[3])


def _check_page_table(table: Any, batch: int, k_cache: Tensor, device: torch.device) -> None:
    check_int32("page_table", table, {"batch": batch, "pages_per_sequence": None}, device, contiguous=False)
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(
            f"page_table must have a contiguous last dimension, got strides {table.stride()}; use "
            f"page_table.contiguous()"
        )
    if k_cache.shape[1] == 0:
        raise ValueError(f"pages must have at least one token, got k_cache of shape {tuple(k_cache.shape)}")


def check_decode_options(q: Tensor, sink: Any, scale: Any, splits: Any) -> Splits:
    """The splits as an int, a FixedSplit or None. Raises TypeError or ValueError if an option is wrong."""
    if sink is not None:
        check_sink(sink, q, q.shape[-2])
    if scale is not None:
        check_scale(scale)
    if splits is None or isinstance(splits, FixedSplit):
        return splits
    number = as_int(splits)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"splits must be None, an int or a tileattn.FixedSplit, got {splits!r}")
    if not 1 <= number <= MOST_SPLITS:
        raise ValueError(f"splits must lie in 1 .. {MOST_SPLITS}, got {number}")
    return number


def check_tree_mask(tree_mask: Any, batch: int, max_seqlen_q: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless tree_mask is bool (batch or 1, max_seqlen_q, max_seqlen_q)."""
    if not isinstance(tree_mask, Tensor) or tree_mask.dtype != torch.bool:
        raise TypeError(
            f"tree_mask must be a bool tensor (batch, q_len, q_len), True where a query sees a key, got "
            f"{getattr(tree_mask, 'dtype', type(tree_mask).__name__)}"
        )
    if tree_mask.device != device:
        raise ValueError(f"tree_mask must be on q's device {device}, got {tree_mask.device}")
    shape = tuple(tree_mask.shape)
    if shape not in ((batch, max_seqlen_q, max_seqlen_q), (1, max_seqlen_q, max_seqlen_q)):
        raise ValueError(
            f"tree_mask must have shape (batch or 1, q_len, q_len), with max_seqlen_q for q_len in a packed call, = "
            f"({batch} or 1, {max_seqlen_q}, {max_seqlen_q}), got {shape}"
        )


def check_out(out: Any, inputs: DecodeInputs) -> None:
    """Raises TypeError or ValueError unless o can be written to `out` without a change of an input.

    `out` has o's shape below the API: (batch, q_len, heads, head_dim_v), or (1, total_q, heads, head_dim_v). That it
    shares memory with an input is an error where strides tell it; addresses of traced tensors are unknown.
    """
    q, v_cache = inputs.q, inputs.v_cache
    shape = (*q.shape[:3], v_cache.shape[3])
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have o's shape, got {tuple(out.shape)} instead of {shape} (with the batch)")
    if out.dtype != q.dtype:
        raise TypeError(f"out must have q's dtype {q.dtype}, got {out.dtype}")
    if out.device != q.device:
        raise ValueError(f"out must be on q's device {q.device}, got {out.device}")
    if is_expanded(out):
        raise ValueError(f"out must not be expanded, got strides {out.stride()} for shape {tuple(out.shape)}")
    if torch.compiler.is_compiling() or type(out) is not Tensor or out.is_meta:
        return
    for name in ("q", "k_cache", "v_cache", "seqlens_k", "page_table", "cu_seqlens_q", "sink"):
        tensor = getattr(inputs, name)
        if tensor is not None and overlap(out, tensor):
            raise ValueError(f"out must not share memory with {name}: decode reads {name} while it writes out")
    for tensor in inputs.operands.tensors:
        if overlap(out, tensor):
            raise ValueError("out must not share memory with a tensor of the mask or of a score modification")


def check_no_gradient(tensors: Sequence[Tensor | None]) -> None:
    """Raises NotImplementedError if a gradient may be asked for: decode has no backward pass."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            "decode has no gradients, and a tensor of the call requires grad: use torch.no_grad(), detach(), or "
            "tileattn.attention and tileattn.varlen_attention, which have gradients"
        )


def check_plan(plan: Any) -> None:
    """Raises TypeError unless plan is a DecodePlan or None. Whether it fits is checked where the backend is chosen."""
    if plan is not None and not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must be what tileattn.decode_plan returned, or None, got {type(plan).__name__}")


def check_made_for(planned: str, call: str) -> None:
    """Raises ValueError if a plan was made for another call."""
    if planned != call:
        raise ValueError(
            f"plan was made for another call: made by decode_plan for [{planned}], given to decode for [{call}]; make "
            f"a plan with the same tensors' shapes and the same options"
        )
