"""The reference's forward passes: correct by the tolerance rule, gradients included, and as their docstrings say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn import ALiBi, Bias, Causal, Documents, KeyPadding, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.dropout import weight_of_kept
from tileattn.reference import RowState, flash_attention_1, flash_attention_2, online_softmax, standard_attention
from tileattn.testing import (
    assert_accurate,
    assert_forward_accurate,
    dropout_mask,
    eager_attention,
    oracle_attention,
)

ALL = (standard_attention, flash_attention_1, flash_attention_2)
TILED = (flash_attention_1, flash_attention_2)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    return random(2, seqlen_q, 4, 16), random(2, seqlen_k, 2, 16), random(2, seqlen_k, 2, 24)


# --- Online softmax ---


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (33, 33, 34), (1,) * 100])
def test_online_softmax_does_not_depend_on_how_the_row_is_cut(sizes: tuple[int, ...]) -> None:
    scores, values = 10 * random(5, 100), random(100, 8)
    o, lse = online_softmax(scores.split(sizes, dim=-1), values.split(sizes))
    exact = scores.double()
    assert_accurate("o", o, exact.softmax(-1) @ values.double(), [scores.softmax(-1) @ values])
    assert_accurate("lse", lse, exact.logsumexp(-1), [scores.logsumexp(-1)], lse_of=torch.float32)


def test_the_invariant_holds_after_every_part() -> None:
    scores, values = random(5, 100).double(), random(100, 8).double()
    state = RowState.empty(scores, 8)
    for n in range(0, 100, 25):
        state = state.update(scores[:, n : n + 25], values[n : n + 25])
        seen = scores[:, : n + 25]
        p = (seen - seen.amax(-1, keepdim=True)).exp()
        assert torch.equal(state.m, seen.amax(-1))
        torch.testing.assert_close(state.l, p.sum(-1))
        torch.testing.assert_close(state.o, p @ values[: n + 25])


def test_scores_beyond_the_range_of_exp() -> None:
    """exp(1000) overflows even float64; the maximum is taken out first."""
    scores = torch.tensor([[1000.0, 999.0, -1000.0]])
    o, lse = online_softmax(scores.split(1, dim=-1), torch.eye(3).split(1))
    assert o.isfinite().all()
    assert o[0, 2] == 0
    assert lse.item() == pytest.approx(1000 + math.log1p(math.exp(-1)))


def test_online_softmax_of_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        online_softmax([], [])


# --- Attention ---


@pytest.mark.parametrize("attention", ALL)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (1, 1), (65, 130), (130, 65)])
@pytest.mark.parametrize("sink", [False, True])
def test_lengths(attention: Callable[..., tuple[Tensor, Tensor]], seqlen_q: int, seqlen_k: int, sink: bool) -> None:
    arguments = (*qkv(seqlen_q, seqlen_k), Causal(), (), random(4) if sink else None)
    got = attention(*arguments)
    assert_forward_accurate(attention.__name__, got, oracle_attention(*arguments), eager_attention(*arguments))


@pytest.mark.parametrize("attention", ALL)
@pytest.mark.parametrize("mask", [Documents(torch.zeros(1, 0, dtype=torch.int32)), KeyPadding(torch.zeros(2, 0) > 0)])
def test_masks_with_tensors_where_there_is_no_key(
    attention: Callable[..., tuple[Tensor, Tensor]], mask: Documents | KeyPadding
) -> None:
    o, lse = attention(*qkv(5, 0), mask)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full((2, 4, 5), -torch.inf))


@pytest.mark.parametrize("attention", ALL)
@pytest.mark.parametrize(
    "mask",
    [
        Documents(torch.zeros(0, 5, dtype=torch.int64)),
        KeyPadding(torch.zeros(0, 5) > 0),
        PrefixLM(torch.zeros(0, dtype=torch.int32)) & Causal(),
    ],
)
def test_masks_with_tensors_of_no_batch_element(attention: Callable[..., tuple[Tensor, Tensor]], mask: Mask) -> None:
    q, k, v = (x[:0] for x in qkv(5, 5))
    o, lse = attention(q, k, v, mask)
    assert o.shape == (0, 5, 4, v.shape[-1])
    assert lse.shape == (0, 4, 5)


@pytest.mark.parametrize("attention", ALL)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0), (3, 5)])
def test_gradients_are_zeros_where_no_query_sees_a_key(
    attention: Callable[..., tuple[Tensor, Tensor]], seqlen_q: int, seqlen_k: int, sink: bool
) -> None:
    """There are none, or the mask hides all of them."""
    leaves = [x.requires_grad_() for x in (*qkv(seqlen_q, seqlen_k), random(4), random(1, 4, seqlen_q, seqlen_k))]
    q, k, v, logits, bias = leaves
    mask = KeyPadding(torch.zeros(2, seqlen_k) > 0)
    o, lse = attention(q, k, v, mask, (Bias(bias),), logits if sink else None)
    for output, reached in ((o, (q, k, v, bias, *((logits,) if sink else ()))), (lse, (q, k, bias))):
        for grad in torch.autograd.grad(output.sum(), reached, retain_graph=True):
            assert (grad == 0).all()


@pytest.mark.parametrize("attention", TILED)
@pytest.mark.parametrize(("block_M", "block_N"), [(1, 1), (7, 16), (64, 13), (1000, 1000)])
def test_tiles_of_any_size(attention: Callable[..., tuple[Tensor, Tensor]], block_M: int, block_N: int) -> None:
    bias = Bias(random(1, 4, 33, 41))
    arguments = (*qkv(33, 41), SlidingWindow(9, 4), (bias, SoftCap(3.0)), random(4), 0.3)
    got = attention(*arguments, block_M=block_M, block_N=block_N)
    assert_forward_accurate(attention.__name__, got, oracle_attention(*arguments), eager_attention(*arguments))


@pytest.mark.parametrize("attention", ALL)
def test_dropout_multiplies_probabilities_and_leaves_lse(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    q, k, v = (x.double() for x in qkv(70, 91))
    p, sink = 0.3, random(4).double()
    dropout = dropout_mask(1, p, 2, 4, 70, 91) * weight_of_kept(p)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / 4
    logits = torch.cat([scores, sink[:, None, None].expand(2, 4, 70, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., :-1] * dropout
    o, lse = attention(q, k, v, sink=sink, dropout=dropout)
    torch.testing.assert_close(o, torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, dim=2)))
    torch.testing.assert_close(lse, logits.logsumexp(dim=-1))


@pytest.mark.slow_except("flash_attention_1", reason="1 s each")
@pytest.mark.parametrize("attention", ALL)
def test_the_expectation_under_dropout_is_the_result_without(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Over 400 seeds, within 5 standard deviations."""
    q, k, v = (x.double() for x in qkv(9, 17))
    expected, _ = attention(q, k, v, Causal())
    seeds = [dropout_mask(seed, 0.4, 2, 4, 9, 17) * weight_of_kept(0.4) for seed in range(400)]
    outputs = torch.stack([attention(q, k, v, Causal(), dropout=dropout)[0] for dropout in seeds])
    deviation = outputs.std(dim=0) / 20
    assert ((outputs.mean(dim=0) - expected).abs() <= 5 * deviation).all()


