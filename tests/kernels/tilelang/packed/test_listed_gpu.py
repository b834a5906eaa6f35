"""Packed calls that take their tiles from lists, on a GPU: ``pytest -m gpu``.

Outputs and gradients of masks without ranges by the rule of `tileattn.testing`; wrong lengths; lengths and tables that
are written in place, which a later call and a replay of a CUDA graph see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import (
    ALiBi,
    BlockSparse,
    Causal,
    Dilated,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    SoftCap,
    Strided,
)
from tileattn.call.facts import Packed, device_arch
from tileattn.kernels import kept_lists
from tileattn.kernels.tile_lists import Cut
from tileattn.kernels.tilelang.lists import launch
from tileattn.kernels.tilelang.packed.plan import work_list
from tileattn.kernels.tilelang.packed_lists import PackedSizes, make_packed_lists
from tileattn.math import load
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    expected_forward,
    expected_gradients,
    gradients,
)
from tileattn.testing.call_arguments import DROPOUT_SEED, Arguments
from tileattn.variant.key import encode

pytestmark = pytest.mark.gpu

DEVICE = "cuda"  # "meta", without values, in benchmarks/precompile.py
BF16 = torch.bfloat16
SEQUENCES, BLOCKS = 6, 13

# Queries and keys of each sequence, and unused rows behind them.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "self": ((1300, 40, 1111, 0, 1, 640), (1300, 40, 1111, 0, 1, 640), 5),
    "cross": ((700, 0, 1, 1500, 300, 129), (1200, 50, 0, 1500, 77, 1300), 100),
    "similar": ((1100, 1025, 1300, 1153, 1280, 1024), (1100, 1025, 1300, 1153, 1280, 1024), 0),
    "decoding": ((1, 2, 128, 0, 700, 5), (1500, 700, 128, 3, 1600, 1024), 0),
}


def _table(*shape: int, most: int, seed: int = 0) -> Tensor:
    """Random numbers from 0 on, in runs of 90 along the last dimension."""
    runs = (*shape[:-1], -(-shape[-1] // 90))
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, most, runs, generator=generator, dtype=torch.int32)
    return numbers.repeat_interleave(90, -1)[..., : shape[-1]].to(DEVICE)


def _images(longest: int) -> Mask:
    documents = _table(SEQUENCES, longest, most=3)
    return ImageTextDocuments(documents, torch.where(_table(SEQUENCES, longest, most=2, seed=1) == 1, 1, -1))


def _ids(longest: int) -> Mask:
    ids = _table(SEQUENCES, longest, most=4)
    return FunctionMask(lambda b, h, q, k: load(ids, b, q) == load(ids, b, k))


def _by_both(longest: int) -> Mask:
    limits = torch.tensor([900, 40, 100, 1500, 20, 1000], dtype=torch.int32, device=DEVICE)
    return FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (k <= q) & (q - k < 150 * (h + 1)))


def _blocks(longest: int) -> Mask:
    generator = torch.Generator().manual_seed(2)
    return BlockSparse((torch.rand(SEQUENCES, 4, BLOCKS, BLOCKS, generator=generator) < 0.2).to(DEVICE), 128)


# Of the most keys that a sequence has.
MASKS: dict[str, Callable[[int], Mask]] = {
    "dilated": lambda longest: Dilated(511, dilation=4),
    "strided": lambda longest: Strided(128, 63),
    "local-global": lambda longest: SlidingWindow(100, 30) | GlobalTokens(64),
    "neighborhood": lambda longest: Neighborhood((40, 40), (9, 9)),
    "far": lambda longest: FunctionMask(lambda b, h, q, k: q - k >= 300),
    "images-text": _images,
    "ids": _ids,
    "by-both": _by_both,
    "blocks": _blocks,
}


class Case(NamedTuple):
    """A call; `mods` makes its score modifications."""

    mask: str
    lengths: str = "cross"
    head_dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    deterministic: bool = False
    mods: Callable[[], tuple[Any, ...]] = tuple
    sink: bool = False
    dropout_p: float = 0.0


def _slopes() -> tuple[Any, ...]:
    return (ALiBi(torch.linspace(0.01, 0.2, 4, device=DEVICE)),)


CASES = {
    **{f"{name}-64": Case(name) for name in MASKS},
    **{f"{name}-128-self": Case(name, "self", (128, 128)) for name in MASKS},
    "dilated-similar": Case("dilated", "similar", (128, 128), (4, 4)),
    "by-both-similar": Case("by-both", "similar"),
    "images-text-decoding": Case("images-text", "decoding", (128, 128)),
    "local-global-decoding": Case("local-global", "decoding"),
    "dilated-96": Case("dilated", head_dims=(96, 96)),
    "dilated-192/128": Case("dilated", head_dims=(192, 128)),
    "dilated-256": Case("dilated", head_dims=(256, 256)),
    "local-global-256": Case("local-global", "self", (256, 256)),
    "far-256": Case("far", head_dims=(256, 256)),
    "deterministic-64": Case("ids", deterministic=True),
    "deterministic-128": Case("dilated", "self", (128, 128), deterministic=True),
    "deterministic-far": Case("far", "decoding", (128, 128), deterministic=True),
    "softcap": Case("far", "self", mods=lambda: (SoftCap(20.0),)),
    "alibi": Case("far", "self", (128, 128), mods=_slopes),
    "sink": Case("local-global", sink=True),
    "dropout": Case("dilated", "self", dropout_p=0.2),
    "dropout-128": Case("far", head_dims=(128, 128), dropout_p=0.5),
}


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


class Problem:
    """The tensors of a case, and what attention makes of them. Unused rows are NaN."""

    def __init__(self, case: Case, mask: Mask | None = None) -> None:
        self.case = case
        generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(0)
        lengths_q, lengths_k, behind = LENGTHS[case.lengths]

        def rows(lengths: tuple[int, ...], heads: int, head_dim: int) -> Tensor:
            x = torch.randn(1, sum(lengths) + behind, heads, head_dim, device=DEVICE, dtype=BF16, generator=generator)
            x[:, sum(lengths) :] = torch.nan
            return x

        (heads, kv_heads), (head_dim, head_dim_v) = case.heads, case.head_dims
        q, k = rows(lengths_q, heads, head_dim), rows(lengths_k, kv_heads, head_dim)
        v, self.do = rows(lengths_k, kv_heads, head_dim_v), rows(lengths_q, heads, head_dim_v)
        packed = Packed(cu_seqlens(lengths_q), cu_seqlens(lengths_k), max(lengths_q), max(lengths_k))
        sink = torch.linspace(-1, 2, heads, device=DEVICE) if case.sink else None
        self.arguments = Arguments(
            q,
            k,
            v,
            mask or MASKS[case.mask](max(lengths_k)),
            case.mods(),
            sink,
            None,
            "bshd",
            None,
            packed,
            case.dropout_p,
        )
        self.leaves = self.arguments.leaves()

    def forward(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """o and lse, by the TileLang kernels, with one batch element; `changes` are of the lengths."""
        a = self.arguments
        packed = (a.packed or Packed(a.q, a.q, 0, 0))._replace(**changes)
        if a.dropout_p:  # not while a graph is captured
            torch.manual_seed(DROPOUT_SEED)
        o, lse = tileattn.varlen_attention(
            a.q[0],
            a.k[0],
            a.v[0],
            *packed,
            mask=a.mask,
            score_mod=a.score_mods or None,
            sink=a.sink,
            dropout_p=a.dropout_p,
            deterministic=self.case.deterministic,
            return_lse=True,
            backend="tilelang",
        )
        return o[None], lse[None]

    def gradients(self, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return gradients(outputs, self.leaves, self.do, None)

    def ours(self) -> dict[str, Tensor]:
        outputs = self.forward()
        return {"o": outputs[0].detach(), "lse": outputs[1].detach(), **self.gradients(outputs)}


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    kept_lists.forget_lists()
    yield
    kept_lists.forget_lists()


def kept_cuts() -> list[Cut]:
    """The cuts of the lists that were made."""
    keys: list[Any] = list(kept_lists._kept)
    return [of_call[3] for of_call, *_ in keys]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str) -> None:
    problem = Problem(CASES[name])
    outputs = problem.forward()
    assert kept_cuts(), "the forward pass took no lists"
    got = problem.gradients(outputs)
    assert any(cut.by_keys for cut in kept_cuts()), "the backward pass took no lists"
    arguments = problem.arguments
    assert_forward_accurate(name, tuple(x.detach() for x in outputs), *expected_forward(arguments))  # type: ignore[arg-type]
    assert_gradients_accurate(name, got, *expected_gradients(arguments, problem.do, None), BF16)
    tileattn.check_packed()


def _same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same bits, but of dq, whose additions have no fixed order."""
    for name, tensor in expected.items():
        if name == "dq":
            torch.testing.assert_close(got[name], tensor, rtol=2**-6, atol=1e-3)
        else:
            assert torch.equal(got[name], tensor), name


