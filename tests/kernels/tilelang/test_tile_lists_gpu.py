"""Calls that take their tiles from lists, on a GPU: ``pytest -m gpu tests/kernels/tilelang/test_tile_lists_gpu.py``.

Outputs and gradients of eight sparse masks by the rule of `tileattn.testing`, at lengths that are no multiples of
tiles; writes in place, which a later call and a replay of a CUDA graph see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import Causal, Dilated, FunctionMask, Mask
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels import kept_lists
from tileattn.math import load
from tileattn.testing import assert_accurate, assert_forward_accurate, eager_attention, oracle_attention

pytestmark = pytest.mark.gpu

DEVICE = "cuda"  # "meta", without values, in benchmarks/precompile.py
BF16 = torch.bfloat16


class Case(NamedTuple):
    """A call: the name of a pattern, or what makes a mask, given the case."""

    mask: str | Callable[[Case], Mask]
    lengths: tuple[int, int] = (1110, 1110)
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    batch: int = 2
    deterministic: bool = False


def _dilated(case: Case) -> Mask:
    return Dilated(511, dilation=4)


def _far(case: Case) -> Mask:
    """The first 300 queries see nothing, and nothing sees the last 300 keys: empty rows and columns of tiles."""
    return FunctionMask(lambda b, h, q, k: q - k >= 300)


def _by_batch(case: Case) -> Mask:
    limits = torch.tensor([900, 200][: case.batch], dtype=torch.int32, device=DEVICE)
    return FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (k <= q) & (q - k < 100 * (h + 1)))


WIDE = ((96, 96), (192, 128), (256, 256))
CASES = {
    **{f"{name}-{dim}": Case(name, head_dims=(dim, dim)) for name in NAMES for dim in (64, 128)},
    **{
        f"{name}-{'/'.join(map(str, dims))}": Case(name, head_dims=dims)
        for name in ("dilated", "loaded-windows")
        for dims in WIDE
    },
    "more-keys": Case(_dilated, (500, 2345), head_dims=(128, 128)),
    "more-queries": Case(_dilated, (2345, 500), head_dims=(128, 128)),
    "far": Case(_far, (1200, 1200), head_dims=(64, 64)),
    "far-256": Case(_far, (1200, 1200), head_dims=(256, 256)),
    "by-batch": Case(_by_batch, head_dims=(128, 128)),
    "deterministic": Case("dilated", head_dims=(128, 128), deterministic=True),
    "deterministic-far": Case(_far, (1200, 1200), head_dims=(128, 128), deterministic=True),
}


class Problem:
    """The tensors of a case, and what attention makes of them."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(seed)
        self.case = case

        def rows(length: int, heads: int, head_dim: int) -> Tensor:
            shape = (case.batch, length, heads, head_dim)
            return torch.randn(shape, device=DEVICE, dtype=BF16, generator=generator)

        (seqlen_q, seqlen_k), (heads, kv_heads), (head_dim, head_dim_v) = case.lengths, case.heads, case.head_dims
        self.q, self.k = rows(seqlen_q, heads, head_dim), rows(seqlen_k, kv_heads, head_dim)
        self.v, self.do = rows(seqlen_k, kv_heads, head_dim_v), rows(seqlen_q, heads, head_dim_v)
        self.leaves = {"q": self.q, "k": self.k, "v": self.v}
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        if callable(case.mask):
            self.mask = case.mask(case)
        else:
            self.mask = pattern(case.mask, seqlen_k, heads, DEVICE).mask

    def forward(self) -> tuple[Tensor, Tensor]:
        """o and lse by the TileLang kernels."""
        return tileattn.attention(
            *self.leaves.values(),
            mask=self.mask,
            return_lse=True,
            backend="tilelang",
            deterministic=self.case.deterministic,
        )

    def gradients(self, o: Tensor) -> dict[str, Tensor]:
        leaves = list(self.leaves.values())
        return dict(zip(self.leaves, torch.autograd.grad(o, leaves, self.do.to(o.dtype), retain_graph=True)))

    def ours(self) -> dict[str, Tensor]:
        return self.gradients(self.forward()[0])

    def standard(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.mask, [], None, None)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    kept_lists.forget_lists()
    yield
    kept_lists.forget_lists()


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str) -> None:
    problem = Problem(CASES[name])
    o, lse = problem.forward()
    got = problem.gradients(o)
    assert kept_lists._kept, "neither pass took lists"
    oracle, eager = oracle_attention(*problem.standard()), eager_attention(*problem.standard())
    assert_forward_accurate(name, (o.detach(), lse.detach()), oracle, eager)
    expected, runs = problem.gradients(oracle[0]), [problem.gradients(each) for each in eager[0]]
    for leaf in problem.leaves:
        assert_accurate(
            f"d{leaf} of {name}", got[leaf], expected[leaf].double(), [run[leaf] for run in runs], gradient=True
        )


