"""What decode equals: attention of the whole, its own steps and parts, and causal attention if a tree is a chain."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.cached_sequences import Cache, Heads, Rows, Sequence, arguments_of, decoded, draw
from tests.tools.decode_call import EVERYWHERE
from tileattn import ALiBi, Causal, FixedSplit, SlidingWindow
from tileattn.call.decoding import Splits
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

BF16 = torch.bfloat16


def plain(device: str, heads: int = 8, kv_heads: int = 2, dim: int = 64) -> Heads:
    return Heads(heads, kv_heads, dim, dim, BF16, device)


def whole(sequence: Sequence, rows: slice, *rest: Any) -> tuple[Any, Any]:
    """The oracle's and eager's results for the last queries of a sequence, of the dense oracle on the whole."""
    q, k, v = (x[None] for x in (sequence.q[rows], sequence.k[: rows.stop], sequence.v[: rows.stop]))
    return oracle_attention(q, k, v, *rest), eager_attention(q, k, v, *rest)


def batched(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    o, lse = result
    return o[None], lse[None]


def no_fixed_split_of_torch(backend: str, device: str, splits: Splits) -> None:
    if backend == "torch" and device == "cuda" and isinstance(splits, FixedSplit):
        pytest.skip("refused: PyTorch's products depend on the batch")


# --- Attention ---


@pytest.mark.parametrize("page", [0, 3, 16])
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_steps_are_the_rows_of_causal_attention(backend: str, device: str, page: int) -> None:
    """A prefill of 33 tokens, then steps of 1, 1, 2, 5 and 1; all of it as one causal call."""
    sequence = draw(plain(device), 43, 1)
    results, first = [], 0
    for count in (33, 1, 1, 2, 5, 1):
        results.append(decoded([Rows(sequence, first, count)], Cache(page, slack=9), backend=backend)[0])
        first += count
    got = torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results], dim=1)
    oracle, eager = whole(sequence, slice(0, 43), Causal())
    assert_forward_accurate("steps", batched(got), oracle, eager)
    q, k, v = (x[None] for x in (sequence.q, sequence.k, sequence.v))
    of_attention = tileattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert_forward_accurate("attention", of_attention, oracle, eager)


@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_without_causal_and_of_equal_lengths_it_is_attention(backend: str, device: str) -> None:
    sizes = plain(device, 12, 3)
    sequences = [draw(sizes, 130, seed) for seed in range(3)]
    rows = [Rows(sequence, 123, 7) for sequence in sequences]
    alibi = ALiBi(torch.linspace(0.01, 0.2, 12, device=device))
    (q, k, v, seqlens_k), _ = arguments_of(rows, Cache())
    rest = (SlidingWindow(50, 3), (alibi,))
    got = tileattn.decode(
        q, k, v, seqlens_k, causal=False, mask=rest[0], score_mod=alibi, return_lse=True, backend=backend
    )
    assert_forward_accurate("decode", got, oracle_attention(q, k, v, *rest), eager_attention(q, k, v, *rest))


# --- Trees ---


@pytest.mark.parametrize("splits", [1, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_a_chain_is_causal(backend: str, device: str, page: int, splits: Splits) -> None:
    """Bit for bit, except in lse of Triton: its compiler sums a row's weights in an order that the mask's loads decide.

    Bits are promised for one variant only.
    """
    no_fixed_split_of_torch(backend, device, splits)
    sizes = plain(device)
    rows = [Rows(draw(sizes, length, length), length - 6, 6) for length in (300, 6, 64, 129)]
    chain = torch.ones(6, 6, dtype=torch.bool, device=device).tril().expand(4, 6, 6)
    options = {"backend": backend, "splits": splits}
    causal = decoded(rows, Cache(page), **options)
    tree = decoded(rows, Cache(page), tree_mask=chain, **options)
    for (o, lse), (got, got_lse) in zip(causal, tree, strict=True):
        if (backend, device) == ("triton", "cuda"):
            torch.testing.assert_close(got_lse, lse, rtol=0, atol=2e-6)
            torch.testing.assert_close(got, o, rtol=2**-7, atol=1e-6)  # a last bit of bfloat16
        else:
            assert torch.equal(got, o)
            assert torch.equal(got_lse, lse)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_each_path_of_a_tree_is_a_sequence(backend: str, device: str, packed: bool) -> None:
    """Two branches of a draft: each node is the last token of a sequence of its ancestors."""
    parents = (-1, 0, 1, 0, 3, 3)
    tree = torch.zeros(6, 6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        tree[node, node] = True
        if parent >= 0:
            tree[node] |= tree[parent]
    sizes, old = plain(device), 77
    drafts = [draw(sizes, old + 6, seed) for seed in (1, 2)]
    masks = tree.to(device).expand(2, 6, 6)
    options = {"tree_mask": masks, "backend": backend}
    results = decoded([Rows(each, old, 6) for each in drafts], Cache(16, packed=packed), **options)
    for each, (o, lse) in zip(drafts, results):
        for node in range(6):
            keys = [*range(old), *(old + int(i) for i in tree[node].nonzero())]
            path = Sequence(each.q[old + node, None], each.k[keys], each.v[keys])
            q, k, v = (x[None] for x in (path.q, path.k, path.v))
            got = o[None, node, None], lse[None, :, node, None]
            assert_forward_accurate(f"node {node}", got, oracle_attention(q, k, v), eager_attention(q, k, v))


# --- Parts ---


@pytest.mark.parametrize("cut", [0, 1, 64, 99, 199, 200])
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_two_parts_merged_are_the_whole(backend: str, device: str, cut: int) -> None:
    sizes = plain(device)
    sequence = draw(sizes, 200, 5)
    q, k, v = sequence.q[-3:][None], sequence.k[None], sequence.v[None]

    def part(keys: slice) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([k[:, keys].shape[1]], dtype=torch.int32, device=device)
        o, lse = tileattn.decode(q, k[:, keys], v[:, keys], lengths, causal=False, return_lse=True, backend=backend)
        return o, lse

    got = tileattn.merge(*part(slice(0, cut)), *part(slice(cut, 200)))
    assert_forward_accurate("merged", got, oracle_attention(q, k, v), eager_attention(q, k, v))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_merging_nothing(device: str) -> None:
    """A part without keys has weight 0, whatever its o holds; two of them are a row without keys."""
    o = torch.randn(1, 3, 2, 16, device=device, dtype=BF16)
    lse = torch.randn(1, 2, 3, device=device)
    nothing, empty = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for got, got_lse in (tileattn.merge(o, lse, nothing, empty), tileattn.merge(nothing, empty, o, lse)):
        assert torch.equal(got, o)
        assert torch.equal(got_lse, lse)
    got, got_lse = tileattn.merge(nothing, empty, nothing, empty)
    assert (got == 0).all()
    assert (got_lse == -torch.inf).all()


# --- Nothing is read that is not to be read ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page", [0, 1, 16, 64])
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_nothing_leaks_from_a_sequence_into_its_neighbours(backend: str, device: str, page: int, packed: bool) -> None:
    """Every other sequence is NaN; the others have the same bits as without."""
    sizes = plain(device)
    rows = [Rows(draw(sizes, length, length), length - 2, 2) for length in (130, 5, 64, 2, 200, 65)]
    cache, options = Cache(page, packed), {"backend": backend}
    (q, k, v, lengths), named = arguments_of(rows, cache)
    o, lse = tileattn.decode(q, k, v, lengths, **named, **options, return_lse=True)
    spoilt = [Rows(_nan(each.sequence), each.first, 2) if i % 2 else each for i, each in enumerate(rows)]
    (q, k, v, lengths), named = arguments_of(spoilt, cache)
    got, got_lse = tileattn.decode(q, k, v, lengths, **named, **options, return_lse=True)
    for number in (0, 2, 4):
        mine = slice(2 * number, 2 * number + 2)
        if packed:
            assert torch.equal(got[mine], o[mine])
            assert torch.equal(got_lse[:, mine], lse[:, mine])
        else:
            assert torch.equal(got[number], o[number])
            assert torch.equal(got_lse[number], lse[number])


def _nan(sequence: Sequence) -> Sequence:
    return Sequence(*(torch.full_like(x, torch.nan) for x in (sequence.q, sequence.k, sequence.v)))


@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_special_values_go_where_attention_has_them(backend: str, device: str) -> None:
    """NaN in a key that is seen makes the row NaN, as does an infinite score of +inf; a key of -inf has no weight."""
    sizes = plain(device, 2, 1)
    sequence = draw(sizes, 70, 3)
    sequence.k[40, 0] = torch.nan
    o, lse = decoded([Rows(sequence, 69, 1)], Cache(16), backend=backend)[0]
    assert o.isnan().all()
    assert lse.isnan().all()
    o, lse = decoded([Rows(sequence, 69, 1)], Cache(16), mask=SlidingWindow(20, 0), backend=backend)[0]
    assert o.isfinite().all()
    assert lse.isfinite().all()


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""

    def of(sizes: Heads, q_len: int, cache: Cache, **options: Any) -> Callable[[], Any]:
        rows = [Rows(draw(sizes, 40, seed), 3, q_len) for seed in (0, 1)]
        return functools.partial(decoded, rows, cache, **options, backend="tilelang")

    for page, q_len in itertools.product((0, 1, 16, 64), (1, 2, 5, 33)):
        yield of(plain("meta"), q_len, Cache(page))
        yield of(plain("meta"), q_len, Cache(page, packed=True))
    for page in (0, 16):
        chain = torch.ones(2, 6, 6, dtype=torch.bool, device="meta")
        for options in ({"splits": 1}, {"splits": FixedSplit(128)}):
            yield of(plain("meta"), 6, Cache(page), **options)
            yield of(plain("meta"), 6, Cache(page), tree_mask=chain, **options)
    yield of(plain("meta"), 6, Cache(16, packed=True), tree_mask=chain)
    yield of(plain("meta"), 3, Cache(), causal=False)
    slopes = ALiBi(torch.ones(12, device="meta"))
    yield of(plain("meta", 12, 3), 7, Cache(), causal=False, mask=SlidingWindow(50, 3), score_mod=slopes)
    yield of(plain("meta", 2, 1), 1, Cache(16), mask=SlidingWindow(20, 0))
