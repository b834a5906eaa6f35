"""Derivatives of score modifications: against torch's autograd, in float64."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tileattn import ALiBi, Bias, SoftCap
from tileattn import math as tm
from tileattn.variant.derivative import derivative, float_loads
from tileattn.variant.expression import Expr, TensorSymbol, nodes, symbol, text_of
from tileattn.variant.key import encode
from tileattn.variant.program import program
from tileattn.variant.reading import evaluate, parse

Function = Callable[..., Any]  # (score, weight, h, q) -> value; weight an element of a float tensor (h,)

SCORE = symbol("score")
WEIGHTS = TensorSymbol("t0", torch.float64, (False,))
SHAPE = (2, 5, 16)  # heads, queries, scores


@pytest.fixture(autouse=True)
def numbers_are_float64() -> Iterator[None]:
    """Where torch makes tensors of the numbers in an expression."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positions() -> dict[str, Tensor]:
    return {"h": torch.arange(SHAPE[0])[:, None, None], "q": torch.arange(SHAPE[1])[:, None] - 2}


def both(expr: Any, values: dict[str, Tensor], wrt: Expr, x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative, and autograd's, where `wrt` has the value `x` for each element."""
    x = x.clone().requires_grad_()
    if wrt.op == "symbol":
        result = evaluate(expr, {**values, wrt.args[0]: x})
        slope = evaluate(derivative(expr, wrt), {**values, wrt.args[0]: x})
    else:  # as the elements of a tensor of which each result has its own
        result, slope = (_with_loaded(e, str(wrt), x, values) for e in (expr, derivative(expr, wrt)))
    result = torch.as_tensor(result).expand(x.shape)
    expected = None
    if result.requires_grad:
        (expected,) = torch.autograd.grad(result.sum(), x, allow_unused=True)
    expected = torch.zeros_like(x) if expected is None else expected
    return torch.as_tensor(slope).detach().to(x.dtype).expand(x.shape), expected


def _with_loaded(expr: Any, text: str, x: Tensor, values: dict[str, Tensor]) -> Any:
    """Evaluates the expression with x in place of the load of that text."""
    return evaluate(_replaced(expr, text), {**values, "f9": x})


def _replaced(expr: Any, text: str) -> Any:
    if not isinstance(expr, Expr):
        return expr
    return (
        symbol("f9") if str(expr) == text else Expr(expr.op, tuple(_replaced(a, text) for a in expr.args), expr.dtype)
    )


def assert_as_autograd(function: Function, score: Tensor, weight: Tensor) -> None:
    expr = function(SCORE, WEIGHTS[symbol("h"),], symbol("h"), symbol("q"))
    at = {"score": score, **positions(), "t0": weight[:, 0, 0]}
    for wrt, x in ((SCORE, score), (WEIGHTS[symbol("h"),], weight.expand(SHAPE))):
        got, expected = both(expr, at, wrt, x)
        # Autograd multiplies zeros by infinities where the tangent vanishes; where it finds a number, so do we.
        known = torch.isfinite(expected)
        torch.testing.assert_close(got[known], expected[known], rtol=1e-7, atol=1e-12, msg=lambda m: f"{expr}: {m}")


OPERATIONS: dict[str, Function] = {
    "add": lambda s, w, h, q: s + w,
    "add numbers": lambda s, w, h, q: 2 + s + 0.5,
    "sub": lambda s, w, h, q: w - s,
    "negative": lambda s, w, h, q: -s,
    "mul": lambda s, w, h, q: s * w,
    "mul positions": lambda s, w, h, q: q * s * h,
    "mul conditions": lambda s, w, h, q: s * (q > 0),
    "power": lambda s, w, h, q: s**3,
    "div": lambda s, w, h, q: s / w,
    "div by score": lambda s, w, h, q: w / s,
    "div by position": lambda s, w, h, q: s / (q + 9),
    "div by number": lambda s, w, h, q: s / 3,
    "div by zero": lambda s, w, h, q: tm.where(q > 0, s / 0.0, s * w),
    "floordiv of positions": lambda s, w, h, q: s * (q // 2),
    "mod number": lambda s, w, h, q: s % 0.75,
    "mod": lambda s, w, h, q: s % w,
    "mod of positions": lambda s, w, h, q: s * (q % 2),
    "min": lambda s, w, h, q: tm.minimum(s, w),
    "max": lambda s, w, h, q: tm.maximum(s, w),
    "clamp": lambda s, w, h, q: tm.maximum(tm.minimum(s, 0.5), -0.5),
    "max of position": lambda s, w, h, q: tm.maximum(q, s * w),
    "min of positions": lambda s, w, h, q: tm.minimum(q, h) * s,
    "where": lambda s, w, h, q: tm.where(s > w, s * w, q),
    "where same": lambda s, w, h, q: tm.where(q > 0, s + 1, s + 2),
    "abs": lambda s, w, h, q: tm.abs(s * w),
    "abs of position": lambda s, w, h, q: s - w * abs(q - 1),
    "tanh": lambda s, w, h, q: tm.tanh(s * w),
    "sigmoid": lambda s, w, h, q: tm.sigmoid(s * w),
    "int": lambda s, w, h, q: s * parse("(int w)".replace("w", "(mul score 3.0)"), {}),
    "exp": lambda s, w, h, q: tm.exp(s * w),
    "exp2": lambda s, w, h, q: tm.exp2(s * w),
    "log": lambda s, w, h, q: tm.log(s * s + w),
    "log2": lambda s, w, h, q: tm.log2(abs(s)),
    "sqrt": lambda s, w, h, q: tm.sqrt(abs(s) + abs(w)),
    "sin": lambda s, w, h, q: tm.sin(s * w),
    "cos": lambda s, w, h, q: tm.cos(s * w),
    "float": lambda s, w, h, q: s * parse("(float q)", {}) + parse("(float score)", {}) * w,
    "comparisons": lambda s, w, h, q: tm.where((s > w) & ~(s == 1) | (s <= -1) & (s != 0) | (w < s) | (w >= 2), s, w),
    "constant": lambda s, w, h, q: q * 2.0,
    "one node twice": lambda s, w, h, q: (lambda x: x * x + tm.sin(x))(tm.exp(s * w)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name: str) -> None:
    assert_as_autograd(OPERATIONS[name], random(*SHAPE, seed=0), random(SHAPE[0], 1, 1, seed=1))


def test_every_operation_has_a_rule() -> None:
    """The operations above are all that there are."""
    from tileattn.variant.operations import OPS

    arguments = (SCORE, WEIGHTS[symbol("h"),], symbol("h"), symbol("q"))
    seen = {node.op for function in OPERATIONS.values() for node in nodes(function(*arguments))}
    assert set(OPS) <= seen


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s: tm.abs(s), 0.0),
        (lambda s: tm.minimum(s, 0.0), 0.5),
        (lambda s: tm.maximum(0.0, s), 0.5),
        (lambda s: tm.maximum(s, 2 * s), 1.5),
        (lambda s: tm.where(s > 0, s, 3 * s), 3.0),
    ],
)
def test_where_there_is_no_derivative_as_torch(function: Function, expected: float) -> None:
    got, autograd = both(function(SCORE), {}, SCORE, torch.zeros(3))
    assert got.tolist() == autograd.tolist() == [expected] * 3


