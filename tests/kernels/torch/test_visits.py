"""The keys that the torch backend visits under any mask: none that is seen is left out, and the mask is evaluated
where it hides a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import (
    Causal,
    Documents,
    FunctionMask,
    GlobalTokens,
    KeyPadding,
    Mask,
    Neighborhood,
    SlidingWindow,
    SoftCap,
    Strided,
)
from tileattn.kernels.torch import visits
from tileattn.kernels.torch.mask import ScoreMatrix
from tileattn.variant.key import encode
from tileattn.variant.program import restore

BATCH, HEADS = 2, 3
LIMITS = torch.tensor([[40], [200]])
MASKS: dict[str, Mask] = {
    "band": FunctionMask(lambda b, h, q, k: (q - k < 50) & (k <= q)),
    "every third block": FunctionMask(lambda b, h, q, k: (q // 32 + k // 32) % 3 == 0),
    "holes": FunctionMask(lambda b, h, q, k: k % 32 != 20),
    "nothing for some rows": FunctionMask(lambda b, h, q, k: (k < q) & (q % 128 < 64)),
    "by head": FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < 30 * (h + 1))),
    "by element": FunctionMask(lambda b, h, q, k: k < LIMITS[b, 0]),
    "by element and head": FunctionMask(lambda b, h, q, k: (k < LIMITS[b, 0]) | (h == 1)),
    "a function and documents": Documents(torch.arange(260) // 70) & FunctionMask(lambda b, h, q, k: (q + k) % 5 > 0),
    "two ranges": SlidingWindow(20, 0) | KeyPadding(torch.arange(260)[None] < 10),
    "local and global": SlidingWindow(20, 20) | GlobalTokens(5),
    "strided": Strided(64, 10),
    "neighborhood": Neighborhood((13, 20), (3, 20)),
    "causal alone": Causal(),
    "all": FunctionMask(lambda b, h, q, k: q - q + k >= 0),
    "none": FunctionMask(lambda b, h, q, k: q - q > k - k),
}
LENGTHS = [(260, 260), (150, 260), (300, 260), (1, 260)]


def matrix_of(mask: Mask, seqlen_q: int, seqlen_k: int) -> ScoreMatrix:
    restored, _ = restore(*encode(mask, ()))
    return ScoreMatrix(restored, (), slice(0, BATCH), HEADS, seqlen_q, seqlen_k, torch.float32, torch.device("cpu"))


def allowed_by(matrix: ScoreMatrix) -> Tensor:
    allowed = ~matrix.forbidden(slice(0, matrix.seqlen_q), slice(0, matrix.seqlen_k))
    return allowed.expand(BATCH, HEADS, matrix.seqlen_q, matrix.seqlen_k)


@pytest.fixture(autouse=True)
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "CELL", 16)
    monkeypatch.setattr(visits, "FEWEST_SCORES", 0)
    monkeypatch.setattr(visits, "GAP", 0)


@pytest.mark.parametrize("gap", [0, 40])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_visited_and_whole_keys(name: str, seqlen_q: int, seqlen_k: int, gap: int) -> None:
    matrix = matrix_of(MASKS[name], seqlen_q, seqlen_k)
    allowed = allowed_by(matrix)
    of_sizes = visits.Visits(matrix, 32)
    for block_M in (32, 96):
        elements = of_sizes.keys(block_M, gap)
        assert len(elements) in (1, BATCH)
        for element, ranges in enumerate(elements):
            batch = slice(None) if len(elements) == 1 else slice(element, element + 1)
            assert len(ranges) == -(-seqlen_q // block_M)
            for i, seen in enumerate(ranges):
                rows = allowed[batch, :, i * block_M : (i + 1) * block_M]
                left = rows.clone()
                for tile in seen.tiles(48):
                    left[..., tile] = False
                    assert seen.partial(tile) or rows[..., tile].all()
                assert not left.any()
                assert seen.visited == sum(tile.stop - tile.start for tile in seen.tiles(48))


def counts(name: str, block_M: int = 32) -> tuple[int, int]:
    """The keys that all blocks of rows visit, and those of them where the mask is evaluated."""
    tiles = [
        (seen, tile)
        for ranges in visits.Visits(matrix_of(MASKS[name], 260, 260), 32).keys(block_M)
        for seen in ranges
        for tile in seen.tiles(16)
    ]
    return sum(t.stop - t.start for _, t in tiles), sum(t.stop - t.start for seen, t in tiles if seen.partial(t))


def test_tiles_are_skipped() -> None:
    everything = 9 * 260
    assert counts("none") == (0, 0)
    assert counts("all") == (everything, 0)
    visited, partial = counts("every third block")
    assert (visited, partial) == (9 * 9 * 32 // 3 - 28 * 3, 0)
    for name in ("band", "two ranges", "local and global", "neighborhood"):
        assert counts(name)[0] < 0.55 * everything, name


def test_few_scores_are_not_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FEWEST_SCORES", 2**40)
    assert counts("none")[0] == 9 * 260


@pytest.mark.parametrize("mod", [None, SoftCap(20.0)])  # PyTorch's fused attention, and the loop
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_all_tiles(name: str, mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(BATCH, 260, HEADS, 16, generator=random, dtype=torch.float64) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run() -> list[Tensor]:
        o = tileattn.attention(*inputs, mask=MASKS[name], score_mod=mod, backend="torch")
        return [o, *torch.autograd.grad(o, inputs, do)]

    skipped = run()
    monkeypatch.setattr(visits, "FEWEST_SCORES", 2**40)
    torch.testing.assert_close(skipped, run())


def test_a_table_that_is_written_in_place_is_read_again() -> None:
    limit = torch.zeros(1, dtype=torch.int32)
    mask: Callable[..., Any] = lambda b, h, q, k: k < limit[0]  # noqa: E731
    x = torch.randn(1, 260, 1, 16, generator=torch.Generator().manual_seed(1))
    assert (tileattn.attention(x, x, x, mask=mask, backend="torch") == 0).all()
    limit.fill_(1)
    torch.testing.assert_close(tileattn.attention(x, x, x, mask=mask, backend="torch"), x[:, :1].expand_as(x))
