"""Users' functions in TileLang's generated code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.user_functions import HEADS, MASKS, SCORES, SEQLEN_K, SEQLEN_Q
from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
)
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import for_tensors

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]


def _cases() -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind}-{name}")
        for kind, functions in (("score", SCORES), ("mask", MASKS))
        for name in functions
    ]


@pytest.mark.parametrize(("kind", "name"), _cases())
def test_functions(kind: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mask = FunctionMask(MASKS[name]) if kind == "mask" else None
    _check(name, mask, (SCORES[name],) if kind == "score" else (), monkeypatch, tmp_path)


PLACE = torch.arange(SEQLEN_K)
PATTERNS: dict[str, Mask] = {
    "dilated": Dilated(9, 4, dilation=3),
    "strided": Strided(4, 2),
    "window or global": SlidingWindow(3, 3) | GlobalTokens(2),
    "neighborhood of an image": Neighborhood((4, 5), 3),
    "neighborhood of a video": Neighborhood((2, 3, 3), (2, 2, 3)),
    "blocks": BlockSparse(torch.arange(16).view(1, 1, 4, 4) % 3 > 0, (16, 32)),
    "images": ImageTextDocuments(PLACE // 11, PLACE % 7 // 3 - 1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_sparse_patterns(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _check(name, PATTERNS[name], (), monkeypatch, tmp_path)


def test_a_root_of_a_distance_is_no_root_of_less_than_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where q is k its argument is 0, which must not be rounded to -1e-9."""
    _check("root", Causal(), (lambda s, b, h, q, k: s - torch.sqrt(0.1 * q - 0.1 * k),), monkeypatch, tmp_path)


def _check(
    name: str, mask: Mask | None, mods: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, SEQLEN_Q, HEADS, 16), (1, SEQLEN_K, HEADS, 16), (1, SEQLEN_K, HEADS, 16))
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
    variant, operands = encode(for_tensors(mask, q, k), mods)
    call = AttentionCall(torch.float16, 16, 16, variant, arch=ARCH)
    monkeypatch.setattr(
        forward_launch, "forward_function", lambda call, config: Kernel(forward_kernel(call, config), tmp_path)
    )
    o, lse = forward_launch.prepare(call, q.shape, k.shape, 0.25)(Inputs(q, k, v, None, operands))
    arguments = (q, k, v, mask, mods)
    assert_forward_accurate(name, (o, lse), oracle_attention(*arguments), eager_attention(*arguments))