@pytest.mark.parametrize("name", ["far", "far-256", "deterministic-far"])
def test_rows_and_columns_without_tiles(name: str) -> None:
    problem = Problem(CASES[name])
    o, lse = problem.forward()
    grads = problem.gradients(o)
    assert (o[:, :300] == 0).all()
    assert (lse[:, :, :300] == -torch.inf).all()
    assert (grads["q"][:, :300] == 0).all()
    assert (grads["k"][:, -300:] == 0).all()
    assert (grads["v"][:, -300:] == 0).all()


def windows_problem() -> tuple[Problem, Tensor]:
    """A problem whose mask reads a window for each head, and the table of these."""
    case = Case(lambda case: Causal(), (1500, 1500), (4, 4))
    table = torch.tensor([64, 100, 300, 1500], dtype=torch.int32, device=DEVICE)
    problem = Problem(case)
    problem.mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(table, h))
    return problem, table


def _on_another_table(problem: Problem, values: list[int]) -> dict[str, Tensor]:
    """The output and the gradients with a table of these values that no call has seen."""
    fresh = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    other = Problem(problem.case)
    other.mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(fresh, h))
    o = other.forward()[0]
    return {"o": o.detach(), **other.gradients(o)}


def _assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same bits, but of dq, whose additions have no fixed order."""
    for name, tensor in expected.items():
        if name == "q":
            torch.testing.assert_close(got[name], tensor, rtol=2**-6, atol=1e-4)
        else:
            assert torch.equal(got[name], tensor), name


def test_a_write_in_place_is_seen_by_the_next_call() -> None:
    problem, table = windows_problem()
    before = problem.forward()[0]
    for values in ([1500, 64, 700, 0], [0, 0, 1, 2]):
        table.copy_(torch.tensor(values, dtype=torch.int32))
        o = problem.forward()[0]
        assert not torch.equal(o, before)
        _assert_close({"o": o.detach(), **problem.gradients(o)}, _on_another_table(problem, values))


def test_a_write_in_place_is_seen_by_a_replay() -> None:
    """The lists are made in the graph, in both passes."""
    problem, table = windows_problem()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.ours()  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = problem.forward()[0]
        grads = problem.gradients(o)
    for values in ([64, 100, 300, 1500], [1500, 64, 700, 0], [0, 0, 1, 2]):
        table.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        got = {"o": o.detach().clone(), **{name: grad.clone() for name, grad in grads.items()}}
        _assert_close(got, _on_another_table(problem, values))


def test_a_graph_of_a_mask_without_tensors() -> None:
    problem = Problem(CASES["dilated-64"])
    expected = problem.forward()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = problem.forward()[0]
    kept_lists.forget_lists()
    torch.empty(2**24, device=DEVICE).fill_(1.0)  # over memory that lists outside of the graph had
    for _ in range(2):
        graph.replay()
        assert torch.equal(o, expected)


def test_two_streams_have_lists_of_their_own() -> None:
    problem = Problem(CASES["loaded-windows-128"])
    expected = problem.forward()[0]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    runs = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                runs.append(problem.forward()[0])
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for o in runs)
    assert len(kept_lists._kept) == 3


def test_a_compiled_function() -> None:
    problem, table = windows_problem()

    @torch.compile(fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tileattn.attention(q, k, v, mask=problem.mask, backend="tilelang") * 2

    tensors = [leaf.detach() for leaf in problem.leaves.values()]
    assert torch.equal(run(*tensors), 2 * tileattn.attention(*tensors, mask=problem.mask, backend="tilelang"))
    table.fill_(10)
    assert torch.equal(run(*tensors), 2 * tileattn.attention(*tensors, mask=problem.mask, backend="tilelang"))


def test_twenty_launches_give_the_same_bits() -> None:
    problem = Problem(CASES["images-text-128"])
    o = problem.forward()[0]
    first = {"o": o.detach(), **problem.gradients(o)}
    for _ in range(20):
        o = problem.forward()[0]
        _assert_close({"o": o.detach(), **problem.gradients(o)}, first)


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for case in CASES.values():
        yield Problem(case).ours
    problem, _ = windows_problem()
    yield problem.ours
    for return_lse in (False, True):
        yield functools.partial(
            tileattn.attention,
            *(leaf.detach() for leaf in problem.leaves.values()),
            mask=problem.mask,
            return_lse=return_lse,
            backend="tilelang",
        )
