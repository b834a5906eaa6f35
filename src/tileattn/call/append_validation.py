"""Checks of the arguments of :func:`tileattn.append_kv`. Each error names what was given and what is accepted.

:func:`check_append` checks what the host knows; it reads no values on the device. :func:`check_overlap` checks the
addresses of a call, which may differ between calls that agree in everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .appending import AppendInputs
from .fp8 import FP8
from .memory import is_expanded, overlap
from .validation import check_dense, check_int32

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TOKENS, _PACKED_TOKENS = "(batch, new, kv_heads, head_dim)", "(total, kv_heads, head_dim) with cu_seqlens_q"
_QUERIES, _PACKED_QUERIES = "(batch, q_len, heads, head_dim)", "(total, heads, head_dim) with cu_seqlens_q"
_CACHE = "(batch, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with page_table"


def check_append(inputs: AppendInputs) -> None:
    """Raises TypeError or ValueError unless the arguments, as the user gave them, make one append call."""
    packed = inputs.cu_seqlens_q is not None
    for name in ("k", "v"):
        _check_rows(name, getattr(inputs, name), 3 if packed else 4, _PACKED_TOKENS if packed else _TOKENS)
    for name in ("k_cache", "v_cache"):
        _check_rows(name, getattr(inputs, name), 4, _CACHE)
    if inputs.q is not None:
        _check_rows("q", inputs.q, 3 if packed else 4, _PACKED_QUERIES if packed else _QUERIES)
    _check_dtypes(inputs)
    _check_gradients(inputs)
    _check_sizes(inputs)
    _check_sequences(inputs)
    _check_rotation(inputs)


def _check_rows(name: str, x: Any, ndim: int, shape: str) -> None:
    check_dense(name, x, ndim, f"{ndim} dimensions, {shape}")
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"{name} must have at least 1 head and 1 element per head, got shape {tuple(x.shape)}")
    if name in ("k_cache", "v_cache") and is_expanded(x):
        raise ValueError(f"{name} must not be expanded, got strides {x.stride()} for shape {tuple(x.shape)}")


def _check_dtypes(inputs: AppendInputs) -> None:
    k = inputs.k
    for name in ("k", "k_cache", "v_cache"):
        if getattr(inputs, name).dtype in (FP8, torch.float8_e5m2):
            raise NotImplementedError(f"{name} is {getattr(inputs, name).dtype}: fp8 caches are not supported yet")
    if k.dtype not in _DTYPES:
        raise TypeError(f"k must be float16, bfloat16, float32 or float64, got {k.dtype}")
    for name in ("v", "k_cache", "v_cache", "q"):
        x = getattr(inputs, name)
        if x is None:
            continue
        if x.dtype != k.dtype:
            raise TypeError(f"{name} must have k's dtype {k.dtype}, got {x.dtype}")
        _check_device(name, x, k)


def _check_device(name: str, x: Tensor, k: Tensor) -> None:
    if x.device != k.device:
        raise ValueError(f"{name} must be on k's device {k.device}, got {x.device}")


def _check_gradients(inputs: AppendInputs) -> None:
    for name in ("k_cache", "v_cache"):
        if getattr(inputs, name).requires_grad:
            raise ValueError(f"{name} must not require grad: it is written in place, without gradients")
    if not torch.is_grad_enabled():
        return
    for name in ("k", "v", "q", "cos", "sin"):
        x = getattr(inputs, name)
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(f"append_kv has no gradients, and {name} requires grad: use torch.no_grad() or detach()")


def _check_sizes(inputs: AppendInputs) -> None:
    k, v, k_cache, v_cache = inputs[:4]
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"k and v must agree in all but head_dim, got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        got = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must agree in all but head_dim, got shapes {got}")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} must have the heads and head_dim of {name}_cache, {tuple(cache.shape[-2:])}, got "
                f"{tuple(x.shape[-2:])}"
            )
    if inputs.q is not None:
        _check_q(inputs.q, k, inputs.cu_seqlens_q is not None)


def _check_sequences(inputs: AppendInputs) -> None:
    k, k_cache, ends = inputs.k, inputs.k_cache, inputs.cu_seqlens_q
    batch = None if ends is not None else k.shape[0]
    check_int32("seqlens_k", inputs.seqlens_k, {"batch": batch}, k.device, owner="k")
    batch = inputs.seqlens_k.shape[0]
    if ends is not None:
        check_int32("cu_seqlens_q", ends, {"batch + 1": batch + 1}, k.device, owner="k")
    if inputs.page_table is not None:
        sizes = {"batch": batch, "pages_per_sequence": None}
        check_int32("page_table", inputs.page_table, sizes, k.device, owner="k", contiguous=False)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache must have one row per sequence, {batch}, got {k_cache.shape[0]} (shape {tuple(k_cache.shape)}); "
            f"a cache of pages needs page_table="
        )


def _check_q(q: Tensor, k: Tensor, packed: bool) -> None:
    if q.shape[0] != k.shape[0]:
        what = "rows" if packed else "batch size"
        raise ValueError(f"q must have k's {what} {k.shape[0]}, got {q.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q must have k's head_dim {k.shape[-1]}, got {q.shape[-1]}")


def _check_rotation(inputs: AppendInputs) -> None:
    cos, sin = inputs.cos, inputs.sin
    if (cos is None) != (sin is None):
        raise ValueError(f"cos and sin must be given together, got {'sin' if cos is None else 'cos'} alone")
    if cos is None or sin is None:
        for name in ("q", "positions", "q_positions"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"{name} is for rotary embeddings, which need cos and sin; got none")
        return
    for name, x in (("cos", cos), ("sin", sin)):
        _check_table(name, x, inputs.k)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        got = f"{tuple(cos.shape)} in {cos.dtype} and {tuple(sin.shape)} in {sin.dtype}"
        raise ValueError(f"cos and sin must have one shape and dtype, got {got}")
    head_dim = inputs.k.shape[-1]
    if not 2 <= 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos and sin must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to head_dim {head_dim}, "
            f"got {tuple(cos.shape)}"
        )
    _check_positions(inputs)


def _check_table(name: str, x: Any, k: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(f"{name} must have shape (positions, rotary_dim / 2), got {tuple(x.shape)}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name} must have a contiguous last dimension, got strides {x.stride()}")
    _check_device(name, x, k)


def _check_positions(inputs: AppendInputs) -> None:
    k, q, packed = inputs.k, inputs.q, inputs.cu_seqlens_q is not None
    if inputs.q_positions is not None and q is None:
        raise ValueError("q_positions needs q, got None")
    for name, rows in (("positions", k), ("q_positions", q)):
        given = getattr(inputs, name)
        if given is None or rows is None:
            continue
        dims = ("total",) if packed else ("batch", "new" if name == "positions" else "q_len")
        check_int32(name, given, dict(zip(dims, rows.shape)), k.device, owner="k", contiguous=False)
    if q is not None and inputs.positions is not None and inputs.q_positions is None and q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"q_positions must be given with positions where q has another number of rows than k, got {q.shape[1]} and "
            f"{k.shape[1]} rows"
        )


# --- Addresses ---


def check_overlap(inputs: AppendInputs) -> None:
    """Raises ValueError if k, v or q lie in the memory of a cache, or if the caches share elements."""
    for cache in ("k_cache", "v_cache"):
        for name in ("k", "v", "q"):
            x = getattr(inputs, name)
            if x is not None and overlap(x, getattr(inputs, cache)):
                raise ValueError(f"{name} must not lie in the memory of {cache}, which is written; use {name}.clone()")
    if overlap(inputs.k_cache, inputs.v_cache):
        raise ValueError("k_cache and v_cache must not share elements: values would be written over keys")