CUTS = {
    "forward": Cut(128, 128, longest_first=True),
    "cluster": Cut(256, 176, longest_first=True),
    "keys": Cut(64, 128, by_keys=True, masks_queries=True),
    "queries": Cut(128, 96, masks_queries=True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [name for name in MASKS if name != "blocks"])
def test_the_kernel_gives_the_bits_of_pytorchs_operations(name: str, cut: str) -> None:
    for lengths_q, lengths_k, behind in LENGTHS.values():
        variant, operands = encode(MASKS[name](max(lengths_k)), ())
        packed = Packed(cu_seqlens(lengths_q), cu_seqlens(lengths_k), max(lengths_q), max(lengths_k))
        totals, tiles = (sum(lengths_q) + behind, sum(lengths_k) + behind), CUTS[cut]
        tile = tiles.block_N if tiles.by_keys else tiles.block_M
        work = work_list(device_arch(packed.cu_seqlens_q.device), packed, *totals, tile, of_keys=tiles.by_keys)
        sizes = PackedSizes.of(packed, *totals, 4)
        with mock.patch.object(launch, "make_packed_lists", side_effect=AssertionError("PyTorch made the lists")):
            got = launch.make_packed(variant, operands, packed, sizes, tiles, work)
        expected = make_packed_lists(variant, operands, sizes, tiles, work)
        assert got[2:4] == expected[2:4]
        assert torch.equal(got.tiles, expected.tiles)
        assert torch.equal(got.counts, expected.counts)
        assert expected.rows is None or torch.equal(got.rows, expected.rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["images-text-64", "dilated-similar", "local-global-256", "deterministic-64"])
def test_twenty_launches_give_the_same_bits(name: str) -> None:
    problem = Problem(CASES[name])
    first = problem.ours()
    for _ in range(20):
        _same(problem.ours(), first)


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("name", ["dilated-64", "by-both-similar"])
def test_wrong_lengths_are_told(name: str, which: str) -> None:
    """No list has a tile then; o and lse are those of rows that belong to no sequence."""
    problem = Problem(CASES[name])
    packed = problem.arguments.packed
    assert packed is not None
    wrong = (packed.cu_seqlens_q if which == "cu_seqlens_q" else packed.cu_seqlens_k) + 10**6
    o, lse = problem.forward(**{which: wrong})
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    with pytest.raises(ValueError, match=which):
        tileattn.check_packed()
    assert problem.forward()[0][:, : int(packed.cu_seqlens_q[-1])].isfinite().all()
    tileattn.check_packed()


def windows_problem() -> tuple[Problem, Tensor]:
    """A problem whose mask reads a window for each head, and the table of these."""
    table = torch.tensor([64, 100, 300, 1500], dtype=torch.int32, device=DEVICE)
    mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(table, h))
    return Problem(Case("", "similar", heads=(4, 4)), mask), table


