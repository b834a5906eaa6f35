"""The lists of tiles of a call: by the kernel where it knows the mask, else by PyTorch's operations.

The kernel takes one launch, one more where lines are sorted, and one where a mask has wide loads (analysis.py).
Nothing is read on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....call.facts import Packed, device_arch
from ....call.inputs import Operands
from ...tile_lists import Cut, Sizes, TileLists, is_listed, make_lists
from ..host import as_bytes
from ..packed_lists import MOST_BYTES, PackedSizes, make_packed_lists, shape_of
from .analysis import (
    MOST_BATCH,
    MOST_BLOCK,
    MOST_COPIED,
    MOST_HEADS,
    MOST_NUMBER,
    MOST_POSITIONS,
    MOST_WIDE,
    Analysis,
    WideLoad,
    analysis,
)
from .bits import with_bits
from .library import ListsJob, lists_function

BOUNDS, COUNTS, LISTS = range(3)  # what a launch does, as in kernel.py
WARPS = 4  # of a block
LISTED_ARCH = "sm_90a"  # the Hopper schedules walk over lists
MOST_ELEMENTS = 2**31 - 1  # of a tensor that the kernel reads


def make(variant: str, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device) -> TileLists:
    """The lists of a call, with bits if the cut says so; arguments as of :func:`tile_lists.make_lists`."""
    found = analysis(variant) if device.type == "cuda" and torch.version.hip is None else None
    if found is None or not fits(found, operands, sizes, cut):
        lists = make_lists(variant, operands, sizes, cut, device)
    else:
        lists = by_kernel(lists_function(variant, device_arch(device)), found, operands, sizes, cut, device)
    return with_bits(variant, operands, sizes, cut, lists, device) if cut.bits else lists


def lists_jobs(variant: str, arch: str, packed: bool = False) -> tuple[ListsJob, ...]:
    """The kernel that long calls of a variant make their lists with, if there is one: on sm_90a alone."""
    has_kernel = variant and arch == LISTED_ARCH and is_listed(variant) and analysis(variant) is not None
    return (ListsJob(variant, arch, packed),) if has_kernel else ()


def make_packed(
    variant: str, operands: Operands, packed: Packed, sizes: PackedSizes, cut: Cut, work: Tensor
) -> TileLists:
    """The lists of a packed call; arguments as of :func:`tileattn.kernels.tilelang.packed_lists.make_packed_lists`."""
    device = work.device
    found = analysis(variant) if device.type == "cuda" and torch.version.hip is None else None
    if found is None or not packed_fits(found, operands, sizes, cut):
        return make_packed_lists(variant, operands, sizes, cut, work)
    function = lists_function(variant, device_arch(device), True)
    return packed_by_kernel(function, found, operands, packed, sizes, cut, work)


def packed_fits(of: Analysis, operands: Operands, sizes: PackedSizes, cut: Cut) -> bool:
    """Whether a packed call is within what the kernel assumes, and bounds of wide loads take at most `MOST_BYTES`."""
    longest = (length + MOST_BLOCK for length in (sizes.max_seqlen_q, sizes.max_seqlen_k))  # whole tiles
    bytes_of_bounds = sum(8 * math.prod(shape) for shape in _bounds_of_packed(of, sizes, cut))
    return fits(of, operands, Sizes(sizes.sequences, sizes.heads, *longest), cut) and bytes_of_bounds <= MOST_BYTES


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
        and all(_is_taken(operands.tensors[number]) for number in of.tensors)
        and all(_elements(load, operands) <= MOST_WIDE for load in (*of.row_loads, *of.column_loads))
    )


def _is_taken(tensor: Tensor) -> bool:
    """Whether the kernel takes a tensor: an expanded one would be copied as a whole, a row of it for each head, say."""
    return 1 <= tensor.numel() <= (MOST_ELEMENTS if tensor.is_contiguous() else MOST_COPIED)


def _elements(load: WideLoad, operands: Operands) -> int:
    """The most elements of a tensor that a wide load may read for a row of tiles."""
    sizes = operands.tensors[load.number].shape
    return math.prod(min(width + 1, size) for width, size in zip(load.widths, sizes))


def by_kernel(
    function: Callable[..., Any], of: Analysis, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device
) -> TileLists:
    """The lists by the compiled kernel of the analysis."""
    rows, columns = -(-sizes.seqlen_q // cut.block_M), -(-sizes.seqlen_k // cut.block_N)
    lines, capacity = (columns, rows) if cut.by_keys else (rows, columns)
    batch, heads = sizes.batch if of.by_batch else 1, sizes.heads if of.by_head else 1
    bounds = [
        torch.empty(len(loads), 2, batch * heads if by_plane(loads) else 1, count, dtype=torch.int64, device=device)
        for loads, count in ((of.row_loads, rows), (of.column_loads, columns))
        if loads
    ]
    lists = _launched(function, of, operands, sizes, cut, (batch, heads, lines, capacity), bounds, device)
    return lists._replace(batch_step=heads * lines * of.by_batch, head_step=lines * of.by_head)


def _launched(
    function: Callable[..., Any],
    of: Analysis,
    operands: Operands,
    sizes: Sizes,
    cut: Cut,
    shape: tuple[int, int, int, int],
    bounds: list[Tensor],
    device: torch.device,
) -> TileLists:
    """The lists, without steps, of a kernel's launches.

    Args:
        shape: batch elements and heads that have planes, the lines of a plane, and the tiles of a line.
        bounds: of wide loads, for the kernel to fill.
    """
    batch, heads, lines, capacity = shape
    every = batch * heads * lines
    new = functools.partial(torch.empty, dtype=torch.int32, device=device)
    tiles, counts = new(every, capacity), new(every, 2)
    order, costs = (new(every), new(every)) if cut.longest_first else (None, None)
    unused = counts.view(-1)
    tensors = [as_bytes(operands.tensors[number]).reshape(-1).contiguous() for number in of.tensors]
    shapes = [operands.tensors[number].shape[axis] for number, axis in of.sizes]
    ints = [operands.ints[number] for number in of.ints]

    def launch(phase: int, blocks: int) -> None:
        function(
            tiles,
            counts,
            unused if order is None else order,
            unused if costs is None else costs,
            *bounds,
            *tensors,
            *shapes,
            *ints,
            blocks,
            phase,
            int(cut.longest_first),
            int(cut.by_keys),
            int(cut.masks_queries),
            cut.block_M,
            cut.block_N,
            sizes.seqlen_q,
            sizes.seqlen_k,
            lines,
            capacity,
            heads,
        )

    if bounds:
        warps = sum(each.shape[2] * each.shape[3] for each in bounds)
        launch(BOUNDS, -(-warps // WARPS))
    if cut.longest_first:
        launch(COUNTS, every)
    launch(LISTS, every)
    return TileLists(tiles, counts, 0, 0, order)


def packed_by_kernel(
    function: Callable[..., Any],
    of: Analysis,
    operands: Operands,
    packed: Packed,
    sizes: PackedSizes,
    cut: Cut,
    work: Tensor,
) -> TileLists:
    """The lists of a packed call by the compiled kernel of the analysis."""
    shape = shape_of(sizes, cut, of.by_head)
    bounds = [torch.empty(each, dtype=torch.int64, device=work.device) for each in _bounds_of_packed(of, sizes, cut)]
    first = (work, packed.cu_seqlens_q, packed.cu_seqlens_k)
    most = Sizes(1, shape.planes, sizes.max_seqlen_q, sizes.max_seqlen_k)
    lists = _launched(functools.partial(function, *first), of, operands, most, cut, (1, *shape), bounds, work.device)
    return lists._replace(head_step=shape.lines * of.by_head)


def _bounds_of_packed(of: Analysis, sizes: PackedSizes, cut: Cut) -> list[tuple[int, int, int, int]]:
    """The shapes of the bounds of wide loads, by row and by column of tiles (packed_lines.py)."""
    planes, lines, capacity = shape_of(sizes, cut, of.by_head)
    shapes = []
    for loads, is_row in ((of.row_loads, True), (of.column_loads, False)):
        if is_row != cut.by_keys:
            places = planes if by_plane(loads) else 1, lines
        else:
            places = sizes.sequences * planes if is_row or by_plane(loads) else 1, capacity
        shapes += [(len(loads), 2, *places)] if loads else []
    return shapes


def by_plane(loads: tuple[WideLoad, ...]) -> bool:
    """Whether any of the loads depends on the batch element or the head."""
    return any(load.by_plane for load in loads)
