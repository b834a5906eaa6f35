"""Users' functions: each backend and dtype computes what PyTorch computes from the same lines in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.user_functions import HEADS, MASKS, SCORES, SEQLEN_K, SEQLEN_Q, slopes
from tileattn import ALiBi, Bias, FunctionMask, attention, varlen_attention
from tileattn import math as tm
from tileattn.reference import flash_attention_1, flash_attention_2, flash_attention_2_backward, standard_attention
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    gradients,
    oracle_attention,
    oracle_gradients,
)
from tileattn.variant.expression import symbol
from tileattn.variant.reading import evaluate
from tileattn.variant.tracing.eager import with_captures

Function = Callable[..., Any]

EVERY = [pytest.param({"score_mod": f}, id=f"score-{name}") for name, f in SCORES.items()] + [
    pytest.param({"mask": f}, id=f"mask-{name}") for name, f in MASKS.items()
]


BACKENDS = [
    ("torch", torch.float32),
    ("triton", torch.float32),
    pytest.param("torch", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("triton", torch.bfloat16, marks=pytest.mark.slow),
]


def inputs(dtype: torch.dtype = torch.float32, seqlen_q: int = SEQLEN_Q, seqlen_k: int = SEQLEN_K) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, seqlen_q, HEADS, 16), (1, seqlen_k, HEADS, 16), (1, seqlen_k, HEADS, 16))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def parts(variant: dict[str, Function]) -> tuple[Any, tuple[Function, ...]]:
    """Mask and modifications, to be run as they are on tensors."""
    mask = FunctionMask(variant["mask"]) if "mask" in variant else None
    return mask, ((variant["score_mod"],) if "score_mod" in variant else ())


@pytest.mark.slow_cases(
    "triton-dtype1-mask-floor of negative integers",
    "triton-dtype1-mask-product beyond int32",
    "triton-dtype1-mask-slopes in 16 bits",
    "triton-dtype1-mask-integers of 64 bits",
    reason="0.3 s each in Triton's interpreter; the same in a score",
)
@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_functions(variant: dict[str, Function], backend: str, dtype: torch.dtype) -> None:
    """o, lse and the gradients of q, k and v."""
    if backend == "triton":
        pytest.importorskip("triton")
    check(variant, backend, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", EVERY)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("tilelang", torch.bfloat16), ("tilelang", torch.float16), ("triton", torch.float32), ("torch", torch.bfloat16)],
)
def test_functions_on_a_gpu(variant: dict[str, Function], backend: str, dtype: torch.dtype) -> None:
    on_device = {name: with_captures(function, lambda x: _moved(x, "cuda")) for name, function in variant.items()}
    check(on_device, backend, dtype, "cuda")


def _moved(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def check(variant: dict[str, Function], backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v = (x.to(device) for x in inputs(dtype))
    mask, mods = parts(variant)
    leaves = {name: x.clone().requires_grad_() for name, x in zip(("dq", "dk", "dv"), (q, k, v))}
    o, lse = attention(*leaves.values(), **variant, backend=backend, return_lse=True)
    arguments = (q, k, v, mask, mods)
    assert_forward_accurate(
        "user", (o.detach(), lse.detach()), oracle_attention(*arguments), eager_attention(*arguments)
    )
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    oracle, sizes = oracle_gradients(exact, do, None, *exact.values(), mask, mods)
    eager = eager_gradients(leaves, do, None, *leaves.values(), mask, mods)
    assert_gradients_accurate("user", gradients((o, lse), leaves, do, None), oracle, eager, sizes, dtype)


@pytest.mark.parametrize("variant", EVERY)
def test_functions_in_float64(variant: dict[str, Function]) -> None:
    arguments = (*inputs(torch.float64), *parts(variant))
    with default_dtype(torch.float64):  # in which PyTorch then turns integers into floats
        expected = oracle_attention(*arguments)
    got = attention(*inputs(torch.float64), **variant, return_lse=True)
    torch.testing.assert_close(got, expected)


class default_dtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


# --- Floats are float32 at least ---

LONG = 2048


def far(slopes: Tensor) -> Function:
    return lambda s, b, h, q, k: s + slopes[h] * k


@pytest.mark.parametrize("make", [far, ALiBi], ids=["function", "alibi"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_in_16_bits_count_as_their_values(make: Function, dtype: torch.dtype) -> None:
    arguments = inputs(torch.float32, 5, LONG)
    short = (slopes / 3).to(dtype)
    expected = attention(*arguments, score_mod=make(short.float()))
    assert torch.equal(attention(*arguments, score_mod=make(short)), expected)
    for run in (standard_attention, flash_attention_1, flash_attention_2):
        of_wide, of_short = (run(*arguments, None, (make(x),))[0] for x in (short.float(), short))
        assert torch.equal(of_short, of_wide)


@pytest.mark.parametrize("make", [far, ALiBi], ids=["function", "alibi"])
def test_in_a_float64_call_all_is_float64(make: Function) -> None:
    arguments = inputs(torch.float64, 5, LONG)
    expected = attention(*arguments, score_mod=make((slopes / 3).double()))
    assert torch.equal(attention(*arguments, score_mod=make(slopes / 3)), expected)
    assert torch.equal(
        standard_attention(*arguments, None, (make(slopes / 3),))[0],
        standard_attention(*arguments, None, (make((slopes / 3).double()),))[0],
    )


def test_packed_calls_as_well() -> None:
    q, k, v = (x[0] for x in inputs(torch.float32, LONG, LONG))
    cu_seqlens = torch.tensor([0, 5, LONG], dtype=torch.int32)
    short = (slopes / 3).bfloat16()
    for make in (far, ALiBi):
        of_short, of_wide = (
            varlen_attention(q, k, v, cu_seqlens, cu_seqlens, LONG, LONG, score_mod=make(x))
            for x in (short, short.float())
        )
        assert torch.equal(of_short, of_wide)
    bias = torch.randn(2, 1, LONG, LONG, generator=torch.Generator().manual_seed(0)).bfloat16()
    of_short, of_wide = (
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens, LONG, LONG, score_mod=Bias(x)) for x in (bias, bias.float())
    )
    assert torch.equal(of_short, of_wide)


@pytest.mark.slow_cases("score-dtype1", "score-dtype2", reason="1 s each")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "variant",
    [
        {"score_mod": lambda s, b, h, q, k: s + 0.3 * k + tm.minimum(0.1 * q, k) + tm.where(q > k, 0.1, 0.2)},
        {"mask": lambda b, h, q, k: 0.1 * k <= q * 0.3},
    ],
    ids=["score", "mask"],
)
def test_the_default_dtype_does_not_matter(variant: dict[str, Function], dtype: torch.dtype) -> None:
    arguments = inputs(torch.float32, LONG, LONG)
    expected = attention(*arguments, **variant)
    with default_dtype(dtype):
        assert torch.equal(attention(*arguments, **variant), expected)
        assert torch.equal(attention(*arguments, **variant, backend="torch"), expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_of_tensors_in_16_bits_are_summed_in_32(backend: str) -> None:
    """Each is a sum of 2 * 2048 * 5 terms: in bfloat16 it would stop growing."""
    if backend == "triton":
        pytest.importorskip("triton")
    q, k, v = inputs(torch.float32, 5, 512)

    def gradient(short: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
        leaf = short.clone().requires_grad_()
        attention(*arguments, score_mod=lambda s, b, h, q, k: s * leaf[h], **options).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        return leaf.grad

    short = slopes.bfloat16()
    exact = gradient(short.double(), q.double(), k.double(), v.double())
    got = gradient(short, q, k, v, backend=backend)
    assert ((got.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()


def test_gradients_of_tensors_in_16_bits_in_the_reference() -> None:
    q, k, v = inputs(torch.float32, 64, 512)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def gradient(short: Tensor, *arguments: Tensor) -> Tensor:
        mods = (lambda s, b, h, q, k: s * short[h],)
        o, lse = flash_attention_2(*arguments, None, mods)
        grads = flash_attention_2_backward(do.to(o.dtype), *arguments, o, lse, None, mods, tensors=(short,))
        return grads.tensors[0]

    short = slopes.bfloat16()
    exact, got = gradient(short.double(), q.double(), k.double(), v.double()), gradient(short, q, k, v)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()


def test_integers_of_8_bits_are_not_computed_in_8_bits() -> None:
    table = torch.full((SEQLEN_K,), 100, dtype=torch.int8)
    arguments = inputs()
    got = attention(*arguments, score_mod=lambda s, b, h, q, k: s + 0.001 * (table[k] * table[k]))
    expected = attention(*arguments, score_mod=lambda s, b, h, q, k: s + 10.0)
    torch.testing.assert_close(got, expected)


def test_a_divisor_that_is_zero_in_hidden_scores() -> None:
    arguments = inputs(torch.float32, 9, 9)
    got = attention(*arguments, mask=lambda b, h, q, k: (k > 0) & (q % k == 0))
    _, _, q, k = torch.meshgrid(*(torch.arange(n) for n in (1, HEADS, 9, 9)), indexing="ij")
    seen = (k > 0) & (q % k.clamp(min=1) == 0)
    expected = attention(*arguments, score_mod=Bias(torch.where(seen, 0.0, -math.inf)))
    torch.testing.assert_close(got, expected)


# --- Far from 0 ---


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "silu", "tanh"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_scores_give_no_nan(name: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    function = getattr(tm, name)
    q, k, v = inputs()
    q = (q * 1000).requires_grad_()
    o = attention(q, k, v, score_mod=lambda s, b, h, i, j: function(s), backend=backend)
    o.sum().backward()
    assert q.grad is not None
    assert o.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(tm.__all__) - {"load", "maximum", "minimum", "where"}))
def test_functions_of_math_on_numbers_tensors_and_traced_values(name: str) -> None:
    function = getattr(tm, name)
    bounds = (0.5, 0.75) if name == "clamp" else ()
    for x in (0.25, 1.0, 3.0):
        on_tensor = function(torch.tensor(x, dtype=torch.float64), *bounds)
        on_values = evaluate(function(symbol("score"), *bounds), {"score": torch.tensor(x, dtype=torch.float64)})
        torch.testing.assert_close(torch.tensor(function(x, *bounds), dtype=torch.float64), on_tensor)
        torch.testing.assert_close(on_values, on_tensor)


def test_numbers_that_leave_the_range_of_floats() -> None:
    assert tm.exp(1000.0) == tm.exp2(5000.0) == math.inf
    assert tm.sigmoid(-1000.0) == 0.0
    assert tm.sigmoid(1000.0) == 1.0
    assert tm.softplus(1000.0) == 1000.0
