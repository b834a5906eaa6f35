"""The nodes of which the kernel of lists consists, computed by PyTorch: never wrong, for random expressions."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tools.random_masks import KINDS, Generator, RandomMask
from tests.tools.registers import Interpreter
from tests.tools.tile_counts import exact_kinds, random_tiles
from tileattn import FunctionMask
from tileattn.kernels.tilelang.lists.analysis import MOST_NUMBER, Analysis, analysed, analysis
from tileattn.kernels.tilelang.lists.registers import Unknown
from tileattn.math import load
from tileattn.variant.expression import Expr, symbol
from tileattn.variant.intervals.tiles import Kind, tile_kinds
from tileattn.variant.intervals.values import Ends
from tileattn.variant.key import encode
from tileattn.variant.program import Program
from tileattn.variant.reading import parse

SIZE = 40
KNOWN = [kind for kind in KINDS if kind != "floats"]


def analysis_of(generator: Generator, case: RandomMask) -> Analysis | None:
    """Of a random mask, which may have what the kernel does not know."""
    anywhere = (0, symbol("seqlen_k"))
    traced = Program(case.expr, anywhere, (0, 0), anywhere, (0, 0), None, tuple(generator.tensors.values()), 1, 0)
    try:
        return analysed(traced)
    except Unknown:
        return None


def compared(kind: str, seed: int, tiles: int = 300) -> tuple[Tensor, Tensor, Tensor] | None:
    """See :func:`beside_every_pair`; None for a mask that the kernel does not know."""
    generator = Generator(Random(seed), kind, SIZE)
    case = generator.mask()
    if not isinstance(case.expr, Expr):
        return None
    of = analysis_of(generator, case)
    if of is None or (of.ints and not (1 if of.divisors else -MOST_NUMBER) <= case.values["i0"] <= MOST_NUMBER):
        return None
    return beside_every_pair(of, case, tiles, seed)


def beside_every_pair(of: Analysis, case: RandomMask, tiles: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the kinds of random tiles; returns them, those by PyTorch's operations, and the exact ones."""
    q, k = random_tiles(tiles, SIZE, torch.Generator().manual_seed(seed))
    b, h = case.values["b"], case.values["h"]
    ends = (Ends(*(end + first for end in side), (-(2**24), 2**24), 63) for side, first in ((q, case.q[0]), (k, 0)))
    of_q, of_k = ends
    points = [Ends(number, number, (0, 9), 0) for number in (torch.tensor(b), torch.tensor(h))]
    by_nodes = Interpreter(of, case.values, of_q, of_k, b, h).kinds()
    by_pytorch = tile_kinds(case.expr, case.values, of_q, of_k, *points)
    for allowed in (case.allowed(), case.allowed_in_kernels()):
        exact = exact_kinds(allowed, q, k)
        for found in (by_nodes, by_pytorch):
            wrong = ((found != Kind.MIXED) & (found != exact)).nonzero()
            assert not len(wrong), (case.expr, [end[wrong[0]].tolist() for end in (*of_q[:2], *of_k[:2])])
    return by_nodes, by_pytorch, exact


@pytest.mark.slow_cases("bits", reason="5 s")
@pytest.mark.parametrize("kind", KNOWN)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_expressions(kind: str, seed: int) -> None:
    compared(kind, seed)


TABLE, ROW = torch.zeros(2, 1213, dtype=torch.int32), torch.zeros(1213, dtype=torch.int32)
WIDE = {  # masks whose bounds are read before the kernel runs, and whether they depend on batch element or head
    "by batch element": (lambda b, h, q, k: k < load(TABLE, b, q), True),
    "by head": (lambda b, h, q, k: k < load(TABLE, h, q), True),
    "by neither": (lambda b, h, q, k: (k < load(ROW, q)) & (k > b) & (k > h), False),
}


@pytest.mark.parametrize("name", WIDE)
def test_whose_a_wide_load_is(name: str) -> None:
    function, by_plane = WIDE[name]
    found = analysis(encode(FunctionMask(function), ())[0])
    assert found is not None
    assert [wide.by_plane for wide in found.row_loads] == [by_plane]
    assert found.column_loads == ()


OF_NUMBERS = (
    "(lt (mod (sub q k) i0) 3)",
    "(eq (mod q i0) (mod k i0))",
    "(le (mul (floordiv q i0) i0) k)",
    "(ge (mod (sub k q) (sub h 5)) -2)",
    "(eq (floordiv (add q k) (add h 1)) i0)",
    "(eq (sub (mul 3 q) (mul 6 k)) i0)",
    "(ne (add (mul 4 q) (mul 2 h)) (add (mul 6 k) b))",
    "(eq (mul 3 q) (add (mul 5 k) i0))",
    "(lt (abs (sub q (mul i0 h))) (min k i0))",
)


@pytest.mark.parametrize("text", OF_NUMBERS)
def test_run_time_numbers(text: str) -> None:
    """Divisors, and numbers in equations, which are the same at all positions of a tile."""
    generator = Generator(Random(0), "one affine comparison", SIZE)
    expr = parse(text, {})
    needless = 0
    for number in (1, 2, 7, 13, 39, 41):
        for first in (-SIZE, 0):
            case = RandomMask(expr, {"b": 1, "h": number % 4, "i0": number}, (first, SIZE), (0, SIZE))
            of = analysis_of(generator, case)
            assert of is not None
            found, by_pytorch, _ = beside_every_pair(of, case, 300, number)
            needless += int(((found == Kind.MIXED) & (by_pytorch != Kind.MIXED)).sum())
    assert needless <= 36  # of 3600
