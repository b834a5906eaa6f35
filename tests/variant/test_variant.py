"""Variants as values: traced expressions and their text, keys and operands, and users' functions."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tileattn
from tests.tools.positions import BATCH, HEADS, Positions, positions
from tileattn import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    FunctionMask,
    Mask,
    PrefixLM,
    ScoreMod,
    SlidingWindow,
    SoftCap,
    attention,
)
from tileattn import math as tm
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.variant.expression import TensorSymbol, dtype_of, symbol, text_of
from tileattn.variant.key import encode, normalize
from tileattn.variant.program import program, restore
from tileattn.variant.reading import evaluate, parse

POSITIONS = ("b", "h", "q", "k")
examples = settings(deadline=None, derandomize=True)


# --- Expressions: the same Python code on symbols and on tensors ---

Function = Callable[..., Any]  # (score, b, h, q, k, t0, t1) -> value; t0 a float tensor (h,), t1 an int tensor (b, k)

FLOAT_UNARY: list[Function] = [tm.tanh, tm.exp, tm.exp2, tm.sin, tm.cos, tm.abs, operator.neg, lambda x: x**3]
FLOAT_BINARY: list[Function] = [operator.add, operator.sub, operator.mul, operator.truediv, tm.minimum, tm.maximum]
INT_UNARY: list[Function] = [operator.neg, operator.abs, lambda x: x**2]
INT_BINARY: list[Function] = [operator.add, operator.sub, operator.mul, tm.minimum, tm.maximum]
COMPARISONS: list[Function] = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
LOGIC: list[Function] = [operator.and_, operator.or_]


def unary(op: Function, x: Function) -> Function:
    return lambda *a: op(x(*a))


def binary(op: Function, x: Function, y: Function) -> Function:
    return lambda *a: op(x(*a), y(*a))


def select(condition: Function, x: Function, y: Function) -> Function:
    return lambda *a: tm.where(condition(*a), x(*a), y(*a))


def constant(value: float) -> Function:
    return lambda *a: value


def argument(index: int) -> Function:
    return lambda *a: a[index]


int_leaves = st.sampled_from([argument(i) for i in range(1, 5)] + [lambda *a: a[6][a[1], a[4]]])
float_leaves = st.sampled_from([argument(0), lambda *a: a[5][a[2]]])
int_numbers = st.integers(-5, 5).map(constant)
float_numbers = st.floats(-3, 3, allow_subnormal=False).map(lambda x: constant(float(f"{x:.3g}")))


def with_a_leaf(op: Function, leaf: Function, other: Function, flip: bool) -> Function:
    return binary(op, other, leaf) if flip else binary(op, leaf, other)


def grown(leaves: st.SearchStrategy[Function], numbers: st.SearchStrategy[Function], one: Any, two: Any) -> Any:
    """Values that depend on an argument; a number stands only beside one that does."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(unary, st.sampled_from(one), inner),
            st.builds(binary, st.sampled_from(two), inner, inner),
            st.builds(with_a_leaf, st.sampled_from(two), inner, numbers, st.booleans()),
        ),
        max_leaves=5,
    )


def divided(op: Function, x: Function, by: int) -> Function:
    return lambda *a: op(x(*a), by)


ints = st.one_of(
    grown(int_leaves, int_numbers, INT_UNARY, INT_BINARY),
    st.builds(divided, st.sampled_from([operator.mod, operator.floordiv]), int_leaves, st.integers(1, 5)),
)
floats = grown(float_leaves, float_numbers, FLOAT_UNARY, FLOAT_BINARY)
conditions = st.recursive(
    st.one_of(
        st.builds(binary, st.sampled_from(COMPARISONS), ints, st.one_of(ints, int_numbers)),
        st.builds(binary, st.sampled_from(COMPARISONS), floats, st.one_of(floats, ints, float_numbers)),
    ),
    lambda inner: st.one_of(
        st.builds(binary, st.sampled_from(LOGIC), inner, inner),
        st.builds(binary, st.sampled_from(LOGIC), inner, st.booleans().map(constant)),
        st.builds(unary, st.just(operator.invert), inner),
    ),
    max_leaves=3,
)
values = st.one_of(
    ints,
    floats,
    conditions,
    st.builds(select, conditions, floats, st.one_of(floats, ints, float_numbers)),
    st.builds(select, conditions, ints, st.one_of(ints, int_numbers)),
    st.builds(binary, st.sampled_from(FLOAT_BINARY[:3]), floats, ints),
)

