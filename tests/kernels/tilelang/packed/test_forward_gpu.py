"""What only a GPU can show of packed sequences' forward pass, beside conformance: ``pytest -m gpu``."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.conformance_call import run
from tileattn import ALiBi, Causal, SlidingWindow, SoftCap
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.packed import work_list as records
from tileattn.testing import ConformanceCase, assert_forward_accurate, build, expected_forward
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import PackedShape

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# At, before and behind the ends of tiles of 64, 128 and 192 rows; and nothing.
EDGES = (1, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 255, 256, 257, 0, 2)
LONG_TAIL = (1500, *EDGES)  # on average much shorter than the longest: no two blocks share keys
SIMILAR = (1100, 1025, 1300, 1153)


class Packing(NamedTuple):
    """A call: lengths, heads, head dims."""

    lengths_q: tuple[int, ...] = LONG_TAIL
    lengths_k: tuple[int, ...] = LONG_TAIL
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (128, 128)
    mask: Any = None
    score_mod: Callable[[int], Any] | None = None  # of the number of heads
    sink: bool = False
    behind: int = 0
    longest: int | None = None  # instead of the longest lengths

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """The arguments of `varlen_attention`; unused tail rows are NaN."""
        generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(seed)

        def rows(lengths: Sequence[int], heads: int, head_dim: int) -> Tensor:
            shape = (sum(lengths) + self.behind, heads, head_dim)
            x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)
            x[sum(lengths) :] = torch.nan
            return x

        (heads, kv_heads), (head_dim, head_dim_v) = self.heads, self.head_dims
        q, k = rows(self.lengths_q, heads, head_dim), rows(self.lengths_k, kv_heads, head_dim)
        v = rows(self.lengths_k, kv_heads, head_dim_v)
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens(self.lengths_q),
            "cu_seqlens_k": cu_seqlens(self.lengths_k),
            "max_seqlen_q": self.longest or max(self.lengths_q),
            "max_seqlen_k": self.longest or max(self.lengths_k),
            "mask": self.mask,
            "score_mod": None if self.score_mod is None else self.score_mod(heads),
            "sink": torch.linspace(-1, 2, heads, device=DEVICE) if self.sink else None,
        }

    def call(self, seed: int = 0, **changes: Any) -> tuple[Tensor, Tensor]:
        """o and lse."""
        return attend(**(self.arguments(seed) | changes))


def attend(**arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = tileattn.varlen_attention(**arguments, return_lse=True, backend="tilelang")
    return o, lse


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def _alibi(heads: int) -> ALiBi:
    return ALiBi(torch.linspace(0.1, 1, heads, device=DEVICE))


def _softcap(heads: int) -> SoftCap:
    return SoftCap(20.0)


PACKINGS = {
    "causal": Packing(mask=Causal(), behind=77),
    "causal-64": Packing(head_dims=(64, 64), mask=Causal(), behind=1),
    "full": Packing(sink=True, behind=300),
    "similar": Packing(SIMILAR, SIMILAR, (24, 24), behind=5),
    "similar-256": Packing(SIMILAR, tuple(reversed(SIMILAR)), (8, 4), (256, 256)),
    "window-192/128": Packing(head_dims=(192, 128), mask=SlidingWindow(100, 20)),
    "cross": Packing(EDGES, tuple(reversed(EDGES)), (8, 2), mask=Causal(), sink=True, behind=3),
    "decode": Packing((1,) * 65, tuple(range(0, 1300, 20)), (16, 2), mask=Causal()),
    "generic": Packing(head_dims=(256, 256), mask=Causal(), score_mod=_softcap, sink=True, behind=9),
    "alibi": Packing(EDGES, EDGES, score_mod=_alibi),
}
GRAPHED, QUEUED = PACKINGS["causal"], PACKINGS["similar"]
ANY_LENGTHS = ("causal-64", "full", "generic")
# Where lengths are alike and where they are not: each kind may have a kernel of its own (see packed_forward.py).
KINDS = ((1400, 1400), (1400, *[1] * 9))


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for packing in PACKINGS.values():
        yield packing.call
    for name in ANY_LENGTHS:
        for kind in KINDS:
            yield _of_any_lengths(name, kind).call
    for case in edge_cases():
        yield functools.partial(run, build(case, DEVICE), "tilelang")
    yield Packing((1, 3), (1, 3)).call


def _of_any_lengths(name: str, lengths: Sequence[int], behind: int = 0) -> Packing:
    """One of the packings with other lengths, all below the longest that the call allows."""
    return PACKINGS[name]._replace(lengths_q=(*lengths,), lengths_k=(*lengths,), longest=1500, behind=behind)


# --- Results ---


def edge_cases() -> list[ConformanceCase]:
    shapes = [
        PackedShape("edges", 4, 2, EDGES, EDGES, behind=70),
        PackedShape("crossed", 4, 1, EDGES, (*EDGES[5:], *EDGES[:5]), behind=1),
        PackedShape("long-tail", 2, 1, LONG_TAIL, LONG_TAIL, behind=130),
        PackedShape("similar", 2, 2, SIMILAR, SIMILAR, behind=64),
    ]
    structures = [
        Structure("bf16", dim, dim_v, mask, (), sink, True)
        for dim, dim_v in ((64, 64), (128, 128), (256, 256), (192, 128))
        for mask, sink in (("none", False), ("causal", True))
    ]
    return [ConformanceCase(structure, shape) for structure in structures for shape in shapes]


@pytest.mark.parametrize("case", edge_cases(), ids=lambda case: case.id)
def test_sequences_that_end_where_tiles_do(case: ConformanceCase) -> None:
    arguments = build(case, DEVICE)
    assert_forward_accurate(case.id, run(arguments, "tilelang"), *expected_forward(arguments))


@pytest.mark.parametrize("name", ["causal", "causal-64", "similar", "generic", "decode"])
def test_nothing_leaks_from_a_sequence_into_its_neighbours(name: str) -> None:
    """Every other sequence is NaN; the rows of the others have the same bits as without."""
    packing = PACKINGS[name]
    arguments = packing.arguments()
    o, lse = attend(**arguments)
    owners = [
        torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE))
        for lengths in (packing.lengths_q, packing.lengths_k)
    ]
    for parity in (0, 1):
        spoilt = {name: arguments[name].clone() for name in "qkv"}
        for name, owner in zip("qkv", (owners[0], owners[1], owners[1])):
            spoilt[name][: len(owner)][owner % 2 == parity] = torch.nan
        got, got_lse = attend(**arguments | spoilt)
        mine = owners[0] % 2 != parity
        assert torch.equal(got[: len(mine)][mine], o[: len(mine)][mine])
        assert torch.equal(got_lse[:, : len(mine)][:, mine], lse[:, : len(mine)][:, mine])
        assert (got[len(mine) :] == 0).all()
        assert (got_lse[:, len(mine) :] == -torch.inf).all()


class Guarded:
    """A stand-in for `Tensor.new_empty`: memory between two margins that must stay untouched."""

    MARGIN, CANARY = 2**16, 123.0

    def __init__(self) -> None:
        self.memory: list[Tensor] = []

    def __call__(self, like: Tensor, *given: int | tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        size = given[0] if isinstance(given[0], tuple) else given
        count = math.prod(size)
        memory = torch.full((count + 2 * self.MARGIN,), self.CANARY, dtype=dtype or like.dtype, device=like.device)
        self.memory.append(memory)
        inside = memory[self.MARGIN : self.MARGIN + count]
        inside.fill_(torch.nan if inside.is_floating_point() else 2**30)
        return inside.view(size)

    def assert_untouched(self) -> None:
        assert len(self.memory) >= 2
        for memory in self.memory:
            assert (memory[: self.MARGIN] == self.CANARY).all()
            assert (memory[-self.MARGIN :] == self.CANARY).all()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    guards = Guarded()
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **named: guards(self, *size, **named))
    return guards


@pytest.mark.parametrize("name", PACKINGS)
def test_every_row_is_written_and_nothing_else(name: str, guarded: Guarded) -> None:
    o, lse = PACKINGS[name].call()
    guarded.assert_untouched()
    assert o.isfinite().all()
    assert not lse.isnan().any()


def test_single_keys() -> None:
    """Many sequences of one query and key: o is v. More than the planning kernel's warps look at in one step."""
    packing = Packing((1,) * 5000, (1,) * 5000, (4, 4))
    arguments = packing.arguments()
    o, _ = attend(**arguments)
    assert torch.equal(o, arguments["v"])


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """The last sequence's rows begin beyond what 32 bits can say."""
    lengths_q, lengths_k = (2**20, 64), (1, 256)
    q = Packing((64,), (256,), (1, 1), (64, 64)).arguments()
    wide = torch.zeros((sum(lengths_q), 33, 64), device=DEVICE, dtype=torch.bfloat16)
    wide[-64:, 32:] = q["q"]
    k, v = (torch.cat([x[:1], x]) for x in (q["k"], q["v"]))
    lengths = {"cu_seqlens_q": cu_seqlens(lengths_q), "cu_seqlens_k": cu_seqlens(lengths_k)}
    longest = {"max_seqlen_q": 2**20, "max_seqlen_k": 256}
    o, _ = attend(q=wide[:, 32:], k=k, v=v, **lengths, **longest)
    assert torch.equal(o[-64:], attend(**q | longest)[0])


