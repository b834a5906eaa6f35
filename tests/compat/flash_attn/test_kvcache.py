"""`flash_attn_with_kvcache` by flash-attn's documentation, over a sample of the parameters of flash-attn's own test.

The oracle is written here, sequence by sequence: keys and values as one tensor, rotations as complex products in
float64. Rows of the cache that no sequence may see are NaN. The tolerance is that of :mod:`tileattn.testing`. The same
tests run on a GPU by ``pytest -m gpu``.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tileattn.compat import flash_attn as compat
from tileattn.compat.flash_attn import flash_attn_with_kvcache
from tileattn.testing import assert_forward_accurate

BATCH, HEADS = 2, 6
KV_HEADS = {"mha": 6, "gqa": 3, "mqa": 1}
BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """One point of the grid; `lengths` are (q_len, capacity)."""

    lengths: tuple[int, int] = (3, 79)
    dim: int = 64
    heads: str = "gqa"
    dtype: torch.dtype = FP16
    page_size: int = 0  # 0: contiguous
    batch_idx: bool = False
    leftpad: bool = False
    new: int = 0  # 0: none; -1: as many as queries
    rotary: float = 0.0  # the share of head_dim
    interleaved: bool = True
    causal: bool = False
    local: bool = False
    alibi: str = ""  # "heads", or "batch"
    softcap: float = 0.0
    sink: bool = False
    num_splits: int = 0
    seqlens: str = "tensor"  # "int", or "none"


GRID: dict[str, list[Any]] = {
    "lengths": [(1, 128), (1, 339), (3, 799), (64, 256), (16, 1025), (64, 64), (5, 63)],
    "dim": [32, 59, 64, 80, 128, 256],
    "heads": ["mha", "mqa", "gqa"],
    "dtype": [FP16, BF16],
    "page_size": [0, 0, 256, 16, 3],
    "batch_idx": [False, True],
    "leftpad": [False, True],
    "new": [0, -1, -1, 1, 2],
    "rotary": [0.0, 0.5, 1.0],
    "interleaved": [False, True],
    "causal": [False, True],
    "local": [False, True],
    "alibi": ["", "", "batch", "heads"],
    "softcap": [0.0, 0.0, 7.0],
    "sink": [False, False, True],
    "num_splits": [1, 0, 5],
    "seqlens": ["tensor", "tensor", "int", "none"],
}


def grid(count: int) -> Iterator[Case]:
    """A fixed sample of the combinations that flash-attn allows."""
    draw = random.Random(23)
    for _ in range(count):
        fields = {name: draw.choice(values) for name, values in GRID.items()}
        if fields["page_size"]:
            fields["batch_idx"] = False
        if fields["new"]:
            fields["seqlens"] = "tensor" if fields["seqlens"] == "none" else fields["seqlens"]
        else:
            fields["rotary"] = 0.0
        yield Case(**fields)


CASES = list(grid(60))


def rotated(x: Tensor, angles: Tensor, first: int, step: int, interleaved: bool) -> Tensor:
    """x (rows, heads, dim) in float64: row i rotated by the angles (positions, pairs) of position first + i * step."""
    pairs = angles.shape[1]
    turn = torch.polar(torch.ones_like(angles), angles)[first + step * torch.arange(x.shape[0])][:, None]
    part, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        turned = torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    else:
        both = torch.complex(part[..., :pairs].contiguous(), part[..., pairs:].contiguous()) * turn
        turned = torch.cat((both.real, both.imag), dim=-1)
    return torch.cat((turned, rest), dim=-1)


class Problem:
    """The tensors of a case on the CPU, the arguments of the call, and what it must give."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(CASES.index(case) if case in CASES else 1000)
        self.case = case
        (self.q_len, self.capacity), kv_heads = case.lengths, KV_HEADS[case.heads]
        self.new = self.q_len if case.new < 0 else min(case.new, self.q_len)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape).to(case.dtype)

        self.q = numbers(BATCH, self.q_len, HEADS, case.dim)
        self.k, self.v = (numbers(BATCH, self.new, kv_heads, case.dim) for _ in range(2))
        self.angles = torch.zeros(0)
        pairs = int(case.rotary * case.dim) // 16 * 8
        if pairs and self.new:
            angles = (torch.rand(self.capacity + self.q_len, pairs) * 6.28).double()
            self.cos, self.sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
            self.angles = torch.atan2(self.sin.double(), self.cos.double())
            self.length = torch.hypot(self.sin.double(), self.cos.double())
        most = self.capacity - self.new
        before = torch.randint(0 if self.new else 1, most + 1, (BATCH,), dtype=torch.int32)
        if case.seqlens != "tensor":
            before[:] = self.capacity if case.seqlens == "none" else before[0]
        self.before = before.tolist()
        self.after = [n + self.new for n in self.before]
        self.first = [random.Random(n).randint(0, n) if case.leftpad else 0 for n in self.before]
        self.window = tuple(torch.randint(0, self.capacity, (2,)).tolist()) if case.local else (-1, -1)
        shape = {"": None, "heads": (HEADS,), "batch": (BATCH, HEADS)}[case.alibi]
        self.slopes = None if shape is None else torch.rand(shape) * 0.3
        self.sink = torch.randn(HEADS) if case.sink else None
        self.seqlens = {"tensor": before, "int": self.before[0], "none": None}[case.seqlens]
        self._lay_out(numbers, kv_heads)

    def _lay_out(self, numbers: Callable[..., Tensor], kv_heads: int) -> None:
        """The cache: the keys and values that sequences have before the call, and NaN."""
        size, table = self.case.page_size, None
        rows = 2 * BATCH if self.case.batch_idx else BATCH
        if size:
            width = -(-self.capacity // size)
            table = torch.randperm(3 * BATCH * width)[: BATCH * width].int().view(BATCH, width)
            shape = (3 * BATCH * width, size, kv_heads, self.case.dim)
            if self.case.seqlens == "none":
                self.capacity = width * size
                self.before = self.after = [self.capacity] * BATCH
        else:
            shape = (rows, self.capacity, kv_heads, self.case.dim)
        self.caches = [torch.full(shape, torch.nan, dtype=self.case.dtype) for _ in range(2)]
        self.rows = torch.randperm(rows)[:BATCH].int() if self.case.batch_idx else None
        self.old = []
        self.table = table
        for b in range(BATCH):
            lo, hi = self.first[b], self.before[b]
            self.old.append([numbers(hi - lo, kv_heads, self.case.dim) for _ in range(2)])
            for cache, old in zip(self.caches, self.old[b]):
                cache[self.places(b, lo, hi)] = old
        if table is not None:
            for b in range(BATCH):
                table[b, -(-self.after[b] // size) :] = -1

    def places(self, b: int, lo: int, hi: int) -> tuple[Any, Tensor]:
        """The indices of the keys lo .. hi of a sequence in the cache."""
        j = torch.arange(lo, hi)
        if self.table is not None:
            return self.table[b].long()[j // self.case.page_size], j % self.case.page_size
        return (b if self.rows is None else int(self.rows[b])), j

    def call(self, device: str) -> tuple[Any, list[Tensor]]:
        """What the function returns, and the caches afterwards."""
        case = self.case

        def there(x: Any) -> Any:
            return x.to(device, copy=True) if isinstance(x, Tensor) else x

        caches = [there(cache) for cache in self.caches]
        options: dict[str, Any] = {
            "cache_seqlens": there(self.seqlens),
            "cache_batch_idx": there(self.rows),
            "cache_leftpad": torch.tensor(self.first, dtype=torch.int32, device=device) if case.leftpad else None,
            "block_table": there(self.table),
            "causal": case.causal,
            "window_size": self.window,
            "softcap": case.softcap,
            "rotary_interleaved": case.interleaved,
            "alibi_slopes": there(self.slopes),
            "num_splits": case.num_splits,
            "return_softmax_lse": True,
            "s_aux": there(self.sink),
        }
        if self.new:
            options |= {"k": there(self.k), "v": there(self.v)}
        if self.angles.numel() and self.new:
            options |= {"rotary_cos": there(self.cos), "rotary_sin": there(self.sin)}
        return flash_attn_with_kvcache(there(self.q), *caches, **options), caches

    def rotate(self, x: Tensor, b: int, step: int) -> Tensor:
        """Row i of x (rows, heads, dim) rotated to position cache_seqlens + i * step, rounded to the call's dtype."""
        if not self.angles.numel():
            return x
        turned = rotated(x.double(), self.angles, self.before[b], step, self.case.interleaved)
        # cos and sin are rounded, so that a rotation also scales a little
        length = self.length[self.before[b] + step * torch.arange(x.shape[0])][:, None]
        pairs = length.shape[-1]
        scale = length.repeat_interleave(2, -1) if self.case.interleaved else length.repeat(1, 1, 2)
        turned[..., : 2 * pairs] *= scale
        return turned.to(x.dtype)

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence after the call, from its first on."""
        k = torch.cat((self.old[b][0], self.rotate(self.k[b], b, 1)))
        return k, torch.cat((self.old[b][1], self.v[b]))

    def expected(self, dtype: torch.dtype, scaled_first: bool = False) -> tuple[Tensor, Tensor]:
        """out and lse, computed in `dtype`."""
        results = [self._sequence(b, dtype, scaled_first) for b in range(BATCH)]
        return torch.stack([o for o, _ in results]), torch.stack([lse for _, lse in results])

    def _sequence(self, b: int, dtype: torch.dtype, scaled_first: bool) -> tuple[Tensor, Tensor]:
        case, seqlen = self.case, self.after[b]
        q = self.rotate(self.q[b], b, 1 if case.causal or case.local else 0).to(dtype)
        k, v = (x.to(dtype).repeat_interleave(HEADS // KV_HEADS[case.heads], dim=1) for x in self.keys(b))
        scale = case.dim**-0.5
        factors = (k * scale, 1.0) if scaled_first else (k, scale)
        scores = torch.einsum("qhd,khd->hqk", q, factors[0]) * factors[1]
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        position = torch.arange(self.q_len)[:, None] + seqlen - self.q_len
        key = torch.arange(self.first[b], seqlen)
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.ndim == 1 else self.slopes[b]
            scores = scores - (slopes[:, None, None].double() * (position - key).abs()).to(dtype)
        hidden = torch.zeros(self.q_len, key.numel(), dtype=torch.bool)
        left, right = self.window
        if left >= 0:
            hidden |= key < position - left
        if case.causal or right >= 0:
            hidden |= key > position + (0 if case.causal else right)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sink is not None:
            scores = torch.cat((scores, self.sink.to(dtype)[:, None, None].expand(-1, self.q_len, 1)), dim=-1)
        lse = torch.logsumexp(scores.to(torch.promote_types(dtype, torch.float32)), dim=-1)
        p = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : key.numel()]
        return torch.einsum("hqk,khd->qhd", p, v), lse


def check(case: Case, device: str) -> None:
    problem = Problem(case)
    (out, lse), caches = problem.call(device)
    assert (out.shape, out.dtype) == (problem.q.shape, case.dtype)
    assert (lse.shape, lse.dtype) == ((BATCH, HEADS, problem.q_len), torch.float32)
    eager = [problem.expected(case.dtype, scaled_first) for scaled_first in (False, True)]
    of_eager = [o for o, _ in eager], [lse for _, lse in eager]
    assert_forward_accurate(str(case), (out.cpu(), lse.cpu()), problem.expected(torch.float64), of_eager)
    for before, after, of_sequence in zip(problem.caches, caches, (0, 1)):
        want = before.clone()
        for b in range(BATCH):
            want[problem.places(b, problem.first[b], problem.after[b])] = problem.keys(b)[of_sequence]
        # keys are rotated in float32: a rounding away from float64's at most; values are copied
        torch.testing.assert_close(
            after.cpu(), want, rtol=torch.finfo(case.dtype).eps * (1 - of_sequence), atol=1e-3 * (1 - of_sequence),
            equal_nan=True,
        )  # fmt: skip


# On a GPU most cases need kernels of their own.
QUICK = 20
RUNS = [(number, "cpu") for number in range(len(CASES))] + [
    pytest.param(number, "cuda", marks=[pytest.mark.gpu] + [pytest.mark.slow] * (number >= QUICK))
    for number in range(len(CASES))
]


@pytest.mark.parametrize(("number", "device"), RUNS)
def test_as_documented(number: int, device: str) -> None:
    check(CASES[number], device)


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels the quick tests need on a GPU, for benchmarks/precompile.py: of decode, and of append_kv."""
    for case in CASES[:QUICK]:
        if case.dim % 8:
            continue  # Triton's
        problem = Problem(case)
        if case.new:
            yield functools.partial(problem.call, "meta")
        without = Problem(case)
        without.new = 0
        yield functools.partial(without.call, "meta")


# --- What is asked of the arguments ---

NAMES = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale "
    "causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
)
DEFAULTS = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0}


def test_names_order_and_defaults() -> None:
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    by_place = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    expected: dict[str, Any] = dict.fromkeys(NAMES.split()) | dict.fromkeys(NAMES.split()[:3], inspect.Parameter.empty)
    assert by_place == expected | DEFAULTS | {"return_softmax_lse": False}
    assert list(by_place) == NAMES.split()
    assert list(parameters)[len(by_place) :] == ["page_table", "s_aux"]
    assert compat.flash_attn_interface.flash_attn_with_kvcache is compat.flash_attn_with_kvcache


def test_only_out_is_returned_unless_lse_is_asked_for() -> None:
    problem = Problem(Case())
    out = flash_attn_with_kvcache(problem.q, *problem.caches, cache_seqlens=problem.seqlens)
    assert isinstance(out, Tensor)
    (expected, _), _ = problem.call("cpu")
    assert torch.equal(out, expected)


def test_the_newer_name_of_a_block_table() -> None:
    problem = Problem(Case(page_size=16, new=-1))
    (expected, _), caches = problem.call("cpu")
    new = {"k": problem.k, "v": problem.v, "cache_seqlens": problem.seqlens}
    out = flash_attn_with_kvcache(problem.q, *problem.caches, **new, page_table=problem.table)
    assert torch.equal(out, expected)
    assert torch.equal(problem.caches[0].nan_to_num(9.0), caches[0].nan_to_num(9.0))


def test_a_backward_pass_raises() -> None:
    """flash-attn computes such calls, too, and has no gradient."""
    problem = Problem(Case())
    q = problem.q.clone().requires_grad_()
    out = flash_attn_with_kvcache(q, *problem.caches, cache_seqlens=problem.seqlens)
    assert out.requires_grad
    with pytest.raises(
        NotImplementedError, match="flash_attn_with_kvcache: a call that reads a cache has no gradients"
    ):
        out.sum().backward()
    with torch.no_grad():
        assert not flash_attn_with_kvcache(q, *problem.caches, cache_seqlens=problem.seqlens).requires_grad


def test_autocast_does_not_matter() -> None:
    problem = Problem(Case(dtype=BF16))
    (expected, _), _ = problem.call("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        (out, _), _ = problem.call("cpu")
    assert out.dtype == BF16
    assert torch.equal(out, expected)


def test_compiled_as_a_whole() -> None:
    """With the caches changed in place, and other lengths without another compilation."""
    problem = Problem(Case(new=-1, rotary=1.0, causal=True, leftpad=True))
    first = torch.tensor(problem.first, dtype=torch.int32)
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounter()

    def step(caches: list[Tensor], seqlens: Tensor) -> Tensor:
        rotary = {"rotary_cos": problem.cos, "rotary_sin": problem.sin, "cache_leftpad": first}
        new = (problem.k, problem.v)
        out = flash_attn_with_kvcache(problem.q, *caches, *new, cache_seqlens=seqlens, causal=True, **rotary)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend=frames)
    for less in (0, 1):
        seqlens = torch.tensor([max(n - less, f) for n, f in zip(problem.before, problem.first)], dtype=torch.int32)
        mine, theirs = ([cache.clone() for cache in problem.caches] for _ in range(2))
        assert torch.equal(compiled(mine, seqlens), step(theirs, seqlens))
        assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(mine, theirs))
    assert frames.frame_count == 1


Q, CACHE, NEW = torch.zeros(2, 3, 6, 16), torch.zeros(2, 9, 3, 16), torch.zeros(2, 3, 3, 16)
LENGTHS, TURN = torch.tensor([2, 3], dtype=torch.int32), torch.ones(12, 8)
PAGES, TABLE = torch.zeros(5, 4, 3, 16), torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("caches", "options", "error", "message"),
    [
        (CACHE, {"k": NEW}, ValueError, "k and v must be given together, got k alone"),
        (CACHE, {"v": NEW}, ValueError, "k and v must be given together, got v alone"),
        (CACHE, {"k": NEW, "v": NEW}, ValueError, "cache_seqlens must be given with k and v"),
        (CACHE, {"rotary_cos": TURN}, ValueError, "must be given together, got no rotary_sin"),
        (CACHE, {"rotary_cos": TURN, "rotary_sin": TURN}, ValueError, "rotary_cos and rotary_sin need k and v"),
        (CACHE, {"cache_seqlens": LENGTHS.long()}, TypeError, r"cache_seqlens must be int32"),
        (CACHE, {"cache_seqlens": 2.0}, TypeError, "cache_seqlens must be an int or an int32 tensor"),
        (CACHE, {"cache_seqlens": True}, TypeError, "cache_seqlens must be an int or an int32 tensor"),
        (CACHE, {"cache_seqlens": LENGTHS[:1]}, ValueError, r"cache_seqlens must have shape \(batch,\) = \(2,\)"),
        (CACHE, {"cache_seqlens": 10}, ValueError, r"cache_seqlens must lie in 0 \.\. 9"),
        (CACHE, {"cache_seqlens": 7, "k": NEW, "v": NEW}, ValueError, "cache_seqlens plus the number of new keys"),
        (CACHE, {"cache_leftpad": LENGTHS.tolist()}, TypeError, r"cache_leftpad must be an int32 tensor \(batch,\)"),
        (CACHE, {"cache_batch_idx": LENGTHS.long()}, TypeError, "cache_batch_idx must be int32"),
        (CACHE, {"cache_batch_idx": LENGTHS}, ValueError, "cache_batch_idx"),
        (PAGES, {"block_table": TABLE, "cache_batch_idx": LENGTHS}, ValueError, "exclude each other"),
        (PAGES, {"block_table": TABLE, "page_table": TABLE}, ValueError, "are two names of one argument"),
        (PAGES, {"block_table": TABLE.long()}, TypeError, "block_table must be int32"),
        (PAGES, {"block_table": TABLE.tolist()}, TypeError, "block_table must be an int32 tensor, got list"),
        (PAGES, {"block_table": TABLE[:1]}, ValueError, r"block_table must have shape \(batch, pages_per_sequence\)"),
        (PAGES, {"block_table": TABLE + 5}, ValueError, "block_table"),
        (PAGES, {}, ValueError, "k_cache must have one row per sequence, 2, got 5"),
        (CACHE[0], {}, ValueError, r"k_cache must have 4 dimensions, .* got shape \(9, 3, 16\)"),
        (CACHE, {"num_splits": 0.5}, TypeError, "num_splits must be an int"),
        (CACHE, {"num_splits": -1}, ValueError, r"num_splits must lie in 1 \.\. 256"),
        (CACHE, {"s_aux": torch.zeros(5)}, ValueError, "s_aux"),
        (CACHE, {"softcap": -1.0}, ValueError, "softcap must be a positive finite number"),
        (CACHE, {"window_size": 3}, TypeError, "window_size must be two ints"),
    ],
)
def test_errors(caches: Tensor, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(Q, caches, caches.clone(), **options)
    assert not caches.any(), "written to before the error"