TENSORS = {"t0": torch.tensor([0.5, -1.25]), "t1": torch.tensor([[3, 1, 2], [0, -4, 7]])}
TENSOR_SYMBOLS = {
    name: TensorSymbol(name, tensor.dtype, tuple(size == 1 for size in tensor.shape))
    for name, tensor in TENSORS.items()
}


def grid() -> dict[str, Tensor]:
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 4, 3)), indexing="ij")
    score = torch.randn(b.shape, generator=torch.Generator().manual_seed(0))
    return {"score": score, "b": b, "h": h, "q": q - 1, "k": k}


def trace(function: Function) -> Any:
    return function(*map(symbol, ("score", *POSITIONS)), *TENSOR_SYMBOLS.values())


@settings(examples, max_examples=300)
@given(values)
def test_expressions_print_to_what_they_read_back_from(function: Function) -> None:
    expr = trace(function)
    text = text_of(expr)
    again = parse(text, TENSOR_SYMBOLS)
    assert text_of(again) == text
    assert dtype_of(again) == dtype_of(expr)
    assert "\n" not in text
    assert "}" not in text  # a variant's key ends a function there
    assert ";" not in text


@settings(examples, max_examples=300)
@given(values)
def test_expressions_compute_what_the_function_does(function: Function) -> None:
    expr = trace(function)
    arguments = grid()
    direct = function(*arguments.values(), *TENSORS.values())
    got = evaluate(parse(text_of(expr), TENSOR_SYMBOLS), {**arguments, **TENSORS})
    kind = "float" if direct.dtype.is_floating_point else "bool" if direct.dtype == torch.bool else "int"
    assert dtype_of(expr) == kind
    torch.testing.assert_close(torch.as_tensor(got).expand(direct.shape), direct, rtol=0, atol=0, equal_nan=True)


@settings(examples, max_examples=50)
@given(values)
def test_evaluating_on_symbols_gives_the_expression_back(function: Function) -> None:
    expr = trace(function)
    assert text_of(evaluate(expr, {name: symbol(name) for name in ("score", *POSITIONS)})) == text_of(expr)


@pytest.mark.parametrize("number", [0.1, 1e-30, -2.5e30, 1 / 3, math.inf, -math.inf, 7, -7, 2**31 - 1], ids=str)
def test_numbers_survive_the_text_exactly(number: float) -> None:
    text = str(symbol("score") * number)
    assert evaluate(parse(text, {}), {"score": 1.0}) == number
    assert type(parse(text, {}).args[1]) is type(number)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (symbol("q") + 0, "q"),
        (0 + symbol("q"), "q"),
        (symbol("q") - 0, "q"),
        (symbol("score") + 0.0, "(add score 0.0)"),
        ((symbol("k") <= symbol("q")) & True, "(le k q)"),
        (True & (symbol("k") <= symbol("q")), "(le k q)"),
        ((symbol("k") <= symbol("q")) | False, "(le k q)"),
        (tm.minimum(symbol("q"), symbol("q")), "q"),
        (1 - symbol("q"), "(sub 1 q)"),
        (tm.where(symbol("q") == 1, 1.0, symbol("score")), "(where (eq q 1) 1.0 score)"),
        (symbol("q") & 1, "(and q 1)"),
    ],
)
def test_text(expr: Any, text: str) -> None:
    assert str(expr) == text


