"""The reference's backward pass, compared with autograd through standard attention and with finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.dropout import weight_of_kept
from tileattn.reference import flash_attention_2, flash_attention_2_backward, standard_attention
from tileattn.testing import dropout_mask

BATCH, HEADS, KV_HEADS = 2, 4, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    q = random(BATCH, seqlen_q, HEADS, 8)
    return q, random(BATCH, seqlen_k, KV_HEADS, 8, seed=1), random(BATCH, seqlen_k, KV_HEADS, 12, seed=2)


MASKS: dict[str, Callable[[int], Mask | None]] = {
    "full": lambda seqlen: None,
    "causal": lambda seqlen: Causal(),
    "window": lambda seqlen: SlidingWindow(5, 2),
    "prefix": lambda seqlen: PrefixLM(7),
    "documents": lambda seqlen: Documents(torch.arange(seqlen) // 9) & Causal(),
}


def slopes() -> Tensor:
    return torch.linspace(0.05, 0.4, HEADS, dtype=torch.float64)


# A modification, given the tensor that it reads; and that tensor, given both lengths.
Mod = Callable[[Tensor], Any]
MODS: dict[str, tuple[Mod, Callable[[int, int], Tensor]] | None] = {
    "none": None,
    "softcap": (lambda unused: SoftCap(3.0), lambda seqlen_q, seqlen_k: slopes()),
    "alibi": (ALiBi, lambda seqlen_q, seqlen_k: slopes()),
    "bias": (Bias, lambda seqlen_q, seqlen_k: random(1, HEADS, seqlen_q, seqlen_k, seed=3)),
    "bias of keys": (Bias, lambda seqlen_q, seqlen_k: random(BATCH, 1, 1, seqlen_k, seed=4)),
    "ignores the score": (lambda t: lambda score, b, h, q, k: t[h] * (q - k), lambda seqlen_q, seqlen_k: slopes()),
    "ignores everything": (lambda t: lambda score, b, h, q, k: 0.0 * (q - k), lambda seqlen_q, seqlen_k: slopes()),
}


def by_autograd(
    arguments: Sequence[Tensor],
    mask: Mask | None,
    mod: Mod | None,
    do: Tensor,
    dlse: Tensor | None,
    dropout: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of q, k, v, sink and the modification's tensor, through the matrix of scores."""
    leaves = [x.clone().requires_grad_() for x in arguments]
    q, k, v, sink, tensor = leaves
    o, lse = standard_attention(q, k, v, mask, [mod(tensor)] if mod else [], sink, dropout=dropout)
    seen = torch.isfinite(lse)
    total = (o * do).sum() + (0.0 if dlse is None else (torch.where(seen, lse, 0.0) * dlse).sum())
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves, strict=True)]


