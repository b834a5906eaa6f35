"""Values of lengths and page tables that are wrong: on a CPU an error at once; and what the host makes of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileattn
from tests.tools.cached_sequences import int32
from tests.tools.decode_call import facts_of
from tileattn.testing import DecodeArguments

LENGTHS = (40, 12, 33)


def paged(**changes: Any) -> dict[str, Any]:
    """Three sequences of two queries in pages of 8; 12 pages, of which the sequences have 5, 2 and 5."""
    q, cache = torch.randn(3, 2, 4, 16), torch.randn(12, 8, 2, 16)
    table = int32([[0, 1, 2, 3, 4, -1], [5, 6, -1, 99, -1, -1], [7, 8, 9, 10, 11, -(2**31)]], "cpu")  # type: ignore[arg-type]
    return {
        "q": q,
        "k_cache": cache,
        "v_cache": cache,
        "seqlens_k": int32(LENGTHS, "cpu"),
        "page_table": table,
    } | changes


def changed(name: str, index: Any, value: int) -> dict[str, Any]:
    arguments = paged()
    arguments[name][index] = value
    return arguments


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (changed("seqlens_k", 1, 49), r"seqlens_k must lie in 0 \.\. 48, .* got 49 \(sequence 1\)"),
        (changed("seqlens_k", 2, -1), r"seqlens_k must lie in 0 \.\. 48, .* got -1 \(sequence 2\)"),
        (changed("page_table", (0, 4), -1), r"page_table must name pages in 0 \.\. 11 .* got -1 at \[0, 4\]"),
        (changed("page_table", (2, 0), 12), r"page_table must name pages in 0 \.\. 11 .* got 12 at \[2, 0\]"),
        (changed("seqlens_k", 1, 17), r"page_table must name pages in 0 \.\. 11 .* got -1 at \[1, 2\]"),
    ],
    ids=["too many keys", "less than none", "a page of -1", "one page too far", "keys without a page"],
)
def test_wrong_values_raise_at_once(arguments: dict[str, Any], says: str, fixed: bool) -> None:
    options = {"splits": tileattn.FixedSplit(128)} if fixed else {}
    with pytest.raises(ValueError, match=says):
        tileattn.decode(**arguments, **options)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ([1, 2, 4, 6], "cu_seqlens_q must start at 0, got 1"),
        ([0, 4, 2, 6], "cu_seqlens_q must not decrease, got 2 after 4"),
        ([0, 2, 4, 7], "the last value of cu_seqlens_q must be at most total_q = 6, got 7"),
        ([0, 1, 1, 5], "max_seqlen_q must be at least the longest length, got 3 and a length of 4"),
    ],
)
def test_wrong_packed_lengths_raise_at_once(ends: list[int], says: str) -> None:
    arguments = paged()
    arguments["q"] = arguments["q"].flatten(0, 1)
    with pytest.raises(ValueError, match=says):
        tileattn.decode(**arguments, cu_seqlens_q=int32(ends, "cpu"), max_seqlen_q=3)


@pytest.mark.parametrize("q_len", [1, 7, 40])
def test_pages_before_a_window_may_be_none(q_len: int) -> None:
    """A prefill chunk as well: what the window has left is given back."""
    q, cache, window = torch.randn(1, q_len, 4, 16), torch.randn(12, 8, 2, 16), tileattn.SlidingWindow(9, 0)
    table, length = torch.arange(12, dtype=torch.int32)[None], int32((90,), "cpu")
    expected = tileattn.decode(q, cache, cache, length, page_table=table, mask=window)
    left = (90 - q_len - 9) // 8
    given_back = table.clone()
    given_back[:, :left] = -1
    cache[:left] = torch.nan
    torch.testing.assert_close(tileattn.decode(q, cache, cache, length, page_table=given_back, mask=window), expected)


def test_the_largest_length_is_the_capacity() -> None:
    arguments = paged(page_table=torch.arange(12, dtype=torch.int32).view(2, 6), seqlens_k=int32([48, 48], "cpu"))
    arguments["q"] = arguments["q"][:2]
    assert tileattn.decode(**arguments).isfinite().all()


def test_a_call_of_the_same_tensors_with_another_table_is_another_call() -> None:
    """What is kept of a plain call depends on the table's shape, and on whether there is one."""
    arguments = paged()
    o = tileattn.decode(**arguments)
    table = arguments.pop("page_table")
    wider = torch.cat([table, table], dim=1)
    assert torch.equal(tileattn.decode(**arguments, page_table=wider), o)
    with pytest.raises(ValueError, match=r"seqlens_k must lie in 0 \.\. 32"):
        tileattn.decode(**arguments, page_table=table[:, :4])
    with pytest.raises(ValueError, match="k_cache must have one row per sequence, 3, got 12"):
        tileattn.decode(**arguments)


@pytest.mark.parametrize(
    ("page", "rows"), [(0, 0), (1, 1), (2, 2), (3, 1), (16, 16), (48, 16), (24, 8), (64, 64), (256, 64), (192, 64)]
)
def test_kernels_are_made_for_what_divides_the_page_size(page: int, rows: int) -> None:
    q, cache = torch.zeros(1, 1, 2, 16), torch.zeros(1, page or 5, 2, 16)
    table = int32([[0]], "cpu") if page else None  # type: ignore[list-item]
    call = facts_of(DecodeArguments(q, cache, cache, int32([1], "cpu"), table))
    assert call.page_rows == rows
    assert call.paged == bool(page)