def test_flash_attention_2_computes_the_mask_on_the_diagonal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, allows = [], Causal.allows

    def recorded(self: Causal, b: Any, h: Any, q: Any, k: Any) -> Any:
        if isinstance(q, Tensor):  # not while it is traced
            tiles.append((int(q.min()), int(k.min())))
        return allows(self, b, h, q, k)

    monkeypatch.setattr(Causal, "allows", recorded)
    flash_attention_2(*qkv(64, 64), Causal(), block_M=16, block_N=16)
    assert tiles == [(0, 0), (16, 16), (32, 32), (48, 48)]


def test_flash_attention_2_does_not_read_hidden_keys() -> None:
    """Not even NaN in their values gets through; a mask alone would multiply it by 0."""
    q, k, v = qkv(64, 128)
    v[:, :32] = math.nan
    mask = SlidingWindow(31, 0)  # positions 64..127 see keys 33..127
    o, _ = flash_attention_2(q, k, v, mask, block_M=16, block_N=16)
    assert o.isfinite().all()


@pytest.mark.parametrize("attention", ALL)
def test_gradients(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """The gradients of o and lse with respect to all inputs, with rows that see no key."""

    def gradients(run: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        tensors = [*qkv(91, 77), random(4), random(1, 4, 91, 77), random(4).abs()]
        leaves = [x.half().to(dtype).requires_grad_() for x in tensors]
        q, k, v, sink, bias, slopes = leaves
        o, lse = run(q, k, v, Causal(), (ALiBi(slopes), Bias(bias), SoftCap(3.0)), sink, 0.4)
        ((o * random(*o.shape).to(dtype)).sum() + (lse * random(*lse.shape).to(dtype)).sum()).backward()
        return [x.grad for x in leaves if x.grad is not None]

    def eager_run(order: int) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *arguments: tuple(runs[order] for runs in eager_attention(*arguments))  # type: ignore[return-value]

    got, oracle = gradients(attention, torch.float16), gradients(oracle_attention, torch.float64)
    eager = [gradients(eager_run(order), torch.float16) for order in (0, 1)]
    assert len(got) == 6
    for name, mine, exact, *runs in zip(("dq", "dk", "dv", "dsink", "dbias", "dslopes"), got, oracle, *eager):
        assert_accurate(name, mine, exact, runs, gradient=True)


@pytest.mark.parametrize("attention", TILED)
def test_gradients_of_a_tensor_are_rounded_once(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Not once a tile: the gradient of bfloat16 slopes is that of float32 slopes, rounded."""
    q, k, v = qkv(73, 75)
    weights = random(*attention(q, k, v)[0].shape)
    slopes = random(2, 4).bfloat16()
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = slopes.to(dtype).requires_grad_()
        o, _ = attention(q, k, v, score_mods=(ALiBi(leaf),), block_M=8, block_N=8)
        gradients.append(torch.autograd.grad((o * weights).sum(), leaf)[0])
    assert torch.equal(gradients[0], gradients[1].bfloat16())
