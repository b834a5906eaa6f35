"""Triton's kernels with lists of tiles on a GPU: ``pytest -m gpu tests/kernels/triton/test_lists_gpu.py``.

Outputs and gradients of sparse masks by the rule of `tileattn.testing`, at lengths that are no multiples of tiles;
writes in place, which a later call and a replay of a CUDA graph see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tests.kernels.triton.test_backend import check, tensor
from tileattn import ALiBi, Bias, Causal, Dilated, FunctionMask, Mask, SoftCap
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels import kept_lists
from tileattn.math import load
from tileattn.tuner.state import forget_prepared

pytest.importorskip("triton")
from tileattn.kernels.triton import lists

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """A call: the name of a pattern, or what makes a mask."""

    mask: str | Callable[[], Mask]
    lengths: tuple[int, int] = (1110, 1110)
    head_dim: int = 64
    dtype: torch.dtype = BF16


def _dilated() -> Mask:
    return Dilated(511, dilation=4)


def _far() -> Mask:
    """The first 300 queries see nothing, and nothing sees the last 300 keys: empty rows and columns of tiles."""
    return FunctionMask(lambda b, h, q, k: q - k >= 300)


def _by_batch() -> Mask:
    limits = torch.tensor([900, 200], dtype=torch.int32, device="cuda")
    return FunctionMask(lambda b, h, q, k: (k < load(limits, b)) & (k <= q) & (q - k < 100 * (h + 1)))


CASES = {
    **{f"{name}-64": Case(name) for name in NAMES},
    **{f"{name}-128": Case(name, head_dim=128) for name in ("dilated", "neighborhood", "loaded-ids", "blocks")},
    **{f"{name}-fp32": Case(name, dtype=F32) for name in ("strided", "loaded-windows", "blocks")},
    "dilated-fp32-128": Case("dilated", head_dim=128, dtype=F32),
    "windows-by-head-256": Case("windows-by-head", head_dim=256),
    "local-global-20": Case("local-global", head_dim=20, dtype=F16),  # pointers instead of descriptors
    "more-keys": Case(_dilated, (500, 2345)),
    "more-queries": Case(_dilated, (2345, 500), 128),
    "far": Case(_far, (1200, 1200)),
    "by-batch": Case(_by_batch),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    seqlen_q, seqlen_k = case.lengths
    q = tensor(2, seqlen_q, 4, case.head_dim, dtype=case.dtype)
    k, v = (tensor(2, seqlen_k, 2, case.head_dim, dtype=case.dtype, seed=seed) for seed in (1, 2))
    return q, k, v


def mask_of(case: Case) -> Mask:
    return case.mask() if callable(case.mask) else pattern(case.mask, case.lengths[1], 4, "cuda").mask


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    """Nor prepared calls, which do not know of another limit."""
    forget_prepared()
    kept_lists.forget_lists()
    yield
    forget_prepared()
    kept_lists.forget_lists()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls take lists."""
    monkeypatch.setattr(lists, "FEWEST_PAIRS", 2**18)


def attention(mask: Mask) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.attention(q, k, v, mask=mask, return_lse=True, backend="triton")

    return run


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, short: None) -> None:
    mask = mask_of(CASES[name])
    check(name, attention(mask), *inputs(CASES[name]), mask)
    assert kept_lists._kept, "neither pass took lists"


def test_a_long_call() -> None:
    """Long enough by itself; the first call takes lists, one of 4095 queries does not."""
    q, k, v = (tensor(1, 4096, 1, 64, dtype=BF16, seed=seed) for seed in range(3))
    mask = _dilated()
    check("short", attention(mask), q[:, 1:], k, v, mask)
    assert not kept_lists._kept
    check("long", attention(mask), q, k, v, mask)
    assert kept_lists._kept


def test_rows_and_columns_without_tiles(short: None) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(CASES["far"]))
    o, lse = attention(_far())(q, k, v)
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    assert (o[:, :300] == 0).all()
    assert (lse[:, :, :300] == -torch.inf).all()
    assert (dq[:, :300] == 0).all()
    assert (dk[:, -300:] == 0).all()
    assert (dv[:, -300:] == 0).all()


def test_gradients_of_what_a_modification_reads(short: None) -> None:
    """Beside float64, in which the tile kernels have no part."""
    tensors = [tensor(1, 700, 2, 64, dtype=F32, seed=seed) for seed in range(3)]
    tensors += [tensor(1, 2, 700, 700, dtype=F32, seed=3), tensor(2, dtype=F32, seed=4).abs() / 16]
    mask = FunctionMask(lambda b, h, q, k: (abs(q - k) < 90) | (k < 20))
    runs = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        mods = (Bias(leaves[3]), ALiBi(leaves[4]), SoftCap(5.0))
        o = tileattn.attention(*leaves[:3], mask=mask, score_mod=mods, backend=backend)
        runs.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    assert kept_lists._kept
    for got, expected in zip(*runs):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def passes(mask: Mask, leaves: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    o, _ = attention(mask)(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]


def windows(table: Tensor) -> Mask:
    return Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(table, h))


def fresh(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def test_the_same_bits_in_each_run(short: None) -> None:
    """Of lists that are kept, and of those that are made again."""
    leaves = [x.requires_grad_() for x in inputs(CASES["loaded-ids-64"])]
    mask = mask_of(CASES["loaded-ids-64"])
    first = passes(mask, leaves)
    for number in range(10):
        if number % 2:
            kept_lists.forget_lists()
        assert all(map(torch.equal, passes(mask, leaves), first))


def test_a_write_in_place_is_seen_by_the_next_call(short: None) -> None:
    leaves = [x.requires_grad_() for x in inputs(CASES["blocks-64"])]
    table = fresh([64, 100, 300, 1500])
    before = passes(windows(table), leaves)
    for values in ([1500, 64, 700, 0], [0, 0, 1, 2]):
        table.copy_(fresh(values))
        after = passes(windows(table), leaves)
        assert all(map(torch.equal, after, passes(windows(fresh(values)), leaves)))
        assert not torch.equal(after[0], before[0])


def test_a_write_in_place_is_seen_by_a_replay(short: None) -> None:
    """The lists are made in the graph, in both passes."""
    leaves = [x.requires_grad_() for x in inputs(CASES["blocks-64"])]
    table = fresh([64, 100, 300, 1500])
    mask = windows(table)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes(mask, leaves)  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes(mask, leaves)
    for values in ([64, 100, 300, 1500], [1500, 64, 700, 0], [0, 0, 1, 2]):
        table.copy_(fresh(values))
        graph.replay()
        assert all(map(torch.equal, captured, passes(windows(fresh(values)), leaves)))


@pytest.mark.parametrize("name", ["neighborhood", "neighborhood-128"])
def test_ranges_of_64_bits(name: str) -> None:
    """Without lists: bounds that are products of positions, and tiles that are copied by TMA."""
    case = Case("neighborhood", (300, 300), 128 if name.endswith("128") else 64)
    mask = mask_of(case)
    check(name, attention(mask), *inputs(case), mask)
    assert not kept_lists._kept
