"""`flash_attn.modules.mha` beside the functions that it calls, and `_get_block_size_n` beside flash-attn's table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn.compat import flash_attn as compat
from tileattn.compat.flash_attn.flash_attn_interface import _get_block_size_n
from tileattn.compat.flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention, get_alibi_slopes

QKV = torch.randn(2, 9, 3, 4, 16)
CU = torch.tensor([0, 4, 9], dtype=torch.int32)
OPTIONS: dict[str, Any] = {"softmax_scale": 0.3, "window_size": (3, 1), "deterministic": True}


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.25, 0.1, 0.0])])
@pytest.mark.parametrize(("made", "given"), [(False, None), (True, None), (True, False), (False, True)])
def test_modules_call_the_functions(made: bool, given: bool | None, slopes: Tensor | None) -> None:
    causal = made if given is None else given
    keywords = {**OPTIONS, "alibi_slopes": slopes, "causal": causal}
    own = FlashSelfAttention(made, alibi_slopes=slopes, **OPTIONS)
    assert torch.equal(own(QKV, given), compat.flash_attn_qkvpacked_func(QKV, **keywords))
    packed = QKV[0]
    o = own(packed, given, cu_seqlens=CU, max_seqlen=5)
    assert torch.equal(o, compat.flash_attn_varlen_qkvpacked_func(packed, CU, 5, **keywords))

    cross = FlashCrossAttention(made, alibi_slopes=slopes, **OPTIONS)
    q, kv = QKV[:, :7, 0], QKV[:, :, 1:, :2] if slopes is None else QKV[:, :, 1:]
    assert torch.equal(cross(q, kv, given), compat.flash_attn_kvpacked_func(q, kv, **keywords))
    of_q = torch.tensor([0, 2, 7], dtype=torch.int32)
    o = cross(q[0], kv[0], given, of_q, 5, CU, 5)
    assert torch.equal(o, compat.flash_attn_varlen_kvpacked_func(q[0], kv[0], of_q, CU, 5, 5, **keywords))


def test_dropout_in_training_only() -> None:
    module = FlashSelfAttention(attention_dropout=0.5)
    torch.manual_seed(1)
    o = module(QKV)
    torch.manual_seed(1)
    assert torch.equal(o, compat.flash_attn_qkvpacked_func(QKV, 0.5))
    assert torch.equal(module.eval()(QKV), compat.flash_attn_qkvpacked_func(QKV))


def test_slopes_are_a_buffer_that_is_not_saved() -> None:
    module = FlashSelfAttention(alibi_slopes=torch.tensor([0.5, 0.25]))
    assert not module.state_dict()
    assert [name for name, _ in module.named_buffers()] == ["alibi_slopes"]
    qkv = QKV[:, :, :, :2].bfloat16()
    expected = compat.flash_attn_qkvpacked_func(qkv, alibi_slopes=torch.tensor([0.5, 0.25]))
    assert torch.equal(module.bfloat16()(qkv), expected)


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda: FlashSelfAttention()(QKV[0], cu_seqlens=CU), "max_seqlen"),
        (lambda: FlashCrossAttention()(QKV[0, :, 0], QKV[0, :, 1:], None, CU), "max_seqlen"),
        (lambda: FlashCrossAttention()(QKV[0, :, 0], QKV[0, :, 1:], None, CU, 5), "cu_seqlens_k"),
        (lambda: FlashCrossAttention()(QKV[0, :, 0], QKV[0, :, 1:], None, CU, 5, CU), "max_seqlen_k"),
    ],
)
def test_lengths_come_together(call: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing} must be given with cu_seqlens, got None"):
        call()


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert get_alibi_slopes(1) == [1 / 256]
    assert get_alibi_slopes(12)[:8] == get_alibi_slopes(8)
    roots = [math.sqrt(1 / 2) ** i for i in (1, 3, 5, 7)]
    torch.testing.assert_close(get_alibi_slopes(12)[8:], roots)
    assert get_alibi_slopes(3) == [1 / 16, 1 / 256, 1 / 4]
    assert all(len(get_alibi_slopes(n)) == n for n in range(1, 40))
    with pytest.raises(ValueError, match="nheads must be at least 1, got 0"):
        get_alibi_slopes(0)


# --- Tiles of flash-attn's kernels: head dims up to, then (plain, causal, dropout, causal dropout) ---

LARGE_MEMORY = {32: (128,) * 4, 64: (128, 128, 64, 64), 96: (64,) * 4, 128: (64, 64, 32, 32), 256: (64,) * 4}
BLOCKS = {
    "sm_80": ((8, 0), LARGE_MEMORY),
    "sm_86": ((8, 6), LARGE_MEMORY | {128: (32, 64, 32, 32)}),
    "sm_89": ((8, 9), LARGE_MEMORY | {128: (32, 64, 32, 32)}),
    "sm_90": ((9, 0), LARGE_MEMORY),
    "sm_100": ((10, 0), LARGE_MEMORY),
}


@pytest.mark.parametrize("architecture", BLOCKS)
def test_block_sizes(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, table = BLOCKS[architecture]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for head_dim in range(1, 257):
        sizes = table[min(limit for limit in table if head_dim <= limit)]
        for device in (torch.device("cuda", 0), "cuda:0", 0):
            for size, (dropout, causal) in zip(sizes, [(False, False), (False, True), (True, False), (True, True)]):
                assert _get_block_size_n(device, head_dim, dropout, causal) == size, (head_dim, dropout, causal)


def test_block_sizes_without_a_gpu() -> None:
    assert _get_block_size_n(torch.device("cpu"), 128, False, False) == 64
    for wrong in (0, 257):
        with pytest.raises(ValueError, match=f"head_dim must lie in 1 .. 256, as in flash-attn, got {wrong}"):
            _get_block_size_n("cpu", wrong, False, False)
