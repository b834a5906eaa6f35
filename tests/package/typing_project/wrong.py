"""A user's module with mistakes, each of which a type checker must find: test_typing.py runs mypy on it."""

# ruff: noqa: B018

from __future__ import annotations

from torch import Tensor

import tileattn
from tileattn.nn import MaskedAttention, SelfAttention


def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor:
    tileattn.attention(q, k, v).shape
    tileattn.attention(q, k, v, return_lse=True).shape  # error: attr-defined
    tileattn.attention(q, k, v, return_lse=return_lse).shape  # error: union-attr
    tileattn.attention(q, k, v, is_causal=True)  # error: call-overload
    tileattn.attention(q, k, v, causal="yes")  # error: call-overload
    tileattn.attention(q, k, v, True)  # error: call-overload
    tileattn.attention(q, k)  # error: call-overload
    tileattn.varlen_attention(q, k, v, q, q, 4, 4, layout="bhsd")  # error: call-overload
    tileattn.varlen_attention(q, k, v, q, q, 4)  # error: call-overload
    return tileattn.attention(q, k, v, return_lse=True)  # error: return-value


def decoding(x: Tensor, lengths: Tensor) -> None:
    tileattn.decode(x, x, x, lengths, return_lse=True).shape  # error: attr-defined
    tileattn.decode(x, x, x)  # error: call-overload
    tileattn.decode(x, x, x, lengths, block_table=x)  # error: call-overload
    tileattn.decode(x, x, x, lengths, plan=x)  # error: call-overload
    tileattn.decode_plan(x, x, x, lengths, out=x)  # error: call-arg
    tileattn.PagedKVCache(2, 16, 2, 8).append(x)  # error: call-arg


def sdpa(query: Tensor) -> None:
    tileattn.scaled_dot_product_attention(query, query, query, causal=True)  # error: call-arg
    tileattn.scaled_dot_product_attention(query, query, query).lse  # error: attr-defined


def modules(module: SelfAttention, x: Tensor) -> None:
    module(x).shape  # error: attr-defined
    module(x, mask=tileattn.Causal())  # error: call-arg
    MaskedAttention(32, 4)(x, tileattn.Causal(), caches=None)  # error: call-arg
    MaskedAttention(32, 4, windows=3)  # error: call-arg


def profiles(x: Tensor) -> None:
    tileattn.profile(tileattn.attention, x, x, x).milliseconds  # error: attr-defined
    tileattn.profile_all(tileattn.attention, x)  # error: arg-type


def names() -> None:
    tileattn.atention  # error: attr-defined
    tileattn.nn.Attention  # error: attr-defined
