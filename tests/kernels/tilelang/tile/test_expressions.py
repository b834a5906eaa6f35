"""The integer values of TileLang's expressions: with constant operands they fold to a constant."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tilelang")

import tilelang.language as T
from tvm import arith

from tileattn import math as tm
from tileattn.kernels.tilelang.tile.expressions import Emitter
from tileattn.variant.expression import symbol
from tileattn.variant.torch_functions import fmod, shift_right

POSITIONS = (-70000, -65, -7, -3, -1, 0, 1, 2, 5, 64, 70001)
OPERATIONS = {
    "floor by 3": lambda q, k: q // 3,
    "floor by -4": lambda q, k: q // -4,
    "floor of a difference": lambda q, k: (q - k) // 5,
    "remainder by 5": lambda q, k: q % 5,
    "remainder by -3": lambda q, k: q % -3,
    "remainder of a product": lambda q, k: (q * k) % 7,
    "product": lambda q, k: (q * k) // 65536,
    "product with a large constant": lambda q, k: (q * 3000000000) % 11,
    "exclusive or": lambda q, k: q ^ k,
    "bits": lambda q, k: (q & 6) | (k & 9),
    "shift": lambda q, k: (q >> 2) - (k << 3),
}


def folded(expr: Any, **positions: int) -> int:
    return int(arith.Analyzer().simplify(Emitter({})(expr, **{name: T.int32(x) for name, x in positions.items()})))


@pytest.mark.parametrize("name", OPERATIONS)
def test_integers_are_pythons(name: str) -> None:
    """Values equal Python's, also for negative integers and products beyond int32."""
    function = OPERATIONS[name]
    traced = function(symbol("q"), symbol("k"))
    for q in POSITIONS:
        for k in POSITIONS:
            assert folded(traced, q=q, k=k) == function(q, k), (q, k)


def test_quotients_that_are_rounded_towards_zero() -> None:
    for q in POSITIONS:
        assert folded(fmod(symbol("q"), 4), q=q) == (abs(q) % 4) * (1 if q >= 0 else -1)
        assert folded(shift_right(symbol("q"), 3), q=q) == q >> 3


def test_an_integer_beyond_int32_comes_as_the_nearest() -> None:
    assert folded(symbol("q") * symbol("k"), q=2**20, k=2**20) == 2**31 - 1
    assert folded(symbol("q") * symbol("k"), q=-(2**20), k=2**20) == -(2**31)


def test_what_stays_within_int32_is_computed_there() -> None:
    q, k = symbol("q"), symbol("k")
    for expr in (q - k, (q - k) * 64, (q // 128) * 128, tm.minimum(q, k) + 1, (q % 8) * k):
        assert str(Emitter({}).exact(expr, q=T.int32(5), k=T.int32(7)).dtype) == "int32"
    for expr in (q * k, q * 1000):
        assert str(Emitter({}).exact(expr, q=T.int32(5), k=T.int32(7)).dtype) == "int64"
