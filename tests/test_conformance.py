"""Every backend, on every case: right by the tolerance rule, or refused with the reason that it gives.

On a CPU: the torch backend on the "quick" selection, the reference and the others on "smoke". On a GPU (`pytest -m
gpu`): TileLang on the "full" selection. A refused case counts as skipped, after its refusal has been checked.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

import tileattn
from tileattn import ops
from tileattn.dispatch import BACKENDS
from tileattn.reference import flash_attention_1, flash_attention_2, standard_attention
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_forward_accurate,
    build,
    conformance_cases,
    eager_attention,
    oracle_attention,
    poisoned_memory,
)
from tileattn.variant import encode

REFERENCE = {f.__name__: f for f in (standard_attention, flash_attention_1, flash_attention_2)}


def _parameters() -> list[object]:
    """(case, backend, device); those of one case stand together, because they share its oracle."""
    names = [backend.name for backend in BACKENDS]
    found = []
    for case in conformance_cases("quick"):
        for name in [*REFERENCE, *names] if case.smoke else ["torch"]:
            found.append(pytest.param(case, name, "cpu", id=f"{case.id}-{name}"))
    if torch.cuda.is_available():
        for case in conformance_cases("full"):
            for name in names if case.smoke else ["tilelang"]:
                found.append(pytest.param(case, name, "cuda", id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu))
    return found


@functools.lru_cache(maxsize=2)
def _expected(case: ConformanceCase, device: str) -> tuple[Arguments, object, object]:
    arguments = build(case, device)
    return arguments, oracle_attention(*arguments.positional), eager_attention(*arguments.positional)


def _refusal(arguments: Arguments, name: str) -> str | None:
    q, k, v, mask, score_mods, sink, _ = arguments.positional
    call = ops.make_call(q, k, v, sink, encode(mask, score_mods)[0], needs_grad=False)
    return next(backend for backend in BACKENDS if backend.name == name).refusal(call)


def _run(arguments: Arguments, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """o, as bshd, and lse from the public function."""
    bhsd = arguments.layout == "bhsd"
    q, k, v = (x.transpose(1, 2) if bhsd else x for x in (arguments.q, arguments.k, arguments.v))
    o, lse = tileattn.attention(
        q,
        k,
        v,
        mask=arguments.mask,
        score_mod=arguments.score_mods,
        scale=arguments.scale,
        sink=arguments.sink,
        layout=arguments.layout,
        return_lse=True,
        backend=backend,
    )
    return (o.transpose(1, 2) if bhsd else o), lse


@pytest.mark.parametrize(("case", "backend", "device"), _parameters())
def test_conformance(case: ConformanceCase, backend: str, device: str) -> None:
    arguments, oracle, eager = _expected(case, device)
    if backend in REFERENCE:
        got = REFERENCE[backend](*arguments.positional)
    else:
        if reason := _refusal(arguments, backend):
            with pytest.raises(NotImplementedError, match=re.escape(reason)):
                _run(arguments, backend)
            pytest.skip(f"refused, as it says: {reason}")
        with poisoned_memory():
            got = _run(arguments, backend)
    o, lse = got
    assert o.dtype == case.dtype
    assert lse.dtype == torch.promote_types(case.dtype, torch.float32)
    assert_forward_accurate(case.id, got, oracle, eager)