@pytest.mark.parametrize("lengths", [(40, 40), (17, 50), (50, 17), (1, 33)], ids=str)
@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("mask_name", MASKS)
def test_gradients_are_those_of_autograd(mask_name: str, mods: str, lengths: tuple[int, int]) -> None:
    q, k, v = qkv(*lengths)
    mask = MASKS[mask_name](lengths[1])
    mod, tensor = None, slopes()
    if (maker := MODS[mods]) is not None:
        mod, tensor = maker[0], maker[1](*lengths)
    sink = torch.linspace(-1.0, 1.0, HEADS, dtype=torch.float64)
    do, dlse = random(BATCH, lengths[0], HEADS, 12, seed=5), random(BATCH, HEADS, lengths[0], seed=6)
    expected = by_autograd((q, k, v, sink, tensor), mask, mod, do, dlse)
    tensor.requires_grad_()
    score_mods = [mod(tensor)] if mod else []
    o, lse = flash_attention_2(q, k, v, mask, score_mods, sink)
    got = flash_attention_2_backward(
        do, q, k, v, o.detach(), lse.detach(), mask, score_mods, sink, None, [tensor], dlse, block_M=16, block_N=8
    )
    for name, x, y in zip(("dq", "dk", "dv", "dsink", "dtensor"), (*got[:4], *got.tensors), expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("p", [0.2, 1.0])
def test_gradients_under_dropout_are_those_of_autograd(mask_name: str, p: float) -> None:
    q, k, v = qkv(30, 41)
    mask, bias = MASKS[mask_name](41), random(1, HEADS, 30, 41, seed=3)
    sink = torch.linspace(-1.0, 1.0, HEADS, dtype=torch.float64)
    do, dlse = random(BATCH, 30, HEADS, 12, seed=5), random(BATCH, HEADS, 30, seed=6)
    dropout = dropout_mask(4, p, BATCH, HEADS, 30, 41) * weight_of_kept(p)
    expected = by_autograd((q, k, v, sink, bias), mask, Bias, do, dlse, dropout)
    bias.requires_grad_()
    o, lse = flash_attention_2(q, k, v, mask, [Bias(bias)], sink, dropout=dropout)
    got = flash_attention_2_backward(
        do, q, k, v, o.detach(), lse.detach(), mask, [Bias(bias)], sink, None, [bias], dlse, dropout, 16, 8
    )
    for name, x, y in zip(("dq", "dk", "dv", "dsink", "dbias"), (*got[:4], *got.tensors), expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("blocks", [(1, 1), (7, 13), (64, 64), (128, 16)], ids=str)
def test_tiles_of_any_size(blocks: tuple[int, int]) -> None:
    q, k, v = qkv(30, 41)
    do = random(BATCH, 30, HEADS, 12, seed=5)
    o, lse = flash_attention_2(q, k, v, Causal())
    got = flash_attention_2_backward(do, q, k, v, o, lse, Causal(), block_M=blocks[0], block_N=blocks[1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad((standard_attention(*leaves, Causal())[0] * do).sum(), leaves)
    for x, y in zip(got[:3], expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_rows_that_see_no_key_have_no_gradient() -> None:
    q, k, v = qkv(50, 17)  # the first 33 queries stand before the first key
    do = random(BATCH, 50, HEADS, 12, seed=5)
    o, lse = flash_attention_2(q, k, v, Causal())
    got = flash_attention_2_backward(do, q, k, v, o, lse, Causal())
    assert torch.equal(got.q[:, :33], torch.zeros_like(got.q[:, :33]))
    assert all(torch.isfinite(x).all() for x in got[:3])
    assert got.sink is None


def test_a_sink_that_is_shut_off_has_no_gradient() -> None:
    q, k, v = qkv(50, 17)
    sink = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    o, lse = flash_attention_2(q, k, v, Causal(), sink=sink)
    got = flash_attention_2_backward(random(BATCH, 50, HEADS, 12), q, k, v, o, lse, Causal(), sink=sink)
    assert got.sink is not None
    assert torch.equal(got.sink, torch.zeros_like(sink))


def test_hidden_tiles_are_not_visited() -> None:
    """NaN in keys that no query sees must not get into the gradients of the others."""
    q, k, v = qkv(16, 64)
    window = SlidingWindow(8, 0)  # of the 64 keys the first 40 are before every query's window
    o, lse = flash_attention_2(q, k, v, window)
    k, v = k.clone(), v.clone()
    k[:, :32], v[:, :32] = torch.nan, torch.nan
    got = flash_attention_2_backward(random(BATCH, 16, HEADS, 12), q, k, v, o, lse, window, block_N=16)
    assert all(torch.isfinite(x).all() for x in got[:3])


def test_gradcheck() -> None:
    """Compared with finite differences, for a call with all options."""
    mask, mods = SlidingWindow(4, 1), [SoftCap(2.0)]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
            o, lse = flash_attention_2(q, k, v, mask, mods, sink)
            ctx.save_for_backward(q, k, v, sink, o, lse)
            return o, lse

        @staticmethod
        def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, sink, o, lse = ctx.saved_tensors
            gradients = flash_attention_2_backward(
                do, q, k, v, o, lse, mask, mods, sink, dlse=dlse, block_M=4, block_N=4
            )
            return gradients[:4]

    q, k, v = random(1, 6, 2, 3), random(1, 9, 1, 3, seed=1), random(1, 9, 1, 2, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(2, dtype=torch.float64))]
    assert torch.autograd.gradcheck(Attention.apply, leaves)
