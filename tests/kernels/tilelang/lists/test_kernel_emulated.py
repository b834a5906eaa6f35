"""The kernel that makes lists of tiles, run on the CPU by emulate(): the same bits as PyTorch's operations give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.test_tile_lists import CPU, CUTS, MASKS, SIZES, WALKS, SameBlock
from tests.tools.random_masks import Generator
from tileattn import BlockSparse, Dilated, FunctionMask, Mask, Neighborhood
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels.tile_lists import Cut, Sizes, TileLists, make_lists
from tileattn.kernels.tilelang.lists.analysis import analysis
from tileattn.kernels.tilelang.lists.kernel import lists_kernel
from tileattn.kernels.tilelang.lists.launch import by_kernel, fits
from tileattn.kernels.tilelang.lists.library import dtypes_of
from tileattn.math import load
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.expression import Expr
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import CallSizes

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

ALL: dict[str, Mask] = {
    **MASKS,
    **{f"{name}-1213": pattern(name, 1213, 3, "cpu").mask for name in NAMES},
    "blocks-of-64-1213": BlockSparse(
        torch.rand(1, 3, 19, 19, generator=torch.Generator().manual_seed(0)) < 0.3, 64
    ).in_call(CallSizes(1, 3, 3, 1213, 1213, 0)),
    "same-block": SameBlock() & FunctionMask(lambda b, h, q, k: k % 2 == 0),
}
USUAL = ("dilated", "everything")  # the others take 6 s and more each
# Lines of several tiles for each thread, and of fewer than there are threads.
LONG = [
    (Sizes(2, 3, 1213, 1213), Cut(8, 2)),
    (Sizes(2, 3, 1213, 1213), Cut(2, 16, by_keys=True, masks_queries=True)),
    (Sizes(1, 3, 1213, 1213), Cut(8, 8, longest_first=True)),
]


@functools.cache
def kernel_of(variant: str) -> Callable[..., Any]:
    found = analysis(variant)
    assert found is not None
    return Kernel(lists_kernel(found, dtypes_of(variant)))


def by_both_ways(mask: Mask, sizes: Sizes, cut: Cut) -> tuple[TileLists, TileLists]:
    variant, operands = encode(mask, ())
    found = analysis(variant)
    assert found is not None
    assert fits(found, operands, sizes, cut)
    return (
        by_kernel(kernel_of(variant), found, operands, sizes, cut, CPU),
        make_lists(variant, operands, sizes, cut, CPU),
    )


def assert_equal(got: TileLists, expected: TileLists) -> None:
    assert got[2:4] == expected[2:4]
    for one, other in zip((*got[:2], got.rows), (*expected[:2], expected.rows), strict=True):
        if isinstance(other, Tensor):
            assert one is not None
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one is None


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_the_same_bits_as_by_pytorch(name: str) -> None:
    walks = [(SIZES[sizes], CUTS[cut]) for sizes, cut in WALKS]
    for sizes, cut in [*walks, *LONG]:
        if name.startswith("blocks-") and (sizes.seqlen_q, sizes.seqlen_k) != (1213, 1213):
            continue  # of other lengths it is another mask
        assert_equal(*by_both_ways(ALL[name], sizes, cut))


@pytest.mark.slow(reason="lowers and compiles a kernel, 20 s")
def test_a_table_by_batch_element_and_position() -> None:
    """Bounded before, for each batch element; beside one by head alone and one number, which the kernel reads.

    One has gaps between its elements, and one is transposed.
    """
    ends = (torch.arange(1213)[:, None].repeat(1, 2) // torch.tensor([100, 300]) * 100 + 150).T
    widths = torch.tensor([400, 0, 600, 0, 5000, 0], dtype=torch.int16)[::2]
    least = torch.tensor(-900)
    mask = FunctionMask(lambda b, h, q, k: (k < load(ends, b, q)) & (q - k < load(widths, h)) & (q - k > load(least)))
    for sizes, cut in LONG:
        assert_equal(*by_both_ways(mask, sizes, cut))


@pytest.mark.slow(reason="lowers and compiles two kernels, 4 s")
def test_one_kernel_serves_all_numbers() -> None:
    """Windows, and divisors."""
    dilated = [Dilated(511, dilation=4), Dilated(100, dilation=7), Dilated(0, dilation=1), Dilated(900, dilation=128)]
    images = [Neighborhood((36, 34), (9, 9)), Neighborhood((17, 71), (5, 13)), Neighborhood((2, 600), (1, 599))]
    for masks in (dilated, images):
        assert len({encode(mask, ())[0] for mask in masks}) == 1
        for mask in masks:
            for cut in (CUTS["keys"], CUTS["sorted"]):
                assert_equal(*by_both_ways(mask, SIZES["square"], cut))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["affine comparisons, joined", "quotients and remainders", "bits", "choices"])
@pytest.mark.parametrize("seed", range(3))
def test_random_expressions(kind: str, seed: int) -> None:
    """Without run-time numbers, of which PyTorch's operations know more."""
    random = Random(seed)
    while True:
        generator = Generator(random, kind, 300)
        expr = generator.mask().expr
        if isinstance(expr, Expr) and "i0" not in generator.values:
            break
    text = str(expr)

    def allows(b: Any, h: Any, q: Any, k: Any) -> Any:
        return parsed(text, b, h, q, k)

    for sizes, cut in ((Sizes(2, 3, 260, 300), Cut(16, 8)), (Sizes(2, 3, 310, 300), Cut(8, 8, by_keys=True))):
        assert_equal(*by_both_ways(FunctionMask(allows), sizes, cut))


def parsed(text: str, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The value of an expression's text at positions that are traced."""
    from tileattn.variant.reading import evaluate, parse

    return evaluate(parse(text, {}), {"b": b, "h": h, "q": q, "k": k})