def _elsewhere(problem: Problem, windows: list[int]) -> dict[str, Tensor]:
    """What new tensors of the present lengths, and a table of these values, give."""
    other, table = windows_problem()
    table.copy_(torch.tensor(windows, dtype=torch.int32))
    packed = problem.arguments.packed
    assert packed is not None
    fresh = packed._replace(cu_seqlens_q=packed.cu_seqlens_q.clone(), cu_seqlens_k=packed.cu_seqlens_k.clone())
    other.arguments = replace(other.arguments, packed=fresh)
    return other.ours()


OTHER_LENGTHS = ((1300, 1100, 1025, 1300, 1, 1024), (0, 1300, 1280, 700, 1300, 0))


def _write(problem: Problem, lengths: Sequence[int]) -> None:
    packed = problem.arguments.packed
    assert packed is not None
    packed.cu_seqlens_q.copy_(cu_seqlens(lengths))
    packed.cu_seqlens_k.copy_(cu_seqlens(lengths))


def test_writes_in_place_are_seen_by_the_next_call() -> None:
    problem, table = windows_problem()
    windows = [64, 100, 300, 1500]
    problem.ours()
    for lengths in OTHER_LENGTHS:
        _write(problem, lengths)
        _same(problem.ours(), _elsewhere(problem, windows))
        windows = windows[::-1]
        table.copy_(torch.tensor(windows, dtype=torch.int32))
        _same(problem.ours(), _elsewhere(problem, windows))


def test_writes_in_place_are_seen_by_a_replay() -> None:
    """The lists are made in the graph, in both passes."""
    problem, table = windows_problem()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.ours()  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.ours()
    for lengths, windows in zip(
        (LENGTHS["similar"][0], *OTHER_LENGTHS), ([64, 100, 300, 1500], [1500, 64, 700, 0], [9] * 4)
    ):
        _write(problem, lengths)
        table.copy_(torch.tensor(windows, dtype=torch.int32))
        graph.replay()
        got = {name: tensor.clone() for name, tensor in captured.items()}
        _same(got, _elsewhere(problem, windows))


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for case in CASES.values():
        yield Problem(case).ours
    yield windows_problem()[0].ours
