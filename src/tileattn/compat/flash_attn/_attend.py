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

    def scale(self, q: Tensor) -> float:
        """The factor of the scores; q is the user's, whose head_dim is not padded."""
        return q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def score_mods(self) -> list[ScoreMod]:
        """The score modifications, the cap before the bias as in flash-attn."""
        caps: list[ScoreMod] = [SoftCap(float(self.softcap))] if self.softcap > 0 else []
        return caps if self.alibi_slopes is None else [*caps, ALiBi(self.alibi_slopes)]


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed, block_table: Any, seqused_k: Any = None
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed queries (total, heads, head_dim) to pages (pages, page_size, kv_heads, head_dim).

    With seqused_k, sequence ``b`` has only its first ``seqused_k[b]`` keys; block_table may then be None, and k and v
    packed like the queries.
    """
    check_inputs(q, q, q, packed)
    options = options.with_numbers()
    if options.dropout_p:
        which = "seqused_k" if block_table is None else "block_table"
        raise ValueError(f"dropout_p must be 0 with {which}, got {options.dropout_p}")
    mask, given = options.mask(packed.max_seqlen_k), (q, k, v, options.alibi_slopes)
    q = last_contiguous(q)
    with torch.no_grad(), without_autocast(q.device.type):
        result = varlen_attention(
            q,
            k,
            v,
            *packed,
            seqused_k=seqused_k,
            block_table=block_table,
            mask=None if isinstance(mask, Causal) else mask,
            causal=isinstance(mask, Causal),
            score_mod=options.score_mods() or None,
            scale=options.scale(q),
            return_lse=bool(options.return_attn_probs),
        )
    if isinstance(result, Tensor):
        return forward_only("flash_attn_varlen_func with block_table", result, given)
    o, lse = result
    return forward_only("flash_attn_varlen_func with block_table", o, given), lse, q.new_empty(0)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed | None = None) -> Result:
    """Attention of padded batches (batch, seqlen, heads, head_dim) or of packed sequences (total, heads, head_dim)."""
    check_inputs(q, k, v, packed)
    options = options.with_numbers()
    shows_dropped = options.return_attn_probs and options.dropout_p > 0
    seed = next_seed(q.device) if shows_dropped else None
    result = compute(q, k, v, options, packed, return_lse=bool(options.return_attn_probs))
    if isinstance(result, Tensor):
        return result
    o, lse = result
    return o, lse, q.new_empty(0) if seed is None else probabilities(q, k, lse, options, packed, seed)


def compute(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packed: Packed | None, *, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes o, or o and lse, of checked inputs and options with numbers."""
    mask = options.mask(k.shape[1] if packed is None else packed.max_seqlen_k)
    keywords: dict[str, Any] = {
        "mask": None if isinstance(mask, Causal) else mask,
        "causal": isinstance(mask, Causal),
        "score_mod": options.score_mods() or None,
        "scale": options.scale(q),
        "dropout_p": options.dropout_p,
        "deterministic": bool(options.deterministic),
        "return_lse": return_lse,
    }
    padded_q, padded_k, padded_v = (pad(last_contiguous(x)) for x in (q, k, v))
    with without_autocast(q.device.type):
        if packed is None:
            result = attention(padded_q, padded_k, padded_v, **keywords)
        else:
            result = varlen_attention(padded_q, padded_k, padded_v, *packed, **keywords)
        if isinstance(result, Tensor):
            return result if padded_v is v else result[..., : v.shape[-1]]
        o, lse = result
        return o[..., : v.shape[-1]], lse


def probabilities(q: Tensor, k: Tensor, lse: Tensor, options: Options, packed: Packed | None, seed: Tensor) -> Tensor:
    """``S_dmask`` of a call with dropout: options with numbers, the call's lse and the seed that it drew."""
    mask = options.mask(k.shape[1] if packed is None else packed.max_seqlen_k)
    of_call = (lse, packed, mask, options.score_mods(), options.scale(q), options.dropout_p, seed)
    with without_autocast(q.device.type):
        return signed_probabilities(q, k, *of_call)


def last_contiguous(x: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is not contiguous, as kernels need it; flash-attn copies too."""
    return x if x.stride(-1) == 1 else x.contiguous()


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
    check_inputs(q, q, q, None)


def check_inputs(q: Any, k: Any, v: Any, packed: Packed | None) -> None:
    """Checks the requirements of flash-attn that `attention` does not have; `attention` checks all others."""
    ndim, shape = (4, "(batch, seqlen, heads, head_dim)") if packed is None else (3, "(total, heads, head_dim)")
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


def packed_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any) -> Packed:
    """The sequences of a packed call; flash-attn also accepts lengths in tensors of one element."""
    longest = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)
    return Packed(cu_seqlens_q, cu_seqlens_k, *longest)


def _longest(name: str, size: Any) -> Any:
    """The argument `name` as an int; flash-attn also accepts a tensor of one element."""
    if not isinstance(size, Tensor):
        return size
    if size.numel() != 1 or size.dtype == torch.bool or size.is_floating_point() or size.is_complex():
        raise TypeError(
            f"{name} must be an int, or an integer tensor of one element, got a tensor of shape {tuple(size.shape)} in "
            f"{size.dtype}"
        )
    return int(size)
