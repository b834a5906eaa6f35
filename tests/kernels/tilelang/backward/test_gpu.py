"""What only a GPU can show of the TileLang backward pass: ``pytest -m gpu tests/kernels/tilelang/backward``.

Gradients are compared by the tolerance rule of `tileattn.testing`. The oracle is autograd through standard attention in
float64; eager is the same in the inputs' dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Bias, Causal, Documents, SlidingWindow, SoftCap
from tileattn.testing import assert_accurate, eager_attention, oracle_attention

pytestmark = pytest.mark.gpu

DEVICE = "cuda"  # "cpu" in test_emulated.py; "meta", without values, in benchmarks/precompile.py
BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """A call; `mods` makes score modifications from random tensors, whose gradients are wanted as well."""

    lengths: tuple[int, int] = (300, 300)
    heads: tuple[int, int] = (4, 4)
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = BF16
    mask: Any = None
    mods: Callable[[Case, Callable[..., Tensor]], list[Any]] = lambda case, random: []
    tensors: int = 0  # how many tensors `mods` makes
    sink: bool = False
    dlse: bool = False
    aligned: bool = True
    layout: str = "bshd"
    batch: int = 2
    scale: float | None = None


def _alibi(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [ALiBi(random(case.heads[0], factor=0.02))]


def _alibi_by_batch(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [ALiBi(random(case.batch, case.heads[0], factor=0.02)), SoftCap(4.0)]


def _bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [Bias(random(case.batch, case.heads[0], *case.lengths, dtype=case.dtype))]


def _shared_bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [Bias(random(1, case.heads[0], *case.lengths))]


def _narrow_shared_bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [Bias(random(1, case.heads[0], *case.lengths, dtype=case.dtype))]


def _padded_bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    """A bias whose rows begin at multiples of 16 bytes, though their length is none; so must its gradient's."""
    return [Bias(random(case.batch, case.heads[0], *case.lengths, dtype=case.dtype, padding=-case.lengths[1] % 8))]


