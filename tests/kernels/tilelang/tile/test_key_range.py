"""Masks as ranges of keys, and as bits of a thread's columns: evaluated without a GPU, on constants."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T
from tvm import arith

from tileattn import Causal, Documents, Mask, PrefixLM, SlidingWindow
from tileattn.kernels.tilelang.tile.expressions import Emitter
from tileattn.kernels.tilelang.tile.key_range import key_range
from tileattn.kernels.tilelang.tile.key_words import COLUMNS, columns_below, row_range
from tileattn.kernels.tilelang.tile.mask import Visibility
from tileattn.variant.key import encode
from tileattn.variant.program import program

SEQLEN_K = 20
LARGEST = 2**30 - 1


def _number(expr: object) -> int:
    return int(arith.Analyzer().simplify(expr))


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
    key, operands = encode(mask, ())
    traced = program(key)
    keys = key_range(traced)
    assert keys is not None
    visible = Visibility(
        traced, Emitter({f"i{n}": T.int32(value) for n, value in enumerate(operands.ints)}), T.int32(SEQLEN_K)
    )
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


def test_bits_of_the_columns_below_a_limit() -> None:
    for limit in range(-9, COLUMNS + 9):
        bits = _number(columns_below(T.int32(limit)))
        for j in range(32):
            assert (bits >> j & 1) == (j // 2 * 8 + j % 2 < limit), (limit, j)
