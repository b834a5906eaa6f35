"""Packed sequences in the generated code for sm_80, run on the CPU by emulate(): the plan, the launch, the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tileattn.call import packed_status
from tileattn.call.dropout import Dropout, draw_seed
from tileattn.call.facts import Packed, sizes
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang import backend
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.kernels.tilelang.packed import plan as packed
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel
from tileattn.runtime import operators as ops
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_forward_accurate,
    build,
    expected_forward,
    packed_cases,
    poisoned_memory,
)
from tileattn.testing.call_arguments import DROPOUT_SEED
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode
from tileattn.variant.scores import for_packed

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CASES = [case for case in packed_cases("full") if case.structure.dtype in ("bf16", "fp16")]
QUICK = next(case for case in CASES if case.id.startswith("bf16-d64-causal-sink-varlen-cross"))

Once = Callable[[Any, Callable[[], Any]], Kernel]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """The emulated kernel of a key, made when it is first asked for."""
    compiled: dict[Any, Kernel] = {}

    def find(key: Any, make: Callable[[], Any]) -> Kernel:
        if key not in compiled:
            compiled[key] = Kernel(make(), tmp_path_factory.mktemp("kernel"))
        return compiled[key]

    return find


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch, once: Once) -> list[list[int]]:
    """Tensors are on the CPU, and kernels run there; the statuses that calls report."""
    reported: list[list[int]] = []
    monkeypatch.setattr(
        forward_launch,
        "forward_function",
        lambda call, config: once((call, config), lambda: forward_kernel(call, config)),
    )
    monkeypatch.setattr(packed, "plan_function", lambda arch: once(arch, lambda: plan_kernel("sm_80")))
    monkeypatch.setattr(packed_status.STATUS, "devices", {})
    monkeypatch.setattr(
        packed_status, "report", lambda device: reported.append(packed_status.status_of(device).tolist())
    )
    return reported


def run(arguments: Arguments, given: Packed | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a case, or of its tensors with other lengths."""
    q, k, v, mask, mods, sink, *_ = arguments.positional
    given = given or arguments.packed
    assert given is not None
    variant, operands = encode(mask, for_packed(mods, *given[:2]))
    aligned = arguments.layout != "unaligned"
    torch.manual_seed(DROPOUT_SEED)
    dropout = Dropout(arguments.dropout_p, draw_seed("cpu")) if arguments.dropout_p else None
    inputs = Inputs(q, k, v, sink, operands, dropout, given)
    call = replace(ops.make_call(inputs, variant), arch=ARCH, aligned=aligned)
    assert backend.refusal(call) is None
    scale = q.shape[3] ** -0.5 if arguments.scale is None else arguments.scale
    forward = forward_launch.prepare(call, *sizes(q, k, given), scale)
    with poisoned_memory():
        return forward(inputs)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[] if case is QUICK else pytest.mark.slow) for case in CASES]
)
def test_case(case: ConformanceCase, statuses: list[list[int]]) -> None:
    arguments = build(case)
    got = run(arguments)
    assert_forward_accurate(case.id, got, *expected_forward(arguments))
    assert all(status == [0, 0, 0, 0] for status in statuses)


def test_wrong_lengths_give_nothing(statuses: list[list[int]]) -> None:
    """No memory is touched where the wrong cumulative lengths lead."""
    arguments = build(QUICK)
    assert arguments.packed is not None
    cu_seqlens_q, cu_seqlens_k, *longest = arguments.packed
    for wrong in (cu_seqlens_q + 10**6, -cu_seqlens_q - 10**6):
        o, lse = run(arguments, Packed(wrong, cu_seqlens_k, *longest))
        assert (o == 0).all()
        assert (lse == -torch.inf).all()
    assert [status[:2] for status in statuses] == [[1, 0]] * 2
