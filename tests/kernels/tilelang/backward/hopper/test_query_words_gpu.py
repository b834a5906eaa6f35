"""Masked tiles of windows and documents, which hide scores by a bit for each, on a GPU: ``pytest -m gpu``.

The cases have documents that begin anywhere within tiles, keys that no single range of queries sees (warps with such a
key evaluate the mask), ranges that differ by head, lengths of queries and keys that differ, and grouped heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.tilelang.backward import test_gpu as gpu
from tests.kernels.tilelang.backward.test_gpu import FP16, Case, Problem, assert_same, check
from tests.kernels.tilelang.packed import test_backward_gpu as packed
from tests.kernels.tilelang.packed.test_forward_gpu import EDGES, LONG_TAIL
from tileattn import Causal, Documents, KeyPadding, Mask, PrefixLM, SlidingWindow
from tileattn.math import load
from tileattn.testing import ConformanceCase, assert_gradients_accurate, expected_gradients
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import PackedShape

pytestmark = pytest.mark.gpu


def _of_lengths(case: Case, *lengths: int) -> Documents:
    """Documents of these lengths over and over; those of the second batch element begin elsewhere."""
    count = (case.lengths[1] + 50 * case.batch) // sum(lengths) + 1
    ids = torch.repeat_interleave(torch.arange(count * len(lengths)), torch.tensor(lengths * count))
    rows = torch.stack([ids[b * 50 : b * 50 + case.lengths[1]] for b in range(case.batch)])
    return Documents(rows.to(gpu.DEVICE, torch.int32))


def _documents(*lengths: int) -> Callable[[Case], Documents]:
    return lambda case: _of_lengths(case, *lengths)


def _causal(*lengths: int) -> Callable[[Case], Mask]:
    return lambda case: _of_lengths(case, *lengths) & Causal()


def _within_window(*lengths: int) -> Callable[[Case], Mask]:
    return lambda case: _of_lengths(case, *lengths) & SlidingWindow(70, 9)


def _scattered(case: Case) -> Documents:
    """Ids in any order: no key has one range of queries."""
    return Documents((torch.arange(case.lengths[1], device=gpu.DEVICE) * 7 % 3).to(torch.int32))


def _in_pieces(case: Case) -> Documents:
    """The first 300 keys in pieces, the others in documents of 90: both kinds of warps, in one block too."""
    position = torch.arange(case.lengths[1], device=gpu.DEVICE)
    return Documents(torch.where(position < 300, position // 45 % 2, 5 + position // 90).to(torch.int32))


def _padding(case: Case) -> KeyPadding:
    """Padding at the end; of the second batch element also in between."""
    position = torch.arange(case.lengths[1], device=gpu.DEVICE)
    kept = [position < case.lengths[1] - 77, (position % 100 < 83) & (position > 20)]
    return KeyPadding(torch.stack(kept[: case.batch]))


@dataclass(frozen=True, eq=False)
class WindowsByHead(Mask):
    """A causal window of its own for each head, read from memory."""

    sizes: torch.Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k >= q - load(self.sizes, h))

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Any:
        return k_lo, k_hi + load(self.sizes, h) + 1

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Any:
        return k_hi, k_lo + load(self.sizes, h) + 1


def _by_head(case: Case) -> WindowsByHead:
    return WindowsByHead((torch.arange(case.heads[0], device=gpu.DEVICE) * 61 + 3).to(torch.int32))


D64, D96, D128 = (64, 64), (96, 96), (128, 128)
CASES = {
    "documents-64": Case((533, 533), (4, 2), D64, mask=_documents(61, 190, 5, 129)),
    "documents-causal-64": Case((700, 700), (8, 2), D64, mask=_causal(61, 190, 5, 129), dlse=True),
    "documents-causal-64-fp16": Case((397, 397), (2, 2), D64, FP16, mask=_causal(33, 64, 128)),
    "documents-96": Case((533, 533), (4, 4), D96, mask=_documents(250, 7, 100)),
    "documents-causal-96": Case((641, 641), (4, 1), D96, mask=_causal(250, 7, 100)),
    "documents-128": Case((640, 640), (4, 2), D128, mask=_documents(1, 127, 64, 200)),
    "documents-causal-128": Case((533, 533), (4, 2), D128, mask=_causal(61, 190, 5, 129), sink=True),
    "documents-of-one": Case((300, 300), (2, 1), D128, mask=_documents(1)),
    "documents-window-64": Case((533, 533), (4, 2), D64, mask=_within_window(61, 190, 5, 129)),
    "documents-window-128": Case((533, 533), (4, 2), D128, mask=_within_window(300, 44)),
    "documents-fewer-queries": Case((211, 500), (4, 2), D128, mask=_causal(61, 190, 5, 129)),
    "documents-more-queries": Case((500, 211), (4, 2), D64, mask=_documents(61, 19)),
    "documents-causal-more-queries": Case((500, 211), (4, 2), D128, mask=_causal(61, 19)),
    "scattered-64": Case((400, 400), (4, 2), D64, mask=_scattered),
    "in-pieces-64": Case((777, 777), (4, 2), D64, mask=_in_pieces),
    "in-pieces-128": Case((777, 777), (4, 2), D128, mask=_in_pieces),
    "padding-64": Case((400, 431), (4, 2), D64, mask=_padding),
    "padding-128": Case((400, 431), (4, 2), D128, mask=_padding),
    "prefix-64": Case((400, 431), (4, 2), D64, mask=PrefixLM(77)),
    "by-head-64": Case((400, 431), (6, 2), D64, mask=_by_head),
    "by-head-128": Case((533, 400), (6, 2), D128, mask=_by_head),
    "window-64": Case((700, 700), (4, 2), D64, mask=SlidingWindow(150, 0)),
    "window-both-64": Case((411, 700), (4, 2), D64, mask=SlidingWindow(150, 40)),
    "window-96": Case((700, 411), (4, 2), D96, mask=SlidingWindow(200, 31)),
    "window-128": Case((700, 700), (8, 2), D128, mask=SlidingWindow(150, 0)),
    "window-right-128": Case((333, 520), (4, 2), D128, mask=SlidingWindow(None, 17)),
    "window-left-128": Case((520, 333), (4, 2), D128, mask=SlidingWindow(17, None)),
    "window-of-one": Case((300, 300), (2, 2), D128, mask=SlidingWindow(0, 0)),
}
DETERMINISTIC = ("documents-causal-64", "documents-causal-128", "in-pieces-64", "window-128")


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    problem = Problem(CASES[name])
    check(name, problem, problem.ours())


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_without_sums_of_dq(name: str) -> None:
    problem = Problem(CASES[name])
    first = problem.ours(deterministic=True)
    check(name, problem, first)
    for _ in range(20):
        assert_same(problem.ours(deterministic=True), first, True)


RELAUNCHED = ("documents-causal-64", "by-head-64", "in-pieces-128", "window-64")


@pytest.mark.parametrize("name", RELAUNCHED)
def test_two_hundred_launches_give_the_same_gradients(name: str) -> None:
    """A range that is read before it is there would show as an outlier."""
    case = CASES[name]
    problem = Problem(case._replace(lengths=(2100, 2100), heads=(case.heads[0] * 2, case.heads[1] * 2)))
    output = problem.forward()
    first = problem.gradients(*output)
    for _ in range(200):
        assert_same(problem.gradients(*output), first, False)


def packed_cases() -> list[ConformanceCase]:
    shapes = [
        PackedShape("edges", 4, 2, EDGES, EDGES, behind=70),
        PackedShape("crossed", 4, 1, EDGES, (*EDGES[5:], *EDGES[:5]), behind=1),
        PackedShape("long-tail", 2, 1, LONG_TAIL, LONG_TAIL, behind=130),
    ]
    structures = [
        Structure("bf16", dim, dim, mask, (), False, True)
        for dim in (64, 96, 128)
        for mask in ("window", "documents", "causal&documents")
    ]
    return [ConformanceCase(structure, shape) for structure in structures for shape in shapes]


@pytest.mark.parametrize("case", packed_cases(), ids=lambda case: case.id)
def test_packed_sequences(case: ConformanceCase) -> None:
    arguments, do, dlse, got = packed._edge_case(case)
    assert_gradients_accurate(case.id, got, *expected_gradients(arguments, do, dlse), case.dtype)


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for name, case in CASES.items():
        yield Problem(case).ours
        if name in DETERMINISTIC:
            yield functools.partial(Problem(case).ours, deterministic=True)
    for packed_case in packed_cases():
        yield functools.partial(packed._edge_case, packed_case)
