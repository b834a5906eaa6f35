"""The least and greatest element over boxes of indices, beside slices of the tensor."""

from __future__ import annotations

import math

import pytest
import torch

from tileattn.variant.intervals import tables
from tileattn.variant.intervals.tables import over_ranges

SHAPES = [(), (1,), (13,), (64,), (5, 17), (3, 4, 9)]
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("width", [0, 1, 3, 100])
def test_boxes(
    shape: tuple[int, ...], dtype: torch.dtype, width: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most is not None:  # elements are read in parts
        monkeypatch.setattr(tables, "MOST_ELEMENTS", most)
    random = torch.Generator().manual_seed(len(shape))
    tensor = torch.randint(-100, 101, shape, generator=random)
    tensor = tensor % 3 > 0 if dtype == torch.bool else tensor.abs().to(dtype)
    ranges = []
    for size in shape:
        ends = torch.randint(size, (2, 60), generator=random)
        ranges.append((ends.amin(0), (ends.amin(0) + width).minimum(ends.amax(0))))
    least, greatest, nan = over_ranges(tensor, ranges, [width] * len(shape))
    assert not nan.any()
    for i in range(60):
        box = tensor[tuple(slice(int(first[i]), int(last[i]) + 1) for first, last in ranges)]
        at = i if shape else ...
        assert least[at] == box.min()
        assert greatest[at] == box.max()


@pytest.mark.parametrize("width", [None, 1])
def test_nan_is_told_apart_from_the_numbers_beside_it(width: int | None) -> None:
    tensor = torch.tensor([1.0, math.nan, math.nan, math.inf, 2.0])
    first, last = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 1, 2, 4])
    least, greatest, nan = over_ranges(tensor, [(first, last)], None if width is None else [width])
    assert nan.tolist() == [False, True, True, False]
    assert least.tolist() == [1.0, 1.0, -math.inf, 2.0]
    assert greatest.tolist() == [1.0, 1.0, math.inf, math.inf]


def test_ranges_broadcast() -> None:
    tensor = torch.arange(12).view(3, 4)
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    least, _, _ = over_ranges(tensor, [(rows, rows), (columns, columns)])
    assert torch.equal(least, tensor)
