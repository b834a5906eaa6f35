"""The key ranges of masks, by which tiles are skipped: correct for every tile, and tight for simple masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tools.positions import (
    BATCH,
    HEADS,
    Positions,
    Side,
    documents,
    lengths,
    paddings,
    positions,
    prefixes,
    windows,
)
from tileattn import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow
from tileattn import math as tm
from tileattn.variant.key import encode
from tileattn.variant.masks import FIRST_POSITION
from tileattn.variant.program import program
from tileattn.variant.reading import evaluate

examples = settings(deadline=None, derandomize=True)


def assert_sound(case: Positions, side: Side) -> None:
    places = torch.arange(side.length)
    for lo, hi in side.tiles():
        allowed = side.allowed[:, :, lo : hi + 1]
        ranges = case.ranges(side, lo, hi)
        inside = {
            name: (places >= begin[..., None]) & (places < end[..., None]) for name, (begin, end) in ranges.items()
        }
        assert not (allowed.any(dim=2) & ~inside[side.any]).any(), ("an allowed place is not visited", lo, hi, ranges)
        assert not (inside[side.all] & ~allowed.all(dim=2)).any(), ("a forbidden place counts as seen", lo, hi, ranges)


def assert_tight(case: Positions, side: Side) -> None:
    """The range of any begins and ends at an allowed place; that of all is all that the whole tile allows."""
    places = torch.arange(side.length)
    for lo, hi in side.tiles():
        allowed = side.allowed[:, :, lo : hi + 1]
        seen, by_all = allowed.any(dim=2), allowed.all(dim=2)
        ranges = case.ranges(side, lo, hi)
        begin, end = ranges[side.any]
        some = seen.any(dim=-1)
        first = torch.where(seen, places, side.length).amin(-1)
        last = torch.where(seen, places, -1).amax(-1)
        assert torch.equal(begin[some], first[some]), (lo, hi)
        assert torch.equal(end[some], last[some] + 1), (lo, hi)
        assert (end <= begin)[~some].all(), (lo, hi)
        begin, end = ranges[side.all]
        assert torch.equal((end - begin).clamp(min=0), by_all.sum(-1)), (lo, hi)


both_sides = pytest.mark.parametrize("side", ["keys", "queries"])


@both_sides
@settings(examples, max_examples=120)
@given(case=positions())
def test_ranges_are_sound(case: Positions, side: str) -> None:
    assert_sound(case, getattr(case, side))


@both_sides
@settings(examples, max_examples=30)
@given(case=positions(lambda seqlen_k: st.builds(Causal)))
def test_causal_is_tight(case: Positions, side: str) -> None:
    assert_tight(case, getattr(case, side))


@both_sides
@settings(examples, max_examples=60)
@given(case=positions(lambda seqlen_k: windows()))
def test_windows_are_tight(case: Positions, side: str) -> None:
    assert_tight(case, getattr(case, side))


@both_sides
@settings(examples, max_examples=60)
@given(case=positions(lambda seqlen_k: prefixes()))
def test_prefixes_are_tight(case: Positions, side: str) -> None:
    assert_tight(case, getattr(case, side))


@both_sides
@settings(examples, max_examples=60)
@given(case=positions(lambda seqlen_k: paddings(seqlen_k, one_side=True)))
def test_padding_on_one_side_is_tight(case: Positions, side: str) -> None:
    assert_tight(case, getattr(case, side))


@both_sides
@settings(examples, max_examples=60)
@given(case=lengths.flatmap(lambda n: st.tuples(st.just(n), documents(n, in_order=True))))
def test_documents_in_order_are_tight(case: tuple[int, Mask], side: str) -> None:
    seqlen, mask = case
    call = Positions(mask, BATCH, HEADS, seqlen, seqlen)
    assert_tight(call, getattr(call, side))


def test_documents_in_order_skip_tiles_and_masks() -> None:
    """The numbers themselves: 4 documents of 64 in tiles of 32."""
    mask = Documents(torch.arange(256) // 64)
    tile = (torch.tensor(64), torch.tensor(95))
    for question in ("kv_range", "full_range", "q_range", "full_q_range"):
        assert [int(x) for x in getattr(mask, question)(0, 0, *tile, 256)] == [64, 128]


def test_padding_between_keys_leaves_the_longest_run_without_a_mask() -> None:
    keep = torch.zeros(1, 256, dtype=torch.bool)
    keep[:, 10:20] = keep[:, 30:200] = keep[:, 210:250] = True
    tile = (torch.tensor(0), torch.tensor(95))
    mask = KeyPadding(keep)
    assert [int(x) for x in mask.kv_range(0, 0, *tile, 256)] == [10, 250]
    assert [int(x) for x in mask.full_range(0, 0, *tile, 256)] == [30, 200]


def test_a_causal_window_skips_queries_on_both_sides() -> None:
    """The numbers themselves: keys 64..95 are seen by queries 64..195, and all of them by 95..164."""
    mask = Causal() & SlidingWindow(100, None)
    tile = (torch.tensor(64), torch.tensor(95))
    assert [int(x) for x in mask.q_range(0, 0, *tile, 256)] == [64, 196]
    assert [int(x) for x in mask.full_q_range(0, 0, *tile, 256)] == [95, 165]


def test_or_joins_full_ranges_that_touch() -> None:
    mask = PrefixLM(4) | SlidingWindow(2, 0)
    lo, hi = (int(x) for x in mask.full_range(0, 0, torch.tensor(5), torch.tensor(5), 16))
    assert (lo, hi) == (0, 6)


def test_or_joins_full_ranges_of_queries_that_touch_before_the_first_key() -> None:
    """With 16 queries and 4 keys, the first positions are negative."""
    mask = SlidingWindow(0, 6) | SlidingWindow(None, 2)
    lo, hi = (int(x) for x in mask.full_q_range(0, 0, torch.tensor(2), torch.tensor(2), 4))
    assert (lo, hi) == (-4, 4)


@pytest.mark.slow_cases("queries", reason="3 s")
@both_sides
@settings(examples, max_examples=100)
@given(case=positions())
def test_ranges_are_the_same_traced(case: Positions, side: str) -> None:
    """What a kernel computes from its operands is what the mask says of itself."""
    of: Side = getattr(case, side)
    assume(of.tiled > 2)
    key, operands = encode(case.mask, ())
    traced = program(key)
    values = {
        **{f"t{i}": x for i, x in enumerate(operands.tensors)},
        **{f"i{i}": x for i, x in enumerate(operands.ints)},
        "b": torch.arange(BATCH)[:, None],
        "h": torch.arange(HEADS)[None],
        "seqlen_k": case.seqlen_k,
    }
    for lo, hi in ((0, of.tiled - 1), (1, 1), (1, 2)):
        for name, index in zip(("q_lo", "q_hi") if side == "keys" else ("k_lo", "k_hi"), (lo, hi)):
            values[name] = torch.tensor(index + of.first_tiled)
        for name, expected in case.ranges(of, lo, hi).items():
            got = case.clamped(of, tuple(evaluate(end, values) for end in getattr(traced, name)))  # type: ignore[arg-type]
            assert all(map(torch.equal, got, expected)), (key, name)


def test_without_a_mask_all_queries_see_all_keys() -> None:
    traced = program("")
    assert [str(end) for end in traced.q_range] == [str(end) for end in traced.full_q_range]
    assert traced.q_range[0] == FIRST_POSITION
    assert str(traced.q_range[1]) == "seqlen_k"


def test_ranges_of_queries_are_part_of_the_backward_text_alone() -> None:
    traced = program(encode(Causal(), ())[0])
    assert "k_lo" not in str(traced)
    assert traced.backward_text.startswith(str(traced))
    assert "k_lo" in traced.backward_text
    assert "k_hi" in traced.backward_text


# --- Masks of users who do not know of ranges of queries ---


@dataclass(frozen=True, eq=False)
class SinkTokens(Mask):
    """A causal window that also sees the first keys, as masks were written before the backward pass."""

    left: int
    first: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((k >= q - self.left) | (k < self.first))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return 0, q_hi + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return q_hi - self.left, q_lo + 1


@dataclass(frozen=True, eq=False)
class WindowAndSelf(SlidingWindow):
    """Derived from a mask that answers about queries, and wider: its answers would be too narrow."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return super().allows(b, h, q, k) | (k == 0)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return 0, tm.maximum(1, super().kv_range(b, h, q_lo, q_hi, seqlen_k)[1])