def test_floordiv_has_none() -> None:
    """As floor has none in torch, which does not differentiate its floor_divide."""
    weight = WEIGHTS[symbol("h"),]
    assert derivative(SCORE // weight, SCORE) == derivative(SCORE // weight, weight) == 0.0
    assert derivative(SCORE // 0.5 + 2 * SCORE, SCORE) == 2.0


# --- Random expressions ---


def binary(op: Function, x: Function, y: Function) -> Function:
    return lambda *a: op(x(*a), y(*a))


def unary(op: Function, x: Function) -> Function:
    return lambda *a: op(x(*a))


def select(x: Function, y: Function, z: Function) -> Function:
    return lambda *a: tm.where(x(*a) > y(*a), z(*a), x(*a))


def safe_log(x: Any) -> Any:
    return tm.log(x * x + 0.5)


def safe_sqrt(x: Any) -> Any:
    return tm.sqrt(abs(x) + 0.25)


UNARY: list[Function] = [tm.tanh, tm.sin, tm.cos, tm.abs, operator.neg, safe_log, safe_sqrt, lambda x: x**2,
                         lambda x: tm.exp(tm.sin(x)), lambda x: tm.exp2(tm.cos(x)), lambda x: x % 0.7]  # fmt: skip
BINARY: list[Function] = [operator.add, operator.sub, operator.mul, tm.minimum, tm.maximum,
                          lambda x, y: x / (2 + tm.sin(y))]  # fmt: skip
leaves = st.one_of(
    st.sampled_from([0, 0, 1, 2, 3]).map(lambda i: lambda *a: a[i]),
    st.sampled_from([-2, 0, 1, 3, 0.0, 1.0, -0.5, 1.75]).map(lambda number: lambda *a: number),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(unary, st.sampled_from(UNARY), inner),
        st.builds(binary, st.sampled_from(BINARY), inner, inner),
        st.builds(select, inner, inner, inner),
    ),
    max_leaves=6,
)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(trees)
def test_random_expressions(function: Function) -> None:
    assert_as_autograd(lambda *a: function(*a) + 0.0 * a[0], random(*SHAPE, seed=2), random(SHAPE[0], 1, 1, seed=3))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(trees)
def test_derivatives_print_to_what_they_read_back_from(function: Function) -> None:
    arguments = (SCORE, WEIGHTS[symbol("h"),], symbol("h"), symbol("q"))
    slope = derivative(SCORE * function(*arguments), SCORE)
    assert text_of(parse(text_of(slope), {"t0": WEIGHTS})) == text_of(slope)


# --- Programs ---

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 3, 4, 6


def slopes() -> Tensor:
    return torch.linspace(0.1, 0.5, HEADS, dtype=torch.float64)


def bias() -> Tensor:
    return random(1, HEADS, SEQLEN_Q, SEQLEN_K, seed=4)


def captures(table: Tensor) -> Function:
    return lambda score, b, h, q, k: score * table[h, abs(q - k)] + tm.tanh(table[h, 0])


PROGRAMS: dict[str, list[Any]] = {
    "softcap": [SoftCap(1.5)],
    "alibi": [ALiBi(slopes())],
    "bias": [Bias(bias())],
    "bias of keys": [Bias(random(BATCH, 1, 1, SEQLEN_K, seed=5))],
    "bias then softcap": [Bias(bias()), SoftCap(1.5)],
    "alibi then softcap then alibi": [ALiBi(slopes()), SoftCap(1.5), ALiBi(-slopes())],
    "two loads of one tensor": [captures(random(HEADS, SEQLEN_K, seed=6))],
    "squared": [lambda score, b, h, q, k: score * abs(score), SoftCap(4.0)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    key, operands = encode(None, PROGRAMS[name])
    score = program(key).score
    sizes = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    b, h, q, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    values = {
        **{f"t{i}": tensor.clone().requires_grad_() for i, tensor in enumerate(operands.tensors)},
        **{f"f{i}": torch.tensor(number) for i, number in enumerate(operands.floats)},
    }
    values |= {"b": b, "h": h, "q": q + SEQLEN_K - SEQLEN_Q, "k": k}
    values["score"] = random(*sizes, seed=7).requires_grad_()
    out = random(*sizes, seed=8)  # the gradient of the modified scores
    result = evaluate(score, values)
    leaves = [values["score"], *(values[f"t{i}"] for i in range(len(operands.tensors)))]
    expected = torch.autograd.grad(result, leaves, out)
    slope = torch.as_tensor(evaluate(derivative(score, SCORE), values))
    torch.testing.assert_close(out * slope, expected[0])
    # Gradients of tensors, as a kernel adds them up: each load's part goes to the element that it has read.
    gradients = {f"t{i}": torch.zeros_like(tensor) for i, tensor in enumerate(operands.tensors)}
    for load in float_loads(score):
        name, *index = load.args
        where = [torch.as_tensor(evaluate(i, values)).expand(sizes) for i in index]
        gradients[name].index_put_(tuple(where), out * evaluate(derivative(score, load), values), accumulate=True)
    for got, want in zip(gradients.values(), expected[1:], strict=True):
        torch.testing.assert_close(got.detach(), want)


def test_what_is_not_there_costs_nothing() -> None:
    score = program(encode(None, [ALiBi(slopes())])[0]).score
    (slope,) = float_loads(score)
    assert derivative(score, SCORE) == 1.0
    assert str(derivative(score, slope)) == "(sub 0 (float (abs (sub q k))))"
    score = program(encode(None, [Bias(bias())])[0]).score
    assert derivative(score, SCORE) == derivative(score, float_loads(score)[0]) == 1.0
    assert derivative(score, symbol("f0")) == 0.0
    assert derivative(2.5, SCORE) == 0.0


def test_integers_that_become_factors_are_floats() -> None:
    """In int32, q * q * k would overflow at 1300 tokens."""
    q, k = symbol("q"), symbol("k")
    assert str(derivative(SCORE * q * q * k, SCORE)) == "(mul (float k) (mul (float q) (float q)))"


def test_float_loads() -> None:
    q, h = symbol("q"), symbol("h")
    integers, flags = TensorSymbol("t1", torch.int32, (False,)), TensorSymbol("t2", torch.bool, (False,))
    other = TensorSymbol("t3", torch.float16, (False, False))
    weight = WEIGHTS[q,]
    score = SCORE * weight + tm.where(flags[q,], weight, integers[q,]) + other[integers[h,], 0]
    assert [str(load) for load in float_loads(score)] == ["(load t0 q)", "(load t3 (load t1 h) 0)"]
    assert float_loads(tm.where(weight > 0, SCORE, 0.0) + weight // 1.0) == ()  # it is read, but nothing depends on it
    assert float_loads(1.0) == ()


@pytest.mark.parametrize(
    "wrt", [symbol("q"), SCORE + 1, "score", TensorSymbol("t1", torch.int32, (False,))[symbol("q"),]]
)
def test_with_respect_to_something_else(wrt: Any) -> None:
    with pytest.raises(TypeError, match="derivative: wrt must be a float symbol or the load of a float tensor"):
        derivative(SCORE, wrt)
