"""The lists of tiles of a call: by the kernel where it knows the mask, else by PyTorch's operations.

The kernel takes one launch, and two where lines are sorted. Before that come some operations of PyTorch for each load
that it does not do itself (analysis.py). Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....call.facts import device_arch
from ....call.inputs import Operands
from ....variant.evaluated import values_of
from ....variant.expression import Expr, has_symbol
from ....variant.intervals.evaluator import Evaluator
from ....variant.intervals.tiles import grid
from ....variant.intervals.values import Ends, Floats
from ..host import as_bytes
from ..tile_lists import Cut, Sizes, TileLists, is_listed, make_lists
from .analysis import MOST_BATCH, MOST_BLOCK, MOST_HEADS, MOST_NUMBER, MOST_POSITIONS, Analysis, analysis
from .library import ListsJob, lists_function

LISTED_ARCH = "sm_90a"  # the Hopper schedules walk over lists
MOST_ELEMENTS = 2**31 - 1  # of a tensor that the kernel reads


def make(variant: str, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device) -> TileLists:
    """The lists of a call; arguments as of :func:`tileattn.kernels.tilelang.tile_lists.make_lists`."""
    found = analysis(variant) if device.type == "cuda" and torch.version.hip is None else None
    if found is None or not fits(found, operands, sizes, cut):
        return make_lists(variant, operands, sizes, cut, device)
    return by_kernel(lists_function(variant, device_arch(device)), found, operands, sizes, cut, device)


def jobs_of(variant: str, arch: str) -> tuple[ListsJob, ...]:
    """The kernel that long calls of a variant make their lists with, if there is one: on sm_90a alone."""
    has_kernel = variant and arch == LISTED_ARCH and is_listed(variant) and analysis(variant) is not None
    return (ListsJob(variant, arch),) if has_kernel else ()


def fits(of: Analysis, operands: Operands, sizes: Sizes, cut: Cut) -> bool:
    """Whether a call is within what the kernel assumes."""
    return (
        max(sizes.seqlen_q, sizes.seqlen_k) < MOST_POSITIONS
        and max(cut.block_M, cut.block_N) <= MOST_BLOCK
        and sizes.heads <= MOST_HEADS
        and sizes.batch <= MOST_BATCH
        and all(abs(operands.ints[number]) <= MOST_NUMBER for number in of.ints)
        and all(operands.ints[number] >= 1 for number in of.divisors)
        and all(1 <= operands.tensors[number].shape[axis] <= MOST_NUMBER for number, axis in of.sizes)
        and all(1 <= operands.tensors[number].numel() <= MOST_ELEMENTS for number in of.tensors)
    )


def by_kernel(
    function: Callable[..., Any], of: Analysis, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device
) -> TileLists:
    """The lists by the compiled kernel of the analysis."""
    rows, columns = -(-sizes.seqlen_q // cut.block_M), -(-sizes.seqlen_k // cut.block_N)
    lines, capacity = (columns, rows) if cut.by_keys else (rows, columns)
    batch, heads = sizes.batch if of.by_batch else 1, sizes.heads if of.by_head else 1
    every = batch * heads * lines
    tiles = torch.empty(every, capacity, dtype=torch.int32, device=device)
    counts = torch.empty(every, 2, dtype=torch.int32, device=device)
    order, costs = (torch.empty(2, every, dtype=torch.int32, device=device) if cut.longest_first else (None, None))
    unused = counts.view(-1)
    given = (
        *_bounds(of, operands, sizes, cut, device),
        *(as_bytes(operands.tensors[number]).reshape(-1) for number in of.tensors),
        *(operands.tensors[number].shape[axis] for number, axis in of.sizes),
        *(operands.ints[number] for number in of.ints),
    )
    numbers = (
        int(cut.by_keys), int(cut.masks_queries), cut.block_M, cut.block_N, sizes.seqlen_q, sizes.seqlen_k, lines,
        capacity, heads,
    )  # fmt: skip
    if order is None or costs is None:
        function(tiles, counts, unused, unused, *given, 1, 0, *numbers)
    else:
        function(tiles, counts, order, costs, *given, 0, 1, *numbers)
        function(tiles, counts, order, costs, *given, 1, 1, *numbers)
    return TileLists(tiles, counts, heads * lines * of.by_batch, lines * of.by_head, order)


def _bounds(of: Analysis, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device) -> list[Tensor]:
    """The bounds of loads by row of tiles, and by column: int64 (loads, 2, planes or 1, tiles)."""
    if not of.row_loads and not of.column_loads:
        return []
    values = values_of(operands)
    q, k = grid(sizes.seqlen_q, sizes.seqlen_k, cut.block_M, cut.block_N, device)
    q = Ends(q.first[:, 0], q.last[:, 0], q.span, q.width)
    planes = {"b": _numbers(sizes.batch, 0, device), "h": _numbers(sizes.heads, 1, device)}
    shape = sizes.batch if of.by_batch else 1, sizes.heads if of.by_head else 1
    sides = (("q", q, of.row_loads), ("k", k, of.column_loads))
    return [
        _of_side(loads, Evaluator(values, planes | {name: ends}, device), len(ends.first), shape)
        for name, ends, loads in sides
        if loads
    ]


def _of_side(loads: tuple[Expr, ...], evaluate: Evaluator, tiles: int, planes: tuple[int, int]) -> Tensor:
    """The bounds of loads, each at all of its rows of tiles, or columns."""
    found = [evaluate(load) for load in loads]
    if not any(has_symbol(load, name) for load in loads for name in "bh"):
        planes = (1, 1)
    result = torch.empty(len(loads), 2, *planes, tiles, dtype=torch.int64, device=found[0].lo.device)
    for of_load, bounds in zip(result, found):
        assert not isinstance(bounds, Floats)
        of_load[0].copy_(bounds.lo)
        of_load[1].copy_(bounds.hi)
    return result.flatten(2, 3)


def _numbers(count: int, axis: int, device: torch.device) -> Ends:
    """The numbers of batch elements (axis 0) or heads (axis 1), to be broadcast with rows of tiles on axis 2."""
    shape = [1, 1, 1]
    shape[axis] = count
    number = torch.arange(count, device=device).view(shape)
    return Ends(number, number, (0, count - 1), 0)
