"""FlexAttention's masks become TileLang kernels for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

pytest.importorskip("tilelang")

from tests.tools.lowering import lower, make_call
from tileattn.call.facts import AttentionCall
from tileattn.compat.flex_attention import create_block_mask
from tileattn.compat.flex_attention.blocks import mask_of

TABLE = torch.arange(300) // 70
ONE = torch.ones(1, 1, 3, dtype=torch.int32)


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (TABLE[q_idx] == TABLE[kv_idx]) & (q_idx >= kv_idx)


def call_of(block_mask: BlockMask) -> AttentionCall:
    q, k = (torch.empty(1, 4, length, 64) for length in block_mask.seq_lengths)
    return make_call(mask_of(block_mask, q, k), dim=64)


@pytest.mark.slow(reason="10 s")
def test_a_function_that_reads_a_table() -> None:
    """With Q_LEN != KV_LEN. The shift is an argument of the kernel, so other lengths compile nothing."""
    call, other = (call_of(create_block_mask(document, None, None, n, 400, device="cpu")) for n in (300, 200))
    assert call == other
    assert "wgmma" in lower(call)


@pytest.mark.slow  # 8 s: reads a table of blocks as the other test does one of tokens
def test_pytorchs_block_mask() -> None:
    indices = ONE[..., None] * 0
    blocks = BlockMask.from_kv_blocks(ONE, indices, ONE, indices + 1, mask_mod=document, seq_lengths=(300, 400))
    assert "wgmma" in lower(call_of(blocks))
