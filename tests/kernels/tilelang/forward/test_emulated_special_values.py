"""NaN and infinities in the generated code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.special_values import HEADS, assert_as_the_formula, call_of
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.slow]


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("mask", ["full", "causal", "documents"])
def test_o_and_lse(mask: str, sink: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        forward_launch, "forward_function", lambda call, config: Kernel(forward_kernel(call, config), tmp_path)
    )
    special = call_of(mask, torch.float16, "cpu", seqlen_q=20)
    variant, operands = encode(special.mask, ())
    call = AttentionCall(torch.float16, 16, 16, variant, arch=ARCH, sink=sink)
    logits = torch.zeros(HEADS) if sink else None
    q, k, v, _ = special
    got = forward_launch.prepare(call, q.shape, k.shape, 0.25)(Inputs(q, k, v, logits, operands))
    assert_as_the_formula((*special, (), logits), got)
