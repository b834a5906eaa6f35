"""Implements all functions of `flash_attn_interface`: it translates flash-attn's options to tileattn's arguments."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.attention import attention
from ...api.varlen import varlen_attention
from ...call.facts import Packed, has_autocast
from ...call.head_dims import MAX, pad
from ...call.scalars import as_float
from ...variant.masks import Causal, Mask
from ...variant.scores import ALiBi, ScoreMod, SoftCap
from ..windows import window_mask
from ._forward_only import forward_only
from ._probabilities import next_seed, signed_probabilities

Result = Tensor | tuple[Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """The arguments that follow the tensors, in flash-attn's order."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool

    def with_numbers(self) -> Options:
        """The options with Python's numbers; flash-attn also accepts numpy's numbers and tensors of one element."""
        scale = None if self.softmax_scale is None else as_float("softmax_scale", self.softmax_scale)
        dropout_p = as_float("dropout_p", self.dropout_p, "a probability, a number from 0 to 1")
        softcap = as_float("softcap", self.softcap, "a positive finite number, or 0 for no cap")
        if not 0 <= softcap < float("inf"):
            raise ValueError(f"softcap must be a positive finite number, or 0 for no cap, got {softcap}")
        return self._replace(softmax_scale=scale, dropout_p=dropout_p, softcap=softcap)

    def mask(self, seqlen_k: int) -> Mask | None:
        """The mask of a call with at most `seqlen_k` keys."""
        return window_mask(self.causal, *_window(self.window_size), seqlen_k)

    def score_mods(self) -> list[ScoreMod]:
        """The score modifications, the cap before the bias as in flash-attn."""
        caps: list[ScoreMod] = [SoftCap(float(self.softcap))] if self.softcap > 0 else []
        return caps if self.alibi_slopes is None else [*caps, ALiBi(self.alibi_slopes)]


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed, block_table: Any
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed queries (total, heads, head_dim) to pages (pages, page_size, kv_heads, head_dim)."""
    _check(q, q, q, 3)
    options = options.with_numbers()
    if options.dropout_p:
        raise ValueError(f"dropout_p must be 0 with block_table, got {options.dropout_p}")
    mask, given = options.mask(packed.max_seqlen_k), (q, k, v, options.alibi_slopes)
    q = q if q.stride(-1) == 1 else q.contiguous()
    with torch.no_grad(), without_autocast(q.device.type):
        result = varlen_attention(
            q,
            k,
            v,
            *packed,
            block_table=block_table,
            mask=None if isinstance(mask, Causal) else mask,
            causal=isinstance(mask, Causal),
            score_mod=options.score_mods() or None,
            scale=q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
            return_lse=bool(options.return_attn_probs),
        )
    if isinstance(result, Tensor):
        return forward_only("flash_attn_varlen_func with block_table", result, given)
    o, lse = result
    return forward_only("flash_attn_varlen_func with block_table", o, given), lse, q.new_empty(0)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed | None = None) -> Result:
    """Attention of padded batches (batch, seqlen, heads, head_dim) or of packed sequences (total, heads, head_dim)."""
    _check(q, k, v, 4 if packed is None else 3)
    options = options.with_numbers()
    mask, mods = options.mask(k.shape[1] if packed is None else packed.max_seqlen_k), options.score_mods()
    shows_dropped = options.return_attn_probs and options.dropout_p > 0
    seed = next_seed(q.device) if shows_dropped else None
    keywords: dict[str, Any] = {
        "mask": None if isinstance(mask, Causal) else mask,
        "causal": isinstance(mask, Causal),
        "score_mod": mods or None,
        "scale": q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale,
        "dropout_p": options.dropout_p,
        "deterministic": bool(options.deterministic),
        "return_lse": bool(options.return_attn_probs),
    }
    padded_q, padded_k, padded_v = (pad(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v))
    with without_autocast(q.device.type):
        if packed is None:
            result = attention(padded_q, padded_k, padded_v, **keywords)
        else:
            result = varlen_attention(padded_q, padded_k, padded_v, *packed, **keywords)
        if isinstance(result, Tensor):
            return result if padded_v is v else result[..., : v.shape[-1]]
        o, lse = result
        probabilities = q.new_empty(0)
        if seed is not None:
            of_call = (lse, packed, mask, mods, keywords["scale"], options.dropout_p, seed)
            probabilities = signed_probabilities(q, k, *of_call)
    return o[..., : v.shape[-1]], lse, probabilities


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast: flash-attn computes in its inputs' dtype, and so must the products of S_dmask."""
    if torch._C._is_any_autocast_enabled() and has_autocast(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _window(window_size: Any) -> tuple[Any, Any]:
    """(left, right) as ints; flash-attn also accepts tensors of one element."""
    try:
        sizes: list[Any] = [s if isinstance(s, torch.SymInt) else operator.index(s) for s in window_size]
        left, right = sizes
        if any(isinstance(s, bool) for s in window_size):
            raise TypeError
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two ints, (left, right), -1 for no bound, got {window_size!r}") from None
    return left, right


def is_window(window_size: Any) -> bool:
    """Whether window_size bounds the keys of a query on any side."""
    left, right = _window(window_size)
    return bool(left >= 0 or right >= 0)


def check_queries(q: Any) -> None:
    """Checks q (batch, q_len, heads, head_dim) of a call that reads a cache; the caches are checked elsewhere."""
    _check(q, q, q, 4)


def _check(q: Any, k: Any, v: Any, ndim: int) -> None:
    """Checks the requirements of flash-attn that `attention` does not have; `attention` checks all others."""
    shape = "(batch, seqlen, heads, head_dim)" if ndim == 4 else "(total, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, {shape}, got shape {tuple(x.shape)}")
        if not 1 <= x.shape[-1] <= MAX:
            raise ValueError(f"{name}: head_dim must lie in 1 .. {MAX}, as in flash-attn, got {x.shape[-1]}")
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"on a GPU q, k and v must be float16 or bfloat16, as in flash-attn, got {q.dtype}")


def unpacked(name: str, x: Any, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors of the argument `name`, stacked in dimension `dim`, as views.

    dim: 2 for (batch, seqlen, count, heads, head_dim), 1 for packed (total, count, heads, head_dim).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != dim + 3 or x.shape[dim] != count:
        shape = f"(batch, seqlen, {count}, heads, head_dim)" if dim == 2 else f"(total, {count}, heads, head_dim)"
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return x.unbind(dim)
