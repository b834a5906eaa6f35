"""Every backend on every case: its results are right by the tolerance rule, or it refuses the case with a reason.

On a CPU: the torch backend on the "quick" selection, every second of them in `make test`; the reference and the others
on "smoke", where Triton interprets.
On a GPU (`pytest -m gpu`): TileLang on the "full" selection, Triton on a part of it, and the ladder on its full and
causal cases. A refused case counts as skipped after its refusal has been checked: the text, and that the table of what
must run (support_table.py) allows it.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from hypothesis import given, settings

import tileattn
from tests.tools.compositions import Composition, compositions
from tests.tools.conformance_call import refusal, run
from tests.tools.triton_kernels.interpreted import is_for_triton, is_slow_to_interpret
from tileattn.reference import flash_attention_1, flash_attention_2, standard_attention
from tileattn.runtime.dispatch import BACKENDS
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_forward_accurate,
    build,
    conformance_cases,
    eager_attention,
    expected_forward,
    oracle_attention,
    packed_cases,
    poisoned_memory,
)
from tileattn.testing.shapes import PackedShape

# So many scores take float64's oracle and PyTorch's loop a second or two: `make test` has of these one reference.
MANY_SCORES, QUICK_WITH_MANY = 2**20, ("flash_attention_2",)
REFERENCE = {f.__name__: f for f in (standard_attention, flash_attention_1, flash_attention_2)}


def _parameters() -> list[object]:
    """(case, backend, device); those of one case stand together, because they share its oracle."""
    names = [backend.name for backend in BACKENDS]
    parameters = []
    for i, case in enumerate(conformance_cases("quick") + packed_cases("quick")):
        reference = [] if isinstance(case.shape, PackedShape) else REFERENCE
        for name in [*reference, *names] if case.smoke else ["torch"]:
            many = case.shape.seqlen_q * case.shape.seqlen_k >= MANY_SCORES and name not in QUICK_WITH_MANY
            one_of_two = not case.smoke and i % 2 == 1
            interpreted = name == "triton" and is_slow_to_interpret(case)
            marks = [pytest.mark.slow] if many or one_of_two or interpreted else []
            parameters.append(pytest.param(case, name, "cpu", id=f"{case.id}-{name}", marks=marks))
    if torch.cuda.is_available():
        for i, case in enumerate(conformance_cases("full") + packed_cases("full")):
            others = ["triton"] * is_for_triton(i, case) + ["mma"] * _plain(case)
            for name in names if case.smoke else ["tilelang", *others]:
                parameters.append(pytest.param(case, name, "cuda", id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu))
    return parameters


def _plain(case: ConformanceCase) -> bool:
    """Whether the ladder may run a case, which knows full and causal attention only."""
    structure = case.structure
    return (
        not isinstance(case.shape, PackedShape)
        and structure.mask in ("none", "causal")
        and not structure.scores
        and not structure.sink
    )


@functools.lru_cache(maxsize=2)
def _expected(case: ConformanceCase, device: str) -> tuple[Arguments, object, object]:
    arguments = build(case, device)
    return arguments, *expected_forward(arguments)


@pytest.mark.parametrize(("case", "backend", "device"), _parameters())
def test_conformance(case: ConformanceCase, backend: str, device: str) -> None:
    arguments, oracle, eager = _expected(case, device)
    if backend in REFERENCE:
        got = REFERENCE[backend](*arguments.positional)
    else:
        if reason := refusal(arguments, backend, needs_grad=False):
            with pytest.raises(NotImplementedError, match=re.escape(reason)):
                run(arguments, backend)
            pytest.skip(f"refused, as it says: {reason}")
        with poisoned_memory():
            got = run(arguments, backend)
    o, lse = got
    assert o.dtype == case.out_dtype
    assert lse.dtype == torch.promote_types(case.out_dtype, torch.float32)
    assert_forward_accurate(case.id, got, oracle, eager)


# --- Random compositions ---


@settings(max_examples=200, deadline=None, derandomize=True)
@given(compositions())
def test_random_compositions(composition: Composition) -> None:
    """The torch backend, and the tiled reference in tiles so small that ranges matter, on anything composed."""
    arguments = composition.arguments()
    oracle, eager = oracle_attention(*arguments), eager_attention(*arguments)  # type: ignore[arg-type]
    q, k, v, mask, mods, sink, scale = arguments
    got = {
        "torch": tileattn.attention(
            q, k, v, mask=mask, score_mod=mods, sink=sink, scale=scale, return_lse=True, backend="torch"
        ),
        "flash_attention_1": flash_attention_1(*arguments, block_M=8, block_N=8),
        "flash_attention_2": flash_attention_2(*arguments, block_M=8, block_N=8),
    }
    for name, result in got.items():
        assert_forward_accurate(name, result, oracle, eager)
