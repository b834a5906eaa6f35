"""What the torch backend decodes with on a GPU, on a CPU: all sequences at once over the whole capacity."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.decode_call import run_decode
from tileattn.kernels.torch.decode import backend, capacity
from tileattn.testing import (
    DecodeCase,
    assert_forward_accurate,
    build_decode,
    decode_cases,
    expected_decode,
    poisoned_memory,
)

CASES = [case for case in decode_cases("smoke") if not case.structure.fixed]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_is_right_in_tiles_of_any_size(case: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(inputs: Any, sizes: Any, mask: Any, score_mods: Any, scale: float, splits: Any) -> Any:
        return capacity.decode(inputs, sizes, mask, score_mods, scale)

    monkeypatch.setattr(backend.sequences, "decode", decode)
    arguments = build_decode(case)
    expected = expected_decode(arguments)
    for size in (2**25, 2**13):
        monkeypatch.setattr(capacity, "MAX_TILE", size)
        with poisoned_memory():
            got = run_decode(arguments, "torch")
        assert_forward_accurate(case.id, got, *expected)
