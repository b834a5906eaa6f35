"""Calls whose mixed tiles have bits, on a GPU: ``pytest -m gpu tests/kernels/tilelang/test_mixed_bits_gpu.py``.

Every pattern with bits in all mixed tiles, in the first three alone, and with none: outputs and gradients by the rule
of `tileattn.testing`, and equal o, lse, dk and dv in all three ways. A replay of a CUDA graph makes the bits again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.kernels.tilelang import test_tile_lists_gpu as listed
from tests.kernels.tilelang.lists.test_bits_emulated import CUTS, MASKS, SQUARE, TALL, WIDE, compare
from tileattn import Causal, FunctionMask, Mask
from tileattn.bench.sparse_masks import NAMES
from tileattn.kernels import kept_lists
from tileattn.kernels.tile_lists import TileLists
from tileattn.kernels.tilelang.lists import bits
from tileattn.kernels.tilelang.lists.launch import make
from tileattn.math import load
from tileattn.testing import assert_accurate, assert_forward_accurate, eager_attention, oracle_attention
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

pytestmark = pytest.mark.gpu

DEVICE = "cuda"  # "meta", without values, in benchmarks/precompile.py
ALL, THREE, NONE = "all", "three", "none"
SHARED = [name for name in NAMES if name not in ("windows-by-head", "loaded-windows", "blocks")]


def _ids(case: listed.Case) -> Mask:
    ids = torch.arange(max(case.lengths), dtype=torch.int64, device=DEVICE) // 300
    return FunctionMask(lambda b, h, q, k: (load(ids, q) == load(ids, k)) & ((q - k) % 5 != 3))


def _by_batch(case: listed.Case) -> Mask:
    limits = torch.tensor([900, 200][: case.batch], dtype=torch.int32, device=DEVICE)
    return FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (k <= q) & ((q - k) % 3 != 1))


CASES = {
    **{f"{name}-{dim}": listed.Case(name, head_dims=(dim, dim)) for name in SHARED for dim in (64, 128)},
    **{f"dilated-{dim}": listed.Case("dilated", head_dims=(dim, dim_v)) for dim, dim_v in listed.WIDE},
    "strided-long": listed.Case("strided", (4500, 4500), batch=1, head_dims=(64, 64)),  # 192 queries in a tile
    "more-keys": listed.CASES["more-keys"],
    "more-queries": listed.CASES["more-queries"],
    "far": listed.CASES["far"],
    "ids": listed.Case(_ids, (1110, 1300), head_dims=(128, 128)),
    "ids-64": listed.Case(_ids, (1300, 1110)),
    "by-batch": listed.Case(_by_batch, head_dims=(128, 128)),
    "deterministic": listed.CASES["deterministic"],
}


@contextlib.contextmanager
def way(name: str, tile_bytes: int = 2048) -> Iterator[None]:
    """Inside, listed calls have bits of all mixed tiles, of three, or of none, however few heads share them."""
    forget_prepared()
    kept_lists.forget_lists()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(bits, "FEWEST_SHARING", 2**40 if name == NONE else 1))
        stack.enter_context(mock.patch.object(bits, "FEWEST_OPERATIONS", 1))
        bits.may_have_bits.cache_clear()
        if name == THREE:
            stack.enter_context(mock.patch.object(bits, "MOST_BYTES", 3 * tile_bytes))
        yield
    bits.may_have_bits.cache_clear()
    forget_prepared()
    kept_lists.forget_lists()


def kept() -> list[TileLists]:
    return [each.lists for each in kept_lists._kept.values()]


@pytest.mark.parametrize("which", [ALL, THREE])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, which: str) -> None:
    problem = listed.Problem(CASES[name])
    with way(which):
        o, lse = problem.forward()
        got = problem.gradients(o)
        assert any(each.bits is not None for each in kept())
        if which == THREE:
            assert all(each.bits is None or len(each.bits) <= 3 for each in kept())
    with way(NONE):
        plain, plain_lse = problem.forward()
        expected = problem.gradients(plain)
        assert kept()
        assert all(each.bits is None for each in kept())
    assert torch.equal(o, plain)
    assert torch.equal(lse, plain_lse)
    listed._assert_close(got, expected)
    oracle, eager = oracle_attention(*problem.standard()), eager_attention(*problem.standard())
    assert_forward_accurate(name, (o.detach(), lse.detach()), oracle, eager)
    expected, runs = problem.gradients(oracle[0]), [problem.gradients(each) for each in eager[0]]
    for leaf in problem.leaves:
        assert_accurate(
            f"d{leaf} of {name}", got[leaf], expected[leaf].double(), [run[leaf] for run in runs], gradient=True
        )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MASKS)
def test_bits_on_every_pair(name: str, cut: str) -> None:
    """By the compiled kernel, beside the mask in PyTorch."""
    variant, operands = encode(MASKS[name], ())
    operands = dataclasses.replace(operands, tensors=[x.cuda() for x in operands.tensors])
    of = CUTS[cut]._replace(bits=True)
    for sizes in (SQUARE,) if name == "neighborhood" else (SQUARE, WIDE, TALL):
        lists = make(variant, operands, sizes, of, torch.device("cuda"))
        on_cpu = lists._replace(**{field: x.cpu() for field, x in lists._asdict().items() if isinstance(x, Tensor)})
        assert compare(on_cpu, MASKS[name], sizes, of) > 0


def window_problem() -> tuple[listed.Problem, Tensor]:
    """A problem whose heads share a mask that reads one number."""
    table = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    problem = listed.Problem(listed.Case(lambda case: Causal(), (1500, 1500), (4, 4)))
    problem.mask = Causal() & FunctionMask(lambda b, h, q, k: (q - k <= load(table, q * 0)) & ((q - k) % 3 != 2))
    return problem, table


def _fresh(problem: listed.Problem, window: int) -> dict[str, Tensor]:
    """The output and the gradients by a table that no call has seen, without bits."""
    other, table = window_problem()
    table.fill_(window)
    with way(NONE):
        o = other.forward()[0]
        return {"o": o.detach(), **other.gradients(o)}


def test_a_write_in_place_is_seen_by_the_next_call() -> None:
    problem, table = window_problem()
    for window in (64, 700, 0, 1500):
        table.fill_(window)
        o = problem.forward()[0]
        got = {"o": o.detach(), **problem.gradients(o)}
        assert any(each.bits is not None for each in kept())
        listed._assert_close(got, _fresh(problem, window))


def test_a_replay_makes_the_bits_again() -> None:
    problem, table = window_problem()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.ours()  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = problem.forward()[0]
        grads = problem.gradients(o)
    for window in (64, 700, 0, 1500):
        table.fill_(window)
        graph.replay()
        listed._assert_close({"o": o.detach(), **grads}, _fresh(problem, window))


def test_twenty_launches_give_the_same_bits() -> None:
    problem = listed.Problem(CASES["neighborhood-128"])
    with way(ALL):
        o = problem.forward()[0]
        first = {"o": o.detach(), **problem.gradients(o)}
        for _ in range(20):
            o = problem.forward()[0]
            listed._assert_close({"o": o.detach(), **problem.gradients(o)}, first)


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""

    def in_way(run: Callable[[], Any], which: str) -> Any:
        with way(which):
            return run()

    with mock.patch.object(listed, "DEVICE", DEVICE):
        problems = [listed.Problem(case) for case in CASES.values()] + [window_problem()[0]]
    for problem in problems:
        for which in (ALL, NONE):
            yield functools.partial(in_way, problem.ours, which)
