"""Gradients of every backend on the conformance cases: right by the tolerance rule, or refused with a reason.

On a CPU: the torch backend on a part of the "quick" selection, Triton in its interpreter on a part of "smoke". On a GPU
(`pytest -m gpu`): TileLang on "full", Triton on a part of it. What may be refused: support_table.py.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor

from tests.tools.conformance_call import refusal, run
from tests.tools.triton_kernels.interpreted import is_for_triton, is_slow_to_interpret
from tileattn.runtime.dispatch import BACKENDS
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_gradients_accurate,
    build,
    conformance_cases,
    expected_gradients,
    gradients,
    output_gradients,
    packed_cases,
    poisoned_memory,
)

# On the CPU, of the cases that are not "smoke" every so many, and none with many scores in float16, in which PyTorch's
# own products, that is eager's, are slow there. Of these `make test` has every second, and none with many scores.
CPU_STEP = 16
MANY_SCORES = 2**20


def _parameters() -> list[object]:
    """(case, backend, device); those of one case stand together, because they share its oracle."""
    names = [backend.name for backend in BACKENDS]
    quick = conformance_cases("quick")
    parameters = []
    for i, case in enumerate(quick + packed_cases("quick")):
        many = case.shape.seqlen_q * case.shape.seqlen_k >= MANY_SCORES
        left_out = i < len(quick) and i % CPU_STEP and not case.smoke
        if left_out or (many and case.structure.dtype == "fp16"):
            continue
        for name in names if case.smoke else ["torch"]:
            interpreted = name == "triton" and is_slow_to_interpret(case, backward=True)
            one_of_two = not case.smoke and (i // CPU_STEP if i < len(quick) else i) % 2 == 1
            marks = [pytest.mark.slow] if many or one_of_two or interpreted else []
            parameters.append(pytest.param(case, name, "cpu", id=f"{case.id}-{name}", marks=marks))
    if torch.cuda.is_available():
        for i, case in enumerate(conformance_cases("full") + packed_cases("full")):
            for name in names if case.smoke else ["tilelang", "triton"] if is_for_triton(i, case) else ["tilelang"]:
                parameters.append(pytest.param(case, name, "cuda", id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu))
    return parameters


@functools.lru_cache(maxsize=2)
def _arguments(case: ConformanceCase, device: str) -> Arguments:
    return build(case, device)


@functools.lru_cache(maxsize=2)
def _expected(case: ConformanceCase, device: str) -> tuple[Tensor, Tensor | None, tuple[object, ...]]:
    arguments = _arguments(case, device)
    do, dlse = output_gradients(case, arguments)
    return do, dlse, expected_gradients(arguments, do, dlse)


@pytest.mark.parametrize(("case", "backend", "device"), _parameters())
def test_gradients_conform(case: ConformanceCase, backend: str, device: str) -> None:
    arguments = _arguments(case, device)
    leaves = arguments.leaves()
    if reason := refusal(arguments, backend, needs_grad=True):
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            run(arguments, backend)
        pytest.skip(f"refused, as it says: {reason}")
    do, dlse, expected = _expected(case, device)
    with poisoned_memory():
        got = gradients(run(arguments, backend), leaves, do, dlse)
    for name, leaf in leaves.items():
        assert (got[name].shape, got[name].dtype) == (leaf.shape, leaf.dtype)
    assert_gradients_accurate(case.id, got, *expected, case.dtype)
