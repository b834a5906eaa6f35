"""Dropout in the TileLang kernels, on a GPU: ``pytest -m gpu tests/kernels/tilelang/tile/test_dropout_gpu.py``.

o and gradients are compared by the tolerance rule of `tileattn.testing`, with the pattern of `tileattn.call.dropout` as
a matrix. The pattern of the kernels is read from their outputs, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.kernels.tilelang.backward import test_gpu as gpu
from tests.kernels.tilelang.backward.test_gpu import FP16, Case
from tileattn import Causal, SlidingWindow, quantize_fp8
from tileattn.call.dropout import Dropout, Place, draw_seed, keep_mask, weight_of_kept
from tileattn.call.inputs import Inputs
from tileattn.runtime.operators import Options, run_backward, run_forward
from tileattn.testing import assert_forward_accurate, dropout_mask, eager_attention, eager_gradients, oracle_attention

pytestmark = pytest.mark.gpu

SEED = 5

# (case, probability)
CASES = {
    "full": (Case((333, 333)), 0.1),
    "full-cross": (Case((100, 411), (4, 2)), 0.5),
    "half": (Case((300, 300), (4, 2), mask=Causal()), 0.5),
    "almost-all": (Case((300, 300), mask=Causal()), 0.999),
    "all": (Case((200, 300), (4, 2), dlse=True), 1.0),
    "one-query": (Case((1, 300), (4, 2)), 0.3),
    "full-16": (Case((300, 170), (4, 2), (16, 16), FP16), 0.1),
    "full-128": (Case((333, 260), (4, 2), (128, 128)), 0.1),
    "full-128-fp16": (Case((129, 257), (4, 4), (128, 128), FP16), 0.5),
    "causal-128": (Case((520, 520), (4, 1), (128, 128), mask=Causal()), 0.1),
    "causal-128-bhsd": (Case((520, 520), (4, 4), (128, 128), mask=Causal(), layout="bhsd"), 0.1),
    "full-256": (Case((300, 311), (4, 4), (256, 256)), 0.1),
    "causal-256": (Case((300, 311), (4, 2), (256, 256), mask=Causal()), 0.1),
    "causal-192/128": (Case((300, 311), (4, 4), (192, 128), mask=Causal()), 0.2),
    "window-96": (Case((300, 341), (4, 4), (96, 96), mask=SlidingWindow(20, 30)), 0.1),
    "window-sink": (Case((300, 300), (4, 2), mask=SlidingWindow(50, 0), sink=True, dlse=True), 0.1),
    "rows-without-keys": (Case((333, 100), (4, 2), mask=Causal(), dlse=True), 0.1),
    "unaligned": (Case((300, 230), (4, 2), mask=Causal(), aligned=False), 0.1),
    "unaligned-128": (Case((300, 230), (4, 2), (128, 128), aligned=False), 0.1),
    "softcap": (Case((300, 300), mask=Causal(), mods=gpu._softcap, dlse=True), 0.1),
    "softcap-128": (Case((300, 300), (4, 2), (128, 128), FP16, mods=gpu._softcap), 0.1),
    "softcap-256": (Case((300, 300), (4, 2), (256, 256), mods=gpu._softcap), 0.1),
    "alibi-128": (Case((300, 300), (4, 2), (128, 128), mask=Causal(), mods=gpu._alibi, tensors=1), 0.1),
    "bias": (Case((300, 333), (4, 2), mods=gpu._bias, tensors=1), 0.2),
    "bias-aligned-128": (Case((320, 328), (4, 4), (128, 128), mask=Causal(), mods=gpu._bias, tensors=1), 0.1),
    "key-bias": (Case((300, 300), (4, 4), mods=gpu._key_bias, tensors=1), 0.1),
    "composed": (
        Case((300, 300), (4, 2), mask=gpu._documents, mods=gpu._capped_bias, tensors=2, sink=True, dlse=True),
        0.1,
    ),
}
DETERMINISTIC = ("full", "causal-128", "causal-256", "window-sink", "softcap", "bias-aligned-128", "composed")


class Problem(gpu.Problem):
    """With the seed that a call draws after ``torch.manual_seed(SEED)``."""

    def __init__(self, case: Case, p: float) -> None:
        super().__init__(case)
        self.p = p

    def seed(self) -> Tensor:
        torch.manual_seed(SEED)
        return draw_seed(gpu.DEVICE)

    def dropout(self) -> Tensor:
        kept = dropout_mask(self.seed(), self.p, self.case.batch, self.case.heads[0], *self.case.lengths)
        return kept.double() * weight_of_kept(self.p)

    def eager(self) -> list[dict[str, Tensor]]:
        """Eager, also by the formula: in a row of which one key is kept, autograd's error is 0 by chance."""
        dlse = self.dlse
        if dlse is not None:
            lse = oracle_attention(*self.standard(), dropout=self.dropout())[1]
            dlse = torch.where(lse == -torch.inf, 0.0, dlse)
        return eager_gradients(self.leaves(), self.do, dlse, *self.standard(), dropout=self.dropout())

    def forward(self, **options: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(SEED)
        return super().forward(dropout_p=self.p, **options)


def check_forward(name: str, problem: Problem, got: tuple[Tensor, Tensor]) -> None:
    given, dropout = problem.standard(), problem.dropout()
    with torch.no_grad():
        oracle, eager = oracle_attention(*given, dropout=dropout), eager_attention(*given, dropout=dropout)
    assert_forward_accurate(name, got, oracle, eager)


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str) -> None:
    problem = Problem(*CASES[name])
    with torch.no_grad():
        check_forward(name, problem, problem.forward())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    problem = Problem(*CASES[name])
    gpu.check(name, problem, problem.ours())


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_gradients(name: str) -> None:
    problem = Problem(*CASES[name])
    first = problem.ours(deterministic=True)
    gpu.check(name, problem, first)
    for _ in range(5):
        again = problem.ours(deterministic=True)
        assert all(torch.equal(again[leaf], first[leaf]) for leaf in first)


