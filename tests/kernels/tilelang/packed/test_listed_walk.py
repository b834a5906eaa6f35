"""Packed calls with lists of tiles, on a CPU: which scores kernels compute if they walk as their source does.

Launches get Python functions in place of kernels. These take the arguments by the names of the real kernels'
parameters, find each block's line as the kernels do, and mark the scores of its tiles: where the mask allows them in
mixed tiles, all in whole ones. What is marked must be what the mask allows, of every sequence and head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.packed.test_plan_kernel import bounds, model
from tests.kernels.tilelang.test_packed_lists import HEADS, LENGTHS, MASKS
from tileattn import Causal, Mask, SlidingWindow, SoftCap
from tileattn.call import packed_status
from tileattn.call.dropout import Dropout
from tileattn.call.facts import AttentionCall, BackwardCall, Packed, sizes
from tileattn.call.inputs import Inputs
from tileattn.kernels import tile_lists
from tileattn.kernels.kept_lists import forget_lists
from tileattn.kernels.tilelang.backward import kernels, launch
from tileattn.kernels.tilelang.backward.defaults import default as backward_default
from tileattn.kernels.tilelang.backward.defaults import queries_default
from tileattn.kernels.tilelang.backward.library import Kernels, kernel_names
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import packed as forward_packed
from tileattn.kernels.tilelang.forward.kernel import kernel_of
from tileattn.kernels.tilelang.packed import plan
from tileattn.kernels.tilelang.packed.work_list import COUNT, FIRST, K_LEN, Q_LEN, SEQUENCE, WIDTH
from tileattn.variant.key import encode


class Problem:
    """The tensors of a packed call, and the scores that its kernels mark: a matrix for each sequence and head."""

    def __init__(self, mask: Mask, lengths: str = "cross", dim: int = 64, mods: tuple[Any, ...] = ()) -> None:
        self.q_lengths, self.k_lengths, rest = LENGTHS[lengths]
        self.mask, self.variant_and_operands = mask, encode(mask, mods)
        variant, operands = self.variant_and_operands
        totals = sum(self.q_lengths) + rest, sum(self.k_lengths) + rest
        self.q, self.k = (torch.zeros(1, total, HEADS, dim, dtype=torch.bfloat16) for total in totals)
        self.packed = Packed(bounds(self.q_lengths), bounds(self.k_lengths), max(self.q_lengths), max(self.k_lengths))
        self.inputs = Inputs(self.q, self.k, self.k, operands=operands, packed=self.packed)
        self.call = AttentionCall(torch.bfloat16, dim, dim, variant, arch="sm_90a", packed=True, return_lse=True)
        self.shapes = sizes(self.q, self.k, self.packed)
        self.marked: dict[str, list[list[Tensor]]] = {}
        self.configs: dict[str, Any] = {}

    def allowed(self, sequence: int, h: int) -> Tensor:
        """Every pair of a sequence's queries and keys."""
        seqlen_q, seqlen_k = self.q_lengths[sequence], self.k_lengths[sequence]
        q = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        seen = self.mask.allows(torch.tensor(sequence), torch.tensor(h), q, torch.arange(seqlen_k)[None])
        return torch.as_tensor(seen).expand(seqlen_q, seqlen_k)

    def kernel(self, which: str, function: Any, config: Any, walk: Callable[[Problem, Any, Any, str], None]) -> Any:
        """A function in place of a kernel, whose TileLang function tells the names of the arguments."""
        names = [str(name).removesuffix("_handle") for name in function.params]
        self.configs[which] = config

        def launched(*arguments: Any) -> None:
            arg = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
            pairs = list(zip(self.q_lengths, self.k_lengths))
            self.marked[which] = [[torch.zeros(*pair, dtype=torch.int) for _ in range(HEADS)] for pair in pairs]
            walk(self, arg, config, which)

        return launched

    def mark(self, which: str, record: list[int], h: int, tile: tuple[slice, slice], masked: bool) -> None:
        """Computes a tile, its rows and keys, as far as its sequence goes."""
        rows, keys = tile
        marked = self.marked[which][record[SEQUENCE]][h]
        if masked:
            marked[rows, keys] += self.allowed(record[SEQUENCE], h)[rows, keys].int()
        else:
            assert rows.stop <= len(marked) or which == "forward"
            assert keys.stop <= marked.shape[1]
            marked[rows, keys] += 1

    def check(self, which: str) -> None:
        for sequence, of_heads in enumerate(self.marked[which]):
            for h, marked in enumerate(of_heads):
                assert torch.equal(marked, self.allowed(sequence, h).int()), (which, sequence, h)