@pytest.mark.parametrize("flag", [True, False])
def test_a_known_condition_can_be_negated(flag: bool) -> None:
    """Python's own ~True is -2, which holds as well."""
    q, k = torch.arange(4)[:, None], torch.arange(4)[None]
    for function in (lambda q, k: ~((k <= q) | flag), lambda q, k: ~((k <= q) & flag)):
        expr = function(symbol("q"), symbol("k"))
        assert torch.equal(evaluate(parse(str(expr), {}), {"q": q, "k": k}), function(q, k))


def test_the_bits_of_integers() -> None:
    q, k = torch.arange(8)[:, None], torch.arange(8)[None]
    for function in (lambda q, k: (q & 1) == 0, lambda q, k: (q | k) < 6, lambda q, k: ((q & 3) == k) | (k == 0)):
        expr = function(symbol("q"), symbol("k"))
        assert torch.equal(evaluate(parse(str(expr), {}), {"q": q, "k": k}), function(q, k))


TORCH_FUNCTIONS: list[Function] = [
    lambda s, q, k: torch.where(q >= k, s, 0.5 * s),
    lambda s, q, k: torch.tanh(s) + torch.exp(-torch.abs(s)),
    lambda s, q, k: torch.minimum(s, torch.maximum(q, k) * 0.5),
    lambda s, q, k: torch.where(torch.logical_and(q > k, torch.logical_not(k == 0)), s, -s),
    lambda s, q, k: torch.sin(s) * torch.cos(s) + torch.exp2(s) - torch.sqrt(torch.abs(s)),
    lambda s, q, k: torch.log(torch.abs(s) + 1.0) + torch.log2(torch.abs(s) + 1.0),
]


@pytest.mark.parametrize("function", TORCH_FUNCTIONS)
def test_functions_of_torch_are_traced_as_they_are(function: Function) -> None:
    arguments = {name: x for name, x in grid().items() if name in ("score", "q", "k")}
    expr = function(*map(symbol, arguments))
    torch.testing.assert_close(evaluate(parse(str(expr), {}), arguments), function(*arguments.values()))


@pytest.mark.parametrize("function", [tm.tanh, tm.exp, tm.exp2, tm.log, tm.log2, tm.sqrt, tm.sin, tm.cos, tm.abs])
def test_functions_of_one_number(function: Function) -> None:
    for x in (0.25, 1.0, 3.0):
        on_tensor = function(torch.tensor(x, dtype=torch.float64)).item()
        assert function(x) == pytest.approx(on_tensor, rel=1e-15, abs=1e-15)
        assert evaluate(function(symbol("score")), {"score": x}) == function(x)


def test_logarithm_of_zero() -> None:
    assert tm.log(0.0) == tm.log2(0.0) == -math.inf


@pytest.mark.parametrize(
    "text", ["", "(", "(add q", "q k", ")", "(nothing q k)", "(add q k))", "unknown", "(load t9 q)"]
)
def test_text_that_is_no_expression(text: str) -> None:
    with pytest.raises((ValueError, KeyError, IndexError)):
        parse(text, {})


# --- What cannot be traced ---

slopes, table = torch.tensor([0.5, 0.25]), torch.arange(12).view(2, 6)


def returns_none(b: Any, h: Any, q: Any, k: Any) -> None:
    q >= k  # noqa: B015


def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > 3:
        return k <= q
    return k == q