@dataclass(frozen=True, eq=False)
class NamedCausal(Causal):
    """Derived, and the same: it keeps the answers."""

    name: int = 0


OLD: dict[str, Callable[[], Mask]] = {
    "own": lambda: SinkTokens(2, 1),
    "own and causal": lambda: SinkTokens(2, 1) & Causal(),
    "own or window": lambda: SinkTokens(2, 1) | SlidingWindow(1, 1),
    "derived and wider": lambda: WindowAndSelf(1, 0),
    "derived and the same": lambda: NamedCausal(),
    "function": lambda: FunctionMask(lambda b, h, q, k: (q + k) % 2 == 0),
}


@pytest.mark.parametrize("seqlens", [(6, 6), (3, 7), (8, 4)], ids=str)
@pytest.mark.parametrize("name", OLD)
def test_masks_that_answer_about_keys_alone(name: str, seqlens: tuple[int, int]) -> None:
    case = Positions(OLD[name](), BATCH, HEADS, *seqlens)
    assert_sound(case, case.keys)
    assert_sound(case, case.queries)
    assert program(encode(case.mask, ())[0]).q_range is not None


def test_a_mask_that_does_not_answer_has_all_queries_and_none() -> None:
    for mask in (SinkTokens(2, 1), WindowAndSelf(1, 0)):
        assert mask.q_range(0, 0, 2, 3, 8) == (FIRST_POSITION, 8)
        assert mask.full_q_range(0, 0, 2, 3, 8) == (0, 0)
    assert NamedCausal().q_range(0, 0, 2, 3, 8) == (2, 8)