def walk_line(problem: Problem, arg: Any, which: str, record: list[int], h: int, line: int, tile: Any) -> int:
    """Marks the tiles of a line; `tile` gives a tile's rows and keys, by its number. Returns how many there are."""
    assert 0 not in (record[Q_LEN], record[K_LEN]) or arg.list_counts[line].tolist() == [0, 0]
    mixed, visited = arg.list_counts[line].tolist()
    for place, number in enumerate(arg.list_tiles[line, :visited].tolist()):
        problem.mark(which, record, h, tile(number), place < mixed)
    return int(visited)


def forward_walk(problem: Problem, arg: Any, config: Any, which: str) -> None:
    """The tasks of all tickets, as packed/tasks.py and forward/hopper/tasks.py find them."""
    rows, done = config.cluster * config.block_M, set()
    lengths: dict[tuple[int, int], int] = {}
    for ticket in range(int(arg.work[0, COUNT]) * HEADS):
        record = arg.work[1 + ticket // HEADS].tolist()
        first, q_len = record[FIRST], record[Q_LEN]
        tiles = max(-(-q_len // rows), 1)
        within = ticket - first * HEADS
        group, rest = divmod(within, arg.side * tiles)
        h, row = group * arg.side + rest % arg.side, (tiles - 1 - rest // arg.side) * rows
        place = h * arg.list_head + first + row // rows
        number = int(arg.list_rows[place])
        assert 0 <= number < tiles
        line = h * arg.list_head + first + number
        done.add(line)

        def tile(column: int, number: int = number) -> tuple[slice, slice]:
            return (
                slice(number * rows, number * rows + rows),
                slice(column * config.block_N, (column + 1) * config.block_N),
            )

        assert arg.list_batch == 0
        visited = walk_line(problem, arg, which, record, h, line, tile)
        # A sequence's longest lines first, mixed tiles counted twice.
        cost = visited + int(arg.list_counts[line, 0])
        assert cost <= lengths.get((h, first), cost)
        lengths[h, first] = cost
    assert len(done) == int(arg.work[0, COUNT]) * (HEADS if arg.list_head else 1)


def block_walk(by_keys: bool) -> Callable[[Problem, Any, Any, str], None]:
    """The blocks of a backward kernel, as backward/places.py and backward/hopper/roles.py find them."""

    def walk(problem: Problem, arg: Any, config: Any, which: str) -> None:
        own, length = (config.block_N, K_LEN) if by_keys else (config.block_M, Q_LEN)
        for block in range((len(arg.work) - 1) * HEADS):
            run = block // HEADS
            if run >= int(arg.work[0, COUNT]):
                continue
            record = arg.work[1 + run].tolist()
            tiles = -(-record[length] // own)
            turn, place = divmod(block - record[FIRST] * HEADS, arg.side * tiles)
            h = turn * arg.side + place % arg.side
            number = place // arg.side if by_keys else tiles - 1 - place // arg.side

            def tile(other: int, number: int = number) -> tuple[slice, slice]:
                row, column = (other, number) if by_keys else (number, other)
                return (
                    slice(row * config.block_M, (row + 1) * config.block_M),
                    slice(column * config.block_N, (column + 1) * config.block_N),
                )

            walk_line(problem, arg, which, record, h, h * arg.list_head + record[FIRST] + number, tile)

    return walk


def write_plan(arch: str) -> Callable[..., None]:
    """The planning kernel in Python; behind the end of a list there is anything."""

    def write(cu_q: Tensor, cu_k: Tensor, work: Tensor, status: Tensor, *numbers: Any) -> None:
        total_q, total_k, _, _, *of_lists, lists = numbers
        work.fill_(-(2**31) + 1234567)
        for tile, of_keys, begin in list(zip(of_lists[:3], of_lists[3:6], of_lists[6:]))[:lists]:
            entries = model(cu_q.diff().tolist(), cu_k.diff().tolist(), total_q, total_k, tile, bool(of_keys))
            work[begin] = torch.tensor([len(entries), *[0] * (WIDTH - 1)])
            work[begin + 1 : begin + 1 + len(entries)] = entries

    return write


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan, "plan_function", write_plan)
    monkeypatch.setattr(packed_status.STATUS, "devices", {})
    monkeypatch.setattr(packed_status, "report", lambda device: None)
    monkeypatch.setattr(forward_packed, "tickets", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(forward_packed, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(tile_lists, "FEWEST_TILES", 4)
    forget_lists()
    yield
    forget_lists()


def run_forward(problem: Problem) -> Any:
    def load(call: AttentionCall, config: Any) -> Any:
        return problem.kernel("forward", kernel_of(call, config), config, forward_walk)

    with mock.patch.object(forward_launch, "forward_function", load):
        forward = forward_launch.prepare(problem.call, *problem.shapes, 0.125)
        forward(problem.inputs)
    return problem.configs["forward"]


def run_backward(problem: Problem, deterministic: bool = False) -> Any:
    """The main kernel's configuration."""
    needs = (True, True, True, False, *[False] * len(problem.inputs.operands.tensors))
    call = BackwardCall(dataclasses.replace(problem.call, needs_grad=True), needs, False, deterministic)

    def load(call: BackwardCall, config: Any = None) -> Kernels:
        config = config or backward_default(call)
        made: dict[str, Any] = {name: lambda *_: None for name in kernel_names(call)}
        for name, tiles in (("main", config), ("queries", queries_default(call))):
            if name in made:
                function = kernels.kernel_of(call, name, config)
                made[name] = problem.kernel(name, function, tiles, block_walk(name == "main"))
        return Kernels(*(made.get(name) for name in Kernels._fields))  # type: ignore[arg-type]

    with mock.patch.object(launch, "backward_kernels", load):
        backward = launch.prepare_backward(call, *problem.shapes, 0.125)
        backward(problem.inputs, problem.q, torch.zeros(1, HEADS, problem.q.shape[1]), problem.q, None)
    return problem.configs["main"]


FORWARD = [
    *(("cross", name) for name in ("local-global", "images-text", "by-both")),
    ("self", "nothing"),
    *(pytest.param("cross", name, marks=pytest.mark.slow) for name in ("dilated", "by-head", "by-sequence")),
    *(pytest.param("self", name, marks=pytest.mark.slow) for name in ("image", "loaded-ids")),
    pytest.param("one", "far-only", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("lengths", "name"), FORWARD)
def test_forward(name: str, lengths: str) -> None:
    problem = Problem(MASKS[name], lengths)
    assert run_forward(problem).listed
    problem.check("forward")


@pytest.mark.parametrize(
    ("name", "dim", "deterministic"),
    [
        ("images-text", 64, False),
        ("by-both", 128, True),
        ("dilated", 256, False),
        pytest.param("far-only", 64, True, marks=pytest.mark.slow),
        pytest.param("by-head", 128, False, marks=pytest.mark.slow),
        pytest.param("by-both", 256, True, marks=pytest.mark.slow),
    ],
)
def test_backward(name: str, dim: int, deterministic: bool) -> None:
    """dk, dv and dq's sums in one kernel; dq in one of its own, of the same heads and of wide ones."""
    problem = Problem(MASKS[name], dim=dim)
    assert run_backward(problem, deterministic).listed
    problem.check("main")
    assert ("queries" in problem.marked) == (deterministic or dim == 256)
    if "queries" in problem.marked:
        problem.check("queries")


def test_sinks_dropout_and_modifications_keep_their_arguments() -> None:
    """Names of arguments are those of the kernel's parameters, as many as there are."""
    slopes = torch.ones(HEADS)
    problem = Problem(MASKS["by-head"], mods=(SoftCap(20.0), lambda score, b, h, q, k: score * slopes[h]))
    dropout = Dropout(0.5, torch.zeros(1, dtype=torch.int64))
    problem.inputs = problem.inputs._replace(sink=torch.zeros(HEADS), dropout=dropout)
    problem.call = dataclasses.replace(problem.call, sink=True, dropout=True)
    assert run_forward(problem).listed
    problem.check("forward")
    assert run_backward(problem).listed
    problem.check("main")


def test_a_call_with_wrong_lengths_has_no_tiles() -> None:
    """If cumulative lengths are wrong, all rows are unused: no line has a tile."""
    problem = Problem(MASKS["dilated"])
    rows = len(problem.q[0])

    def wrong(arch: str) -> Callable[..., None]:
        def write(cu_q: Tensor, cu_k: Tensor, work: Tensor, *_: Any) -> None:
            # As in test_plan_kernel.py.
            tile = 128
            work.fill_(-(2**31) + 7)
            work[0] = torch.tensor([-(-rows // tile), *[0] * 7])
            work[1 : 1 + -(-rows // tile)] = torch.tensor([4, 0, 0, rows, -1, 0, 720, 720])

        return write

    with mock.patch.object(plan, "plan_function", wrong):
        assert run_forward(problem).listed
    assert all(not marked.any() for of_heads in problem.marked["forward"] for marked in of_heads)


# --- Which calls ---


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(30, 5)])
def test_masks_that_know_their_ranges_have_no_lists(mask: Mask) -> None:
    problem, seen = Problem(mask), []

    def load(call: AttentionCall, config: Any) -> Any:
        seen.append(config)
        return lambda *arguments: None

    with mock.patch.object(forward_launch, "forward_function", load):
        forward_launch.prepare(problem.call, *problem.shapes, 0.125)(problem.inputs)
    assert [config.listed for config in seen] == [False]


def test_short_calls_have_none_by_the_rows_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long `max_seqlen` says that a sequence may be; a later call with more rows has."""
    seen: list[Any] = []

    def load(call: AttentionCall, config: Any) -> Any:
        seen.append(config)
        return lambda *arguments: None

    def ignore(*_: Any) -> None:
        pass

    def load_backward(call: BackwardCall, config: Any = None) -> Kernels:
        seen.append(config or backward_default(call))
        return Kernels(ignore, ignore, ignore, None)

    monkeypatch.setattr(tile_lists, "FEWEST_TILES", 50)
    problem, short = Problem(MASKS["dilated"], "self"), Problem(MASKS["dilated"], "one")
    inputs = [
        each.inputs._replace(packed=each.packed._replace(max_seqlen_q=10**6, max_seqlen_k=10**6))
        for each in (short, problem)
    ]
    shapes = sizes(problem.q, problem.k, problem.packed._replace(max_seqlen_q=10**6, max_seqlen_k=10**6))
    with mock.patch.object(forward_launch, "forward_function", load):
        forward = forward_launch.prepare(problem.call, *shapes, 0.125)
        for each in inputs:
            forward(each)
    backward_call = BackwardCall(dataclasses.replace(problem.call, needs_grad=True), (True,) * 3 + (False,))
    with mock.patch.object(launch, "backward_kernels", load_backward):
        backward = launch.prepare_backward(backward_call, *shapes, 0.125)
        for each in inputs:
            backward(each, each.q, torch.zeros(1, HEADS, each.q.shape[1]), each.q, None)
    assert [config.listed for config in seen] == [False, True] * 2