UNTRACEABLE: list[tuple[str, Function, str]] = [
    ("mask", branches, "cannot branch on its arguments .*tileattn.math.where"),
    ("mask", lambda b, h, q, k: q >= k and q < 5, "cannot branch .*`&`"),
    ("mask", lambda b, h, q, k: not q >= k, "cannot branch .*`~`"),
    ("mask", lambda b, h, q, k: 0 <= k < q, "cannot branch"),
    ("mask", lambda b, h, q, k: k <= min(q, 5), "cannot branch .*tileattn.math.minimum"),
    ("mask", returns_none, r"returns_none must return a value computed from \(b, h, q, k\), got NoneType"),
    ("mask", lambda b, h, q, k: (q >= k, k), "must return a value .*got tuple"),
    ("mask", lambda b, h, q, k: "q >= k", "must return a value .*got str"),
    ("mask", lambda b, h, q, k: ~q, "`~` .* takes conditions, .* not int values"),
    ("mask", lambda b, h, q, k: q & (k == 1), "`&` .* takes conditions, .* not int and bool values"),
    ("mask", lambda b, h, q, k: list(q), "one number, not a sequence"),
    ("mask", lambda b, h, q, k: [True, False][q], r"cannot index this object; .*tileattn.math.load\(tensor, b, q\)"),
    ("mask", lambda b, h, q, k: table[b] == k, "with 2 dimensions must be indexed with 2 integer positions"),
    ("mask", lambda b, h, q, k: table[b, q, k] == k, "with 2 dimensions must be indexed with 2 integer positions"),
    ("mask", lambda b, h, q, k: table[b, 1:] == k, "must be indexed with 2 integer positions, got"),
    ("mask", lambda b, h, q, k: table[b, q + 0.5] == k, "indexed with .* integer positions, got"),
    ("mask", lambda b, h, q, k: table[b, score_like] == k, "must be indexed with 2 integer positions, got"),
    ("mask", lambda b, h, q, k: k <= "q", "met str 'q': only numbers, positions and elements"),
    ("score_mod", lambda score, b, h, q, k: score * slopes, "as a whole: index it"),
    ("score_mod", lambda score, b, h, q, k: score * [1.0], "met list"),
    ("score_mod", lambda score, b, h, q, k: score + 1j, "met complex"),
    ("score_mod", lambda score, b, h, q, k: torch.erf(score), "torch.erf cannot be traced .*tileattn.math"),
    ("score_mod", lambda score, b, h, q, k: torch.add(score, 1.0, alpha=2), "torch.add cannot be traced"),
    ("score_mod", lambda score, b, h, q, k: torch.minimum(score, torch.ones(2)), r"as a whole: index .*`slopes\[h\]`"),
    ("score_mod", lambda score, b, h, q, k: score**0.3, r"integer power .*, not to 0.3; .*exp\(0.3 \* "),
    ("score_mod", lambda score, b, h, q, k: score**q, r"cannot raise a traced value to a traced power; .*exp\(y \* "),
    ("score_mod", lambda score, b, h, q, k: None, "must return a value .*score, b, h, q, k.*, got NoneType"),
    ("mask", lambda b, h, q, k: q - k, r"a mask must return a condition, .*, got the number \(sub q k\)"),
    ("mask", lambda b, h, q, k: 1, "a mask must return a condition, .*, got the number 1"),
    ("score_mod", lambda score, b, h, q, k: q >= k, r"a score_mod must return a number, got a condition \(ge q k\)"),
    ("score_mod", lambda score, q, k: score, "positional arguments"),
]  # fmt: skip
score_like = "k"


@pytest.mark.parametrize(("option", "function", "says"), UNTRACEABLE)
def test_what_cannot_be_traced_says_so(option: str, function: Function, says: str) -> None:
    q = torch.zeros(2, 6, 2, 8)
    with pytest.raises(TypeError, match=says):
        attention(q, q, q, **{option: function})


@pytest.mark.parametrize("seen", [True, False])
def test_a_mask_may_be_the_same_everywhere(seen: bool) -> None:
    q = torch.randn(1, 6, 2, 8)
    got = attention(q, q, q, mask=lambda b, h, q, k: seen)
    expected = attention(q, q, q) if seen else torch.zeros_like(got)
    torch.testing.assert_close(got, expected)


# --- Keys and operands ---


