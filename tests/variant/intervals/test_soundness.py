"""The interval analysis is never wrong about "hidden" and "whole": random expressions and tiles, and each rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tools.random_masks import KINDS, Generator, RandomMask
from tests.tools.tile_counts import exact_kinds, random_tiles
from tileattn import math as tm
from tileattn.variant.expression import TensorSymbol, symbol
from tileattn.variant.intervals.tiles import Kind, tile_kinds
from tileattn.variant.intervals.values import Ends
from tileattn.variant.reading import parse
from tileattn.variant.tracing.trace import trace

SIZE = 40


def needless(case: RandomMask, tiles: int, seed: int, cuts: int = 0, *, read: bool = True) -> float:
    """Checks the kinds of random tiles, as PyTorch and as kernels compute. Returns the share of mixed ones that
    both have as hidden or whole."""
    q, k = random_tiles(tiles, case.q[1], torch.Generator().manual_seed(seed))
    positions = tuple(end + case.q[0] for end in q), tuple(end + case.k[0] for end in k)
    b, h = case.values["b"], case.values["h"]
    if not read:  # as on a device: the bounds of all positions are known only roughly
        positions = tuple(Ends(*ends, (-(2**24), 2**24), 15) for ends in positions)
        b, h = (Ends(torch.tensor(each), torch.tensor(each), (0, 9)) for each in (b, h))
    kinds = tile_kinds(case.expr, case.values, *positions, b, h, cuts=cuts)
    exact = [exact_kinds(allowed, q, k) for allowed in (case.allowed(), case.allowed_in_kernels())]
    for of_backend in exact:
        wrong = ((kinds != Kind.MIXED) & (kinds != of_backend)).nonzero()
        assert not len(wrong), (case.expr, [end[wrong[0]].tolist() for side in positions for end in side])
    return float(((kinds == Kind.MIXED) & (exact[0] == exact[1]) & (exact[0] != Kind.MIXED)).float().mean())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_expressions(kind: str, seed: int) -> None:
    needless(Generator(Random(seed), kind, SIZE).mask(), 300, seed, cuts=seed % 3, read=seed % 2 == 0)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_comparison_of_affine_terms_is_exact(seed: int) -> None:
    assert needless(Generator(Random(seed), "one affine comparison", SIZE).mask(), 300, seed) == 0


# --- Each rule, on every tile of a small rectangle ---

TABLES: dict[str, Tensor] = {
    "bytes": torch.tensor([0, 255, 7, 7, 200, 200, 3, 0], dtype=torch.uint8),
    "signed": torch.tensor([-128, 127, 0, -1, -1, 5], dtype=torch.int8),
    "short": torch.tensor([-(2**15), 2**15 - 1, 0, 3], dtype=torch.int16),
    "limits": torch.tensor([2**31 - 1, -(2**31), 2**31 - 2, 0, 1], dtype=torch.int32),
    "long": torch.tensor([2**40, -(2**40), 2**62, 5, 2**63 - 1, -(2**63)]),
    "index": torch.tensor([3, -2, 100, 0, 5, 1], dtype=torch.int32),
    "half": torch.tensor([0.5, -1.0, 65504.0, 0.0], dtype=torch.float16),
    "special": torch.tensor([0.0, math.nan, math.inf, -math.inf, 1.0, 1.0, -3.0, math.nan, math.nan]),
    "infinite": torch.tensor([math.inf, math.inf, 1.0]),
    "zeros": torch.zeros(2),
    "double": torch.tensor([0.1, 1e300, -1e-300, 2.0], dtype=torch.float64),
    "tiny": torch.tensor([1e-40, -1e-42, 0.0, 1e-3]),
    "bits": torch.tensor([[True, False, True], [True, True, True]]),
    "one": torch.tensor([4]),
    "number": torch.tensor(3),
}
bytes_, signed, short, limits, long, index, half, special, infinite, zeros, double, tiny, bits, one, number = (
    TABLES.values()
)

RULES: dict[str, Callable[..., Any]] = {
    "sums that wrap": lambda b, h, q, k: q + 2147483640 > k,
    "differences that wrap": lambda b, h, q, k: k - 2147483645 < q,
    "products that wrap": lambda b, h, q, k: limits[k] * 2 + q > 0,
    "what wraps is not its form": lambda b, h, q, k: (limits[k] + q) - limits[k] <= q,
    "a sum that wraps is less": lambda b, h, q, k: limits[k] + q > limits[k],
    "magnitudes": lambda b, h, q, k: abs(q - k) < 3,
    "negation of the least integer": lambda b, h, q, k: abs(limits[k]) >= 0,
    "products beyond int32": lambda b, h, q, k: (q + 70000) * (k + 70000) > 4900000000,
    "products beyond int64": lambda b, h, q, k: long[k] * long[q] > 0,
    "sums beyond int64": lambda b, h, q, k: long[k] + long[q] > 0,
    "long integers less themselves": lambda b, h, q, k: long[k] - long[k] + k >= 5,
    "quotients of negative integers": lambda b, h, q, k: (q - k) // 3 == -2,
    "remainders of negative integers": lambda b, h, q, k: (q - k) % 5 == 4,
    "quotients by negative integers": lambda b, h, q, k: (q + k) // -4 >= -1,
    "remainders by negative integers": lambda b, h, q, k: (q - 2 * k) % -3 == -1,
    "divisors that cross 0": lambda b, h, q, k: k // (q + 3) > 1,
    "remainders by divisors that cross 0": lambda b, h, q, k: (k + 1) % (q + 3) == 1,
    "divisors of one sign": lambda b, h, q, k: (q * 7) // (k + 1) + (q * 7) % (k + 1) < 4,
    "negative divisors": lambda b, h, q, k: (q * 7) // (-1 - k) + (q * 7) % (-1 - k) < 4,
    "a quotient of a sum": lambda b, h, q, k: (16 * q + k + 5) // 8 - 2 * q == 1,
    "a quotient of a remainder": lambda b, h, q, k: (q % 8) // 2 == 1,
    "a remainder less its integer": lambda b, h, q, k: q - q % 4 == k - k % 4,
    "a residue that factors exclude": lambda b, h, q, k: (2 * q + 4 * k) % 6 == 3,
    "equations without a solution": lambda b, h, q, k: 6 * q == 4 * k + 3,
    "equations with few solutions": lambda b, h, q, k: 3 * q - 5 * k == 1,
    "the same on both sides": lambda b, h, q, k: q - q + k <= k,
    "squares": lambda b, h, q, k: q * q >= k * q,
    "minimum and maximum": lambda b, h, q, k: tm.minimum(q, 3) > tm.maximum(k - 4, -1),
    "choices": lambda b, h, q, k: tm.where(q > k, q - k, k - q) < 4,
    "choices of conditions": lambda b, h, q, k: tm.where(q > 2, k < 3, k > 1),
    "conditions as numbers": lambda b, h, q, k: (q > 2) + (k > 2) + 0 == 1,
    "conditions that differ": lambda b, h, q, k: (q > 2) != (k > 2),
    "low bits": lambda b, h, q, k: (q & 3) == (k & 3),
    "a bit": lambda b, h, q, k: ((q ^ k) & 4) == 0,
    "bits of negative integers": lambda b, h, q, k: (q | -8) < (k & -2) - 6,
    "bits of both": lambda b, h, q, k: (q & k) > (q | k) - 4,
    "shifts": lambda b, h, q, k: (q >> 1) << 1 == k,
    "bytes": lambda b, h, q, k: bytes_[k] > q + 100,
    "signed bytes": lambda b, h, q, k: signed[k] == signed[q],
    "short integers": lambda b, h, q, k: short[k] * 3 < short[q],
    "long integers": lambda b, h, q, k: long[k] == long[q],
    "nested indices": lambda b, h, q, k: index[index[k]] >= q,
    "clamped indices": lambda b, h, q, k: index[tm.minimum(tm.maximum(q - k, 0), 5)] > 0,
    "indices out of range": lambda b, h, q, k: index[q - k] > 2,
    "two indices": lambda b, h, q, k: bits[q % 2, k // 3] & (q >= -3),
    "one element": lambda b, h, q, k: one[q] <= k + number,
    "half floats": lambda b, h, q, k: half[k] < 1.0 * q,
    "NaN is not less": lambda b, h, q, k: special[k] < 0.5,
    "NaN is not greater or equal": lambda b, h, q, k: special[k] >= special[q],
    "NaN differs": lambda b, h, q, k: special[k] != 1.0,
    "not less than NaN": lambda b, h, q, k: ~(special[k] < 2.0),
    "minimum of NaN": lambda b, h, q, k: tm.minimum(special[k], 0.5) < 0.7,
    "minimum of NaN is greater": lambda b, h, q, k: tm.minimum(special[k], 0.5) > 0.2,
    "infinity less infinity": lambda b, h, q, k: infinite[k] - infinite[q] <= math.inf,
    "0 times infinity": lambda b, h, q, k: infinite[k] * zeros[q] <= 1.0,
    "infinity over infinity": lambda b, h, q, k: infinite[k] / infinite[q] >= 0.0,
    "divisions by 0": lambda b, h, q, k: 1.0 / (1.0 * q) > 0.1,
    "roots of negative numbers": lambda b, h, q, k: tm.sqrt(1.0 * q) >= -1.0,
    "logarithms of 0": lambda b, h, q, k: tm.log(1.0 * k) > -1.0,
    "float remainders": lambda b, h, q, k: (0.5 * q) % 1.5 < 0.4,
    "float quotients": lambda b, h, q, k: (0.1 * (q - k)) // 1.0 == -1.0,
    "roundings": lambda b, h, q, k: 0.1 * q <= 0.1 * k,
    "doubles": lambda b, h, q, k: double[k] * double[k] < 1e30,
    "numbers that are flushed": lambda b, h, q, k: tiny[k] * 1e30 > 1e-12,
    "integers beyond float32": lambda b, h, q, k: (q + 16777216) * 1.0 == (k + 16777216) * 1.0,
    "integers that become equal": lambda b, h, q, k: (q + 16777216).float() == (k + 16777216).float(),
    "floats as integers": lambda b, h, q, k: (0.7 * (q - k)).int() == 1,
    "NaN as an integer": lambda b, h, q, k: special[k].int() >= 0,
    "functions": lambda b, h, q, k: tm.tanh(0.2 * q) + tm.sigmoid(0.3 * k) > tm.exp(-0.1 * k) * tm.cos(0.1 * q),
    "the element and the head": lambda b, h, q, k: (q + b) % 4 >= h,
}


def rectangle(fn: Callable[..., Any], first: int = -8, rows: int = 14, columns: int = 12) -> RandomMask:
    traced_fn = trace(fn, ("b", "h", "q", "k"))
    values = {f"t{i}": tensor for i, tensor in enumerate(traced_fn.tensors)}
    symbols = {
        name: TensorSymbol(name, tensor.dtype, tuple(size == 1 for size in tensor.shape))
        for name, tensor in values.items()
    }
    return RandomMask(parse(traced_fn.text, symbols), {**values, "b": 1, "h": 2}, (first, rows), (0, columns))


def every_tile(case: RandomMask) -> tuple[Any, Any]:
    """First and last rows and columns of all tiles."""
    sides = [
        torch.tensor([(lo, hi) for lo in range(count) for hi in range(lo, count)]).unbind(1)
        for count in (case.q[1], case.k[1])
    ]
    q, k = ([end[:, None] for end in sides[0]], list(sides[1]))
    shape = torch.broadcast_shapes(q[0].shape, k[0].shape)
    return tuple(end.expand(shape).flatten() for end in q), tuple(end.expand(shape).flatten() for end in k)


def kinds_of(case: RandomMask, cuts: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The kinds of all tiles by the analysis, and exactly: as PyTorch and as kernels compute."""
    q, k = every_tile(case)
    found = tile_kinds(
        case.expr, case.values, tuple(end + case.q[0] for end in q), k, case.values["b"], case.values["h"], cuts=cuts
    )
    return found, [exact_kinds(allowed, q, k) for allowed in (case.allowed(), case.allowed_in_kernels())]


