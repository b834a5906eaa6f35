"""A user's module, which a type checker accepts: test_typing.py runs mypy on it, and Python."""

# What --strict sets that a file can set for itself, and more: no expression is Any. The one that is ignored below has
# the type Callable[..., object].
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-defs
# mypy: disallow-incomplete-defs, disallow-untyped-decorators, warn-return-any, no-implicit-reexport
# mypy: disallow-any-expr, disallow-any-unimported

from __future__ import annotations

from types import ModuleType

from torch import Tensor, no_grad
from typing_extensions import assert_type

import tileattn
from tileattn.measure.profiling import Profile, Profiles
from tileattn.measure.timing import Effort
from tileattn.nn import NaiveAttention, SelfAttention, SlidingWindowAttention, get_attention

Pair = tuple[Tensor, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor:
    assert_type(tileattn.attention(q, k, v), Tensor)
    assert_type(tileattn.attention(q, k, v, return_lse=False, causal=True), Tensor)
    assert_type(tileattn.attention(q, k, v, return_lse=True, mask=tileattn.SlidingWindow(3, 0)), Pair)
    assert_type(tileattn.attention(q, k, v, return_lse=return_lse, score_mod=tileattn.SoftCap(9.0)), Tensor | Pair)
    o, lse = tileattn.attention(q, k, v, return_lse=True, scale=0.5, layout="bshd", sink=None, backend="torch")
    return tileattn.attention(q, k, v, dropout_p=0.1, deterministic=True) + o * lse.exp().mean()


def varlen(x: Tensor, cu_seqlens: Tensor, return_lse: bool) -> Tensor:
    packed = (cu_seqlens, cu_seqlens, 4, 4)
    assert_type(tileattn.varlen_attention(x, x, x, *packed), Tensor)
    assert_type(tileattn.varlen_attention(x, x, x, *packed, return_lse=False), Tensor)
    assert_type(tileattn.varlen_attention(x, x, x, *packed, return_lse=True, causal=True), Pair)
    assert_type(tileattn.varlen_attention(x, x, x, *packed, return_lse=return_lse), Tensor | Pair)
    return tileattn.varlen_attention(x, x, x, *packed, mask=tileattn.Causal()).sum()


def decoding(x: Tensor, lengths: Tensor, return_lse: bool) -> Tensor:
    plan = tileattn.decode_plan(x, x, x, lengths, splits=tileattn.FixedSplit(128))
    assert_type(plan, tileattn.DecodePlan)
    o = tileattn.decode(x, x, x, lengths, splits=tileattn.FixedSplit(128), plan=plan)
    assert_type(o, Tensor)
    part = tileattn.decode(x, x, x, lengths, return_lse=True, mask=tileattn.SlidingWindow(3, 0))
    assert_type(part, Pair)
    assert_type(tileattn.decode(x, x, x, lengths, return_lse=return_lse, splits=2), Tensor | Pair)
    assert_type(tileattn.merge(*part, *part), Pair)
    return o


def cached(x: Tensor) -> Tensor:
    cache = tileattn.PagedKVCache(x.shape[0], 16, x.shape[2], x.shape[3], dtype=x.dtype)
    cache.extend(x.shape[1])
    assert_type(cache.append(x, x, layer=0), Tensor | None)
    o = tileattn.decode(x, *cache.layer(0), cache.seqlens, page_table=cache.page_table)
    assert_type(cache.step(x.shape[1]).layer(0).attend(x, x, x), Tensor)
    cache.fork(0, [1], length=3)
    cache.free(0)
    return o


def sdpa(query: Tensor, mask: Tensor) -> Tensor:
    assert_type(tileattn.scaled_dot_product_attention(query, query, query), Tensor)
    return tileattn.scaled_dot_product_attention(query, query, query, attn_mask=mask, scale=1.0)


def modules(x: Tensor) -> Tensor:
    any_of_them = get_attention("gqa", 32, 4, num_kv_heads=2)
    assert_type(any_of_them, SelfAttention)
    assert_type(any_of_them(x), tuple[Tensor, Tensor | None])
    assert_type(SlidingWindowAttention(32, 4, 3)(x), tuple[Tensor, Tensor | None])
    masked = tileattn.nn.MaskedAttention(32, 4, mask=tileattn.Causal())
    assert_type(masked(x, mask=tileattn.PrefixLM(2)), tuple[Tensor, Tensor | None])
    assert_type(masked.forward(x), tuple[Tensor, Tensor | None])
    step = tileattn.PagedKVCache(x.shape[0], 16, 4, 8).step(x.shape[1])
    with no_grad():
        assert_type(masked(x, cache=step.layer(0)), tuple[Tensor, Tensor | None])
    o, weights = NaiveAttention(32, 4)(x)
    return o + weights.sum()


def profiles(x: Tensor) -> float:
    effort = Effort(warmup_ms=0.1, measure_ms=0.1, rounds=1)
    one = tileattn.profile(tileattn.attention, x, x, x, effort=effort)
    assert_type(one, Profile)
    several = tileattn.profile_all({"tileattn": modules}, x.flatten(2), effort=effort)  # type: ignore[misc]
    assert_type(several, Profiles)
    return several["tileattn"].ms + one.ms


def padding(x: Tensor, mask: Tensor) -> Tensor:
    tokens = tileattn.unpad_input(x, mask)
    assert_type(tokens.max_seqlen, int)
    return tileattn.pad_input(tokens.x, tokens.indices, *x.shape[:2])


def others(x: Tensor, mask: Tensor) -> Tensor:
    viz: ModuleType = tileattn.viz
    assert viz.__name__ == "tileattn.viz"
    assert_type(tileattn.quantize_fp8(x, x, x), tileattn.QuantizedFP8)
    both = tileattn.Causal() & tileattn.KeyPadding(mask)
    assert_type(both, tileattn.Mask)
    return tileattn.attention(x, x, x, mask=both)
