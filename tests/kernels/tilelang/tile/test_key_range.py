"""Masks as ranges of keys, and as bits of a thread's columns: evaluated without a GPU, on constants."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T
from tvm import arith

from tileattn import Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow
from tileattn.kernels.tilelang.tile.expressions import Emitter
from tileattn.kernels.tilelang.tile.key_range import key_range
from tileattn.kernels.tilelang.tile.key_words import COLUMNS, columns_below, ranges_of_row, row_range
from tileattn.kernels.tilelang.tile.mask import Visibility
from tileattn.variant.key import encode
from tileattn.variant.program import program

SEQLEN_K = 20
LARGEST = 2**30 - 1


def _number(expr: object) -> int:
    return int(arith.Analyzer().simplify(expr))


def _truth(expr: object) -> bool:
    """Of constants joined by & and |, which TVM does not fold."""
    folded = SimpleNamespace(bitwise_or=operator.or_, bitwise_and=operator.and_, bool=bool)
    return bool(eval(str(expr), {"T": folded}))


def _visibility(mask: Mask) -> Visibility:
    key, operands = encode(mask, ())
    values = {f"i{n}": T.int32(value) for n, value in enumerate(operands.ints)}
    return Visibility(program(key), Emitter(values), T.int32(SEQLEN_K))


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [
        (Causal(), None, 0),
        (SlidingWindow(5, 3), 5, 3),
        (SlidingWindow(None, 2), None, 2),
        (SlidingWindow(4, None), 4, None),
        (Causal() & SlidingWindow(7, None), 7, 0),
        (SlidingWindow(LARGEST, LARGEST), LARGEST, LARGEST),
    ],
    ids=str,
)
def test_the_range_of_a_query(mask: Mask, left: int | None, right: int | None) -> None:
    keys = key_range(program(encode(mask, ())[0]))
    assert keys is not None
    visible = _visibility(mask)
    for q in range(-6, SEQLEN_K):
        lo, hi = (_number(bound) for bound in row_range(keys, visible, 0, 0, T.int32(q)))
        seen = [k for k in range(SEQLEN_K) if (left is None or k >= q - left) and (right is None or k <= q + right)]
        assert [k for k in range(SEQLEN_K) if lo <= k < hi] == seen, q
        assert min(lo, hi) >= 0
        assert max(lo, hi) <= SEQLEN_K


def test_other_masks_have_no_range() -> None:
    documents = Documents(torch.zeros(SEQLEN_K, dtype=torch.int32))
    for mask in (None, PrefixLM(4), documents, documents & Causal()):
        assert key_range(program(encode(mask, ())[0])) is None


@pytest.mark.parametrize("mask", [PrefixLM(4), SlidingWindow(5, 3), PrefixLM(2) & SlidingWindow(6, None)], ids=str)
def test_rows_of_which_the_ranges_say_all(mask: Mask) -> None:
    visible = _visibility(mask)
    for q in range(SEQLEN_K):
        lo, hi, whole = ranges_of_row(visible, 0, 0, T.int32(q))
        assert _truth(whole)
        lo, hi = _number(lo), _number(hi)
        assert [k for k in range(SEQLEN_K) if lo <= k < hi] == [k for k in range(SEQLEN_K) if mask.allows(0, 0, q, k)]


def test_rows_of_which_the_ranges_do_not_say_all() -> None:
    visible = _visibility(FunctionMask(lambda b, h, q, k: (q - k) % 2 == 0))
    assert not any(_truth(ranges_of_row(visible, 0, 0, T.int32(q))[2]) for q in range(SEQLEN_K))


def test_rows_of_adjacent_documents_have_one_range() -> None:
    """What the bits of documents need; ids in any order have rows without it."""

    def same(ids: torch.Tensor) -> torch.Tensor:
        mask, q = Documents(ids) & Causal(), torch.arange(SEQLEN_K)
        possible, certain = (bounds(0, 0, q, q, SEQLEN_K) for bounds in (mask.kv_range, mask.full_range))
        return torch.stack([torch.as_tensor(a == b) for a, b in zip(possible, certain)]).all(0)

    assert same(torch.arange(SEQLEN_K) // 6).all()
    assert same(torch.tensor([7] * 3 + [-2] * 9 + [5] * 8)).all()
    assert not same(torch.arange(SEQLEN_K) % 3)[1:].any()  # the first query sees its own key alone


def test_bits_of_the_columns_below_a_limit() -> None:
    for limit in range(-9, COLUMNS + 9):
        bits = _number(columns_below(T.int32(limit)))
        for j in range(32):
            assert (bits >> j & 1) == (j // 2 * 8 + j % 2 < limit), (limit, j)
