"""Gradients at head dims whose padding products leave out: ``pytest -m gpu tests/kernels/tilelang/backward``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels.tilelang.backward.test_gpu import FP16, Case, Problem, _bias, _padded_bias, _softcap, check
from tileattn import Causal, SlidingWindow

pytestmark = pytest.mark.gpu

CASES = {
    "full-80": Case((333, 411), (4, 2), (80, 80)),
    "full-72": Case((333, 260), (4, 4), (72, 72), FP16, dlse=True),
    "causal-80": Case((520, 520), (4, 1), (80, 80), mask=Causal()),
    "full-112": Case((333, 260), (4, 2), (112, 112)),
    "full-104": Case((129, 257), (4, 4), (104, 104), FP16),
    "causal-112": Case((520, 520), (4, 2), (112, 112), mask=Causal()),
    "causal-112-cross": Case((100, 333), (8, 2), (112, 112), mask=Causal()),
    "causal-128/80": Case((300, 311), (4, 4), (128, 80), mask=Causal()),
    "full-112/80": Case((300, 311), (4, 4), (112, 80)),
    "window-80": Case((300, 341), (4, 2), (80, 80), mask=SlidingWindow(50, 30), sink=True),
    "softcap-112": Case((300, 300), (4, 2), (112, 112), mask=Causal(), mods=_softcap),
    "bias-80": Case((300, 333), (4, 2), (80, 80), mods=_bias, tensors=1),
    "bias-padded-112": Case((333, 301), (4, 2), (112, 112), mods=_padded_bias, tensors=1),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, deterministic: bool) -> None:
    problem = Problem(CASES[name])
    check(name, problem, problem.ours(deterministic=deterministic))


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for case in CASES.values():
        for deterministic in (False, True):
            yield functools.partial(Problem(case).ours, deterministic=deterministic)
