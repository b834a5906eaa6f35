"""Decode calls on the generic schedule: the generated code of all its kernels, run on the CPU by emulate()."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.cases import SCALE, Case, Tensors, check_calls
from tileattn import ALiBi, SlidingWindow, SoftCap
from tileattn.call import cache_fields as fields
from tileattn.call import cache_status, packed_status
from tileattn.call.decoding import DecodeInputs, FixedSplit
from tileattn.kernels.tilelang.decode import combine, launch, records, walk
from tileattn.kernels.tilelang.decode.config import GenericConfig
from tileattn.kernels.tilelang.decode.kernel import decode_kernel
from tileattn.kernels.tilelang.decode.packed_keys import packed_keys_kernel
from tileattn.kernels.tilelang.decode.plan_kernel import plan_kernel
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.program import program

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

TILE = GenericConfig(16, 16, 2)
CASES = {
    "free": Case([0, 1, 63, 100], 1, 4, 2, page=3),
    "fixed": Case([0, 1, 63, 300], 1, 4, 2, page=3, splits=FixedSplit(128)),
    "splits": Case([5, 40, 0, 90], 7, 5, 1, page=0, splits=2, mods=(SoftCap(2.0),), sink=True),
    "window-alibi": Case(
        [5, 40, 0, 90], 7, 5, 1, page=0, workers=6, mask=SlidingWindow(20, 0), mods=(ALiBi(torch.rand(5)),), sink=True
    ),
    "more-jobs-than-workers": Case([300, 5, 0, 290], 1, 4, 2, page=3, splits=FixedSplit(128), workers=2),
    "packed": Case([30, 50, 0, 90], [30, 1, 0, 9], 3, 2, page=1, workers=9, sink=True, rest=5),
    "packed-keys": Case(
        [30, 50, 0, 90, 1], [3, 1, 2, 0, 1], 3, 2, page=0, workers=7, sink=True, rest=3, packed_keys=True
    ),
}
# In groups of 4 parts, merged by several blocks where there are more than 5 parts.
GROUPED = {
    "groups": Case([0, 300, 20], 1, 4, 1, page=3, workers=24),
    "groups-fixed": Case([0, 1500], 2, 4, 1, page=16, splits=FixedSplit(128), mask=SlidingWindow(1000, 0), sink=True),
    "groups-more-jobs-than-workers": Case([200, 7, 150], 1, 4, 2, page=0, splits=11, workers=2),
    "groups-splits": Case([200, 7], 1, 4, 2, page=0, splits=11),
}
CASES |= GROUPED


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels run on the CPU, with few workers."""
    numbers = itertools.count()

    def folder() -> Path:
        path = tmp_path / str(next(numbers))
        path.mkdir()
        return path

    # Lowered once for all launches of a test, as a library is built once.
    made: dict[str, Callable[..., Kernel]] = {
        "decode_function": lambda call, config: Kernel(decode_kernel(call, config), folder()),
        "plan_function": lambda arch, packed, key, listed: Kernel(
            plan_kernel(arch, packed, program(key), listed), folder()
        ),
        "packed_keys_function": lambda arch: Kernel(packed_keys_kernel(arch), folder()),
    }
    for name, make in made.items():
        monkeypatch.setattr(launch, name, functools.cache(make))
    monkeypatch.setattr(launch, "default", lambda call, rows: TILE)
    monkeypatch.setattr(GenericConfig, "blocks_per_sm", lambda self, call: 1)
    for status in (cache_status, packed_status):
        monkeypatch.setattr(status.STATUS, "devices", {})
        monkeypatch.setattr(status, "report", lambda device: None)


def prepared(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> tuple[launch.Decoding, DecodeInputs]:
    monkeypatch.setattr(launch.Decoding, "multiprocessors", tensors.case.workers)
    call, sizes, inputs = tensors.inputs()
    return launch.prepare(call, sizes, SCALE, tensors.case.splits), inputs


@pytest.mark.slow(reason="20 s each")
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_decode(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case in GROUPED.values():
        monkeypatch.setattr(launch, "LEAST_KEYS", 1)
        for module in (records, walk, combine):
            for name, value in (("GROUP", 4), ("FLAT", 5)):
                monkeypatch.setattr(module, name, value, raising=False)
    tensors = Tensors(case)
    decoding, inputs = prepared(tensors, monkeypatch)
    o = check_calls(tensors, decoding, inputs, times=2)
    for status in (cache_status, packed_status):
        assert not status.status_of(o.device).any()


@pytest.mark.slow
def test_pages_out_of_range_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors(Case([5, 40], 1, 2, 1, page=4))
    assert tensors.table is not None
    tensors.table[1, 3] = len(tensors.k)
    tensors.lengths[0] = tensors.capacity + 1
    decoding, inputs = prepared(tensors, monkeypatch)
    decoding(inputs, None)
    status = cache_status.status_of(tensors.q.device)
    assert status[fields.PAGE_TABLE] > 0
    assert status[fields.SEQLENS_K] == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 4])
def test_lengths_without_room_are_reported(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of no tokens, or a page table without columns."""
    decoding, inputs = prepared(Tensors(Case([3, 5], 1, 2, 1, page=page)), monkeypatch)
    decoding = launch.Decoding(decoding.call, decoding.sizes._replace(capacity=0), SCALE, None)
    if inputs.page_table is None:
        inputs = inputs._replace(k_cache=inputs.k_cache[:, :0], v_cache=inputs.v_cache[:, :0])
    else:
        inputs = inputs._replace(page_table=inputs.page_table[:, :0])
    o, lse = decoding(inputs, None)
    assert lse is not None
    assert not o.any()
    assert (lse == -torch.inf).all()
    assert cache_status.status_of(o.device)[fields.SEQLENS_K] > 0
