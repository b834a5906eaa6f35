"""The nodes of which the kernel of lists consists, computed by PyTorch: never wrong, for random expressions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.random_masks import KINDS, Generator, RandomMask
from tests.tools.registers import Interpreter, nodes_of
from tests.tools.tile_counts import exact_kinds, random_tiles
from tileattn.kernels.tilelang.lists.analysis import MOST_NUMBER, Analysis, analysed
from tileattn.kernels.tilelang.lists.registers import Unknown
from tileattn.variant.expression import Expr, symbol
from tileattn.variant.intervals.tiles import Kind, tile_kinds
from tileattn.variant.intervals.values import Ends
from tileattn.variant.program import Program

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


def compared(kind: str, seed: int, tiles: int = 300) -> tuple[Any, Any, Any] | None:
    """The kinds of tiles by the nodes, by PyTorch's operations, and exactly (2 if both backends have them whole)."""
    generator = Generator(Random(seed), kind, SIZE)
    case = generator.mask()
    if not isinstance(case.expr, Expr):
        return None
    of = analysis_of(generator, case)
    if of is None or (of.ints and not (1 if of.divisors else -MOST_NUMBER) <= case.values["i0"] <= MOST_NUMBER):
        return None
    q, k = random_tiles(tiles, SIZE, torch.Generator().manual_seed(seed))
    b, h = case.values["b"], case.values["h"]
    ends = (Ends(*(end + first for end in side), (-(2**24), 2**24), 63) for side, first in ((q, case.q[0]), (k, 0)))
    of_q, of_k = ends
    found = Interpreter(of, case.values, of_q, of_k, b, h).kinds()
    for allowed in (case.allowed(), case.allowed_in_kernels()):
        exact = exact_kinds(allowed, q, k)
        wrong = ((found != Kind.MIXED) & (found != exact)).nonzero()
        assert not len(wrong), (case.expr, [end[wrong[0]].tolist() for end in (*of_q[:2], *of_k[:2])])
    return found, tile_kinds(case.expr, case.values, of_q, of_k, b, h), exact


@pytest.mark.parametrize("kind", KNOWN)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_expressions(kind: str, seed: int) -> None:
    compared(kind, seed)
