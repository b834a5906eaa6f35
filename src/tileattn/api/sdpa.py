"""``torch.nn.functional.scaled_dot_product_attention`` by tileattn: the same arguments, shapes and alignment.

PyTorch's conventions differ from those of :func:`tileattn.attention` in three ways, and this module translates them:

- Tensors are (..., heads, seqlen, head_dim), with leading dimensions that broadcast.
- ``is_causal`` is aligned top-left.
- A mask is a tensor.

:mod:`tileattn.compat.torch_sdpa` redirects a model's own calls of PyTorch's function to tileattn.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from ..call.head_dims import padded
from ..call.scalars import as_float
from ..call.validation import check_flags
from ..runtime.context_parallel import refuse_shards
from ..runtime.run import autocast
from ..variant.masks import SlidingWindow
from ..variant.scores import Bias
from .attention import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale * query key^T + attn_mask) value``, with the signature and the semantics of PyTorch's function.

    Args:
        query: (..., heads, L, E), with at least 2 dimensions. Dtypes as for :func:`tileattn.attention`.
        key: (..., heads, S, E). The leading dimensions of query, key and value, heads included, broadcast.
        value: (..., heads, S, Ev).
        attn_mask: tensor that broadcasts to (..., heads, L, S). A boolean mask is True where a query sees a key;
            the modules of :mod:`tileattn.nn` take the opposite, True where it is hidden. A floating-point mask, in
            float32 or query's dtype, is added to the scores and is differentiable; it is fastest on sm_90a if its rows
            begin at multiples of 16 bytes. A query that sees no key gives 0. A
            ``torch.nn.attention.bias.CausalBias`` for L and S is accepted too; it is aligned top-left or bottom-right,
            as its variant says.
        dropout_p: the probability with which each softmax weight is dropped, in every call where it is not 0.
        is_causal: whether query ``i`` sees only the keys up to ``i``. This is aligned top-left, also if L and S
            differ, and excludes attn_mask. (``causal`` of :func:`tileattn.attention` is aligned bottom-right.)
        scale: factor of the scores; None means ``E ** -0.5``.
        enable_gqa: whether key and value may have fewer heads than query; their head counts must divide query's.

    Returns:
        (..., heads, L, Ev) in query's dtype, differentiable in query, key, value and attn_mask. Under
        ``torch.autocast``, query, key and value are cast first, as by PyTorch's function.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is wrong, as in :func:`tileattn.attention`.
        RuntimeError: both attn_mask and is_causal are given, as in PyTorch.
    """
    refuse_shards("tileattn.scaled_dot_product_attention")
    query, key, value = autocast(query), autocast(key), autocast(value)  # first, because the checks depend on dtypes
    _check(query, key, value)
    is_causal, enable_gqa = check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True: give one of the two")
    causal, bottom_right = is_causal, False
    if _is_causal_bias(attn_mask):
        causal, bottom_right, attn_mask = True, _is_bottom_right(attn_mask, query.shape[-2], key.shape[-2]), None
    dims = max(query.ndim, key.ndim, value.ndim)
    query, key, value = (_at_least_4d(x) for x in (query, key, value))
    heads = _heads(query, key, value, enable_gqa)
    batch = _broadcast("the leading dimensions of query, key and value", *(x.shape[:-3] for x in (query, key, value)))
    bias = None if attn_mask is None else _bias(attn_mask, query, (*batch, heads, query.shape[-2], key.shape[-2]))
    query = query if query.shape[-3] == heads else query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    q, k, v = (_one_batch(x, batch) for x in (query, *_kv_heads(key, value, heads)))

    # The number of queries after the last key under top-left alignment. `attention` aligns bottom-right.
    surplus = 0 if bottom_right else q.shape[-2] - k.shape[-2]
    if causal and surplus < 0:  # no query sees the keys after the last query's position
        k, v = (x[..., : q.shape[-2], :] for x in (k, v))
    o = attention(
        *padded(q, k, v),
        mask=SlidingWindow(None, surplus) if causal and surplus > 0 else None,
        causal=causal and surplus <= 0,
        score_mod=None if bias is None else Bias(bias),
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else as_float("scale", scale),
        dropout_p=dropout_p,
        layout="bhsd",
    )
    return o[..., : v.shape[-1]].reshape((*batch, heads, q.shape[-2], v.shape[-1])[-dims:])