def _factor(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    """Score times factor: each is the derivative by the other."""
    factor = random(case.batch, case.heads[0], *case.lengths, dtype=case.dtype)
    return [lambda score, b, h, q, k: score * factor[b, h, q - (case.lengths[1] - case.lengths[0]), k]]


def _wide_factor(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    factor = random(1, 1, *case.lengths)
    return [lambda score, b, h, q, k: score * factor[0, 0, q - (case.lengths[1] - case.lengths[0]), k]]


def _capped_bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [_alibi(case, random)[0], _bias(case, random)[0], SoftCap(5.0)]


def _key_bias(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [Bias(random(case.batch, 1, 1, case.lengths[1]))]


def _relative(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    """A learned bias by distance, which many scores read at one place."""
    keys = case.lengths[1]
    table = random(2 * keys)  # a query's position is from keys - lengths[0] to keys - 1
    return [lambda score, b, h, q, k: score * 1.5 + table[q - k + keys]]


def _softcap(case: Case, random: Callable[..., Tensor]) -> list[Any]:
    return [SoftCap(3.0)]


def _documents(case: Case) -> Any:
    return Documents(torch.arange(case.lengths[1], device=DEVICE, dtype=torch.int32) // 73) & Causal()


CASES = {
    "full": Case((333, 333)),
    "full-cross": Case((100, 411), (4, 2)),
    "full-more-queries": Case((411, 100), (6, 1)),
    "one-query": Case((1, 300), (4, 2)),
    "one-key": Case((70, 1)),
    "full-128": Case((333, 260), (4, 2), (128, 128)),
    "full-128-fp16": Case((129, 257), (4, 4), (128, 128), FP16),
    "causal": Case((300, 300), mask=Causal()),
    "causal-cross": Case((100, 333), (8, 2), mask=Causal()),
    "causal-rows-without-keys": Case((333, 100), (4, 2), mask=Causal(), dlse=True),
    "causal-128": Case((520, 520), (4, 1), (128, 128), mask=Causal()),
    "causal-128-bhsd": Case((520, 520), (4, 4), (128, 128), mask=Causal(), layout="bhsd"),
    "causal-256": Case((300, 311), (4, 2), (256, 256), mask=Causal()),
    "causal-192/128": Case((300, 311), (4, 4), (192, 128), mask=Causal()),
    "full-256": Case((333, 260), (4, 2), (256, 256)),  # of both warpgroups' tiles, a whole and a broken number
    "one-query-256": Case((1, 300), (4, 2), (256, 256)),
    "full-192": Case((200, 391), (6, 2), (192, 192), FP16, dlse=True),
    "causal-160": Case((333, 100), (4, 4), (160, 160), mask=Causal()),
    "window-256": Case((300, 341), (4, 2), (256, 256), mask=SlidingWindow(50, 30), sink=True),
    "softcap-256": Case((200, 333), (4, 1), (256, 256), mask=Causal(), mods=_softcap),
    "softcap-192/128": Case((333, 200), (4, 2), (192, 128), mods=_softcap),
    "full-64/128": Case((300, 170), (4, 2), (64, 128)),
    "full-16": Case((300, 170), (4, 2), (16, 16), FP16),
    "window-40": Case((300, 300), (4, 2), (40, 40), FP16, mask=SlidingWindow(50, 0)),
    "window-96": Case((300, 341), (4, 4), (96, 96), mask=SlidingWindow(20, 30)),
    "window-sink": Case((300, 300), (4, 2), mask=SlidingWindow(50, 0), sink=True, dlse=True),
    "sink-rows-without-keys": Case((300, 200), (4, 2), mask=SlidingWindow(50, 0), sink=True),
    "documents": Case((300, 300), mask=_documents),
    "negative-scale": Case((200, 200), mask=Causal(), scale=-0.3),
    "unaligned": Case((300, 230), (4, 2), mask=Causal(), aligned=False),
    "unaligned-128": Case((300, 230), (4, 2), (128, 128), aligned=False),
    "unaligned-192/16": Case((300, 230), (4, 2), (192, 16), mask=Causal(), mods=_softcap, aligned=False),
    "unaligned-128/40": Case((230, 300), (4, 2), (128, 40), aligned=False),
    "softcap": Case((300, 300), mask=Causal(), mods=_softcap, dlse=True),
    "softcap-fp16": Case((300, 300), (4, 2), (128, 128), FP16, mods=_softcap),
    "alibi": Case((300, 300), (4, 2), mask=Causal(), mods=_alibi, tensors=1),
    "alibi-256": Case((300, 300), (4, 2), (256, 256), mods=_alibi, tensors=1),
    "alibi-by-batch-128": Case((300, 300), (4, 2), (128, 128), mask=Causal(), mods=_alibi_by_batch, tensors=1),
    "bias": Case((300, 333), (4, 2), mods=_bias, tensors=1),
    "bias-aligned-128": Case((320, 328), (4, 4), (128, 128), mask=Causal(), mods=_bias, tensors=1),
    "bias-padded": Case((333, 301), (4, 2), mods=_padded_bias, tensors=1),
    "bias-capped-128": Case((200, 328), (4, 4), (128, 128), FP16, mask=Causal(), mods=_capped_bias, tensors=2),
    "bias-factor-128": Case((328, 200), (4, 2), (128, 128), mask=Causal(), mods=_factor, tensors=1),
    "shared-bias-128": Case((300, 520), (4, 4), (128, 128), mods=_shared_bias, tensors=1),
    "shared-narrow-bias-128": Case((520, 520), (4, 4), (128, 128), mask=Causal(), mods=_narrow_shared_bias, tensors=1),
    "shared-factor": Case((300, 300), (4, 2), mask=SlidingWindow(50, 0), mods=_wide_factor, tensors=1),
    "shared-bias": Case((300, 300), (4, 4), mask=Causal(), mods=_shared_bias, tensors=1),
    "shared-bias-256/48": Case((300, 520), (4, 4), (256, 48), mods=_shared_bias, tensors=1),
    "key-bias": Case((300, 300), (4, 4), mods=_key_bias, tensors=1),
    "relative": Case((200, 230), (4, 2), mods=_relative, tensors=1),
    "composed": Case((300, 300), (4, 2), mask=_documents, mods=_capped_bias, tensors=2, sink=True, dlse=True),
}


class Problem:
    """Leaves and gradients of outputs, and what a function of attention makes of them."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(seed)
        made: list[Tensor] = []

        def random(*shape: int, dtype: torch.dtype = torch.float32, factor: float = 1.0, padding: int = 0) -> Tensor:
            *outer, last = shape
            values = torch.randn((*outer, last + padding), device=DEVICE, generator=generator) * factor
            made.append(values.to(dtype)[..., :last].requires_grad_())
            return made[-1]

        def rows(length: int, heads: int, head_dim: int) -> Tensor:
            if case.aligned:
                return random(case.batch, length, heads, head_dim, dtype=case.dtype)
            wide = random(case.batch, length, heads, head_dim + 3, dtype=case.dtype).detach()
            made.pop()
            return wide[..., 1 : head_dim + 1].requires_grad_()

        (seqlen_q, seqlen_k), (heads, kv_heads), (head_dim, head_dim_v) = case.lengths, case.heads, case.head_dims
        self.case = case
        self.q, self.k = rows(seqlen_q, heads, head_dim), rows(seqlen_k, kv_heads, head_dim)
        self.v = rows(seqlen_k, kv_heads, head_dim_v)
        self.sink = random(heads) if case.sink else None
        self.do = random(case.batch, seqlen_q, heads, head_dim_v, dtype=case.dtype).detach()
        self.dlse = random(case.batch, heads, seqlen_q).detach() if case.dlse else None
        made.clear()
        self.mods = case.mods(case, random)
        self.tensors = made
        assert len(made) == case.tensors
        self.mask = case.mask(case) if callable(case.mask) else case.mask

    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink}
        named |= {f"t{index}": tensor for index, tensor in enumerate(self.tensors)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def ours(self, **options: Any) -> dict[str, Tensor]:
        """Gradients by the TileLang kernels."""
        return self.gradients(*self.forward(**options))

    def forward(self, **options: Any) -> tuple[Tensor, Tensor]:
        """o (bshd) and lse by the TileLang kernels."""
        case = self.case
        q, k, v = (x.transpose(1, 2) if case.layout == "bhsd" else x for x in (self.q, self.k, self.v))
        o, lse = tileattn.attention(
            *(q, k, v), mask=self.mask, score_mod=self.mods or None, sink=self.sink, scale=case.scale,
            layout=case.layout, return_lse=True, backend="tilelang", **options
        )  # fmt: skip
        return o.transpose(1, 2) if case.layout == "bhsd" else o, lse

    def gradients(self, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """The gradients of o, and of lse where it has one."""
        outputs, grads = [o], [self.do.to(o.dtype)]
        if self.dlse is not None:
            seen = (lse != -torch.inf).expand_as(lse)  # -inf has no gradient
            outputs, grads = [*outputs, lse], [*grads, torch.where(seen, self.dlse, 0.0).to(lse.dtype)]
        leaves = self.leaves()
        return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads, retain_graph=True)))

    def standard(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.mask, self.mods, self.sink, self.case.scale)

    def dropout(self) -> Tensor | None:
        """What probabilities are multiplied by."""
        return None

    def oracle(self) -> dict[str, Tensor]:
        outputs = oracle_attention(*self.standard(), dropout=self.dropout())
        return {name: grad.double() for name, grad in self.gradients(*outputs).items()}

    def eager(self) -> list[dict[str, Tensor]]:
        runs = eager_attention(*self.standard(), dropout=self.dropout())
        return [self.gradients(o, lse) for o, lse in zip(*runs)]


def check(name: str, problem: Problem, got: dict[str, Tensor]) -> None:
    oracle, eager = problem.oracle(), problem.eager()
    for leaf, tensor in problem.leaves().items():
        assert got[leaf].dtype == tensor.dtype
        assert_accurate(f"d{leaf} of {name}", got[leaf], oracle[leaf], [run[leaf] for run in eager], gradient=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    problem = Problem(CASES[name])
    check(name, problem, problem.ours())


DETERMINISTIC = (
    "full",
    "causal-128",
    "causal-256",
    "window-sink",
    "alibi",
    "bias",
    "shared-bias",
    "relative",
    "composed",
)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_gradients(name: str) -> None:
    """As exact as the others, and the same bits in every run."""
    problem = Problem(CASES[name])
    first = problem.ours(deterministic=True)
    check(name, problem, first)
    for _ in range(20):
        again = problem.ours(deterministic=True)
        assert all(torch.equal(again[leaf], first[leaf]) for leaf in first)


def rising(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """NaN, with a slope that is NaN, where q < k."""
    return score + tileattn.math.sqrt((q - k) * score * score + 0.25)


def rising_where_seen(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return tileattn.math.where(q >= k, rising(score, b, h, tileattn.math.maximum(q, k), k), score)


@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)])
def test_slopes_of_hidden_scores_do_not_show(head_dims: tuple[int, int]) -> None:
    """Autograd has NaN for them; so the oracle takes a modification that is finite there."""
    shape = Case((200, 233), (4, 2), head_dims, mask=Causal())
    problem = Problem(shape._replace(mods=lambda case, random: [rising]))
    check("rising", Problem(shape._replace(mods=lambda case, random: [rising_where_seen])), problem.ours())
    deterministic = problem.ours(deterministic=True)
    assert all(grad.isfinite().all() for grad in deterministic.values())


def test_many_tiles() -> None:
    """More blocks than multiprocessors, and several tiles of queries and of keys for each."""
    problem = Problem(Case((1500, 1700), (16, 4), (128, 128), mask=Causal(), batch=3))
    check("many tiles", problem, problem.ours())
    problem = Problem(Case((2049, 1025), (16, 8), batch=3))
    check("many tiles, full", problem, problem.ours())


# Some of the cases above, on the same kernels, at sizes in which races would show: lengths, heads.
RELAUNCHED = {
    name: CASES[name]._replace(lengths=lengths, heads=heads)
    for name, lengths, heads in (
        ("full", (1000, 2100), (8, 8)),
        ("full-128", (1000, 1311), (24, 12)),
        ("full-64/128", (1311, 1000), (8, 4)),
        ("causal", (1000, 1000), (8, 8)),
        ("causal-128", (2177, 2177), (16, 4)),
        ("causal-192/128", (900, 1000), (8, 8)),
        ("causal-256", (900, 1000), (8, 4)),
        ("window-sink", (1301, 1301), (8, 2)),
        ("documents", (1000, 1000), (8, 8)),
        ("softcap-fp16", (1000, 1000), (8, 8)),
        ("alibi", (1000, 1000), (8, 8)),
        ("alibi-256", (700, 700), (8, 8)),
        ("bias-aligned-128", (600, 1000), (8, 8)),
        ("unaligned-128", (1000, 900), (8, 4)),
    )
}
RELAUNCHES = [(name, False) for name in RELAUNCHED]
RELAUNCHES += [(name, True) for name in RELAUNCHED if name in DETERMINISTIC]


def assert_same(again: dict[str, Tensor], first: dict[str, Tensor], deterministic: bool) -> None:
    """The same bits; of dq, unless it is deterministic, up to the order of its float32 additions."""
    for leaf in first:
        if leaf == "q" and not deterministic:
            torch.testing.assert_close(again[leaf], first[leaf], rtol=2**-6, atol=1e-4)
        else:
            assert torch.equal(again[leaf], first[leaf]), leaf


@pytest.mark.parametrize(("name", "deterministic"), RELAUNCHES)
def test_two_hundred_launches_give_the_same_gradients(name: str, deterministic: bool) -> None:
    """Races would show as outliers."""
    problem = Problem(RELAUNCHED[name])
    output = problem.forward(deterministic=deterministic)
    first = problem.gradients(*output)
    assert all(grad.isfinite().all() for grad in first.values())
    for _ in range(200):
        assert_same(problem.gradients(*output), first, deterministic)


class Biased:
    """A call whose bias all batch elements share, so that its tiles come from the L2 cache, as fast as they can."""

    def __init__(self, head_dim: int, heads_of_bias: int) -> None:
        generator = None if DEVICE == "meta" else torch.Generator(DEVICE).manual_seed(0)
        random = functools.partial(torch.randn, device=DEVICE, dtype=BF16, generator=generator)
        length, heads = 4096, 2048 // head_dim
        self.leaves = {name: random(4, length, heads, head_dim).requires_grad_() for name in "qkv"}
        self.bias = Bias(random(1, min(heads_of_bias, heads), length, length))

    def run(self, deterministic: bool) -> dict[str, Tensor]:
        """The output, which is its own gradient, and the gradients."""
        options: dict[str, Any] = {"causal": True, "score_mod": self.bias, "backend": "tilelang"}
        o = tileattn.attention(**self.leaves, **options, deterministic=deterministic)
        grads = torch.autograd.grad(o, list(self.leaves.values()), o.detach())
        return {"o": o.detach()} | dict(zip(self.leaves, grads, strict=True))


BIASED = list(itertools.product((64, 128), (1, 32), (False, True)))


@pytest.mark.parametrize(("head_dim", "heads_of_bias", "deterministic"), BIASED)
def test_tiles_of_a_bias_are_read_before_the_next_ones_come(
    head_dim: int, heads_of_bias: int, deterministic: bool
) -> None:
    """On a busy multiprocessor, reading a tile may take longer than the next tile takes to arrive."""
    call = Biased(head_dim, heads_of_bias)
    first = call.run(deterministic)
    for _ in range(8):
        assert_same(call.run(deterministic), first, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_streams_at_the_same_time(deterministic: bool) -> None:
    """Autograd runs a backward pass on the stream of its forward pass."""
    both = [Problem(RELAUNCHED["causal-128"], seed) for seed in (0, 1)]
    expected = [problem.ours(deterministic=deterministic) for problem in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    runs: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(25):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                runs[index].append(both[index].ours(deterministic=deterministic))
    torch.cuda.synchronize()
    for index in range(2):
        for again in runs[index]:
            assert_same(again, expected[index], deterministic)


def test_only_what_is_wanted() -> None:
    problem = Problem(CASES["alibi"])
    q = problem.q.detach()
    o = tileattn.attention(q, problem.k, problem.v, mask=Causal(), score_mod=problem.mods, backend="tilelang")
    got = torch.autograd.grad(o, problem.k, problem.do)[0]
    assert torch.equal(got, problem.ours()["k"])


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for name, case in CASES.items():
        yield Problem(case).ours
        if name in DETERMINISTIC:
            yield functools.partial(Problem(case).ours, deterministic=True)
    for mod in (rising, rising_where_seen):
        for head_dims in ((64, 64), (256, 256)):
            steep = Case((200, 233), (4, 2), head_dims, mask=Causal(), mods=lambda case, random, mod=mod: [mod])
            yield Problem(steep).ours
            yield functools.partial(Problem(steep).ours, deterministic=True)
    yield Problem(Case(head_dims=(128, 128), mask=Causal(), mods=_softcap)).ours
    for name, deterministic in RELAUNCHES:
        yield functools.partial(Problem(RELAUNCHED[name]).ours, deterministic=deterministic)
    for head_dim, heads_of_bias, deterministic in BIASED:
        yield functools.partial(Biased(head_dim, heads_of_bias).run, deterministic)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_nothing_to_differentiate(lengths: tuple[int, int]) -> None:
    problem = Problem(Case(lengths, (4, 2), sink=True, mods=_alibi, tensors=1))
    assert all(not bool(grad.any()) for grad in problem.ours().values())


def test_expanded_tensors() -> None:
    """One batch for all, and the gradient of a sum, which is expanded in all dimensions."""
    problem = Problem(Case((200, 200), (4, 2), (64, 64), mask=Causal(), batch=1))
    leaves = [problem.q, problem.k, problem.v]
    wide = [x.expand(3, -1, -1, -1) for x in leaves]
    got = torch.autograd.grad(tileattn.attention(*wide, causal=True, backend="tilelang").sum(), leaves)
    expected = torch.autograd.grad(oracle_attention(*wide, Causal())[0].sum(), leaves)
    runs = eager_attention(*wide, Causal())[0]
    eager = [torch.autograd.grad(run.sum(), leaves, retain_graph=True) for run in runs]
    for index, name in enumerate("qkv"):
        oracle = expected[index].double()
        assert_accurate(f"d{name}", got[index], oracle, [run[index] for run in eager], gradient=True)


def test_under_torch_compile() -> None:
    problem = Problem(CASES["causal-128"])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = tileattn.attention(q, k, v, mask=Causal(), score_mod=SoftCap(30.0), backend="tilelang")
        return (o.float() * problem.do.float()).sum()

    leaves = [problem.q, problem.k, problem.v]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])
    torch.testing.assert_close(got[0], expected[0], rtol=2**-6, atol=1e-4)


def test_cuda_graph_replays_on_new_inputs() -> None:
    """Workspaces are cleared by the kernels, at each replay."""
    problem = Problem(CASES["alibi"])
    problem.ours()
    static, seeds = Problem(CASES["alibi"]), Problem(CASES["alibi"], seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = static.ours()
    with torch.no_grad():
        for name, leaf in static.leaves().items():
            leaf.copy_(seeds.leaves()[name])
        static.do.copy_(seeds.do)
    graph.replay()
    graph.replay()
    expected = seeds.ours()
    for name in ("k", "v", "t0"):
        assert torch.equal(got[name], expected[name])
    torch.testing.assert_close(got["q"], expected["q"], rtol=2**-6, atol=1e-4)


def test_a_graph_runs_beside_eager_passes() -> None:
    """Small passes keep workspaces for the next one of their stream; a graph may be replayed on any stream."""
    captured, eager = (Problem(RELAUNCHED["causal-128"], seed) for seed in (0, 1))
    expected = [problem.ours(deterministic=True) for problem in (captured, eager)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = captured.ours(deterministic=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(25):
        with torch.cuda.stream(stream):
            graph.replay()
        again = eager.ours(deterministic=True)
        assert_same(again, expected[1], True)
    torch.cuda.synchronize()
    assert_same(got, expected[0], True)


def test_memory_is_the_gradients_and_dq_in_float32() -> None:
    q, k, v = (torch.randn(1, 32768, 8, 128, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3))
    tileattn.attention(*(x[:, :128] for x in (q, k, v)), causal=True).sum().backward()  # compiles and loads
    o = tileattn.attention(q, k, v, causal=True)
    do = torch.randn_like(o)
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    o.backward(do)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    rows = 8 * 32768 * 4
    assert peak <= 3 * q.nbytes + 2 * q.nbytes + 2 * rows + 2**20
