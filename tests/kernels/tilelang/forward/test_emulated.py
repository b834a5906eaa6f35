"""The forward kernel's generated code for sm_80 on dense calls, run on the CPU by emulate(), in small tiles.

Keys grow with their position, so that rows' maxima grow from tile to tile; heads share keys; the last tiles are cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tileattn import Causal, Mask, SlidingWindow
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.config import ForwardConfig
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention, poisoned_memory
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

TILE = ForwardConfig(32, 32, 2, 64)
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3


@pytest.mark.parametrize(
    ("mask", "sink", "seqlen_q", "seqlen_k"),
    [
        pytest.param(SlidingWindow(40, 25), True, 100, 61, id="window-sink"),  # the first 13 queries see no key
        pytest.param(Causal(), False, 80, 61, id="causal", marks=pytest.mark.slow),
        pytest.param(None, False, 33, 85, id="full", marks=pytest.mark.slow),
    ],
)
def test_forward(
    mask: Mask | None, sink: bool, seqlen_q: int, seqlen_k: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = drawn(2, seqlen_q, HEADS, DIM), drawn(2, seqlen_k, KV_HEADS, DIM), drawn(2, seqlen_k, KV_HEADS, DIM)
    q, k, v = q.half(), (k * torch.linspace(0.1, 3, seqlen_k)[:, None, None]).half(), v.half()
    logits = 2 * drawn(HEADS) if sink else None
    variant, operands = encode(mask, ())
    call = AttentionCall(q.dtype, DIM, DIM, variant, sink=sink, arch=ARCH)
    monkeypatch.setattr(
        forward_launch, "forward_function", lambda call, config: Kernel(forward_kernel(call, config), tmp_path)
    )
    forward: Any = forward_launch.prepare_with(TILE, call, q.shape, k.shape, SCALE)
    with poisoned_memory():
        got = forward(Inputs(q, k, v, logits, operands))
    arguments = (q, k, v, mask, (), logits, SCALE)
    assert_forward_accurate("emulated", got, oracle_attention(*arguments), eager_attention(*arguments))
