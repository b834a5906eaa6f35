"""Which calls make their lists by the kernel, and what is compiled ahead for them; on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileattn import Causal, Dilated, FunctionMask, Mask, SoftCap
from tileattn.bench import warmup
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tile_lists import Cut, Sizes, make_lists
from tileattn.kernels.tilelang.lists import launch
from tileattn.kernels.tilelang.lists.analysis import MOST_NUMBER, MOST_POSITIONS, analysis, mask_text
from tileattn.kernels.tilelang.lists.launch import by_kernel, fits, lists_jobs
from tileattn.kernels.tilelang.lists.library import ListsJob, lists_key
from tileattn.math import load
from tileattn.variant.key import encode

SIZES, CUT = Sizes(1, 2, 4096, 4096), Cut(128, 128)
IDS, MATRIX = torch.arange(4096) // 100, torch.ones(64, 64, dtype=torch.bool)


def key(mask: Mask) -> str:
    return encode(mask, ())[0]


def fit(mask: Mask, sizes: Sizes = SIZES, cut: Cut = CUT) -> bool:
    variant, operands = encode(mask, ())
    found = analysis(variant)
    assert found is not None
    return fits(found, operands, sizes, cut)


@pytest.mark.parametrize("name", NAMES)
def test_patterns_have_a_kernel(name: str) -> None:
    mask = pattern(name, 4096, 2, "cpu").mask
    assert fit(mask)
    assert fit(mask, SIZES, Cut(384, 176, longest_first=True))


UNKNOWN = {
    "floats": FunctionMask(lambda b, h, q, k: 0.5 * q > k),
    "a table of floats": FunctionMask(lambda b, h, q, k: load(torch.ones(9), q) > 0.5),
    "a table by the distance": FunctionMask(lambda b, h, q, k: load(IDS, abs(q - k)) > 3),
    "a matrix": FunctionMask(lambda b, h, q, k: load(MATRIX, q, k)),
    # The bounds of an index are those of an equal value before it, which were computed from the other side too.
    "an index by way of k": FunctionMask(lambda b, h, q, k: (abs(q - k + k) > 5) & (load(IDS, abs(q)) == load(IDS, k))),
    "an index by way of q": FunctionMask(lambda b, h, q, k: ((q - (q - k)) // 2 > 5) & (load(IDS, k // 2) == 3)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_are_left_to_pytorch(name: str) -> None:
    assert analysis(key(UNKNOWN[name])) is None
    assert lists_jobs(key(UNKNOWN[name]), "sm_90a") == ()


def test_what_the_kernel_assumes_of_a_call() -> None:
    assert fit(Dilated(511, dilation=4))
    assert not fit(Dilated(511, dilation=4), SIZES._replace(seqlen_q=MOST_POSITIONS))
    assert not fit(Dilated(511, dilation=4), SIZES._replace(heads=5000))
    assert not fit(Dilated(511, dilation=4), cut=Cut(128, 1024))
    assert not fit(Dilated(MOST_NUMBER + 1, dilation=4))
    ids = FunctionMask(lambda b, h, q, k: load(IDS, q) == load(IDS, k))
    assert fit(ids)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert not fit(FunctionMask(lambda b, h, q, k: load(nothing, q) == load(nothing, k)))
    assert not fit(FunctionMask(lambda b, h, q, k: load(IDS.repeat(4), 100 * q) == k))  # 16384 elements a row
    for rows, is_taken in ((4, True), (4096, False)):  # of an expanded table, which would be copied
        of_head = IDS.expand(rows, -1)
        assert fit(FunctionMask(lambda b, h, q, k, of_head=of_head: load(of_head, h, q) == 3)) == is_taken


def test_divisors_are_positive() -> None:
    """Numbers that are no divisors need not be."""
    variant, operands = encode(Dilated(511, dilation=4), ())
    found = analysis(variant)
    assert found is not None
    assert found.divisors
    for number in found.ints:
        ints = list(operands.ints)
        ints[number] = -1
        changed: Any = SimpleNamespace(ints=ints, tensors=operands.tensors)
        assert fits(found, changed, SIZES, CUT) == (number not in found.divisors)


def test_one_kernel_for_all_numbers_and_modifications() -> None:
    plain, other = (encode(Dilated(left, dilation=step), ())[0] for left, step in ((511, 4), (77, 9)))
    assert lists_key(plain, "sm_90a") == lists_key(other, "sm_90a")
    slopes = torch.ones(2)
    for mod in (SoftCap(3.0), lambda score, b, h, q, k: score * slopes[h]):
        assert mask_text(plain) == mask_text(encode(Dilated(511, dilation=4), (mod,))[0])
    assert lists_key(plain, "sm_90a") != lists_key(key(pattern("strided", 512, 1, "cpu").mask), "sm_90a")


def test_launches() -> None:
    """One; one more for sorted lines, and one more for wide loads. No operation of PyTorch besides."""
    phases: list[int] = []
    for mask, wide in ((Dilated(511, dilation=4), []), (pattern("loaded-ids", 4096, 2, "cpu").mask, [launch.BOUNDS])):
        variant, operands = encode(mask, ())
        found = analysis(variant)
        assert found is not None
        for longest_first in (False, True):
            phases.clear()
            cut = CUT._replace(longest_first=longest_first)
            by_kernel(lambda *given: phases.append(given[-11]), found, operands, SIZES, cut, torch.device("cpu"))
            assert phases == [*wide, *[launch.COUNTS] * longest_first, launch.LISTS]


def test_a_cpu_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "by_kernel", None)
    variant, operands = encode(Dilated(511, dilation=4), ())
    made = launch.make(variant, operands, SIZES, CUT, torch.device("cpu"))
    assert torch.equal(made.tiles, make_lists(variant, operands, SIZES, CUT, torch.device("cpu")).tiles)


def test_jobs() -> None:
    variant = key(Dilated(511, dilation=4))
    job = ListsJob(variant, "sm_90a")
    assert lists_jobs(variant, "sm_90a") == (job,)
    assert job.key == lists_key(variant, "sm_90a")
    assert "Dilated" in str(job)
    (packed,) = lists_jobs(variant, "sm_90a", packed=True)
    assert packed.key == lists_key(variant, "sm_90a", packed=True) != job.key
    assert "packed" in str(packed)
    assert lists_jobs(variant, "sm_80") == lists_jobs(key(Causal()), "sm_90a") == lists_jobs("", "sm_90a") == ()


def test_warmup_compiles_it() -> None:
    call = AttentionCall(torch.bfloat16, 64, 64, key(Dilated(511, dilation=4)), arch="sm_90a")
    for wanted, expected in (
        (call, [ListsJob(call.variant, "sm_90a")]),
        (replace(call, packed=True), [ListsJob(call.variant, "sm_90a", packed=True)]),
        (replace(call, dtype=FP8), []),
    ):
        assert [job for job in warmup.jobs([wanted]) if isinstance(job, ListsJob)] == expected


def test_phases_and_warps_are_the_kernels() -> None:
    kernel = pytest.importorskip("tileattn.kernels.tilelang.lists.kernel")
    for name in ("BOUNDS", "COUNTS", "LISTS", "WARPS"):
        assert getattr(launch, name) == getattr(kernel, name)
