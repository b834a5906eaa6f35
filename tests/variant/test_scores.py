"""Masks and score modifications beside a textbook softmax written here, in float64.

The oracle of tileattn.testing calls the masks and modifications themselves; this test writes them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, KeyPadding, PrefixLM, SlidingWindow, SoftCap
from tileattn.variant.scores import for_packed

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SEQLENS = [(9, 9), (7, 12), (12, 7)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def textbook(
    q: Tensor, k: Tensor, v: Tensor, modified: Callable[[Tensor, Tensor, Tensor], Tensor], seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o (batch, seqlen_q, heads, dim) and lse; `modified` of scores, positions (seqlen_q, 1) and keys (seqlen_k,)."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    seqlen_q, seqlen_k = scores.shape[2:]
    position = (torch.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None]
    scores = modified(scores, position, torch.arange(seqlen_k))
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def check(seqlens: tuple[int, int], modified: Any, seen: Any, **options: Any) -> None:
    seqlen_q, seqlen_k = seqlens
    q = drawn(BATCH, seqlen_q, HEADS, DIM, seed=0)
    k, v = (drawn(BATCH, seqlen_k, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    position = (torch.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None]
    visible = None if seen is None else seen(position, torch.arange(seqlen_k))
    expected = textbook(q, k, v, modified or (lambda s, i, j: s), visible)
    got = tileattn.attention(q, k, v, return_lse=True, **options)
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y)


SLOPES = drawn(HEADS, seed=7)
SLOPE, HEAD, ELEMENT = (x[:, None, None] for x in (SLOPES, torch.arange(HEADS), torch.arange(BATCH)[:, None]))
MODIFICATIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "alibi": (ALiBi(SLOPES), lambda s, i, j: s - SLOPE * (i - j).abs()),
    "softcap": (SoftCap(0.7), lambda s, i, j: 0.7 * torch.tanh(s / 0.7)),
    "both": (
        [ALiBi(SLOPES), SoftCap(0.7)],
        lambda s, i, j: 0.7 * torch.tanh((s - SLOPE * (i - j).abs()) / 0.7),
    ),
    "user": (
        lambda s, b, h, q, k: s * (h + 1) - 0.1 * (q - k) + b * k,
        lambda s, i, j: s * (HEAD + 1) - 0.1 * (i - j) + ELEMENT * j,
    ),
}


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_modifications(name: str, seqlens: tuple[int, int]) -> None:
    mod, modified = MODIFICATIONS[name]
    check(seqlens, modified, None, score_mod=mod)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("of", [(BATCH, HEADS, True), (1, HEADS, True), (BATCH, 1, True), (1, 1, False)], ids=str)
@pytest.mark.parametrize("capped", [False, True])
def test_biases(of: tuple[int, int, bool], seqlens: tuple[int, int], capped: bool) -> None:
    """Read by rows, wherever the rows' positions begin; with a cap behind it in the loop, not the fused one."""
    batch, heads, rows = of
    tensor = drawn(batch, heads, seqlens[0] if rows else 1, seqlens[1], seed=8)
    if capped:
        check(seqlens, lambda s, i, j: 2 * torch.tanh((s + tensor) / 2), None, score_mod=[Bias(tensor), SoftCap(2.0)])
    else:
        check(seqlens, lambda s, i, j: s + tensor, None, score_mod=Bias(tensor))


def test_a_bias_on_packed_sequences_is_read_by_rows() -> None:
    """As kernels read it, element by element: sequences of other lengths, each with its own first position."""
    lengths_q, lengths_k = torch.tensor([3, 5, 4]), torch.tensor([6, 2, 4])
    tensor = drawn(3, HEADS, 5, 6, seed=10)
    bounds = (torch.cat([torch.zeros(1), x.cumsum(0)]).int() for x in (lengths_q, lengths_k))
    (packed,) = for_packed((Bias(tensor),), *bounds)
    for b, (seqlen_q, seqlen_k) in enumerate(zip(lengths_q.tolist(), lengths_k.tolist())):
        h, i, j = torch.meshgrid(*map(torch.arange, (HEADS, seqlen_q, seqlen_k)), indexing="ij")
        got = packed(torch.zeros(h.shape, dtype=tensor.dtype), torch.tensor(b), h, i + seqlen_k - seqlen_q, j)
        assert torch.equal(got, tensor[b, :, :seqlen_q, :seqlen_k])


KEEP = drawn(BATCH, 12, seed=9) > -0.5
IDS = torch.tensor([[0, 0, 2, 2, 2, 1, 1, 1, 1, 5, 5, 0], [3, 3, 3, 3, 0, 0, 0, 0, 0, 0, 1, 2]])
PREFIXES = torch.tensor([2, 5])


def in_one_document(i: Tensor, j: Tensor) -> Tensor:
    of_queries, of_keys = IDS[:, i.clamp(min=0)], IDS[:, None, : len(j)]
    return ((of_queries == of_keys) & (i >= 0))[:, None]


# The mask, of a number of keys, and what a query at position i sees of key j.
MASKS: dict[str, tuple[Callable[[int], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": (lambda n: Causal(), lambda i, j: j <= i),
    "window": (lambda n: SlidingWindow(3, 1), lambda i, j: (i - j <= 3) & (j - i <= 1)),
    "window to the left": (lambda n: SlidingWindow(2, None), lambda i, j: i - j <= 2),
    "window to the right": (lambda n: SlidingWindow(None, 2), lambda i, j: j - i <= 2),
    "prefix": (lambda n: PrefixLM(4), lambda i, j: (j < 4) | (j <= i)),
    "prefixes": (lambda n: PrefixLM(PREFIXES), lambda i, j: (j < PREFIXES[:, None, None, None]) | (j <= i)),
    "padding": (lambda n: KeyPadding(KEEP[:, :n]), lambda i, j: KEEP[:, None, None, : len(j)]),
    "documents": (lambda n: Documents(IDS[:, :n]), in_one_document),
    "and": (lambda n: Causal() & SlidingWindow(3, None), lambda i, j: (j <= i) & (i - j <= 3)),
    "or": (
        lambda n: SlidingWindow(1, 0) | FunctionMask(lambda b, h, q, k: k == 0),
        lambda i, j: ((j <= i) & (i - j <= 1)) | (j == 0),
    ),
}


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, seqlens: tuple[int, int]) -> None:
    make, seen = MASKS[name]
    check(seqlens, None, seen, mask=make(seqlens[1]))