def _check(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got a nested one; see tileattn.varlen_attention")
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, (..., seqlen, head_dim), got {tuple(x.shape)}")
        if x.shape[-1] == 0:
            raise ValueError(f"{name}: head dims must be at least 1, got shape {tuple(x.shape)}")


def _is_causal_bias(attn_mask: Any) -> bool:
    """Whether attn_mask is PyTorch's CausalBias: a Tensor subclass whose memory is uninitialised.

    The module of CausalBias is not imported here: the import takes seconds, because it imports Dynamo. A caller that
    has a CausalBias has imported the module.
    """
    bias: Any = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(attn_mask, bias.CausalBias)


def _is_bottom_right(attn_mask: Any, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a CausalBias is aligned bottom-right.

    Raises:
        ValueError: the CausalBias was made for other lengths.
    """
    lengths = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if lengths != (seqlen_q, seqlen_k):
        raise ValueError(
            f"attn_mask, a CausalBias, must be for the L = {seqlen_q} and S = {seqlen_k} of query and key, got one for "
            f"{lengths[0]} and {lengths[1]}"
        )
    return bool(attn_mask.variant.name == "LOWER_RIGHT")


def _at_least_4d(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _broadcast(what: str, *shapes: torch.Size) -> torch.Size:
    try:
        result: torch.Size = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(f"{what} must broadcast, got {', '.join(str(tuple(shape)) for shape in shapes)}") from None
    return result


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """The number of heads of the result."""
    heads, *of_kv = (x.shape[-3] for x in (query, key, value))
    if enable_gqa:
        if any(count == 0 or heads % count for count in of_kv):
            raise ValueError(
                f"enable_gqa: the heads of key and value must divide those of query, got {of_kv[0]} and {of_kv[1]} "
                f"for {heads}"
            )
        return heads
    what = "the heads of query, key and value (without enable_gqa)"
    return _broadcast(what, *(torch.Size([count]) for count in (heads, *of_kv)))[0]


def _kv_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Equalises the head counts of key and value, by repeating them to `heads` only if the counts differ."""
    if key.shape[-3] == value.shape[-3]:
        return key, value
    key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value))
    return key, value


def _one_batch(x: Tensor, batch: torch.Size) -> Tensor:
    """The tensor as (batch, heads, seqlen, head_dim) with a contiguous last dimension; copied only if necessary."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[-3:])
    return x if x.ndim == 4 else x.flatten(0, -4)


def _bias(attn_mask: Any, query: Tensor, scores: tuple[int, ...]) -> Tensor:
    """The mask as a bias (batch or 1, heads or 1, L or 1, S), which is added to the scores (..., heads, L, S)."""
    if getattr(attn_mask, "dtype", None) in (torch.float16, torch.bfloat16):
        attn_mask = autocast(attn_mask)  # like query; float32 is accepted beside any dtype and is more precise
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        got = getattr(attn_mask, "dtype", type(attn_mask).__name__)
        raise TypeError(f"attn_mask must be a tensor in bool, float32 or query's {query.dtype}, got {got}")
    fits = attn_mask.ndim <= len(scores) and all(
        size in (1, full) for size, full in zip(reversed(attn_mask.shape), reversed(scores))
    )
    if not fits:
        raise ValueError(f"attn_mask must broadcast to (..., heads, L, S) = {scores}, got {tuple(attn_mask.shape)}")
    mask = _at_least_4d(attn_mask)
    mask = mask.expand(*mask.shape[:-1], scores[-1])
    leading = mask.shape[:-3]
    mask = _one_batch(mask, torch.Size(scores[:-3]) if math.prod(leading) != 1 else leading)
    return additive(mask, query.dtype) if mask.dtype == torch.bool else mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a bias: 0 where the mask is True, -inf elsewhere.

    The bias takes more memory than the mask, but kernels can copy it in tiles, because its rows begin at multiples of
    16 bytes.
    """
    *others, keys = mask.shape
    rows = torch.zeros(*others, -(-keys // 8) * 8, dtype=dtype, device=mask.device)
    return rows[..., :keys].masked_fill_(~mask, -torch.inf)
