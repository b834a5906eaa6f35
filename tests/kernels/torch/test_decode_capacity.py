"""What the torch backend decodes with on a GPU, on a CPU: all sequences at once over the whole capacity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tileattn
from tests.tools.cached_sequences import Cache, Heads, Rows, arguments_of, draw
from tests.tools.decode_call import run_decode
from tileattn import SlidingWindow
from tileattn.call import cache_status
from tileattn.kernels.torch.decode import backend, capacity
from tileattn.testing import (
    DecodeArguments,
    DecodeCase,
    assert_forward_accurate,
    build_decode,
    decode_cases,
    expected_decode,
    poisoned_memory,
)

CASES = [case for case in decode_cases("smoke") if not case.structure.fixed]


def over_the_capacity(inputs: Any, sizes: Any, mask: Any, score_mods: Any, scale: float, splits: Any) -> Any:
    return capacity.decode(inputs, sizes, mask, score_mods, scale)


@pytest.mark.slow_cases(
    "bf16-d128-causal-packed-chunks-h26kv2-page48-own-splits3-shared",
    "fp16-d64-block_lists-sink-seven-h128kv1-page0-heads_first",
    "fp16-d128-causal-packed-mixed-h16kv1-page256-heads_first-splits7",
    reason="1 s each",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_is_right_in_tiles_of_any_size(case: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.sequences, "decode", over_the_capacity)
    arguments = build_decode(case)
    expected = expected_decode(arguments)
    for size in (2**25, 2**13):
        monkeypatch.setattr(capacity, "MAX_TILE", size)
        with poisoned_memory():
            got = run_decode(arguments, "torch")
        assert_forward_accurate(case.id, got, *expected)


@pytest.mark.parametrize(
    ("field", "at", "value", "says"),
    [
        ("seqlens_k", 1, 99, "seqlens_k must .* sequence 1"),
        ("seqlens_k", 2, -1, "seqlens_k must .* sequence 2"),
        ("page_table", (1, 3), -1, "page_table's entries .* sequence 1"),
        ("page_table", (0, 6), 10**6, "page_table's entries .* sequence 0"),
        ("cu_seqlens_q", 0, 1, "cu_seqlens_q must start at 0.* sequence 0"),
        ("cu_seqlens_q", 3, 77, "cu_seqlens_q must .* sequence 2"),
        ("max_seqlen_q", None, 2, "max_seqlen_q must .* sequence 0"),
        (None, None, None, ""),
    ],
)
def test_wrong_values_are_recorded(
    field: str | None, at: Any, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that no row sees, before a window and past a length, are not."""
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    monkeypatch.setattr(backend.sequences, "decode", over_the_capacity)
    sizes = Heads(2, 1, 16, 16, torch.float32, "cpu")
    rows = [Rows(draw(sizes, 90, seed), first, count) for seed, (first, count) in enumerate(((60, 3), (33, 1), (2, 2)))]
    positional, named = arguments_of(rows, Cache(9, packed=True, slack=9))
    arguments = DecodeArguments(*positional, **named, mask=SlidingWindow(9, 0))
    arguments.page_table[0, :4] = -1  # type: ignore[index]
    if field == "max_seqlen_q":
        arguments = replace(arguments, max_seqlen_q=value)
    elif field is not None:
        getattr(arguments, field)[at] = value
    run_decode(arguments, "torch")
    if field is None:
        tileattn.check_caches()
        return
    with pytest.raises(ValueError, match=says):
        tileattn.check_caches()
