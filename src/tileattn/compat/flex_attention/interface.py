"""``flex_attention``: checks of the arguments, and the call of :func:`tileattn.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions

from ...api.attention import attention
from ...call.head_dims import padded
from ...call.scalars import as_float
from ...call.validation import check_flags
from ...runtime.context_parallel import refuse_shards
from ...runtime.run import autocast
from .blocks import mask_of
from .kernel_options import check_kernel_options
from .mods import check_mod
from .tracing import score_of_function

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """``softmax(mask(score_mod(scale * query key^T))) value``, with the signature and the semantics of PyTorch's.

    Args:
        query: (B, Hq, Q_LEN, E), any strides; float16 or bfloat16 on a GPU, float32 and float64 too on a CPU (as
            :func:`tileattn.attention`).
        key: (B, Hkv, KV_LEN, E) in query's dtype. Its batch size may be 1 if the block mask has query's.
        value: (B, Hkv, KV_LEN, Ev) in query's dtype.
        score_mod: a function ``score_mod(score, b, h, q_idx, kv_idx) -> score`` of the scaled score. ``h`` is the query
            head; queries and keys count from 0. It is traced: tensors that it captures are read element by element.
        block_mask: of :func:`create_block_mask`, or any ``torch.nn.attention.flex_attention.BlockMask``: mask_mod
            decides in its partial blocks, a full block is seen as a whole, an absent one hidden.
        scale: finite factor of the scores; None means ``E ** -0.5``.
        enable_gqa: whether key and value may have fewer heads than query; Hq must be a multiple of Hkv.
        return_lse: whether to return ``(out, lse)``. PyTorch prefers ``return_aux``.
        kernel_options: hints for PyTorch's kernels, without effect here; unknown names are refused.
        return_aux: an ``AuxRequest``, for ``(out, AuxOutput)``. Its ``max_scores`` is refused.

    Returns:
        out (B, Hq, Q_LEN, Ev) in query's dtype, a view of (B, Q_LEN, Hq, Ev); alone, or with lse (B, Hq, Q_LEN), the
        natural logarithm, in float32 (float64 for float64). A query that sees no key has out = 0 and lse = -inf. Both
        are differentiable in query, key, value and the floating-point tensors that score_mod captures.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.
        RuntimeError: block_mask is on another device, or was sliced without a new mask_mod.
        NotImplementedError: ``max_scores``, another BACKEND, or no backend of tileattn runs the call.

    Source: FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    refuse_shards("tileattn.compat.flex_attention.flex_attention")
    query, key, value = autocast(query), autocast(key), autocast(value)
    enable_gqa, return_lse = check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    _check_tensors(query, key, value, enable_gqa)
    _check_block_mask(query, key, block_mask)
    _check_aux(return_lse, return_aux)
    check_kernel_options(kernel_options)
    if score_mod is not None:
        check_mod("score_mod", score_mod, ("score", "b", "h", "q_idx", "kv_idx"))
    shift = key.shape[2] - query.shape[2]
    o, lse = attention(
        *padded(*_operands(query, key, value)),
        mask=None if block_mask is None else mask_of(block_mask, query, key),
        score_mod=None if score_mod is None else score_of_function(score_mod, shift),
        scale=1.0 / math.sqrt(query.shape[3]) if scale is None else as_float("scale", scale),
        layout="bhsd",
        return_lse=True,
    )
    o = o[..., : value.shape[3]]
    if return_aux is not None:
        return o, AuxOutput(lse=lse if return_aux.lse else None)
    return (o, lse) if return_lse else o


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value with one batch size and a contiguous last dimension."""
    batch = query.shape[0]
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value


def _check_tensors(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got a nested one; see tileattn.varlen_attention")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, seqlen, E), got shape {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{name} must have query's dtype and device, {query.dtype} on {query.device}, got {x.dtype} on "
                f"{x.device}"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have query's E = {query.shape[3]}, got shape {tuple(key.shape)}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must have key's (B, Hkv, KV_LEN) = {tuple(key.shape[:3])}, got {tuple(value.shape)}")
    _check_heads(query.shape[1], key.shape[1], enable_gqa)


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if not enable_gqa and heads != kv_heads:
        raise ValueError(
            f"query and key must have one number of heads, got Hq={heads} and Hkv={kv_heads}; try enable_gqa=True"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query's heads must be a multiple of key's, got Hq={heads} and Hkv={kv_heads}")


def _check_block_mask(query: Tensor, key: Tensor, block_mask: Any) -> None:
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        instead = "; a mask function goes into create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)" * callable(block_mask)
        raise TypeError(f"block_mask must be a BlockMask or None, got {type(block_mask).__name__}{instead}")
    batch, kv_batch = query.shape[0], key.shape[0]
    of_mask = None if block_mask is None else block_mask.shape[0]
    if batch != kv_batch and (kv_batch != 1 or of_mask != batch):
        raise ValueError(
            f"key must have query's batch size {batch}, or 1 with a block mask for batch size {batch}, got {kv_batch} "
            f"and block_mask {'None' if of_mask is None else f'for {of_mask}'}"
        )


def _check_aux(return_lse: bool, return_aux: Any) -> None:
    if return_aux is None:
        return
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest or None, got {type(return_aux).__name__}")
    if return_lse:
        raise ValueError("return_lse and return_aux exclude each other: use return_aux=AuxRequest(lse=True)")
    if return_aux.max_scores:
        raise NotImplementedError("return_aux: max_scores is not computed, as in PyTorch on a CPU; lse is")
