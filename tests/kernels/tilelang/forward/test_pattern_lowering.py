"""Sparse patterns become TileLang kernels, as every mask does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import lower, make_call
from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
)
from tileattn.variant.sparse.blocks import for_call

BLOCKS = torch.ones(1, 2, 2, 3, dtype=torch.bool)
IDS = torch.arange(9) // 4


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(Causal() & Neighborhood((4, 5, 6), 3), marks=pytest.mark.slow),  # 8 s and more each
        pytest.param(
            for_call(BlockSparse(BLOCKS, (64, 48)), lambda: (1, 4, 2, 99, 99), lambda: 0), marks=pytest.mark.slow
        ),
        pytest.param(SlidingWindow(5, 5) | GlobalTokens(3), marks=pytest.mark.slow),
        pytest.param(Dilated(8, 8, dilation=2) | Strided(4, 2), marks=pytest.mark.slow),
        pytest.param(ImageTextDocuments(IDS, IDS) & GlobalTokens(IDS[None] > 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kernel_for_hopper(mask: Mask) -> None:
    source = lower(make_call(mask, dim=64))
    assert "wgmma" in source
