"""What only a GPU can show of decode, beside conformance and a server's day: ``pytest -m gpu``.

CUDA graphs, no synchronisation, no compilation for new sizes, large caches, streams, memory, and wrong values that the
host does not see.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.cached_sequences import Cache, Heads, Rows, arguments_of, draw, int32
from tileattn import ALiBi, Bias, FixedSplit, SlidingWindow, SoftCap
from tileattn.call.decoding import Splits
from tileattn.kernels.cache.store import KernelCache
from tileattn.testing import DecodeArguments, assert_forward_accurate, expected_decode

pytestmark = pytest.mark.gpu

DEVICE, BF16 = "cuda", torch.bfloat16
KERNELS = pytest.mark.parametrize("backend", ["tilelang", "triton"])
PAGES = pytest.mark.parametrize("page", [0, 1, 16, 64])


def random_call(
    lengths: Sequence[int],
    q_len: int = 1,
    page: int = 16,
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    capacity: int | None = None,
    seed: int = 0,
) -> DecodeArguments:
    """A call on caches of random values, NaN in rows of no sequence, pages shuffled."""
    generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(seed)
    batch, room = len(lengths), max(capacity or 0, *lengths)
    width = -(-room // page) if page else 0
    rows, tokens = (batch * width + 3, page) if page else (batch, room)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=BF16, generator=generator)

    q, (k, v) = normal(batch, q_len, heads[0], dim), (normal(rows, tokens, heads[1], dim) for _ in range(2))
    table = None
    if page:
        table = torch.randperm(rows, device=DEVICE, generator=generator)[: batch * width].view(batch, width).int()
    arguments = DecodeArguments(q, k, v, int32(lengths, DEVICE), table)
    if DEVICE != "meta":
        spoil(arguments, lengths)
    return arguments


def one_of(arguments: DecodeArguments, number: int) -> DecodeArguments:
    """One sequence of a call, alone."""
    of = slice(number, number + 1)
    q, k, v, table = arguments.q[of], arguments.k_cache, arguments.v_cache, arguments.page_table
    if table is None:
        return DecodeArguments(q, k[of], v[of], arguments.seqlens_k[of])
    return DecodeArguments(q, k, v, arguments.seqlens_k[of], table[of])


def spoil(arguments: DecodeArguments, lengths: Sequence[int]) -> None:
    """NaN behind the sequences, and -1 in the table."""
    k, v, table = arguments.k_cache, arguments.v_cache, arguments.page_table
    used = torch.zeros(k.shape[:2], dtype=torch.bool, device=DEVICE)
    for number, length in enumerate(lengths):
        if table is None:
            used[number, :length] = True
            continue
        keys = torch.arange(length, device=DEVICE)
        used[table[number].long()[keys // k.shape[1]], keys % k.shape[1]] = True
        table[number, -(-length // k.shape[1]) :] = -1
    k[~used], v[~used] = torch.nan, torch.nan


def attend(arguments: DecodeArguments, backend: str, **named: Any) -> tuple[Tensor, Tensor]:
    o, lse = tileattn.decode(*arguments.positional, **(arguments.options | named), return_lse=True, backend=backend)
    return o, lse


def check(name: str, got: tuple[Tensor, Tensor], arguments: DecodeArguments) -> None:
    """The tolerance rule."""
    assert_forward_accurate(name, got, *expected_decode(arguments))


def same(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])


# --- Graphs ---


@pytest.mark.parametrize("splits", [None, FixedSplit(1024)], ids=["free", "fixed"])
@PAGES
@KERNELS
def test_a_graph_captured_at_length_1_serves_100000(backend: str, page: int, splits: Splits) -> None:
    """Lengths, tables, queries and the caches' values are those of the replay."""
    longest = 100_000
    captured = random_call((1, 1, 1, 1), page=page, capacity=longest)
    attend(captured, backend, splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(captured, backend, splits=splits)
    for seed, lengths in enumerate(((longest, 1, 0, 777), (5, 65_537, longest, 1)), 1):
        fresh = random_call(lengths, page=page, capacity=longest, seed=seed)
        for name in ("q", "k_cache", "v_cache", "seqlens_k", "page_table"):
            if getattr(captured, name) is not None:
                getattr(captured, name).copy_(getattr(fresh, name))
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        assert same(got, attend(fresh, backend, splits=splits))
        if splits is not None:
            alone = [attend(one_of(fresh, number), backend, splits=splits) for number in range(4)]
            assert same(got, (torch.cat([o for o, _ in alone]), torch.cat([lse for _, lse in alone])))
        check("replayed", got, fresh)


@KERNELS
def test_a_whole_step_in_a_graph(backend: str) -> None:
    """Append, a plan, and two layers that share it; ten steps of growth by one graph."""
    sizes = Heads(8, 2, 64, 64, BF16, DEVICE)
    sequences = [[draw(sizes, 40, 10 * layer + seed) for seed in range(3)] for layer in range(2)]
    starts = (1, 16, 29)
    caches = [torch.full((2, 12, 16, 2, 64), torch.nan, device=DEVICE, dtype=BF16) for _ in range(2)]
    table = int32([[7, 2, 5], [0, 9, 11], [4, 3, 8]], DEVICE)  # type: ignore[arg-type]
    seqlens_k = int32(starts, DEVICE)
    q, k, v = (torch.zeros(2, 3, 1, heads, 64, device=DEVICE, dtype=BF16) for heads in (8, 2, 2))
    for layer in range(2):
        for number, start in enumerate(starts):
            at = torch.arange(start, device=DEVICE)
            place = table[number].long()[at // 16], at % 16
            for cache, name in zip(caches[layer], "kv"):
                cache[place] = getattr(sequences[layer][number], name)[:start]

    def step() -> list[tuple[Tensor, Tensor]]:
        seqlens_k.add_(1)
        plan, results = None, []
        for layer in range(2):
            k_cache, v_cache = caches[layer]
            tileattn.append_kv(k[layer], v[layer], k_cache, v_cache, seqlens_k, page_table=table)
            call = (q[layer], k_cache, v_cache, seqlens_k)
            plan = plan or tileattn.decode_plan(*call, page_table=table, backend=backend)
            results.append(tileattn.decode(*call, page_table=table, plan=plan, return_lse=True, backend=backend))
        return results

    def feed(number: int) -> None:
        for layer, of_layer in enumerate(sequences):
            for i, (sequence, start) in enumerate(zip(of_layer, starts)):
                for x, name in zip((q, k, v), "qkv"):
                    x[layer, i, 0] = getattr(sequence, name)[start + number]

    feed(0)
    step()
    seqlens_k.copy_(int32(starts, DEVICE))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for number in range(10):
        feed(number)
        graph.replay()
        for layer, got in enumerate(results):
            rows = [Rows(each, start + number, 1) for each, start in zip(sequences[layer], starts)]
            (of_q, *others), _ = arguments_of(rows, Cache())
            check(f"step {number}", got, DecodeArguments(of_q, *others))


# --- No synchronisation, no compilation ---


VARIANTS = ("plain", "fixed", "split", "window", "sink", "bias", "tree")


def variants(batch: int, q_len: int, capacity: int) -> dict[str, dict[str, Any]]:
    """The options of calls with 8 heads."""
    slopes = torch.linspace(0.01, 0.2, 8, device=DEVICE)
    tree = torch.ones(batch, q_len, q_len, dtype=torch.bool, device=DEVICE).tril()
    return {
        "plain": {},
        "fixed": {"splits": FixedSplit(256)},
        "split": {"splits": 7},
        "window": {"mask": SlidingWindow(100, 0), "score_mod": SoftCap(30.0)},
        "sink": {"sink": torch.linspace(-1, 2, 8, device=DEVICE), "score_mod": ALiBi(slopes)},
        "bias": {"score_mod": Bias(torch.zeros(batch, 8, q_len, capacity, device=DEVICE))},
        "tree": {"tree_mask": tree},
    }


@pytest.mark.parametrize("name", VARIANTS)
@KERNELS
def test_nothing_waits_for_the_device(backend: str, name: str) -> None:
    call = random_call((300, 5, 1000, 0), q_len=4, capacity=1024)
    options = variants(4, 4, 1024)[name]
    new = torch.zeros(4, 4, 2, 128, device=DEVICE, dtype=BF16)

    def step() -> None:
        _, k_cache, v_cache, seqlens_k = call.positional
        named = call.options | options | {"backend": backend}
        tileattn.append_kv(new, new, k_cache, v_cache, seqlens_k, page_table=call.page_table)
        tileattn.decode(*call.positional, **named)
        plan = tileattn.decode_plan(*call.positional, **named)
        tileattn.decode(*call.positional, **named, plan=plan)

    step()
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(3):
            step()


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where a kernel is asked for that this process has not loaded."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("compiles")

    with monkeypatch.context() as patch:
        patch.setattr(KernelCache, "find_or_build", fail)
        knobs = pytest.importorskip("triton").knobs
        patch.setattr(knobs.runtime, "jit_post_compile_hook", fail)
        yield


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["plain", "fixed", "window"])
@KERNELS
def test_new_sizes_compile_nothing(backend: str, name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, lengths, capacities, heads, queries and page sizes of one kind; the results are right, too."""
    sizes = Heads(8, 2, 64, 64, BF16, DEVICE)
    sequences = [draw(sizes, 700, seed) for seed in range(5)]
    options = variants(1, 1, 1)[name]
    mods = {"score_mods": (options["score_mod"],), "mask": options["mask"]} if name == "window" else {}

    def call(count: int, q_lens: Sequence[int], page: int, slack: int) -> None:
        rows = [Rows(sequences[i % 5], 100 * i % 500, q_len) for i, q_len in zip(range(count), q_lens)]
        positional, named = arguments_of(rows, Cache(page, packed, slack=slack))
        got = tileattn.decode(*positional, **named, **options, return_lse=True, backend=backend)
        check(f"{count} sequences", got, DecodeArguments(*positional, **named, **mods))

    for q_len in (1, 5, 9, 16, 40):  # one kernel for each number of rows of a tile, at most
        for count in (1, 2, 4):
            call(count, [q_len] * 4, 16, 0)
    with no_compilation(monkeypatch):
        chosen = random.Random(0)
        for _ in range(30):
            q_len, count = chosen.choice((1, 1, 2, 3, 8, 16, 33)), chosen.choice((1, 2, 3, 5, 17))
            q_lens = [chosen.randint(0, q_len) if packed else q_len for _ in range(count)]
            call(count, q_lens, chosen.choice((16, 48, 80)), chosen.choice((0, 1, 500)))


# --- Large ---


@KERNELS
def test_pages_beyond_two_to_the_31_elements(backend: str) -> None:
    """Sequences whose pages are the first and the last of a cache of 2^31 elements and more."""
    page, heads, dim = 16, 8, 128
    pages = 2**31 // (page * heads * dim) + 40
    k, v = (torch.full((pages, page, heads, dim), torch.nan, device=DEVICE, dtype=BF16) for _ in range(2))
    lengths = (300, 320, 17)
    last = [pages - 1 - i for i in range(20)]
    table = torch.full((3, 20), -1, dtype=torch.int32)
    table[0, :19] = torch.tensor(last[:19])
    table[1] = torch.tensor([5, pages - 20, *range(10, 28)])
    table[2, :2] = torch.tensor([pages - 22, 1])
    generator = torch.Generator(DEVICE).manual_seed(0)
    for number, length in enumerate(lengths):
        keys = torch.arange(length)
        at = table[number, keys // page].long().to(DEVICE), (keys % page).to(DEVICE)
        for cache in (k, v):
            cache[at] = torch.randn(length, heads, dim, device=DEVICE, generator=generator).to(BF16)
    q = torch.randn(3, 2, 32, dim, device=DEVICE, generator=generator).to(BF16)
    arguments = DecodeArguments(q, k, v, int32(lengths, DEVICE), table.to(DEVICE))
    check("last pages", attend(arguments, backend), arguments)


@KERNELS
def test_a_row_of_a_contiguous_cache_beyond_two_to_the_31_elements(backend: str) -> None:
    """A second row behind 2^31 elements, and keys of the first one that lie there: of which a window sees the last."""
    heads, dim = 8, 128
    capacity = 2**31 // (heads * dim) + 4096
    k, v = (torch.empty(2, capacity, heads, dim, device=DEVICE, dtype=BF16) for _ in range(2))
    lengths = (capacity, 777)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for cache in (k, v):
        cache[0, -4096:] = torch.nan
        cache[1, :1000] = torch.nan
        cache[0, -600:] = torch.randn(600, heads, dim, device=DEVICE, generator=generator).to(BF16)
        cache[1, :777] = torch.randn(777, heads, dim, device=DEVICE, generator=generator).to(BF16)
    q = torch.randn(2, 2, 32, dim, device=DEVICE, generator=generator).to(BF16)
    window = SlidingWindow(500, 0)
    got = attend(DecodeArguments(q, k, v, int32(lengths, DEVICE), mask=window), backend)
    # The same window in small caches; positions do not matter otherwise.
    ends = [cache[0, -600:].expand(2, -1, -1, -1).clone() for cache in (k, v)]
    small = [torch.cat([end, end[:, :400]], dim=1) for end in ends]
    for cache, of_small in zip((k, v), small):
        of_small[1, :777] = cache[1, :777]
    check("beyond", got, DecodeArguments(q, *small, int32((600, 777), DEVICE), mask=window))


@KERNELS
def test_many_sequences_of_one_key(backend: str) -> None:
    """More than a planning kernel looks at in one step; o is v."""
    count = 5000
    arguments = random_call((1,) * count, page=16, heads=(2, 2), dim=64)
    o, _ = attend(arguments, backend)
    assert arguments.page_table is not None
    assert torch.equal(o[:, 0], arguments.v_cache[arguments.page_table[:, 0].long(), 0])


# --- Launches ---


@pytest.mark.parametrize("name", ["plain", "fixed", "split"])
@PAGES
@KERNELS
def test_two_hundred_launches_give_the_same_bits(backend: str, page: int, name: str) -> None:
    """Parts are merged in their order, whichever ends last."""
    arguments = random_call((9000, 1, 130, 4097, 0, 2000), page=page)
    options = variants(1, 1, 1)[name]
    first = attend(arguments, backend, **options)
    assert all(same(attend(arguments, backend, **options), first) for _ in range(200))


@KERNELS
def test_two_streams_at_the_same_time(backend: str) -> None:
    """Workspaces and counters are not shared."""
    both = [random_call((5000, 300, 8000), seed=seed) for seed in (0, 1)]
    expected = [attend(arguments, backend) for arguments in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(attend(both[index], backend))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(same(each, expected[index]) for each in found[index])


@KERNELS
def test_layers_share_a_plan(backend: str) -> None:
    first, second = (random_call((5000, 300, 0, 8000), q_len=3, seed=seed) for seed in (0, 1))
    second = replace(second, page_table=first.page_table, k_cache=first.k_cache * 2, v_cache=first.v_cache * 3)
    plan = tileattn.decode_plan(*first.positional, **first.options, backend=backend)
    for arguments in (first, second, first):
        assert same(attend(arguments, backend, plan=plan), attend(arguments, backend))


@PAGES
@KERNELS
def test_no_cache_is_copied(backend: str, page: int) -> None:
    """Beside o and lse a call needs some megabytes, for a cache of 512."""
    arguments = random_call((60_000,) * 16, page=page)
    attend(arguments, backend)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    got = attend(arguments, backend)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert arguments.k_cache.nbytes > 400 * 2**20
    assert peak <= sum(x.nbytes for x in got) + 32 * 2**20


# --- Wrong values, which the host does not see ---


class Guarded:
    """In place of `Tensor.new_empty` and `torch.empty`: memory between margins that nobody may touch."""

    MARGIN, CANARY = 2**16, 123

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.full = torch.full

    def __call__(self, shape: Sequence[Any], dtype: torch.dtype | None) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = math.prod(sizes)
        memory = self.full((count + 2 * self.MARGIN,), self.CANARY, dtype=dtype or torch.float32, device=DEVICE)
        self.memory.append(memory)
        inside = memory[self.MARGIN : self.MARGIN + count]
        if inside.dtype.is_floating_point:
            inside.fill_(torch.nan)
        return inside.view(*sizes)

    def assert_untouched(self) -> None:
        assert self.memory
        for memory in self.memory:
            assert (memory[: self.MARGIN] == self.CANARY).all()
            assert (memory[-self.MARGIN :] == self.CANARY).all()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    found, empty = Guarded(), torch.empty

    def new_empty(self: Tensor, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return found(size, dtype or self.dtype)

    def guarded_empty(*size: Any, **named: Any) -> Tensor:
        if torch.device(named.get("device") or "cpu").type != DEVICE:
            return empty(*size, **named)
        return found(size, named.get("dtype"))

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty", guarded_empty)
    return found


def _changed(x: Tensor, index: Any, value: int) -> Tensor:
    wrong = x.clone()
    wrong[index] = value
    return wrong


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a page that is not there": ("page_table", lambda x: _changed(x, (1, 0), 10**6), "page_table"),
    "a page of -1": ("page_table", lambda x: _changed(x, (1, 1), -1), "page_table"),
    "the least page": ("page_table", lambda x: _changed(x, (1, 2), -(2**31)), "page_table"),
    "more keys than room": ("seqlens_k", lambda x: _changed(x, 1, 2**31 - 1), "seqlens_k"),
    "one key more than room": ("seqlens_k", lambda x: _changed(x, 1, 513), "seqlens_k"),
    "fewer keys than none": ("seqlens_k", lambda x: _changed(x, 1, -5), "seqlens_k"),
}


@pytest.mark.parametrize("name", WRONG)
@KERNELS
def test_wrong_values_are_told(backend: str, name: str, guarded: Guarded) -> None:
    """Nothing outside of the tensors is touched, the other sequences are right, and a later check raises."""
    which, change, says = WRONG[name]
    arguments = random_call((300, 200, 65), page=16, capacity=512, q_len=2)
    arguments = replace(arguments, splits=FixedSplit(128))  # else how one is cut depends on the others' lengths
    right = attend(arguments, backend)
    o, lse = attend(replace(arguments, **{which: change(getattr(arguments, which))}), backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        tileattn.check_caches()
    guarded.assert_untouched()
    for number in (0, 2):
        assert torch.equal(o[number], right[0][number])
        assert torch.equal(lse[number], right[1][number])
    assert same(attend(arguments, backend), right)
    tileattn.check_caches()


@KERNELS
def test_a_cache_without_pages(backend: str) -> None:
    """A pool whose first page has not been made; then a length that there is no page for."""
    q = torch.randn(2, 1, 8, 64, device=DEVICE, dtype=BF16)
    cache = torch.zeros(0, 16, 2, 64, device=DEVICE, dtype=BF16)
    table = torch.full((2, 4), -1, dtype=torch.int32, device=DEVICE)
    for lengths in ((0, 0), (0, 3)):
        arguments = DecodeArguments(q, cache, cache, int32(lengths, DEVICE), table)
        o, lse = attend(arguments, backend, out=torch.full_like(q, torch.nan))
        assert not o.any()
        assert (lse == -math.inf).all()
        if any(lengths):
            with pytest.raises(ValueError, match=r"seqlens_k .* sequence 1"):
                tileattn.check_caches()
        else:
            tileattn.check_caches()


@KERNELS
def test_an_infinite_score_in_one_of_several_parts(backend: str) -> None:
    """lse is infinite and o NaN, however large the scores of the other parts are."""
    arguments = random_call((300,), q_len=2, page=16, capacity=320)
    arguments.q.copy_(torch.full_like(arguments.q, 4.0))
    arguments.k_cache.copy_(torch.where(arguments.k_cache.isnan(), torch.nan, 4.0))  # scores of 181
    place = arguments.page_table[0, 2], 3  # type: ignore[index]
    arguments.k_cache[place] = math.inf
    for splits in (1, 3, 30, FixedSplit(128), None):
        o, lse = attend(replace(arguments, splits=splits), backend)
        assert lse.isposinf().all(), splits
        assert o.isnan().all(), splits


@KERNELS
def test_a_later_call_tells_as_well(backend: str) -> None:
    """A copy of the status is started now and then, so it need not be the next one."""
    arguments = random_call((300, 200), page=16)
    tileattn.check_caches()
    attend(replace(arguments, seqlens_k=int32((300, 10**9), DEVICE)), backend)

    def some_calls() -> None:
        for _ in range(200):
            torch.cuda.synchronize()
            time.sleep(2e-3)
            attend(arguments, backend)

    with pytest.raises(ValueError, match="seqlens_k"):
        some_calls()
    attend(arguments, backend)
    tileattn.check_caches()


@pytest.mark.parametrize("change", [lambda cu: cu + 1, lambda cu: cu * 10**6, lambda cu: cu.flip(0), lambda cu: -cu])
@KERNELS
def test_wrong_packed_lengths_are_told(backend: str, change: Callable[[Tensor], Tensor], guarded: Guarded) -> None:
    sizes = Heads(8, 2, 64, 64, BF16, DEVICE)
    rows = [Rows(draw(sizes, 300, seed), 200, count) for seed, count in enumerate((1, 9, 70))]
    positional, named = arguments_of(rows, Cache(16, packed=True))
    wrong = named | {"cu_seqlens_q": change(named["cu_seqlens_q"]).int()}
    tileattn.decode(*positional, **wrong, backend=backend)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        tileattn.check_caches()
    guarded.assert_untouched()
    tileattn.decode(*positional, **named, backend=backend)
    tileattn.check_caches()


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need, for benchmarks/precompile.py."""
    for page, q_len, dim in itertools.product((0, 1, 16, 64), (1, 2, 3, 4), (64, 128)):
        arguments = random_call((3, 2), q_len, page, dim=dim, capacity=64)
        yield lambda arguments=arguments: attend(arguments, "tilelang")  # type: ignore[misc]
    for packed, page, dim, new in ((False, 16, 64, 1), (False, 16, 128, 4), (True, 16, 64, 1), (True, 16, 128, 1)):
        arguments = random_call((3, 2, 4), new, page, dim=dim, capacity=64)
        of_new = torch.zeros(3 * new, 2, dim, device=DEVICE, dtype=BF16)
        options = {"page_table": arguments.page_table, "backend": "tilelang"}
        if packed:
            options["cu_seqlens_q"] = int32((0, 1, 2, 3), DEVICE)
        k = of_new if packed else of_new.view(3, new, 2, dim)
        yield functools.partial(tileattn.append_kv, k, k, *arguments.positional[1:], **options)
    for name in VARIANTS:
        arguments = random_call((3, 2, 4, 1), 4, capacity=1024)
        options = variants(4, 4, 1024)[name]
        yield lambda arguments=arguments, options=options: attend(arguments, "tilelang", **options)  # type: ignore[misc]