@pytest.mark.parametrize("cuts", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_every_tile(rule: str, cuts: int) -> None:
    found, exact = kinds_of(rectangle(RULES[rule]), cuts)
    for of_backend in exact:
        assert not ((found != Kind.MIXED) & (found != of_backend)).any()


EXACT = (
    "quotients of negative integers", "remainders of negative integers", "a quotient of a sum",
    "a residue that factors exclude", "equations without a solution", "equations with few solutions",
    "the same on both sides", "bytes", "clamped indices", "two indices",
)  # fmt: skip


@pytest.mark.parametrize("rule", EXACT)
def test_rules_that_are_exact(rule: str) -> None:
    found, exact = kinds_of(rectangle(RULES[rule]))
    assert torch.equal(found, exact[0])


def test_a_table_that_is_written_in_place_is_read_again() -> None:
    limits = torch.zeros(8, dtype=torch.int32)
    case = rectangle(lambda b, h, q, k: k < limits[q], first=0, rows=8, columns=8)
    assert (kinds_of(case)[0] == Kind.HIDDEN).all()
    limits.fill_(8)
    assert (kinds_of(case)[0] == Kind.WHOLE).all()


@pytest.mark.parametrize("expr", [True, False])
def test_a_mask_without_positions(expr: bool) -> None:
    end = torch.arange(3)
    assert (tile_kinds(expr, {}, (end, end), (end, end)) == 2 * expr).all()


def test_a_table_without_elements() -> None:
    end = torch.arange(3)
    for kind, dtype in (("gt", torch.int32), ("gt", torch.float32), ("", torch.bool)):
        load = TensorSymbol("t0", dtype, (False,))[symbol("k")]
        kinds = tile_kinds(load > 0 if kind else load, {"t0": torch.empty(0, dtype=dtype)}, (end, end), (end, end))
        assert (kinds == Kind.MIXED).all()


def test_no_tiles() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert tile_kinds(True, {}, (none, none), (none, none)).shape == (0,)
