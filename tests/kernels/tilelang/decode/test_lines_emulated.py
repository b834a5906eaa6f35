"""Decode calls that visit the tiles of lines only, on the generic schedule, run on the CPU by emulate()."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.cases import Case, Tensors, check_calls
from tests.kernels.tilelang.decode.line_cases import CASES, poison_hidden
from tests.kernels.tilelang.decode.test_emulated import TILE, prepared
from tests.kernels.tilelang.decode.test_emulated import emulated as emulated
from tileattn.call import cache_status, packed_status
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.testing.emulator.kernel import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.slow(reason="each kernel takes 20 s to lower and to compile"),
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FEWEST_TILES", 1)
    tensors = Tensors(case)
    assert poison_hidden(tensors, TILE.block_N) > 0
    decoding, inputs = prepared(tensors, monkeypatch)
    assert decoding.call.listed
    o = check_calls(tensors, decoding, inputs, times=2)
    for status in (cache_status, packed_status):
        assert not status.status_of(o.device).any()


def test_bits_with_fixed_split_do_not_depend_on_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that all rows hide changes no bit of a row's sums."""
    case = CASES["by-head-fixed"]
    decoding, inputs = prepared(Tensors(case), monkeypatch)
    assert decoding.call.listed  # of any size
    o, lse = decoding(inputs, None)
    monkeypatch.setattr(visits, "MOST_TILES", 0)
    without, inputs = prepared(Tensors(case), monkeypatch)
    assert not without.call.listed
    expected = without(inputs, None)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