def test_a_key_holds_code_and_not_values() -> None:
    assert encode(Causal() & SlidingWindow(512, None), ())[0] == "And(Causal(),SlidingWindow(i,-))"
    assert encode(SlidingWindow(1, 2), ())[0] == encode(SlidingWindow(3, 4), ())[0]
    assert encode(SlidingWindow(1, 2), ())[0] != encode(SlidingWindow(1, None), ())[0]
    assert encode(SlidingWindow(1, None), ())[0] != encode(SlidingWindow(None, 1), ())[0]
    assert encode(None, [SoftCap(30.0)])[0] == encode(None, [SoftCap(50)])[0]
    assert encode(None, [Bias(torch.zeros(1, 2, 3, 4))])[0] != encode(None, [Bias(torch.zeros(1, 1, 3, 4))])[0]
    assert encode(None, [ALiBi(torch.zeros(4))])[0] != encode(None, [ALiBi(torch.zeros(4).half())])[0]
    assert encode(None, ())[0] == ""


def test_equal_functions_share_a_key() -> None:
    keys = {encode(*normalize(None, f, False))[0] for f in (
        lambda score, b, h, q, k: score + 0.5 * h,
        lambda s, batch, head, i, j: s + 0.5 * head,
    )}  # fmt: skip
    assert len(keys) == 1


def test_a_captured_number_is_part_of_the_key() -> None:
    def shifted(by: float) -> Function:
        return lambda score, b, h, q, k: score + by

    keys = {encode(None, [shifted(by)])[0] for by in (0.1, 0.2, 1, 1.0, 0.1)}
    assert len(keys) == 4


@settings(examples, max_examples=100)
@given(positions(), st.lists(st.integers(0, 3), max_size=3))
@example(Positions(Causal(), BATCH, HEADS, 3, 3), [0, 1, 2, 3])
def test_encode_and_restore_are_inverse(case: Positions, choice: list[int]) -> None:
    bias = torch.randn(1, HEADS, case.seqlen_q, case.seqlen_k, generator=torch.Generator().manual_seed(0))
    mods: list[Any] = [
        SoftCap(2.0),
        ALiBi(torch.tensor([0.5, 0.25])),
        Bias(bias),
        lambda s, b, h, q, k: s * slopes[h] + q,
    ]
    mods = [mods[i] for i in choice]
    key, operands = encode(case.mask, mods)
    mask, restored = restore(key, operands)
    b, h, row, k = torch.meshgrid(
        *(torch.arange(n) for n in (BATCH, HEADS, case.seqlen_q, case.seqlen_k)), indexing="ij"
    )
    q = row + case.first
    assert mask is not None
    assert torch.equal(torch.as_tensor(mask.allows(b, h, q, k)).expand(b.shape), case.allowed)
    score = expected = torch.randn(b.shape, generator=torch.Generator().manual_seed(1))
    for mod, again in zip(mods, restored, strict=True):
        score, expected = again(score, b, h, q, k), mod(expected, b, h, q, k)
    torch.testing.assert_close(score, expected, rtol=0, atol=0)
    traced = program(key)
    counted = len(operands.tensors) + len(operands.ints) + len(operands.floats)
    assert (traced.operands, traced.ints) == (counted, len(operands.ints))


def test_a_program_is_the_same_text_in_any_order_of_tracing() -> None:
    key = encode(Causal() & PrefixLM(3), [SoftCap(1.0), lambda s, b, h, q, k: s + slopes[h]])[0]
    first = str(program(key))
    program.cache_clear()
    program(encode(Documents(torch.arange(3)), ())[0])
    assert str(program(key)) == first


# --- Tensors that functions capture ---


def in_closure() -> Function:
    weights = torch.tensor([0.5, 0.25])
    return lambda score, b, h, q, k: score * weights[h]


def in_default(score: Any, b: Any, h: Any, q: Any, k: Any, weights: Any = torch.tensor([0.5, 0.25])) -> Any:  # noqa: B008
    return score * weights[h]


