"""Every backend that decodes, on every case of decode: right by the tolerance rule, or refused with its reason.

On a CPU: the torch backend on the "quick" selection, the others on "smoke", where Triton interprets. On a GPU
(`pytest -m gpu`): TileLang and Triton on the "full" selection, torch on a part of it. A refused case counts as skipped,
after its refusal has been checked against the table of what must run (support_table.py).
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor

from tests.tools.decode_call import NAMES, decode_refusal, run_decode
from tileattn.testing import (
    DecodeArguments,
    DecodeCase,
    assert_forward_accurate,
    build_decode,
    decode_cases,
    expected_decode,
    poisoned_memory,
)

TORCH_STEP = 5  # on a GPU torch decodes over the whole capacity: one case in so many
INTERPRETED_SCORES, INTERPRETED_PARTS = 8_000, 100  # what Triton's interpreter takes a second for


def _parameters() -> list[object]:
    """(case, backend, device); those of one case stand together, because they share its oracle."""
    found = []
    for case in decode_cases("quick"):
        for name in NAMES if case.smoke else ["torch"]:
            marks = [pytest.mark.slow] if name == "triton" and _is_slow_to_interpret(case) else []
            found.append(pytest.param(case, name, "cpu", id=f"{case.id}-{name}", marks=marks))
    if torch.cuda.is_available():
        for number, case in enumerate(decode_cases("full")):
            for name in NAMES:
                if name != "torch" or case.smoke or number % TORCH_STEP == 0:
                    found.append(pytest.param(case, name, "cuda", id=f"{case.id}-{name}-cuda", marks=pytest.mark.gpu))
    return found


def _is_slow_to_interpret(case: DecodeCase) -> bool:
    """Whether it has many scores, or many parts; where it is refused, none are computed."""
    shape = case.shape
    if case.structure.dtype == "fp64":
        return False
    if isinstance(shape.splits, int) and shape.splits * shape.kv_heads * shape.batch > INTERPRETED_PARTS:
        return True
    return sum(rows * keys for rows, keys in zip(shape.lengths_q, shape.lengths_k)) * shape.heads > INTERPRETED_SCORES


@functools.lru_cache(maxsize=2)
def _expected(case: DecodeCase, device: str) -> tuple[DecodeArguments, object, object]:
    arguments = build_decode(case, device)
    return arguments, *expected_decode(arguments)


@pytest.mark.parametrize(("case", "backend", "device"), _parameters())
def test_conformance(case: DecodeCase, backend: str, device: str) -> None:
    arguments, oracle, eager = _expected(case, device)
    if reason := decode_refusal(arguments, backend):
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            run_decode(arguments, backend)
        pytest.skip(f"refused, as it says: {reason}")
    with poisoned_memory():
        o, lse = run_decode(arguments, backend, **_out(case, arguments))
    assert o.dtype == case.dtype
    assert lse.dtype == torch.promote_types(case.dtype, torch.float32)
    assert_forward_accurate(case.id, (o, lse), oracle, eager)


def _out(case: DecodeCase, arguments: DecodeArguments) -> dict[str, Tensor]:
    """For every third case, where o is to be written: a part of a larger tensor, all of it NaN."""
    if len(case.id) % 3:
        return {}
    q, head_dim_v = arguments.q, arguments.v_cache.shape[3]
    whole = torch.full((*q.shape[:-2], q.shape[-2] + 1, head_dim_v + 8), torch.nan, dtype=q.dtype, device=q.device)
    return {"out": whole[..., 1:, :head_dim_v]}
