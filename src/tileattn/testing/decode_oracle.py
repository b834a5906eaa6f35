"""The expected results of `decode`: float64, and eager PyTorch in the call's dtype, one sequence after the other.

Each sequence's keys and values are gathered from its row or its pages, and `oracle_attention` and `eager_attention`
compute it as a dense call. Nothing is shared with an implementation of `decode`: lengths and page tables are read on
the host, and visibility is `Mask.allows` of each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..variant.masks import FunctionMask
from ..variant.sparse.blocks import for_call
from .decode_arguments import DecodeArguments
from .expected import Forward, of_sequence
from .oracle import eager_attention, oracle_attention

EAGER_RUNS = 3  # of `eager_attention`
MATRIX_ROWS = 16


class DecodedSequence(NamedTuple):
    """One sequence of a call as a dense call with one batch element."""

    number: int
    q: Tensor
    """(1, q_len, heads, head_dim)."""
    k: Tensor
    """(1, seqlen_k, kv_heads, head_dim)."""
    v: Tensor
    mask: FunctionMask
    score_mods: tuple[Callable[..., Any], ...]
    sink: Tensor | None
    scale: float | None

    @property
    def positional(self) -> tuple[Any, ...]:
        """As `oracle_attention` takes them."""
        return tuple(self[1:])


def expected_decode(arguments: DecodeArguments) -> Forward:
    """The oracle's and eager's (o, lse) in the shapes of `decode`, as `assert_forward_accurate` takes them.

    A row without keys, and a packed row of no sequence, has o = 0 and lse = -inf; a sink is the lse of the former.
    """
    found = [(oracle_attention(*each.positional), _eager(each)) for each in sequences(arguments)]
    oracle = _joined([exact for exact, _ in found], arguments)
    runs = [_joined([(o[run], lse[run]) for _, (o, lse) in found], arguments) for run in range(EAGER_RUNS)]
    return oracle, ([o for o, _ in runs], [lse for _, lse in runs])


def sequences(arguments: DecodeArguments) -> Iterator[DecodedSequence]:
    """The sequences of a call, in order. Reads lengths and tables on the host."""
    lengths, table = arguments.seqlens_k.tolist(), arguments.page_table
    for number, (q, length) in enumerate(zip(_queries(arguments), lengths, strict=True)):
        k, v = (_gathered(x, table, number, length) for x in (arguments.k_cache, arguments.v_cache))
        rows = q.shape[1]
        mods = tuple(of_sequence(mod, number, rows, length) for mod in arguments.score_mods)
        allows = _visibility(arguments, number, length - rows)
        yield DecodedSequence(number, q, k, v, FunctionMask(allows), mods, arguments.sink, arguments.scale)


def _eager(sequence: DecodedSequence) -> tuple[list[Tensor], list[Tensor]]:
    """Eager's runs, in which few queries are multiplied as the rows of a matrix are, by repeating them.

    PyTorch multiplies a single row by another routine, which sums in more parts. In float32 its error is half as large
    as that of a matrix product. An implementation has the queries of a group of heads as rows of one matrix.
    """
    _, q, k, v, mask, mods, sink, scale = sequence
    rows, keys = q.shape[1], k.shape[1]
    if q.dtype.itemsize < 4 or rows >= MATRIX_ROWS:
        return eager_attention(*sequence.positional)

    def position(q: Tensor) -> Tensor:
        """That of a query, of the position of one of its repetitions."""
        return (q - (keys - rows * MATRIX_ROWS)) // MATRIX_ROWS + (keys - rows)

    def repeated(mod: Callable[..., Any]) -> Callable[..., Any]:
        return lambda score, b, h, q, k: mod(score, b, h, position(q), k)

    allows = FunctionMask(lambda b, h, q, k: mask.allows(b, h, position(q), k))
    many = q.repeat_interleave(MATRIX_ROWS, dim=1)
    of_o, of_lse = eager_attention(many, k, v, allows, [repeated(mod) for mod in mods], sink, scale)
    return [o[:, ::MATRIX_ROWS] for o in of_o], [lse[..., ::MATRIX_ROWS] for lse in of_lse]


def _queries(arguments: DecodeArguments) -> Iterator[Tensor]:
    """The queries of each sequence, (1, q_len, heads, head_dim)."""
    if arguments.cu_seqlens_q is None:
        yield from (arguments.q[number : number + 1] for number in range(arguments.q.shape[0]))
    else:
        for begin, end in pairwise(arguments.cu_seqlens_q.tolist()):
            yield arguments.q[None, begin:end]


def _gathered(cache: Tensor, page_table: Tensor | None, number: int, length: int) -> Tensor:
    """The keys, or values, of a sequence, (1, length, kv_heads, dim); 0 where the cache has NaN.

    Rows that no query can see may hold NaN, and their entries of the table anything. With a weight of 0 the oracle
    must not be NaN either.
    """
    if page_table is None:
        found = cache[number, :length]
    else:
        pages, size = cache.shape[:2]
        key = torch.arange(length, device=cache.device)
        page = page_table[number].long()[key // size].clamp(0, max(pages - 1, 0))
        found = cache[page, key % size]
    return found.masked_fill(found.isnan(), 0.0)[None]


def _visibility(arguments: DecodeArguments, number: int, first: int) -> Callable[..., Tensor]:
    """Which key a query sees, by positions; `first` is the position of the sequence's first query."""
    q, cache, table = arguments.q, arguments.k_cache, arguments.page_table
    sizes = (
        arguments.seqlens_k.shape[0],
        q.shape[-2],
        cache.shape[2],
        q.shape[1] if arguments.max_seqlen_q is None else arguments.max_seqlen_q,
        cache.shape[1] * (1 if table is None else table.shape[1]),
    )
    mask = for_call(arguments.mask, lambda: sizes, lambda: first)
    tree, causal = arguments.tree_mask, arguments.causal

    def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k == k) & (q == q)
        if tree is not None:
            row, column = q - first, k - first
            seen = (column < 0) | tree[number].to(k.device)[row, column.clamp(min=0)]
        elif causal:
            seen = k <= q
        return seen if mask is None else seen & mask.allows(b + number, h, q, k)

    return allows


def _joined(parts: list[tuple[Tensor, Tensor]], arguments: DecodeArguments) -> tuple[Tensor, Tensor]:
    """The results of the whole call."""
    q, device = arguments.q, arguments.q.device
    heads, head_dim_v = q.shape[-2], arguments.v_cache.shape[3]
    dtype, lse_dtype = (parts[0][0].dtype, parts[0][1].dtype) if parts else (torch.float64, torch.float64)
    if arguments.cu_seqlens_q is None:
        o = torch.zeros(*q.shape[:3], head_dim_v, dtype=dtype, device=device)
        lse = torch.full((q.shape[0], heads, q.shape[1]), -torch.inf, dtype=lse_dtype, device=device)
        for number, (of_o, of_lse) in enumerate(parts):
            o[number], lse[number] = of_o[0], of_lse[0]
        return o, lse
    o = torch.zeros(*q.shape[:2], head_dim_v, dtype=dtype, device=device)
    lse = torch.full((heads, q.shape[0]), -torch.inf, dtype=lse_dtype, device=device)
    for span, (of_o, of_lse) in zip(pairwise(arguments.cu_seqlens_q.tolist()), parts, strict=True):
        o[slice(*span)], lse[:, slice(*span)] = of_o[0], of_lse[0]
    return o, lse