def in_keyword_default(score: Any, b: Any, h: Any, q: Any, k: Any, *, weights: Any = slopes) -> Any:
    return score * weights[h]


def in_globals(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * slopes[h]


def through_load(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * tm.load(slopes, h)


@pytest.mark.parametrize(
    "function", [in_closure(), in_default, in_keyword_default, in_globals, through_load], ids=lambda f: f.__name__
)
def test_captured_tensors_are_operands(function: Function) -> None:
    key, operands = encode(None, [function])
    assert key == "+{t:float32:n;(mul score (load t0 h))}"
    assert [tensor.tolist() for tensor in operands.tensors] == [[0.5, 0.25]]


def test_tensors_of_partial_functions() -> None:
    partial = functools.partial(lambda by, score, b, h, q, k, extra: score * by[h] + extra[h], slopes, extra=slopes + 1)
    key, operands = encode(None, [partial])
    assert key == "+{t:float32:n;t:float32:n;(add (mul score (load t0 h)) (load t1 h))}"
    assert torch.equal(operands.tensors[1], slopes + 1)


def test_tensors_that_are_reached_in_another_way() -> None:
    held, weights = [slopes], {"b": table}
    for function in (
        lambda score, b, h, q, k: score * held[0][h],
        lambda score, b, h, q, k: score * tm.load(held[0], h),
        lambda score, b, h, q, k: score * (1 * slopes)[h],
    ):
        key, operands = encode(None, [function])
        assert key == "+{t:float32:n;(mul score (load t0 h))}"
        assert torch.equal(operands.tensors[0], slopes)
    key, operands = encode(FunctionMask(lambda b, h, q, k: held[0].sum() * k > weights["b"][b, q]), ())
    assert key == "FunctionMask({t:float32:;t:int64:nn;(gt (mul (load t0) k) (load t1 b q))})"


def test_unused_tensors_are_no_operands() -> None:
    unused = torch.ones(3)
    key, operands = encode(None, [lambda score, b, h, q, k: (unused[b], score * slopes[h])[1]])
    assert key == "+{t:float32:n;(mul score (load t0 h))}"
    assert operands.tensors[0] is slopes


def test_two_captured_tensors_of_two_functions() -> None:
    other = torch.tensor([[1, 2, 3]])

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * slopes[h] + other[b, k]

    key, operands = encode(FunctionMask(lambda b, h, q, k: other[b, k] > 1), [mod, in_globals])
    assert key == (
        "FunctionMask({t:int64:1n;(gt (load t0 0 k) 1)})"
        "+{t:float32:n;t:int64:1n;(add (mul score (load t0 h)) (load t1 0 k))}+{t:float32:n;(mul score (load t0 h))}"
    )
    mask, mods = restore(key, operands)
    k = torch.arange(3)
    assert mask is not None
    assert mask.allows(0, 0, 0, k).tolist() == [False, True, True]
    assert mods[0](torch.ones(3), 0, 1, 0, k).tolist() == [1.25, 2.25, 3.25]


def test_new_values_in_a_captured_tensor_are_seen() -> None:
    weights = torch.tensor([1.0, 1.0])
    q, k, v = (torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * weights[h]

    assert torch.equal(attention(q, k, v, score_mod=mod), attention(q, k, v, score_mod=lambda s, b, h, q, k: s * 1.0))
    before = attention(q, k, v, score_mod=mod)
    weights.fill_(0.0)
    assert not torch.equal(attention(q, k, v, score_mod=mod), before)


# --- Classes of users ---


@dataclass(frozen=True, eq=False)
class EveryStep(Mask):
    """Every `step`-th key backwards from the query."""

    step: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k) % self.step == 0)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return 0, q_hi + 1


@dataclass(frozen=True, eq=False)
class Within(Mask):
    """Another mask, for some heads."""

    inner: Mask
    heads: Tensor
    bonus: int | None = None

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = self.inner.allows(b, h, q, k) | (tm.load(self.heads, h) == 0)
        return seen if self.bonus is None else seen | (k == self.bonus)


@dataclass(frozen=True, eq=False)
class Scaled(ScoreMod):
    """A factor, a tensor with a gradient, and nothing."""

    factor: float
    by_head: Tensor
    nothing: None = None

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * self.factor + tm.load(self.by_head, h) * tm.tanh(score)


@pytest.mark.parametrize(
    ("mask", "mods"),
    [
        (EveryStep(3), ()),
        (EveryStep(2) | SlidingWindow(1, 0), ()),
        (Within(EveryStep(2), torch.tensor([0, 1])), ()),
        (Within(Causal(), torch.tensor([0, 1]), 5) & SlidingWindow(20, 20), ()),
        (None, (Scaled(0.5, torch.tensor([0.1, 0.2])),)),
        (EveryStep(2), (Scaled(0.5, torch.tensor([0.1, 0.2])), SoftCap(1.0), in_globals)),
    ],
    ids=["own", "own-or-window", "nested", "nested-and-window", "own-score", "own-mask-and-scores"],
)
def test_classes_of_users_run(mask: Mask | None, mods: tuple[Any, ...]) -> None:
    q, k, v = (torch.randn(2, 33, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    got = attention(q, k, v, mask=mask, score_mod=mods, return_lse=True)
    arguments = (q, k, v, mask, mods)
    assert_forward_accurate("user", got, oracle_attention(*arguments), eager_attention(*arguments))  # type: ignore[arg-type]


def test_classes_of_users_have_gradients() -> None:
    by_head = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda q, x: attention(q, k, v, score_mod=Scaled(0.5, x), mask=EveryStep(2)), (q, by_head)
    )


def test_classes_of_users_are_keyed_by_their_name_and_fields() -> None:
    assert encode(Within(EveryStep(2), slopes, None), ())[0] == "Within(EveryStep(i),t:float32:n,-)"
    assert encode(EveryStep(2), ())[0] == encode(EveryStep(7), ())[0]


def test_a_class_that_is_no_dataclass_says_so() -> None:
    class Plain(Mask):
        def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return k <= q

    with pytest.raises(TypeError, match="Plain must be a frozen dataclass"):
        encode(Plain(), ())


def test_two_classes_with_one_name_say_so() -> None:
    def made() -> type[Mask]:
        @dataclass(frozen=True, eq=False)
        class Twice(Mask):
            def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
                return k <= q

        return Twice

    first, second = made(), made()
    encode(first(), ())
    encode(first(), ())
    with pytest.raises(TypeError, match="two masks or score modifications are called 'Twice'"):
        encode(second(), ())


@pytest.mark.parametrize("value", ["text", [1, 2], 1j], ids=str)
def test_a_field_that_is_no_operand_says_so(value: object) -> None:
    with pytest.raises(
        TypeError, match=f"fields of a mask or .* must be numbers, tensors, .* got {type(value).__name__}"
    ):
        encode(None, [Scaled(value, slopes)])  # type: ignore[arg-type]


def test_masks_are_values_that_do_not_change() -> None:
    for value in (Causal(), SlidingWindow(1, 2), SoftCap(3.0)):
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, 0)


def test_public_names() -> None:
    assert set(tm.__all__) >= {"where", "minimum", "maximum", "tanh", "exp", "load"}
    assert tileattn.math is tm


def test_a_function_of_other_arguments_says_which_there_are() -> None:
    def two(score: Any, q: Any) -> Any:
        return score

    def failing(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + len(3)  # type: ignore[arg-type]

    text = r"score_mod must be a function score_mod\(score, b, h, q, k\), got two\(score: .*, q: .*\).*: too many"
    with pytest.raises(TypeError, match=text):
        encode(None, (two,))
    with pytest.raises(TypeError, match="has no len"):
        encode(None, (failing,))
