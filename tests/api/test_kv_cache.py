"""`PagedKVCache` beside lists of tokens: what sequences hold after any methods, and which pages are free."""

from __future__ import annotations

import random as numbers
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tileattn
from tests.api.test_attention import message
from tileattn import Causal, PagedKVCache, attention, decode
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

HEADS, DIM, DIM_V, LAYERS = 2, 8, 16, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache_of(batch: int = 3, max_seqlen: int = 20, **options: Any) -> PagedKVCache:
    return PagedKVCache(batch, max_seqlen, HEADS, DIM, **({"head_dim_v": DIM_V, "page_size": 4} | options))


def free_pages(cache: PagedKVCache) -> set[int]:
    return set(range(cache.pages)) - set(cache.page_table.flatten().tolist())


def assert_consistent(cache: PagedKVCache) -> None:
    """The table has as many entries as the lengths need, in front, and the references are those of the table."""
    for row, length in zip(cache.page_table.tolist(), cache.seqlens.tolist()):
        held = -(-length // cache.page_size)
        assert all(0 <= page < cache.pages for page in row[:held])
        assert set(row[held:]) <= {-1}
        assert len(set(row[:held])) == held
    counts = Counter(page for page in cache.page_table.flatten().tolist() if page >= 0)
    assert cache._references[:-1].tolist() == [counts[page] for page in range(cache.pages)]


class Reference:
    """Lists of the tokens that each sequence holds, beside a cache. A token is a number, and fills its rows."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache, self.count = cache, 0
        self.tokens: list[list[float]] = [[] for _ in range(cache.seqlens.shape[0])]

    def extend(self, counts: list[int]) -> None:
        self.cache.extend(torch.tensor(counts))
        new = [
            [float(self.count + i + 1) for i in range(sum(counts[:row]), sum(counts[: row + 1]))]
            for row in range(len(counts))
        ]
        self.count += sum(counts)
        ends = torch.tensor([0, *counts]).cumsum(0).int()
        flat = torch.tensor([token for row in new for token in row]).view(-1, 1, 1)
        for layer in range(self.cache.layers):
            k, v = (flat.expand(-1, HEADS, dim) + 1000 * layer for dim in (DIM, DIM_V))
            self.cache.append(k.contiguous(), -v, layer=layer, cu_seqlens_q=ends)
        for row, tokens in enumerate(new):
            self.tokens[row] += tokens

    def check(self) -> None:
        cache = self.cache
        assert_consistent(cache)
        assert cache.seqlens.tolist() == [len(tokens) for tokens in self.tokens]
        for layer in range(cache.layers):
            k, v = cache.layer(layer)
            for row, tokens in enumerate(self.tokens):
                pages = cache.page_table[row, : -(-len(tokens) // cache.page_size)]
                expected = torch.tensor(tokens).view(-1, 1, 1) + 1000 * layer
                for pool, sign in ((k, 1), (v, -1)):
                    held = pool[pages].flatten(0, 1)[: len(tokens)]
                    assert torch.equal(held, (sign * expected).expand_as(held))


@pytest.mark.slow_except("0-1", "0-3", "1-16", "2-3", reason="0.5 s each")
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_any_methods(seed: int, page: int) -> None:
    """Tokens come, sequences end, fork and are cut; pages that nobody has are overwritten with NaN all the time."""
    rng = numbers.Random(seed)
    reference = Reference(cache_of(5, 40, page_size=page, pages=max(160 // page, 9), layers=LAYERS))
    cache, done = reference.cache, Counter[str]()
    refused: list[str] = []
    for _ in range(150):
        unused = list(free_pages(cache))
        for layer in range(LAYERS):
            for pool in cache.layer(layer):
                pool[unused] = torch.nan
        action = rng.choice(["extend"] * 4 + ["free", "fork", "truncate"])
        lengths = [len(tokens) for tokens in reference.tokens]
        before = cache.page_table.clone(), cache.seqlens.clone()
        try:
            if action == "extend":
                reference.extend([min(rng.choice([0, 0, 1, 1, 2, 9]), 40 - length) for length in lengths])
            elif action == "free":
                row = rng.randrange(5)
                cache.free(row)
                reference.tokens[row] = []
            elif action == "fork":
                source, *targets = rng.sample(range(5), rng.choice([2, 3]))
                length = rng.choice([None, 0, 1, 7, 99])
                cache.fork(source, targets, length)
                for target in targets:
                    reference.tokens[target] = reference.tokens[source][:length]
            else:
                cut = [rng.choice([length, max(length - 1, 0), length // 2]) for length in lengths]
                cache.truncate(torch.tensor(cut))
                reference.tokens = [tokens[:length] for tokens, length in zip(reference.tokens, cut)]
            done[action] += 1
        except ValueError as error:
            refused.append(str(error))
            assert torch.equal(cache.page_table, before[0])
            assert torch.equal(cache.seqlens, before[1])
        reference.check()
    assert all("pages are needed" in text for text in refused)
    assert min(done.values()) > 5
    assert len(done) == 4


def test_a_step_of_a_model() -> None:
    """Prefill, then steps, in two layers; equal to attention of the whole."""
    batch, heads, tokens = 2, 4, 11
    cache = cache_of(batch, 12, layers=LAYERS)
    q, k, v = (
        random(batch, tokens, heads, DIM),
        random(batch, tokens, 2, DIM, seed=1),
        random(batch, tokens, 2, DIM_V, seed=2),
    )
    results: list[list[Tensor]] = [[], []]
    for rows in (slice(0, 7), slice(7, 8), slice(8, 11)):
        cache.extend(rows.stop - rows.start)
        for layer in range(LAYERS):
            assert cache.append(k[:, rows] + layer, v[:, rows], layer=layer) is None
            o = decode(q[:, rows], *cache.layer(layer), cache.seqlens, page_table=cache.page_table)
            results[layer].append(o)
    for layer in range(LAYERS):
        torch.testing.assert_close(torch.cat(results[layer], 1), attention(q, k + layer, v, causal=True))


def test_rotary_embeddings_go_to_append_kv() -> None:
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    rotary = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": True}
    k, v, q = random(3, 5, HEADS, DIM), random(3, 5, HEADS, DIM_V, seed=1), random(3, 5, 4, DIM, seed=2)
    cache = cache_of()
    cache.extend(5)
    rotated = cache.append(k, v, q=q, **rotary)
    pages = torch.zeros(15, 4, HEADS, DIM), torch.zeros(15, 4, HEADS, DIM_V)
    expected = tileattn.append_kv(k, v, *pages, cache.seqlens, page_table=cache.page_table, q=q, **rotary)
    assert rotated is not None
    assert expected is not None
    assert torch.equal(rotated, expected)
    used = cache.page_table[0, 0]
    assert torch.equal(cache.layer(0)[0][used], pages[0][used])


def test_full_pages_of_a_fork_are_shared_and_the_last_is_not() -> None:
    reference = Reference(cache_of())
    reference.extend([10, 0, 3])
    cache = reference.cache
    used = cache.pages - len(free_pages(cache))
    cache.fork(0, [1, 2])
    table = cache.page_table
    assert (table[1:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2].tolist())) == 3
    assert cache.pages - len(free_pages(cache)) == used - 1 + 2  # sequence 2 gave one back
    reference.tokens = [reference.tokens[0]] + [list(reference.tokens[0]) for _ in range(2)]
    reference.extend([1, 2, 3])
    reference.check()
    cache.free(0)  # whose pages the others still have
    reference.tokens[0] = []
    reference.extend([4, 0, 0])
    reference.check()


def test_full_pages_are_never_copied() -> None:
    cache = cache_of()
    cache.extend(torch.tensor([8, 0, 0]))
    cache.fork(0, [1, 2])
    assert (cache.page_table == cache.page_table[0]).all()
    cache.truncate(torch.tensor([8, 4, 8]))
    assert cache.page_table[1].tolist() == [int(cache.page_table[0, 0]), -1, -1, -1, -1]
    assert len(free_pages(cache)) == cache.pages - 2
    assert_consistent(cache)


def test_a_cut_into_a_shared_page_copies_it() -> None:
    reference = Reference(cache_of())
    reference.extend([8, 0, 0])
    cache = reference.cache
    cache.fork(0, 1)
    cache.truncate(torch.tensor([8, 6, 0]))
    reference.tokens[1] = reference.tokens[0][:6]
    assert cache.page_table[0, 1] != cache.page_table[1, 1]
    reference.extend([0, 2, 0])
    reference.check()


def test_several_ways_to_name_sequences() -> None:
    for named in (1, [1], (1,), range(1, 2), torch.tensor([False, True, False])):
        reference = Reference(cache_of())
        reference.extend([3, 4, 5])
        reference.cache.free(named)
        reference.tokens[1] = []
        reference.check()
        reference.cache.fork(2, named)
        reference.tokens[1] = list(reference.tokens[2])
        reference.check()


def test_pages_may_be_reserved_before_they_are_needed() -> None:
    cache = cache_of()
    cache.reserve(9)
    table = cache.page_table.clone()
    assert (table >= 0).sum() == 9
    assert not cache.seqlens.any()
    cache.extend(9)
    assert torch.equal(cache.page_table, table)
    cache.truncate(3)
    assert (cache.page_table >= 0).sum() == 3


def test_reset_frees_everything() -> None:
    cache = cache_of(pages=6)
    for _ in range(3):
        cache.extend(torch.tensor([9, 4, 8]))
        assert len(free_pages(cache)) == 0
        cache.reset()
        assert len(free_pages(cache)) == 6


def test_too_many_tokens_and_too_few_pages_change_nothing() -> None:
    cache = cache_of(pages=6)
    cache.extend(torch.tensor([4, 4, 5]))
    before = cache.page_table.clone(), cache.seqlens.clone()
    with pytest.raises(ValueError, match=message("at most max_seqlen = 20 tokens", "[4, 4, 21]")):
        cache.extend(torch.tensor([0, 0, 16]))
    with pytest.raises(ValueError, match=message("3 pages are needed and 2 are free, of 6 pages of 4 tokens")):
        cache.extend(torch.tensor([1, 4, 4]))
    assert torch.equal(cache.page_table, before[0])
    assert torch.equal(cache.seqlens, before[1])
    assert_consistent(cache)
    cache.check()


def test_a_fork_or_a_cut_that_is_refused_changes_nothing() -> None:
    cache = cache_of(pages=3)
    cache.extend(torch.tensor([6, 0, 4]))
    held = cache.page_table.clone(), cache.seqlens.clone()
    with pytest.raises(ValueError, match=message("1 pages are needed and 0 are free, of 3 pages")):
        cache.fork(0, 1)
    assert torch.equal(cache.page_table, held[0])
    assert torch.equal(cache.seqlens, held[1])
    assert_consistent(cache)
    cache.fork(2, 1)
    with pytest.raises(ValueError, match="1 pages are needed"):
        cache.truncate(torch.tensor([6, 4, 3]))
    assert cache.seqlens.tolist() == [6, 4, 4]
    assert_consistent(cache)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"max_seqlen": 2.0}, TypeError, "max_seqlen must be an int, got 2.0"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"pages": 0}, ValueError, "pages must be at least 1, got 0"),
        ({"layers": True}, TypeError, "layers must be an int, got True"),
    ],
)
def test_wrong_sizes(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        cache_of(**options)


def test_wrong_arguments() -> None:
    cache = cache_of()
    for tokens in (torch.tensor([1, 2]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False])):
        with pytest.raises(ValueError, match=message("tokens must be an int or an integer tensor (batch,) = (3,)")):
            cache.extend(tokens)
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        cache.extend(-1)
    with pytest.raises(ValueError, match=message("tokens must be at least 0, got [1, -1, 0]")):
        cache.extend(torch.tensor([1, -1, 0]))
    with pytest.raises(ValueError, match="at most max_seqlen = 20 tokens"):
        cache.extend(torch.tensor([2**32, 0, 0]))  # 0 in int32
    with pytest.raises(ValueError, match="tokens must be on the cache's device cpu, got meta"):
        cache.extend(torch.zeros(3, dtype=torch.int32, device="meta"))
    for wrong in (3, -1, [0, 5]):
        with pytest.raises(ValueError, match=message("sequences must lie in 0 .. 2, got")):
            cache.free(wrong)
    with pytest.raises(ValueError, match=message("a bool tensor (batch,) = (3,) on cpu, got torch.int64")):
        cache.free(torch.tensor([0, 1, 2]))
    for wrong in (True, [True, False, True], 1.0, None, "1"):
        with pytest.raises(TypeError, match="sequences must be numbers, or a bool tensor"):
            cache.free(wrong)
    with pytest.raises(TypeError, match=message("source must be an int, got 1.0")):
        cache.fork(1.0, 0)
    with pytest.raises(ValueError, match="targets must not contain the source, sequence 1"):
        cache.fork(1, [0, 1])
    with pytest.raises(ValueError, match=message("source must lie in 0 .. 2, got 3")):
        cache.fork(3, 0)
    with pytest.raises(ValueError, match="length must be at least 0, got -2"):
        cache.fork(0, 1, -2)


def test_what_it_says_of_itself() -> None:
    text = repr(cache_of(max_seqlen=19, layers=2, dtype=torch.bfloat16))
    assert text == "PagedKVCache(3 sequences of up to 19 tokens, 2 layers, 15 pages of 4, 2 heads, torch.bfloat16, cpu)"


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: fake tensors have no values, and whatever asks for one raises."""
    with FakeTensorMode():
        cache = cache_of(layers=LAYERS)
        some = torch.zeros(3, dtype=torch.bool)
        with pytest.raises(DataDependentOutputException):
            cache.extend(3)
        monkeypatch.setattr(cache, "_is_read_at_once", False)
        cache.extend(3)
        cache.extend(torch.zeros(3, dtype=torch.int32))
        cache.truncate(2)
        cache.fork(0, [1, 2])
        cache.fork(0, some, 1)
        cache.free(some)
        cache.free(1)
        cache.reset()
        with pytest.raises(DataDependentOutputException):
            cache.check()


def test_pages_that_lack_on_a_gpu_are_told_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing can be raised at once: entries stay -1, which kernels report."""
    cache = cache_of(pages=4)
    monkeypatch.setattr(cache, "_is_read_at_once", False)
    cache.extend(torch.tensor([8, 4, 9], dtype=torch.int32))
    assert cache.page_table[2].tolist() == [int(cache.page_table[2, 0]), -1, -1, -1, -1]
    with pytest.raises(ValueError, match=message("2 pages were lacking: the cache has 4 pages of 4 tokens")):
        cache.check()
    cache.check()


def test_a_sequence_that_is_too_long_on_a_gpu_is_told_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    monkeypatch.setattr(cache, "_is_read_at_once", False)
    cache.extend(torch.tensor([4, 23, 2**31], dtype=torch.int64))
    cache.fork(1, 2)
    cache.truncate(torch.tensor([4, 21, -1]))
    with pytest.raises(ValueError, match="at most max_seqlen = 20 tokens, 2 had more"):
        cache.check()
    cache.free(1)
    cache.check()
    assert_consistent(cache)


@pytest.mark.gpu
def test_one_cuda_graph_serves_all_steps() -> None:
    """Captured at length 1: pages are taken, tokens written and read by its replays."""
    tokens, causal = 70, (Causal(), (), None, None)
    q, k, v = (random(2, tokens, heads, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (8, 2, 4))
    v = v[:, :, :2]
    cache = PagedKVCache(2, 80, 2, 64, page_size=16, dtype=torch.bfloat16, device="cuda")
    inputs = [x[:, :1].clone() for x in (q, k, v)]

    def step() -> tuple[Tensor, Tensor]:
        cache.extend(1)
        cache.append(*inputs[1:])
        return decode(inputs[0], *cache.layer(0), cache.seqlens, page_table=cache.page_table, return_lse=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    cache.reset()
    results = []
    for token in range(tokens):
        for static, x in zip(inputs, (q, k, v)):
            static.copy_(x[:, token : token + 1])
        graph.replay()
        results.append([x.clone() for x in outputs])
    cache.check()
    tileattn.check_caches()
    got = torch.cat([o for o, _ in results], 1), torch.cat([lse for _, lse in results], 2)
    assert_forward_accurate("steps", got, oracle_attention(q, k, v, *causal), eager_attention(q, k, v, *causal))
    assert_consistent(cache)