# --- Launches ---


@pytest.mark.parametrize("name", PACKINGS)
def test_two_hundred_launches_give_the_same_bits(name: str) -> None:
    arguments = PACKINGS[name].arguments()
    first, first_lse = attend(**arguments)
    for _ in range(200):
        o, lse = attend(**arguments)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("name", ANY_LENGTHS)
def test_new_lengths_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred launches of other lengths; in another order the sequences have the same bits."""
    for kind in KINDS:
        _of_any_lengths(name, kind).call()
    monkeypatch.setattr(launch, "ensure_compiled", lambda *_: pytest.fail("compiles"))
    draw = random.Random(0)
    for seed in range(50):
        count = draw.choice([1, 2, 3, 17, 64])
        lengths = [int(draw.lognormvariate(4, 1.5)) % 1400 for _ in range(count)]
        arguments = _of_any_lengths(name, lengths, behind=seed % 3).arguments(seed)
        o, lse = attend(**arguments)
        order = draw.sample(range(count), count)
        starts = [0, *itertools.accumulate(lengths)]
        place = [row for i in order for row in range(starts[i], starts[i + 1])]
        mixed = {name: torch.cat([arguments[name][place], arguments[name][len(place) :]]) for name in "qkv"}
        bounds = cu_seqlens([lengths[i] for i in order])
        got, got_lse = attend(**arguments | mixed | {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds})
        assert torch.equal(got[: len(place)], o[place])
        assert torch.equal(got_lse[:, : len(place)], lse[:, place])


def test_a_graph_replays_with_other_lengths() -> None:
    arguments = GRAPHED.arguments()
    attend(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attend(**arguments)
    for seed in range(1, 4):
        lengths = random.Random(seed).sample(LONG_TAIL, len(LONG_TAIL))
        for name, fresh in GRAPHED.arguments(seed).items():
            if name in ("q", "k", "v"):
                arguments[name].copy_(fresh)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            arguments[name].copy_(cu_seqlens(lengths))
        graph.replay()
        expected, expected_lse = attend(**arguments)
        assert torch.equal(o, expected)
        assert torch.equal(lse, expected_lse)


def test_two_streams_at_the_same_time() -> None:
    both = [QUEUED.arguments(seed) for seed in (0, 1)]
    expected = [attend(**arguments)[0] for arguments in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outputs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[index].append(attend(**both[index])[0])
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(o, expected[index]) for o in outputs[index])


def test_nothing_waits_for_the_device() -> None:
    arguments = GRAPHED.arguments()
    attend(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            attend(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_o_and_lse_and_the_list() -> None:
    packing = Packing((30000, *[100] * 300), (30000, *[100] * 300), (8, 8), mask=Causal())
    arguments = packing.arguments()
    attend(**arguments)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left must not be freed in between
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    o, lse = attend(**arguments)
    torch.cuda.synchronize()
    rows = 1 + records.capacity(o.shape[0], 301, 128)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak == o.nbytes + lse.nbytes + rows * records.WIDTH * 4


# --- Wrong lengths ---


def _changed(cu: Tensor, index: int, value: int) -> Tensor:
    wrong = cu.clone()
    wrong[index] = value
    return wrong


WRONG = {
    "not from zero": (lambda cu: _changed(cu, 0, 1), "must start at 0"),
    "negative": (lambda cu: cu - 10**9, "must start at 0"),
    "not monotone": (lambda cu: _changed(cu, 3, 2**31 - 1), "must not decrease"),
    "beyond": (lambda cu: _changed(cu, -1, 2**31 - 1), "must not go beyond"),
    "huge": (lambda cu: (cu.long() * 10**5).clamp(max=2**31 - 1).int(), "must not go beyond"),
}


@pytest.mark.parametrize("packing", ["causal", "generic"])
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_lengths_are_told(name: str, which: str, packing: str, guarded: Guarded) -> None:
    """Nothing is touched but o and lse, which are those of rows that belong to no sequence."""
    change, says = WRONG[name]
    arguments = PACKINGS[packing].arguments()
    o, lse = attend(**arguments | {which: change(arguments[which])})
    with pytest.raises(ValueError, match=f"{which} .*{says}"):
        tileattn.check_packed()
    guarded.assert_untouched()
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert attend(**arguments)[0].isfinite().all()
    tileattn.check_packed()


def test_the_next_call_tells_as_well() -> None:
    arguments = GRAPHED.arguments()
    tileattn.check_packed()  # no copy of a status is under way
    attend(**arguments | {"max_seqlen_q": 1499})
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the longest length"):
        attend(**arguments)
    attend(**arguments)
    tileattn.check_packed()
