"""The Triton backend: the code that it generates, what it refuses, and its kernels in Triton's interpreter.

On a machine with a GPU the kernels run there. More tests: the conformance suite, tests/kernels/triton/test_compile.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Bias, Causal, FunctionMask, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.packages import any_machine
from tileattn.kernels.triton import backend
from tileattn.kernels.triton import defaults as config
from tileattn.kernels.triton import grid as order
from tileattn.kernels.triton.grid import Programs, Sizes
from tileattn.kernels.triton.tile_sizes import KERNELS, Config
from tileattn.nn import NaiveAttention, TritonFlashAttention, get_attention
from tileattn.runtime.dispatch import BACKENDS, select
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    gradients,
    oracle_attention,
    oracle_gradients,
)
from tileattn.tuner import state
from tileattn.variant.key import encode, normalize
from tileattn.variant.program import program

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

CALL = AttentionCall(torch.float16, 64, 64, arch="sm_90a")

SMALL = {name: Config(16, 16, 4, 1) for name in KERNELS}


def tensor(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# --- Generated code ---


def key_of(mask: Any, *mods: Any) -> str:
    return encode(*normalize(mask, list(mods) or None, causal=False))[0]


def test_generated_functions_read_like_written_ones() -> None:
    from tileattn.kernels.triton.tile.expressions import source

    text = source(key_of(Causal() & SlidingWindow(512, None), SoftCap(30.0)))
    assert text.startswith('"""And(Causal(),SlidingWindow(i,-))+SoftCap(f)"""\n')
    for function in (
        "def allows(b, h, q, k, tensors, numbers):\n    i0 = numbers[0]\n    return (k <= q) & (k >= (q - i0))\n",
        "def kv_range(b, h, q_lo, q_hi, seqlen_k, tensors, numbers):\n"
        "    i0 = numbers[0]\n    return tl.maximum(0, (q_lo - i0)), tl.minimum((q_hi + 1), seqlen_k)\n",
        "def score(score, b, h, q, k, tensors, numbers):\n"
        "    f0 = numbers[1]\n    return f0 * tanh((score * (1.0 / f0)))\n",
        "    x0 = tanh((score * (1.0 / f0)))\n    return f0 * ((1.0 - (x0 * x0)) * (1.0 * (1.0 / f0)))\n",
    ):
        assert "@triton.jit\n" + function in text or function in text


def test_variants_that_differ_in_numbers_share_their_code() -> None:
    from tileattn.kernels.triton.tile.expressions import functions

    assert functions(key_of(SlidingWindow(5, 0))) is functions(key_of(SlidingWindow(7, 9)))


def strange(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Python's // and % also of negative positions; a row may see nothing."""
    return ((q // 3 + k) % 4 != 1) & ((q - k) % 7 != 0) & ~(q == 2)


def stranger(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return tileattn.math.where(h == 1, abs(score) / 2, score) - tileattn.math.sqrt(abs(q - k) / 3.0) + (q < k)


def of_keys(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Without a score: nothing flows back to q and k."""
    return k / 8


def test_float32_has_a_tanh_of_its_own() -> None:
    from tileattn.kernels.triton.tile.expressions import source

    key = key_of(None, SoftCap(30.0))
    assert "import clamped, floor_div, floor_mod, floor_mod_float, exact_tanh as tanh\n" in source(key, exact=True)
    assert "exact_tanh" not in source(key)


@dataclasses.dataclass(frozen=True, eq=False)
class Nothing(Mask):
    """Hides all keys, and says so."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 0

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Any:
        return 0, 0


@pytest.mark.parametrize(
    ("mask", "of_queries", "of_keys"),
    [
        (None, (False, True, True), (False, True, True)),
        (Causal(), (False, True, True), (True, True, True)),
        (SlidingWindow(5, 5), (True, True, True), (True, True, True)),
        (SlidingWindow(5, None), (True, True, True), (False, True, True)),
        (SlidingWindow(None, 5), (False, True, True), (True, True, True)),
        (Causal() & PrefixLM(3), (False, True, True), (True, True, True)),
        (FunctionMask(strange), (False, False, True), (False, False, True)),
        (Causal() & FunctionMask(strange), (False, False, True), (False, False, True)),
        (Causal() | FunctionMask(strange), (False, True, True), (True, True, True)),
        (FunctionMask(strange) | FunctionMask(strange), (False, False, True), (False, False, True)),
        (Nothing(), (False, False, False), (False, False, True)),
    ],
    ids=lambda value: repr(value) if isinstance(value, tuple) else type(value).__name__,
)
def test_loops(mask: Any, of_queries: tuple[bool, ...], of_keys: tuple[bool, ...]) -> None:
    """Where the ranges say that a loop never turns, there is none."""
    from tileattn.kernels.triton.tile.loops import loops

    traced = program(key_of(mask))
    assert (loops(traced, of_keys=False), loops(traced, of_keys=True)) == (of_queries, of_keys)


# --- Sizes of tiles ---


def biases(count: int, dtype: torch.dtype = torch.float32) -> tuple[Bias, ...]:
    return tuple(Bias(torch.zeros(2, 2, 8, 8, dtype=dtype)) for _ in range(count))


@pytest.mark.parametrize(
    ("changes", "mods", "forward", "keys"),
    [
        ({}, (), (64, 128, 2), (128, 64, 2)),
        ({}, (ALiBi(torch.ones(2)),), (128, 128, 3), (64, 64, 2)),
        ({}, biases(1, torch.float16), (128, 128, 3), (64, 64, 2)),
        ({}, biases(1), (128, 64, 3), (64, 64, 2)),
        ({"head_dim": 128, "head_dim_v": 128}, biases(1), (128, 64, 2), (32, 64, 2)),
        ({"head_dim": 256, "head_dim_v": 256}, biases(2), (128, 32, 2), (16, 64, 2)),
        ({}, biases(6), (128, 32, 2), (64, 64, 2)),
        ({"arch": "sm_80"}, biases(1), (128, 64, 2), (32, 128, 2)),
        ({"arch": "sm_80"}, biases(4), (128, 64, 1), (32, 128, 1)),
        ({"arch": "gfx942"}, biases(6), (128, 64, 1), (16, 128, 1)),
        ({"dtype": torch.float32}, biases(6), (64, 64, 1), (32, 64, 1)),
        ({"dtype": torch.float32, "head_dim": 128, "head_dim_v": 128}, biases(6), (64, 32, 2), (16, 32, 1)),
        ({"dtype": torch.float32, "head_dim": 128, "head_dim_v": 128}, biases(16), (64, 32, 1), (16, 32, 1)),
    ],
)
def test_tiles_shrink_where_scores_are_read_from_tiles(
    changes: dict[str, Any], mods: tuple[Any, ...], forward: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    """test_triton_compile.py shows that they are small enough."""
    call = dataclasses.replace(CALL, variant=key_of(None, *mods), **changes)
    configs = [config.default(kernel, call) for kernel in ("forward", "keys")]
    assert [(each.block_M, each.block_N, each.num_stages) for each in configs] == [forward, keys]


# --- Which calls it runs ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"arch": "gfx942"}, None),
        ({"arch": "sm_80", "head_dim": 7, "head_dim_v": 256, "needs_grad": True, "aligned": False}, None),
        ({"dtype": torch.float32}, None),
        ({"arch": "sm_75"}, "neither an NVIDIA GPU from sm_80 on nor an AMD GPU"),
        ({"arch": "mps"}, "neither an NVIDIA GPU"),
        ({"dtype": torch.float64}, "dtype must be float16, bfloat16 or float32"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be float16"),
        ({"head_dim": 257}, "head_dim must lie in 1 .. 256, not 257"),
        ({"head_dim_v": 512}, "head_dim_v must lie in 1 .. 256, not 512"),
        ({"dropout": True}, "no dropout"),
        ({"variant": "+ALiBi(t:float64:n)"}, "must not be float64"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str | None) -> None:
    said = backend.refusal(dataclasses.replace(CALL, **changes))
    assert (said is None) if reason is None else (said is not None and reason in said)


def test_on_a_cpu_only_where_it_is_named_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    call = dataclasses.replace(CALL, arch="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.refusal(call) is None
    assert "name it" in str(backend.reservation(call))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in str(backend.refusal(call))


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in str(backend.refusal(CALL))
    with any_machine():
        assert backend.refusal(CALL) is None


def test_dispatch_takes_it_where_tilelang_refuses() -> None:
    names = [each.name for each in BACKENDS]
    assert names.index("tilelang") < names.index("triton") < names.index("torch")
    for changes in ({"head_dim": 20}, {"dtype": torch.float32}):
        call = dataclasses.replace(CALL, **changes)
        assert select(call).name == "triton"
    for changes in ({"arch": "gfx1100"}, {"arch": "gfx942", "dtype": torch.float32}):
        assert select(dataclasses.replace(CALL, **changes)).name == "triton"


# --- The kernels ---


def check(
    name: str,
    run: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    mods: tuple[Any, ...] = (),
    scale: float | None = None,
) -> None:
    """o, lse and the gradients of q, k and v, by the tolerance rule."""
    normal, _ = normalize(mask, None, causal=False)
    rest = (normal, mods, None, scale)
    leaves = {"dq": q, "dk": k, "dv": v}
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    do = torch.randn(*q.shape[:3], v.shape[3], generator=torch.Generator().manual_seed(5)).to(q)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=torch.Generator().manual_seed(6)).to(q.device)
    oracle = oracle_attention(*exact.values(), *rest)
    dlse = torch.where(oracle[1].isfinite(), dlse, 0.0)
    got = run(*leaves.values())
    assert_forward_accurate(name, got, oracle, eager_attention(q, k, v, *rest))
    expected, sizes = oracle_gradients(exact, do, dlse, *exact.values(), *rest)
    eager = eager_gradients(leaves, do, dlse, *leaves.values(), *rest)
    assert_gradients_accurate(name, gradients(got, leaves, do, dlse), expected, eager, sizes, q.dtype)


@pytest.mark.parametrize(
    ("mask", "mods", "scale"),
    [
        (SlidingWindow(17, 5), (), None),
        pytest.param(Causal() & SlidingWindow(30, None), (SoftCap(2.0),), None, marks=pytest.mark.slow),
        pytest.param(Causal(), (ALiBi(torch.tensor([0.5, 0.1])), SoftCap(3.0)), -0.3, marks=pytest.mark.slow),
        pytest.param(strange, (stranger,), None, marks=pytest.mark.slow),
        pytest.param(None, (), 0.0, marks=pytest.mark.slow),
    ],
    ids=["window", "causal-window-softcap", "causal-alibi-softcap-negative", "user", "scale0"],
)
def test_in_small_tiles(mask: Any, mods: tuple[Any, ...], scale: float | None) -> None:
    """Tiles so small that short sequences have tiles of each kind; odd sizes, GQA, keys shared by the batch."""
    mods = tuple(ALiBi(mod.slopes.to(DEVICE)) if isinstance(mod, ALiBi) else mod for mod in mods)
    q, k = tensor(2, 51, 2, 20), tensor(1, 45, 1, 20, seed=1).expand(2, -1, -1, -1)
    v = tensor(2, 1, 45, 12, seed=2).transpose(1, 2)
    mask = mask if mask is None or isinstance(mask, Mask) else tileattn.FunctionMask(mask)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.attention(
            q, k, v, mask=mask, score_mod=list(mods) or None, scale=scale, return_lse=True, backend="triton"
        )

    with config.overridden(**SMALL):
        check("small tiles", run, q, k, v, mask, mods, scale)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """float32 as NVIDIA's GPUs have it, in Triton's interpreter: products of parts, exp2 without subnormal results."""
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        from tileattn.kernels.triton import plan

        builder, real = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_dot

        def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: int) -> Any:
            if a.dtype.primitive_bitwidth != 32:
                return real(self, a, b, d, precision, imprecise)
            products = itertools.product(enumerate(bfloat16_parts(a.data)), enumerate(bfloat16_parts(b.data)))
            terms = [(i + j, x @ y) for (i, x), (j, y) in products if i + j < 3]
            total = sum(each for _, each in sorted(terms, key=lambda each: -each[0]))
            return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

        def create_exp2(self: Any, x: Any) -> Any:
            return interpreter.TensorHandle(flushed(torch.exp2(torch.from_numpy(x.data))).numpy(), x.dtype.scalar)

        monkeypatch.setattr(builder, "create_dot", create_dot)
        monkeypatch.setattr(builder, "create_exp2", create_exp2)
        options = interpreter.InterpreterOptions(allowed_dot_input_precisions=("bf16x6", "ieee"))
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        monkeypatch.setattr(plan, "precision_of", lambda call: "bf16x6")
        forget(plan)
    yield
    if DEVICE == "cpu":
        forget(plan)


def forget(plan: Any) -> None:
    """What holds a plan."""
    plan.make_plan.cache_clear()
    state.forget_prepared()


def flushed(x: Tensor) -> Tensor:
    """Subnormal numbers become 0."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)


def bfloat16_parts(x: Any) -> list[Any]:
    """Three of bfloat16, the sum of which is a number of float32."""
    rest, parts = torch.from_numpy(x.copy()), []
    for _ in range(3):
        part = flushed(rest.bfloat16().float())
        rest = rest - part
        parts.append(part.numpy())
    return parts


@pytest.mark.slow_except("1.0", "80.0", reason="0.3 s each in Triton's interpreter")
@pytest.mark.parametrize("distance", [1.0, 60.0, 75.0, 80.0, 84.0, 86.0])
def test_gradients_of_far_keys_in_float32(distance: float, like_a_gpu: None) -> None:
    """All probabilities of a key are e^-distance and less: dk and dv have all of their digits as well."""
    far = torch.zeros(1, 1, 1, 45, device=DEVICE)
    far[..., 3:7] = -distance
    bias = Bias(far.expand(1, 2, 45, 45))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.attention(q, k, v, score_mod=bias, return_lse=True, backend="triton")

    q, k, v = (tensor(1, 45, 2, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    check("far", run, q, k, v, None, (bias,))


@pytest.mark.slow_except("75.0", reason="0.4 s each in Triton's interpreter")
@pytest.mark.parametrize("logit", [1.0, 75.0, 82.0])
def test_gradients_beside_a_large_sink_in_float32(logit: float, like_a_gpu: None) -> None:
    """All probabilities of a query are e^-logit and less: so has dq."""
    q, k, v = (tensor(1, 45, 2, 16, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    do, sink = tensor(1, 45, 2, 16, dtype=torch.float32, seed=5), torch.full((2,), logit, device=DEVICE)
    leaves, rest = {"dq": q, "dk": k, "dv": v}, (None, (), sink, None)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    expected, sizes = oracle_gradients(exact, do, None, *exact.values(), *rest)
    eager = eager_gradients(leaves, do, None, *leaves.values(), *rest)
    got = tileattn.attention(q, k, v, sink=sink, return_lse=True, backend="triton")
    assert_gradients_accurate("sink", gradients(got, leaves, do, None), expected, eager, sizes, q.dtype)


def test_large_scores_in_float32(like_a_gpu: None) -> None:
    """Scores of some hundred: dv errs by less than if nothing but lse were rounded, and the scores exact.

    On a GPU, whose products of float32 add in another order, by about as much (1.01 measured on an H200).
    """
    ratios = []
    for seed in range(4):
        q, k, v, do = (tensor(1, 96, 2, 16, dtype=torch.float32, seed=4 * seed + i) for i in range(4))
        q, k, v = 8 * q, 8 * k, v.requires_grad_()
        o, _ = tileattn.attention(q, k, v, scale=0.3, return_lse=True, backend="triton")
        (dv,) = torch.autograd.grad(o, v, do)
        scores = 0.3 * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
        lse = scores.logsumexp(-1, keepdim=True)
        exact, rounded = (
            torch.einsum("bhqk,bqhd->bkhd", torch.exp(scores - each.double()), do.double())
            for each in (lse, lse.float())
        )
        ratios.append(((dv - exact).norm() / (rounded - exact).norm()).item())
    assert sum(ratios) / len(ratios) < (1.25 if DEVICE == "cuda" else 0.8)


def test_gradient_of_a_bias_in_float32(like_a_gpu: None) -> None:
    """A soft cap follows the bias, lse has a gradient, and query heads share keys."""
    inputs = [tensor(1, 44, heads, 16, dtype=torch.float32, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    inputs.append(tensor(1, 4, 44, 44, dtype=torch.float32, seed=9))
    runs = []
    for name, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        mods = (Bias(leaves[3]), SoftCap(3.0))
        o, lse = tileattn.attention(*leaves[:3], mask=Causal(), score_mod=mods, return_lse=True, backend=name)
        runs.append(torch.autograd.grad(o.square().sum() + 0.3 * lse.sum(), leaves))
    for got, expected in zip(*runs):
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


def test_tanh_of_small_numbers_in_float32() -> None:
    """Keys whose scores are multiplied by what is next to 0: their gradients are exact in all digits as well."""
    table = (tensor(2, 45, dtype=torch.float32) / 1000).requires_grad_()

    def gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * tileattn.math.tanh(table[h, k])

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.attention(q, k, v, score_mod=gate, return_lse=True, backend="triton")

    q, k, v = (tensor(1, 45, 2, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    check("gate", run, q, k, v, None, (gate,))


KERNEL_OF_TANH = """import triton
import triton.language as tl
from tileattn.kernels.triton.tile.arithmetic import exact_tanh

@triton.jit
def kernel(x, y, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(y + at, exact_tanh(tl.load(x + at)))
"""


def test_exact_tanh() -> None:
    from tileattn.kernels.triton.tile.expressions import load

    kernel = load(KERNEL_OF_TANH, "test_exact_tanh")["kernel"]
    ends = torch.tensor([0.0, 1e-30, -1e-7, 1.0, -1.0, 50.0, -50.0, -1e4])
    x = torch.cat([torch.linspace(-10, 10, 4096 - len(ends)), ends]).to(DEVICE)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, 4096)
    torch.testing.assert_close(y.double(), torch.tanh(x.double()), rtol=2**-21.5, atol=0)


def test_a_modification_that_replaces_the_score() -> None:
    q = tensor(1, 9, 2, 16)
    o, expected = (tileattn.attention(q, q, q, score_mod=of_keys, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(o, expected, rtol=1e-3, atol=1e-3)


def test_rows_without_keys() -> None:
    q, k = tensor(1, 9, 2, 16).requires_grad_(), tensor(1, 4, 2, 16, seed=1).requires_grad_()
    o, lse = tileattn.attention(q, k, k, causal=True, return_lse=True, backend="triton")
    assert torch.equal(o[:, :5], torch.zeros_like(o[:, :5]))
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    assert torch.equal(dq[:, :5], torch.zeros_like(dq[:, :5]))
    assert dq.isfinite().all()
    assert dk.isfinite().all()


def test_nan_in_rows_without_keys_reaches_the_gradients_of_the_torch_backend() -> None:
    """Also that of a sink of -inf, which has no probability."""
    q, k, v = (tensor(1, rows, 2, 16, seed=rows) for rows in (21, 17, 17))
    sink, do = torch.tensor([-math.inf, 0.5], device=DEVICE), tensor(1, 21, 2, 16, seed=4)
    do[:, 0, 0] = math.nan
    patterns = []
    for name in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        o = tileattn.attention(*leaves[:3], sink=leaves[3], causal=True, backend=name)
        patterns.append([x.isnan() for x in torch.autograd.grad(o, leaves, do)])
    for got, expected in zip(*patterns):
        assert torch.equal(got, expected)
    assert patterns[0][3].tolist() == [True, False]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 3)], ids=str)
def test_gradients_that_are_asked_for(wanted: tuple[int, ...]) -> None:
    """Subsets of q, k, v and sink. Without dq, a kernel of its own prepares what the kernel for dq prepares."""
    q, k, v = (tensor(2, rows, 2, 16, seed=rows) for rows in (21, 37, 37))
    inputs = [q, k, v, tensor(2, dtype=torch.float32)]
    do, dlse = tensor(2, 21, 2, 16, seed=4), tensor(2, 2, 21, dtype=torch.float32)
    runs = []
    for name in ("triton", "torch"):
        leaves = [x.clone().requires_grad_(place in wanted) for place, x in enumerate(inputs)]
        o, lse = tileattn.attention(*leaves[:3], sink=leaves[3], causal=True, return_lse=True, backend=name)
        runs.append(torch.autograd.grad((o, lse), [leaves[place] for place in wanted], (do, dlse)))
    for got, expected in zip(*runs):
        torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.slow_except("heads_together", reason="2 s each in Triton's interpreter")
@pytest.mark.parametrize(
    ("dims", "apart", "dimensions"),
    [((24, 16), False, 4), ((32, 16), True, 4), ((32, 16), False, 3)],
    ids=["other_columns", "heads_apart", "heads_together"],
)
def test_descriptors(dims: tuple[int, int], apart: bool, dimensions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hopper copies by TMA. The interpreter knows descriptors, and what is beyond their ends."""
    from tileattn.call.inputs import Inputs
    from tileattn.kernels.triton import arguments, plan
    from tileattn.kernels.triton.backward.launch import Backward
    from tileattn.kernels.triton.forward.launch import Forward

    def made_up(seqlen: int, head_dim: int, seed: int) -> Tensor:
        x = tensor(2, seqlen, 2, head_dim, seed=seed)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if apart else x

    monkeypatch.setattr(plan, "has_descriptors", lambda arch: True)
    made: list[int] = []
    real = arguments.TensorDescriptor
    monkeypatch.setattr(arguments, "TensorDescriptor", lambda x, *given: made.append(len(given[0])) or real(x, *given))
    q, k, v = made_up(37, dims[0], 0), made_up(45, dims[0], 1), made_up(45, dims[1], 2)
    key = key_of(Causal())
    call = AttentionCall(torch.float16, *dims, key, needs_grad=True, arch="sm_90a" if DEVICE == "cuda" else "cpu")
    tma = {name: Config(16, 16, 4, 1, tma=True) for name in KERNELS}
    with config.overridden(**tma):
        forward = Forward(call, q.shape, k.shape, dims[0] ** -0.5)
        backward = Backward(BackwardCall(call, (True, True, True, False)), q.shape, k.shape, dims[0] ** -0.5)
    inputs = Inputs(q, k, v)
    o, lse = forward(inputs)
    assert made == ([4, 4] if dimensions == 4 else [3, 3, 3, 3])  # k and v; or q, k, v and o
    made.clear()
    do = made_up(37, dims[1], 3)
    grads = backward(inputs, o, lse, do, None)
    assert made == [dimensions, dimensions, 4, 4]  # k and v for dq, q and do for dk and dv
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = tileattn.attention(*leaves, causal=True, backend="torch")
    for got, wanted in zip((o, *grads[:3]), (expected, *torch.autograd.grad(expected, leaves, do))):
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def test_a_launch_is_worked_out_once() -> None:
    """What Triton compiled is launched again for tensors that look the same, and for no others."""
    from tileattn.kernels.triton.launch_cache import MOST, Launch, LaunchCache

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments: log.append(("again", grid, arguments))

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
            return lambda *arguments, **options: log.append(("compiled", grid, arguments, options)) or Compiled()

    def work_out(*arguments: Any) -> Launch:
        return Launch(Kernel(), grid, Config(0, 0, 4, 2), ("last",), {})

    class Elsewhere(Tensor):
        def get_device(self) -> int:
            return 1

    log: list[Any] = []
    grid = (5, 2, 1)
    launch = LaunchCache()
    x, y, wide = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 5)
    for numbers in ((48, 0.5), (-(2**31), 0.75)):
        launch(work_out, x, None, numbers=numbers)
        launch(work_out, y, None, numbers=numbers)
    assert [entry[0] for entry in log] == ["compiled", "again", "again", "again"]
    assert log[0][1:] == (grid, (x, None, (48, 0.5), "last"), {"num_warps": 4, "num_stages": 2})
    assert log[3][1] == grid
    assert log[3][2][0] is y
    assert log[3][2][1:] == (None, (-(2**31), 0.75), "last")

    # Strides, alignment, dtype, size, device, none.
    elsewhere = x.as_subclass(Elsewhere)
    others = (wide[:, :4], wide[:, 1:], x.half(), x.flatten()[1:5].view(1, 4), elsewhere, None)
    for other in others:
        log.clear()
        for numbers in ((1, 0.5), (2**31, 0.5), (True, 0.5), (1.0, 0.5), (1, 1.5)):
            launch(work_out, other, None, numbers=numbers)
        assert [entry[0] for entry in log] == [*["compiled"] * 4, "again"]
    # Triton compiles for the number 1, for multiples of 16, and for others.
    launch, log[:] = LaunchCache(), []
    for number in (1, 5, 16, 7, 0, -32, -1, 1):
        launch(work_out, x, None, numbers=(number,))
    assert [entry[0] for entry in log] == [*["compiled"] * 3, *["again"] * 5]
    for size in range(2 * MOST):
        launch(work_out, (x, size))
    assert len(launch._known) <= MOST

    log.clear()
    grid = (5, 0, 1)
    LaunchCache()(work_out, x)
    assert not log


@pytest.mark.gpu
def test_a_launch_is_repeated() -> None:
    """The second call's tensors, numbers and stream are used, not the first one's."""
    for seed, window in ((0, 1), (3, 5), (6, 11)):  # Triton compiles for the number 1
        tensors = [tensor(2, 50, 2, 32, seed=seed + each) for each in range(3)]
        do = tensor(2, 50, 2, 32, seed=seed + 9)
        results = []
        for name in ("triton", "torch"):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                leaves = [each.detach().requires_grad_() for each in tensors]
                o = tileattn.attention(*leaves, mask=SlidingWindow(window, 0), backend=name)
                results.append((o, *torch.autograd.grad(o, leaves, do)))
            torch.cuda.synchronize()
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("rows", "batch", "kv_heads", "expected"),
    [
        (1024, 4, 16, 32),
        (16384, 4, 16, 2),
        (10**6, 4, 16, 1),
        (1024, 1, 3, 3),
        (0, 2, 2, 4),
        (5, 0, 3, 1),
        (2048, 1, 17, 9),
    ],
)
def test_heads_side_by_side(rows: int, batch: int, kv_heads: int, expected: int) -> None:
    """As many as read 16 MiB, of what there is, or fewer, as many in each group: 512 bytes a row here."""
    call = AttentionCall(torch.float16, 128, 128, arch="sm_90a")
    sizes = Sizes.of(torch.Size((batch, 7, 2 * kv_heads, 128)), torch.Size((batch, 9, kv_heads, 128)))
    assert sizes.group == 2
    assert sizes.side_by_side(call, rows) == expected


def test_the_grid_of_each_kernel() -> None:
    call = AttentionCall(torch.float16, 128, 128, arch="sm_90a")
    sizes = Sizes.of(torch.Size((2, 16384, 6, 128)), torch.Size((2, 8192, 3, 128)))
    seqlens = 16384, 8192
    assert sizes.over_keys(call, 64) == ((6, 256, 2), 12, 1, (*seqlens, 6, 2))  # 3 times 4 MiB, for 2 heads each
    assert sizes.over_queries(call, 64) == ((1, 128, 6), 6, 1, (*seqlens, 6, 3, 2))  # 16 MiB of q and do
    assert sizes.of_queries(64) == ((12, 256, 1), 12, 1, (16384, 6))
    assert sizes.of_queries(64).arguments == (16384, 6, 12, 1)


@pytest.mark.parametrize(
    ("tiles", "heads", "side_by_side", "grid"),
    [
        (5, 7, 7, (7, 5, 1)),
        (5, 7, 4, (4, 5, 2)),
        (5, 9, 4, (4, 5, 3)),
        (65535, 2, 1, (1, 65535, 2)),
        (65536, 2, 1, (1, 32768, 4)),
        (200000, 3, 2, (2, 50000, 8)),
        (1, 10**6, 2, (16, 1, 62500)),
        (65536, 40000, 1, (2, 32768, 40000)),
        (65536, 70000, 1, (3, 32768, 46668)),
        (0, 3, 1, (1, 0, 3)),
        (3, 0, 1, (1, 3, 0)),
    ],
)
def test_a_grid_has_every_tile_within_its_bounds(
    tiles: int, heads: int, side_by_side: int, grid: tuple[int, int, int]
) -> None:
    programs = Programs.of(tiles, heads, side_by_side)
    assert programs.grid == grid
    together, of_fold, rest = programs.grid
    assert max(of_fold, rest) <= order.MOST
    assert of_fold * programs.folds >= tiles
    assert together * rest // programs.folds >= heads


@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("most", [65535, 2])
@pytest.mark.parametrize(("heads", "side_by_side"), [*itertools.product((1, 3, 4, 7), (1, 2, 4))])
def test_the_order_of_tiles(
    heads: int, side_by_side: int, most: int, from_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tile of each head once; several heads at a time, and of these all first tiles, or all last ones, first."""
    from tileattn.kernels.triton.tile.expressions import load

    monkeypatch.setattr(order, "MOST", most)
    programs = Programs.of(3, heads, side_by_side)
    visited = torch.full((math.prod(programs.grid), 2), -1, dtype=torch.int32, device=DEVICE)
    load(KERNEL_OF_ORDER, "test_order")["kernel"][programs.grid](visited, 20, programs.folds, from_last)
    together = programs.grid[0]
    groups = [range(first, min(first + together, heads)) for first in range(0, heads, together)]
    tiles = (16, 8, 0) if from_last else (0, 8, 16)
    each = [[first, head] for first, head in visited.tolist() if 0 <= first < 20 and head < heads]
    assert each == [[tile, head] for group in groups for tile in tiles for head in group]


KERNEL_OF_ORDER = """import triton
import triton.language as tl
from tileattn.kernels.triton.tile.tiles import last_tile_and_head, tile_and_head

@triton.jit(do_not_specialize=["seqlen"])
def kernel(visited, seqlen, folds, from_last: tl.constexpr):
    if from_last:
        first, head = last_tile_and_head(seqlen, 8, folds)
    else:
        first, head = tile_and_head(8, folds)
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(visited + number * 2, first)
    tl.store(visited + number * 2 + 1, head)
"""


@pytest.mark.slow(reason="8 s each in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_programs_without_a_tile_or_a_head_do_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 tiles of 64 in 2 folds of 3, and of 6 heads 4 side by side; slopes are summed atomically."""
    monkeypatch.setattr(order, "MOST", 4)
    monkeypatch.setattr(Sizes, "side_by_side", lambda *_: 4)
    slopes = torch.tensor([0.5, 0.25, 0.125])
    results = []
    for name in ("triton", "torch"):
        leaves = [tensor(2, 300, 3, 16, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
        own = slopes.to(DEVICE).requires_grad_()
        o = tileattn.attention(*leaves, causal=True, score_mod=ALiBi(own), backend=name)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), (*leaves, own))))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_long_causal_calls_have_the_tiles_of_full_ones() -> None:
    full, causal, windowed = (
        AttentionCall(torch.float16, 128, 128, key_of(mask), arch="sm_90a")
        for mask in (None, Causal(), SlidingWindow(64, 0))
    )
    chosen = {
        (call, keys): config.default("forward", call, keys) for call in (full, causal, windowed) for keys in LENGTHS
    }
    short, long = LENGTHS
    assert chosen[full, short] == chosen[full, long] == chosen[causal, long]
    assert chosen[causal, short] == chosen[windowed, short] == chosen[windowed, long] != chosen[full, long]


LENGTHS = config.LONG - 1, config.LONG


@pytest.mark.skipif(DEVICE == "cpu", reason="too long for the interpreter")
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_either_side_of_where_tiles_change(seqlen: int) -> None:
    q, k, v = (tensor(1, seqlen, 2, 128, seed=seed) for seed in range(3))
    got = tileattn.attention(q, k, v, causal=True, return_lse=True, backend="triton")
    arguments = (q, k, v, Causal())
    assert_forward_accurate("long", got, oracle_attention(*arguments), eager_attention(*arguments))


def test_only_what_is_wanted_is_computed() -> None:
    q, k = tensor(1, 20, 2, 16), tensor(1, 20, 2, 16, seed=1)
    for wanted in ((False, False, True), (True, False, False), (True, True, False), (False, False, False)):
        leaves = [x.clone().requires_grad_(need) for x, need in zip((q, k, k), wanted)]
        tileattn.attention(*leaves, backend="triton").sum().backward() if any(wanted) else None
        assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_no_queries_and_no_keys() -> None:
    o, lse = tileattn.attention(
        tensor(2, 3, 2, 16), tensor(2, 0, 2, 16), tensor(2, 0, 2, 16), return_lse=True, backend="triton"
    )
    assert not o.any()
    assert (lse == -torch.inf).all()
    assert tileattn.attention(*[tensor(2, 0, 2, 16)] * 3, backend="triton").shape == (2, 0, 2, 16)


def test_compiles_in_a_graph() -> None:
    """torch.compile sees one operator, whose gradient is another."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tileattn.attention(q, k, v, causal=True, backend="triton")

    leaves = [tensor(1, 19, 2, 16, seed=seed).requires_grad_() for seed in range(3)]
    expected = tileattn.attention(*leaves, causal=True, backend="triton")
    o = step(*leaves)
    torch.testing.assert_close(o, expected, rtol=0, atol=0)
    for got, wanted in zip(torch.autograd.grad(o.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_learned_number_has_its_gradient() -> None:
    q, warmth = tensor(1, 5, 2, 16), torch.tensor(0.7, device=DEVICE, requires_grad=True)
    grads = [
        torch.autograd.grad(
            tileattn.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * warmth, backend=backend).square().sum(),
            warmth,
        )[0]
        for backend in ("triton", "torch")
    ]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_the_same_in_each_run(head_dim: int) -> None:
    leaves = [tensor(2, 1000, 4, head_dim, seed=seed).requires_grad_() for seed in range(3)]
    runs = [
        torch.autograd.grad(tileattn.attention(*leaves, causal=True, backend="triton").sum(), leaves) for _ in range(3)
    ]
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    q = tensor(2, 333, 4, 64)
    expected = tileattn.attention(q, q, q, causal=True, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tileattn.attention(q, q, q, causal=True, backend="triton")
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)


# --- The module ---


@pytest.mark.slow_except("2-causal", reason="1 s each in Triton's interpreter")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_module_equals_the_textbook(causal: bool, kv_heads: int) -> None:
    options = {"num_kv_heads": kv_heads, "causal": causal, "dtype": torch.float32, "device": DEVICE}
    naive, module = NaiveAttention(32, 4, **options), get_attention("triton", 32, 4, **options)
    assert isinstance(module, TritonFlashAttention)
    module.load_state_dict(naive.state_dict())
    runs = []
    for each in (module, naive):
        x = tensor(2, 21, 32, dtype=torch.float32).requires_grad_()
        output, weights = each(x)
        output.square().sum().backward()
        runs.append([output, x.grad, *(parameter.grad for parameter in each.parameters())])
        assert (weights is None) == (each is module)
    for got, expected in zip(*runs):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_module_has_no_dropout() -> None:
    with pytest.raises(ValueError, match=r"dropout must be 0, got 0\.1: the Triton kernels have no dropout"):
        get_attention("triton", 32, 4, dropout=0.1)