def test_many_tiles() -> None:
    """More tiles than multiprocessors: blocks go from head to head."""
    problem = Problem(Case((1500, 1700), (16, 4), (128, 128), mask=Causal(), batch=3), 0.1)
    check_forward("many tiles", problem, problem.forward())
    gpu.check("many tiles", problem, problem.ours())
    problem = Problem(Case((2049, 1025), (16, 8), batch=3), 0.1)
    check_forward("many tiles, full", problem, problem.forward())
    gpu.check("many tiles, full", problem, problem.ours())


# --- The pattern itself ---

LENGTHS, HEADS = (301, 331), 3
Attend = Callable[..., Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    torch.manual_seed(SEED)
    o = tileattn.attention(q, k, v, dropout_p=p, backend="tilelang")
    assert isinstance(o, Tensor)
    return o


def pattern_forward(run: Attend, head_dim: int, p: float) -> Tensor:
    """Scores are 0, and V holds one unit matrix: o is what is kept of those keys."""
    parts = []
    for first in range(0, LENGTHS[1], head_dim):
        q, k, v = (torch.zeros(2, n, HEADS, head_dim, dtype=FP16, device=gpu.DEVICE) for n in (*LENGTHS, LENGTHS[1]))
        block = v[:, first : first + head_dim]
        block += torch.eye(head_dim, dtype=FP16, device=gpu.DEVICE)[: block.shape[1], None]
        parts.append(run(q, k, v, p)[..., : block.shape[1]] != 0)
    return torch.cat(parts, dim=-1).transpose(1, 2)


def pattern_backward(run: Attend, head_dim: int, p: float) -> Tensor:
    """dO holds a unit matrix: dV is, transposed, what is kept of those rows."""
    parts = []
    for first in range(0, LENGTHS[0], head_dim):
        q, k, v = (torch.zeros(2, n, HEADS, head_dim, dtype=FP16, device=gpu.DEVICE) for n in (*LENGTHS, LENGTHS[1]))
        o = run(q, k, v.requires_grad_(), p)
        do = torch.zeros_like(o)
        block = do[:, first : first + head_dim]
        block += torch.eye(head_dim, dtype=FP16, device=gpu.DEVICE)[: block.shape[1], None]
        parts.append(torch.autograd.grad(o, v, do)[0][..., : block.shape[1]] != 0)
    return torch.cat(parts, dim=-1).permute(0, 2, 3, 1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_pattern_is_that_of_the_seed(head_dim: int, p: float) -> None:
    torch.manual_seed(SEED)
    expected = dropout_mask(draw_seed(gpu.DEVICE), p, 2, HEADS, *LENGTHS)
    assert torch.equal(pattern_forward(attend, head_dim, p), expected)
    assert torch.equal(pattern_backward(attend, head_dim, p), expected)


PLACE = Place(7, 11, 32, 48)  # of a call in another one
OPTIONS = Options("", 1.0, "tilelang", needs_grad=True)


def attend_part(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    """The same for a part of a call."""
    o: Tensor = _AttendPart.apply(q, k, v, p)
    return o


class _AttendPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        torch.manual_seed(SEED)
        ctx.inputs = Inputs(q, k, v, dropout=Dropout(p, draw_seed(gpu.DEVICE), PLACE))
        ctx.outputs = run_forward(OPTIONS, ctx.inputs)
        return ctx.outputs[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        needs = (False, False, True, False)
        return None, None, run_backward(OPTIONS, ctx.inputs, needs, *ctx.outputs, do, None)[0], None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_pattern_of_a_part(head_dim: int) -> None:
    """Heads, rows and keys are counted in the whole call."""
    torch.manual_seed(SEED)
    sides = slice(0, LENGTHS[0]), slice(0, LENGTHS[1])
    expected = keep_mask(draw_seed(gpu.DEVICE), 0.3, 2, HEADS, *sides, PLACE)
    assert torch.equal(pattern_forward(attend_part, head_dim, 0.3), expected)
    assert torch.equal(pattern_backward(attend_part, head_dim, 0.3), expected)


def test_the_share_that_is_kept() -> None:
    """Over 2^24 elements, each p within 6 standard deviations; rows, columns and heads differ."""
    for p in (0.1, 0.5):
        q, k = (torch.zeros(4, 1024, 4, 64, dtype=FP16, device=gpu.DEVICE) for _ in range(2))
        v = torch.zeros_like(k)
        v[..., 0] = 1
        share = attend(q, k, v, p)[..., 0].double() / weight_of_kept(p)
        assert abs(float(share.mean()) - (1 - p)) < 6 * (p * (1 - p) / 2**24) ** 0.5
        by_row = (share - (1 - p)) / (p * (1 - p) / 1024) ** 0.5
        assert 0.95 < float(by_row.std()) < 1.05
        assert len({tuple(row[:16].tolist()) for row in share.transpose(1, 2).reshape(16, 1024)}) == 16


# --- How it is reached ---


def test_fp8_as_the_pattern_says() -> None:
    for case in (Case((300, 411), (4, 2), (128, 128)), Case((300, 300), (4, 2), mask=Causal())):
        problem = Problem(case, 0.1)
        quantized = quantize_fp8(*(x.detach() for x in (problem.q, problem.k, problem.v)))._asdict()
        torch.manual_seed(SEED)
        got = tileattn.attention(**quantized, mask=case.mask, dropout_p=0.1, return_lse=True, backend="tilelang")
        q, k, v, *descales = quantized.values()
        named = dict(zip(("q_descale", "k_descale", "v_descale"), descales), dropout=problem.dropout())
        oracle, eager = (f(q, k, v, case.mask, **named) for f in (oracle_attention, eager_attention))
        assert_forward_accurate("fp8", got, oracle, eager)  # type: ignore[arg-type]


def test_each_call_draws_another_pattern() -> None:
    problem = Problem(*CASES["full"])
    with torch.no_grad():
        o = [tileattn.attention(problem.q, problem.k, problem.v, dropout_p=0.1, backend="tilelang") for _ in range(2)]
    assert not torch.equal(*o)  # type: ignore[arg-type]


def test_a_cuda_graph_draws_a_seed_at_each_replay() -> None:
    problem = Problem(*CASES["causal-128"])
    leaves = [problem.q, problem.k, problem.v]

    def step() -> tuple[Tensor, ...]:
        o = tileattn.attention(*leaves, causal=True, dropout_p=0.5, backend="tilelang")
        assert isinstance(o, Tensor)
        return o, *torch.autograd.grad(o, leaves, problem.do)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([x.clone() for x in static])
    for name, *runs in zip(("o", "dq", "dk", "dv"), *replays):
        assert not torch.equal(runs[0], runs[1]), name
        assert not torch.equal(runs[1], runs[2]), name
    # o is linear in V, and dV the other way round: with one pattern <dO, o> = <dV, V>.
    for o, _, _, dv in replays:
        left, right = (problem.do.double() * o).sum(), (problem.v.double() * dv).sum()
        torch.testing.assert_close(left, right, rtol=0.02, atol=float(o.double().norm() * problem.do.norm()) * 1e-3)


def test_under_torch_compile() -> None:
    problem = Problem(*CASES["causal-128"])
    leaves = [problem.q, problem.k, problem.v]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = tileattn.attention(q, k, v, causal=True, dropout_p=0.5, backend="tilelang")
        return (o.float() * problem.do.float()).sum()  # type: ignore[union-attr]

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    dv = [torch.autograd.grad(compiled(*leaves), leaves)[2] for _ in range(2)]
    assert not torch.equal(*dv)
    # One pattern in both passes.
    value = compiled(*leaves)
    got = torch.autograd.grad(value, leaves)[2]
    size = float(problem.v.double().norm() * got.double().norm())
    torch.testing.assert_close((problem.v.double() * got).sum(), value.double(), rtol=0.02, atol=size * 1e-3)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_nothing_to_drop(lengths: tuple[int, int]) -> None:
    problem = Problem(Case(lengths, (4, 2)), 0.1)
    assert not problem.forward()[0].any()
    assert all(not bool(grad.any()) for grad in problem.ours().values())


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for name, case in CASES.items():
        yield Problem(*case).forward
        yield Problem(*case).ours
        if name in DETERMINISTIC:
            yield functools.partial(Problem(*case).ours, deterministic=True)
    for head_dim in (64, 128, 256):
        for pattern in (pattern_forward, pattern_backward):
            yield functools.partial(pattern, attend, head_dim, 0.5)
    fp8 = torch.float8_e4m3fn
    for head_dims, mask in (((128, 128), None), ((64, 64), Causal())):
        problem = Problem(Case((300, 411), (4, 2), head_dims), 0.1)
        q, k, v = (x.detach().to(fp8) for x in (problem.q, problem.k, problem.v))
        yield functools.partial(
            tileattn.attention, q, k, v, mask=mask, dropout_p=0.1, return_lse=True, backend="tilelang"
        )
