"""Emitted score modifications: they compute what was written, and convert integers only where that is exact."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tileattn import ALiBi, SoftCap
from tileattn import math as tm
from tileattn.kernels.tilelang.tile.simplify import LOG2E, ScoreProgram, score_program
from tileattn.kernels.tilelang.tile.steady import is_uniform, slope_of, step_of
from tileattn.variant.expression import nodes, symbol
from tileattn.variant.key import encode
from tileattn.variant.program import program
from tileattn.variant.reading import evaluate

Mod = Callable[..., Any]

POSITIONS = ("b", "h", "q", "k")
SLOPES = torch.tensor([0.5, 0.25, -0.125], dtype=torch.float64)
OFFSETS = torch.tensor([3, -2, 100])
CAP = 3.0

MODS: dict[str, Mod] = {
    "softcap": lambda score, b, h, q, k: CAP * tm.tanh(score / CAP),
    "negative cap": lambda score, b, h, q, k: tm.tanh(score) * -CAP,
    "cap by head": lambda score, b, h, q, k: SLOPES[h] * tm.tanh(score / SLOPES[h]),
    "condition as a cap": lambda score, b, h, q, k: tm.tanh(score) * (h == 0),
    "tanh as a cap": lambda score, b, h, q, k: tm.tanh(score) * (3.0 * tm.tanh(SLOPES[h])),
    "cap of zero": lambda score, b, h, q, k: tm.tanh(score) * (SLOPES[h] - SLOPES[h]),
    "tanh of a sum": lambda score, b, h, q, k: tm.tanh(score + 0.01 * (k - q)) * 2 - 1,
    "tanh of tanh": lambda score, b, h, q, k: tm.tanh(tm.tanh(score * 0.5) * 4) * SLOPES[h],
    "alibi": lambda score, b, h, q, k: score - SLOPES[h] * abs(q - k),
    "table": lambda score, b, h, q, k: score + SLOPES[k % 3] / SLOPES[h],
    "integers": lambda score, b, h, q, k: score * 100000 * 100000 * h + OFFSETS[h] * (q - k) ** 2,
    "where": lambda score, b, h, q, k: tm.where(q - k < 3, score * 0.5, score / (1 + h) + abs(k - q)),
    "division": lambda score, b, h, q, k: score / (q + 1) + 1 / (score * score + 1) + score / 4 / SLOPES[h],
    "nothing of the score": lambda score, b, h, q, k: SLOPES[h] * 2.0,
    "power": lambda score, b, h, q, k: score + (k / 65536.0) ** 8,
    "condition": lambda score, b, h, q, k: score * 1.5 * (q >= k),
    "several slopes": lambda score, b, h, q, k: score * 2 - 0.5 * (q - k) + SLOPES[h] * k - h * 0.25 + abs(k - q) / 8,
    "falling factor": lambda score, b, h, q, k: (1.0 - abs(q - k) * 0.01) * score * SLOPES[h],
}


def rewritten(mod: Mod, hardware_tanh: bool, causal: bool = False) -> tuple[Any, ScoreProgram, dict[str, torch.Tensor]]:
    """The modification as traced and as emitted, and the values of its tensors."""
    key, operands = encode(None, [mod])
    traced = program(key).score
    tensors = {f"t{index}": tensor for index, tensor in enumerate(operands.tensors)}
    return traced, score_program(traced, hardware_tanh, causal), tensors


def modified(emitted: ScoreProgram, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The scores that a kernel computes."""
    computed = functools.partial(evaluate, dtype=dtype)
    values = values | {f"uniform{i}": computed(expr, values) for i, expr in enumerate(emitted.uniforms)}
    unit = computed(emitted.log2_unit, values) / LOG2E
    assert torch.as_tensor(unit > 0).all()
    return computed(emitted.score, values) * unit


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hardware_tanh", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_rewriting_changes_nothing_but_roundings(name: str, hardware_tanh: bool, causal: bool) -> None:
    """Under a causal mask the scores of later keys may have any value."""
    traced, emitted, tensors = rewritten(MODS[name], hardware_tanh, causal)
    grid = torch.meshgrid(*(torch.arange(size) for size in (2, 3, 8, 8)), indexing="ij")
    values: dict[str, Any] = dict(zip(POSITIONS, grid)) | tensors
    raw = torch.randn(grid[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20
    scale = torch.tensor(0.125, dtype=torch.float64)
    expected = evaluate(traced, values | {"score": raw * scale}, torch.float64)
    got = modified(emitted, values | {"raw": raw, "scale": scale}, torch.float64)
    got, expected = (torch.as_tensor(x).expand(raw.shape) for x in (got, expected))
    seen = grid[2] >= grid[3] if causal else torch.ones_like(grid[2], dtype=torch.bool)
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-11, atol=1e-11)


def test_what_is_in_range_stays_in_range() -> None:
    """k ** 8 and 65536 ** -8 are not float32's, though their product is."""
    _, emitted, _ = rewritten(lambda score, b, h, q, k: score + (k / 65536.0) ** 8, False)
    k = torch.tensor([60000, 65536], dtype=torch.int32)
    values = {"raw": torch.zeros(2), "scale": torch.tensor(0.125), "k": k}
    values |= {f"uniform{i}": evaluate(expr, values) for i, expr in enumerate(emitted.uniforms)}
    torch.testing.assert_close(evaluate(emitted.score, values), torch.tensor([(60000 / 65536) ** 8, 1.0]))
    numbers = [abs(arg) for node in nodes(emitted.score) for arg in node.args if isinstance(arg, float)]
    assert all(number > 1e-37 for number in numbers)


@pytest.mark.parametrize("x", [0.0, 1e-30, 300.0, -300.0, math.inf, -math.inf, math.nan])
def test_tanh_by_exp2_at_the_ends(x: float) -> None:
    """exp2 overflows there in float32."""
    _, emitted, _ = rewritten(lambda score, b, h, q, k: 2.0 * tm.tanh(score), hardware_tanh=False)
    got = modified(emitted, {"raw": torch.tensor(x), "scale": torch.tensor(1.0)})
    torch.testing.assert_close(got, 2 * torch.tanh(torch.tensor(x)), equal_nan=True)


def test_what_a_head_shares_is_computed_once() -> None:
    for mod in (ALiBi(SLOPES), SoftCap(30.0)):
        for hardware_tanh in (False, True):
            traced, emitted, _ = rewritten(mod, hardware_tanh)
            operations = [node.op for node in nodes(emitted.score)]
            assert "load" not in operations
            assert operations.count("div") == (isinstance(mod, SoftCap) and not hardware_tanh)  # 1 / (exp2 + 1)
            assert all(is_uniform(uniform) for uniform in emitted.uniforms)
            assert "load" in {node.op for node in nodes(traced)} or isinstance(mod, SoftCap)


def test_scale_and_cap_are_one_factor() -> None:
    _, emitted, _ = rewritten(SoftCap(30.0), hardware_tanh=True)
    assert str(emitted.score) == "(tanh (mul raw uniform0))"
    assert str(emitted.uniforms[0]) == "(mul (mul scale (div 1.0 f0)) (where (lt f0 0.0) -1.0 1.0))"
    _, emitted, _ = rewritten(SoftCap(30.0), hardware_tanh=False)
    assert str(emitted.score) == "(sub 1.0 (mul (div 1.0 (add (exp2 (mul raw uniform0)) 1.0)) 2.0))"


def test_a_cap_is_left_to_the_softmax() -> None:
    for hardware_tanh in (False, True):
        _, emitted, _ = rewritten(SoftCap(CAP), hardware_tanh)
        assert str(emitted.log2_unit) == "uniform1"
        assert str(emitted.uniforms[1]) == f"(mul (where (lt (abs f0) 1e-30) 1e-30 (abs f0)) {LOG2E})"
    _, emitted, _ = rewritten(ALiBi(SLOPES), True)
    assert emitted.log2_unit == LOG2E


def test_no_tanh_is_left_where_the_hardwares_is_not_exact_enough() -> None:
    for name, mod in MODS.items():
        _, emitted, _ = rewritten(mod, hardware_tanh=False)
        for expr in (emitted.score, emitted.log2_unit, *emitted.uniforms):
            assert "tanh" not in {node.op for node in nodes(expr)}, name


def test_a_cap_that_is_no_number_gives_no_number() -> None:
    _, emitted, tensors = rewritten(lambda score, b, h, q, k: SLOPES[h] * tm.tanh(score), hardware_tanh=True)
    values = {"raw": torch.tensor(1.0), "scale": torch.tensor(1.0), "h": torch.tensor(0)}
    values |= {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()}
    values |= {f"uniform{i}": evaluate(expr, values) for i, expr in enumerate(emitted.uniforms)}
    assert torch.isnan(evaluate(emitted.score, values) * evaluate(emitted.log2_unit, values))


def test_loads_by_position_are_not_hoisted() -> None:
    _, emitted, _ = rewritten(lambda score, b, h, q, k: score + SLOPES[q] * SLOPES[k], hardware_tanh=True)
    assert [node.op for node in nodes(emitted.score)].count("load") == 2
    assert emitted.uniforms == ()


def test_no_distance_is_taken_under_a_causal_mask() -> None:
    for mod in (ALiBi(SLOPES), MODS["falling factor"], MODS["several slopes"]):
        _, emitted, _ = rewritten(mod, True, causal=True)
        assert "abs" not in {node.op for node in nodes(emitted.score)}


def test_what_grows_steadily_is_added_up_before_the_score_joins() -> None:
    _, emitted, _ = rewritten(lambda score, b, h, q, k: score + 0.01 * (k - q) - 0.5 * k + 3.0, True)
    assert str(emitted.score.args[0]) == "(mul raw scale)"
    assert slope_of(emitted.score.args[1], "k") == pytest.approx(-0.49)


# --- Integers that become floats ---

Q, K, I0 = symbol("q"), symbol("k"), symbol("i0")

STEPS = {
    "k": (K, 1),
    "q - k": (Q - K, -1),
    "3 (k - q) + i0": (3 * (K - Q) + I0, 3),
    "-k": (-K, -1),
    "q": (Q, 0),
    "q // 2 - 2 k": (Q // 2 - K * 2, -2),
    "q k": (Q * K, None),
    "i0 k": (I0 * K, None),
    "k // 2": (K // 2, None),
    "k % 2": (K % 2, None),
    "|k|": (abs(K), None),
    "k - k": (K - K, 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_k(name: str) -> None:
    expr, step = STEPS[name]
    assert step_of(expr) == step


SLANTS = {
    "0.5 (q - k)": (0.5 * (Q - K), -0.5),
    "(k + 1) / 4 before the factor": (1.0 - (K + 1.0) * 0.25, -0.25),
    "q alone": (2.0 * Q, 0.0),
    "q k": (1.0 * Q * K, None),
    "|k|": (1.0 * abs(K), None),
    "a square": ((0.5 * K) * (0.5 * K), None),
    "with the score": (symbol("score") + 1.0 * K, None),
    "large steps": (1.0 * (K * 2**17), None),
    "2^100 a key": (K * 2.0**100, 2.0**100),
    "more than 2^100 a key": (K * -(2.0**101), None),
    "more than 2^100 a key by two factors": (2.0**60 * ((Q - K) * 2.0**60), None),
    "more than 2^100 a key by a sum": (K * 2.0**100 + K * 2.0**90, None),
    "infinite": (K * math.inf, None),
    "NaN": (K * math.nan, None),
}


@pytest.mark.parametrize("name", SLANTS)
def test_slopes_by_k(name: str) -> None:
    expr, slope = SLANTS[name]
    assert slope_of(expr, "k") == slope


@pytest.mark.parametrize("expr", [0.5 * (K - Q), 3.0 - (7 * K - I0) * 0.125, (K + Q) * 2.0 + K])
def test_a_sum_that_grows_steadily_costs_one_operation_for_each_column(expr: Any) -> None:
    """Its value at the thread's first key, and a constant."""
    tree, values = _emitted(expr), {"q": 5, "i0": 3, "start": 40, "offset": 0}
    for offset in (0, 1, 8, 121):
        expected = evaluate(expr, {"q": 5, "k": 40 + offset, "i0": 3}, torch.float64)
        assert _value(tree, values | {"offset": offset}) == pytest.approx(float(expected), rel=1e-6)
    assert not _names(tree.a) & {"value", "offset"}
    assert _names(tree.b) == {"offset"}


@pytest.mark.parametrize("slope", [-1e38, -3e38, 2.0**101])
def test_huge_slopes_give_infinities_and_no_nan(slope: float) -> None:
    """The value at the tile's first key and what is added to it must not be infinities of opposite signs."""
    tree, values = _emitted(slope * (Q - K)), {"q": 100, "i0": 0, "start": 0, "offset": 100, "value": 100}
    assert _value(tree, values) == 0.0


def _emitted(expr: Any) -> Any:
    """A conversion to float32 as TileLang's expression of q, i0 and a key's value, start and offset; and those."""
    pytest.importorskip("tilelang")
    from tvm import tirx

    from tileattn.kernels.tilelang.tile.expressions import Emitter, Key

    v = {name: tirx.Var(name, "int32") for name in ("q", "i0", "value", "start", "offset")}
    return Emitter({"i0": v["i0"]})(expr * 1.0, q=v["q"], k=Key(v["value"], v["start"], v["offset"]))


def _names(tree: Any) -> set[str]:
    from tvm import tirx
    from tvm.tirx import stmt_functor

    names: set[str] = set()
    stmt_functor.post_order_visit(tree, lambda node: names.add(node.name) if isinstance(node, tirx.Var) else None)
    return names


@pytest.mark.parametrize("expr", [K - Q, abs(Q - K), tm.minimum(K, Q + 5), tm.where(Q < 3, Q - K, K), 7 * K - I0])
def test_what_grows_steadily_is_converted_once_per_thread(expr: Any) -> None:
    assert _names(_emitted(expr)) >= {"start", "offset"}
    assert "value" not in _names(_emitted(expr))


@pytest.mark.parametrize("expr", [Q * K, K // 3, (Q - K) % 3, K * 2**17, I0 * K, abs(Q * K)])
def test_other_integers_are_computed_as_integers(expr: Any) -> None:
    assert "value" in _names(_emitted(expr))
    assert not _names(_emitted(expr)) & {"start", "offset"}


def test_conditions_compare_integers() -> None:
    assert _names(_emitted(tm.where(Q - K < 64, Q, 2 * Q))) == {"q", "value"}


@pytest.mark.parametrize("start", [0, 1000, 2**24 - 130, 2**24 - 1, 2**25 + 1, 2**30 + 7])
def test_conversion_near_the_end_of_float32s_integers(start: int) -> None:
    """Exact below 2^24; beyond, at most one rounding more than a conversion has."""
    tree = _emitted(K - Q)
    for offset in (0, 1, 9, 119, 121):
        exact = start + offset
        got = _value(tree, {"q": 0, "start": start, "offset": offset})
        assert got == exact if exact <= 2**24 else abs(got - exact) <= 2 * 2**-24 * exact


def _value(tree: Any, values: dict[str, int]) -> float:
    """What the machine computes, every float operation rounded to float32."""
    from tvm import tirx

    def single(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32))

    if isinstance(tree, tirx.Var):
        return values[tree.name]
    if isinstance(tree, (tirx.IntImm, tirx.FloatImm)):
        return tree.value
    if isinstance(tree, tirx.Cast):
        return single(_value(tree.value, values))
    op = {tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul}[type(tree)]
    result = op(_value(tree.a, values), _value(tree.b, values))
    return single(result) if "float" in str(tree.dtype) else result
