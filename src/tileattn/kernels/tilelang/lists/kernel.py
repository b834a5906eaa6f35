"""The kernel that makes lists of tiles: a block for each line, whose threads have a tile each.

A thread evaluates the bounds of its tile in registers. A block goes over its line twice: it counts, and then writes
each tile's number at its place, so that the mixed tiles come first, then the whole ones, then the hidden ones, each in
ascending order. Warps have consecutive parts of a line. There is no atomic operation; equal calls give equal bits.

Where lines are sorted, a launch before only counts, and a block then finds its line's place among those of its plane by
comparing its cost with all. Where a mask has wide loads (analysis.py), the first launch bounds these: a warp for each
row of tiles, and for each column.

Of a packed call a kernel of its own has a block for each line of each head; packed_lines.py says what differs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ..build.compile import OWN_BOUNDS
from ..packed.work_list import WIDTH
from . import packed_lines
from .analysis import Analysis
from .emit import WARP, Emitter, dtype_of_span

WARPS = 4
HIDDEN, MIXED, WHOLE = range(3)
BOUNDS, COUNTS, LISTS = range(3)  # what a launch does
# Numbers that a block's warps tell each other.
OF_MIXED, OF_WHOLE, OF_PLACE, FACTS = range(4)
# A warp has at most 32 tiles of a kind at a time: counts of mixed and whole ones share a number.
EACH = 8
NUMBERS = (
    "blocks", "phase", "sorts", "by_keys", "masks_queries", "block_M", "block_N", "seqlen_q", "seqlen_k", "lines",
    "capacity", "heads",
)  # fmt: skip


def lists_kernel(analysis: Analysis, dtypes: dict[int, str], packed: bool = False) -> Any:
    """The function ``lists([work, cu_seqlens_q, cu_seqlens_k], tiles, counts, rows, costs, *bounds, *tensors, *sizes,
    *ints, *numbers)``.

    tiles, counts, rows: of :class:`TileLists`; without an order ``rows`` is any tensor of int32. costs: int32 (all
    lines,), which the launch that counts writes; else any. bounds: for the analysis's row loads, and its column loads,
    if there are any, int64 (loads, 2, planes or 1, tiles). tensors: those that the analysis names, contiguous and flat;
    bool as uint8. sizes, ints: int32. numbers: int32, of NUMBERS. ``blocks``: lines, or (BOUNDS) a quarter of the rows
    and columns of all ``bounds``; ``sorts``, ``by_keys`` and ``masks_queries``: 0 or 1; ``heads``: planes of a batch
    element.

    Args:
        dtypes: of the tensors, by their numbers.
        packed: whether the kernel is for packed calls. Then ``seqlen_q`` and ``seqlen_k`` are the most that a sequence
            may have, and ``heads`` planes of all lines.
    """
    builder = Builder()
    with builder.prim_func("lists"):
        every = T.dynamic("every")  # lines
        stride = T.dynamic("stride", "int64")  # a place in the lists may be beyond 2^31
        arg = SimpleNamespace(analysis=analysis, packed=packed)
        if packed:
            arg.work = builder.prim_func_arg("work", T.Tensor([T.dynamic("records"), WIDTH], "int32"))
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                setattr(arg, name, builder.prim_func_arg(name, T.Tensor([T.dynamic("ends")], "int32")))
        shape = [every, T.dynamic("width")]
        arg.tiles = builder.prim_func_arg("tiles", T.StridedTensor(shape, [stride, 1], "int32"))
        arg.counts = builder.prim_func_arg("counts", T.Tensor([every, 2], "int32"))
        for name in ("rows", "costs"):
            setattr(arg, name, builder.prim_func_arg(name, T.Tensor([T.dynamic(f"{name}_size")], "int32")))
        arg.bounds = {}
        for side, loads in (("row", analysis.row_loads), ("column", analysis.column_loads)):
            if loads:
                sizes = [len(loads), 2, T.dynamic(f"{side}_planes"), T.dynamic(f"{side}_tiles")]
                arg.bounds[side] = builder.prim_func_arg(f"{side}_bounds", T.Tensor(sizes, "int64"))
        arg.tensors = {
            number: builder.prim_func_arg(f"t{number}", T.Tensor([T.dynamic(f"t{number}_size")], dtypes[number]))
            for number in analysis.tensors
        }
        arg.sizes = {of: builder.prim_func_arg(f"t{of[0]}_size{of[1]}", T.int32()) for of in analysis.sizes}
        arg.ints = {number: builder.prim_func_arg(f"i{number}", T.int32()) for number in analysis.ints}
        for name in NUMBERS:
            setattr(arg, name, builder.prim_func_arg(name, T.int32()))
        _kernel(arg)
    return builder.get().with_attr(OWN_BOUNDS, True)


@T.macro
def _kernel(arg):
    with T.Kernel(arg.blocks, threads=WARPS * WARP) as block:
        thread = T.get_thread_binding()
        warp, lane = thread // WARP, thread % WARP
        if len(arg.bounds) > 0:
            if arg.phase == BOUNDS:
                _bound(arg, T.alloc_var("int32", init=block * WARPS + warp), lane)
        # [WARPS, FACTS]
        facts = T.alloc_shared([WARPS, FACTS], "int32")
        plane = T.alloc_var("int32", init=T.truncdiv(block, arg.lines))
        number = T.alloc_var("int32", init=block - plane * arg.lines)
        part = T.alloc_var("int32", init=T.truncdiv(arg.capacity + (WARPS * WARP - 1), WARPS * WARP) * WARP)
        first = T.alloc_var("int32", init=T.min(warp * part, arg.capacity))
        steps = T.alloc_var("int32", init=T.truncdiv(T.min(arg.capacity - first, part) + (WARP - 1), WARP))
        mixed = T.alloc_var("int32", init=0)
        whole = T.alloc_var("int32", init=0)
        hidden = T.alloc_var("int32", init=0)
        line = T.alloc_var("int32", init=block)
        of = packed_lines.line_of(arg, number) if arg.packed else None
        for turn in T.serial(arg.phase):
            for step in T.serial(steps):
                tile = T.alloc_var("int32", init=first + step * WARP + lane)
                kind = T.alloc_var("int32", init=_kind(arg, of, plane, number, T.min(tile, arg.capacity - 1)))
                is_mixed = T.alloc_var("int32", init=_as_int((kind == MIXED) & (tile < arg.capacity)))
                is_whole = T.alloc_var("int32", init=_as_int((kind == WHOLE) & (tile < arg.capacity)))
                if turn == 0:
                    mixed += is_mixed
                    whole += is_whole
                else:
                    upto = T.alloc_var("int32", init=is_mixed + is_whole * 2**EACH)
                    for i in T.unroll(5):
                        below = T.alloc_var("int32", init=T.shfl_up(upto, 1 << i))
                        if lane >= (1 << i):
                            upto += below
                    of_all = T.alloc_var("int32", init=T.shfl_sync(upto, WARP - 1))
                    before = T.alloc_var("int32", init=upto - is_mixed - is_whole * 2**EACH)
                    of_mixed, of_whole = _low(before), _high(before)
                    place = T.alloc_var("int32", init=hidden + lane - of_mixed - of_whole)
                    if is_mixed == 1:
                        place = mixed + of_mixed
                    if is_whole == 1:
                        place = whole + of_whole
                    if tile < arg.capacity:
                        arg.tiles[line, place] = tile
                    mixed += _low(of_all)
                    whole += _high(of_all)
                    hidden += WARP - _low(of_all) - _high(of_all)
            if turn == 0:
                _share(arg, facts, warp, lane, (mixed, whole, _lines_before(arg, of, plane, number, block, thread)))
                T.sync_threads()
                all_mixed, all_whole, its_place = (_sum(facts, fact, WARPS) for fact in range(FACTS))
                if not arg.packed:
                    line = plane * arg.lines + T.if_then_else(arg.sorts == 1, its_place, number)
                if thread == 0:
                    _write(arg, of, (block, line, plane, number, its_place), all_mixed, all_whole)
                mixed = _sum(facts, OF_MIXED, warp)
                whole = _sum(facts, OF_WHOLE, warp)
                hidden = all_mixed + all_whole + first - mixed - whole
                whole += all_mixed


def _lines_before(arg: Any, of: Any, plane: Any, number: Any, block: Any, thread: Any) -> Any:
    """How many lines come before the block's, of those that this thread looks at. `of`: of a packed call, its line."""
    if arg.packed:
        sorts = (arg.phase == LISTS) & (arg.sorts == 1)
        return packed_lines.shorter_lines(arg, of, sorts, plane, number, block, thread, WARPS * WARP)
    return _longer_lines(arg, plane, number, block, thread)


@T.macro
def _longer_lines(arg, plane, number, block, thread):
    """Of the plane: longer lines, and of equal ones those of later rows."""
    count = T.alloc_var("int32", init=0)
    if (arg.phase == LISTS) & (arg.sorts == 1):
        own = T.alloc_var("int32", init=arg.costs[block])
        for step in T.serial(T.truncdiv(arg.lines + (WARPS * WARP - 1), WARPS * WARP)):
            row = step * (WARPS * WARP) + thread
            if row < arg.lines:
                cost = T.alloc_var("int32", init=arg.costs[plane * arg.lines + row])
                if (cost > own) | ((cost == own) & (row > number)):
                    count += 1
    return count


@T.macro
def _share(arg, facts, warp, lane, of_thread):
    """Adds up numbers of a warp's threads, for all warps."""
    for fact, mine in enumerate(of_thread):
        total = T.alloc_var("int32", init=T.warp_reduce_sum(mine))
        if lane == 0:
            facts[warp, fact] = total


@T.macro
def _sum(facts, fact, warps):
    """Of the first warps."""
    total = T.alloc_var("int32", init=0)
    for i in T.unroll(WARPS):
        if i < warps:
            total += facts[i, fact]
    return total


def _write(arg: Any, of: Any, at: tuple[Any, ...], mixed: Any, whole: Any) -> None:
    """Writes a line's counts and its place among the sorted ones; in the launch that counts, its cost.

    at: the block, where the line is, its plane and number, and how many lines come before it.
    """
    block, line, plane, number, place = at
    if arg.packed:
        packed_lines.write_counts(arg, of, arg.phase == LISTS, block, plane, place, mixed, whole)
    else:
        _write_counts(arg, block, line, number, mixed, whole)


@T.macro
def _write_counts(arg, block, line, number, mixed, whole):
    if arg.phase == LISTS:
        arg.counts[line, 0] = mixed
        arg.counts[line, 1] = mixed + whole
        if arg.sorts == 1:
            arg.rows[line] = number
    else:
        arg.costs[block] = 2 * mixed + whole


def _kind(arg: Any, of: Any, plane: Any, line: Any, tile: Any) -> Any:
    """The kind of a tile of a line, with its ends masked; `of`: of a packed call what the line is of."""
    if not arg.packed:
        return _dense_kind(arg, plane, line, tile)
    row, column = (
        T.alloc_var("int32", init=value)[0]
        for value in (T.if_then_else(arg.by_keys == 1, tile, of.tile), T.if_then_else(arg.by_keys == 1, of.tile, tile))
    )
    kind = _packed_emitted(arg, of, plane, line, tile, row, column)
    return packed_lines.kind_of_tile(arg, of, row, column, kind, HIDDEN, MIXED)


@T.macro
def _dense_kind(arg, plane, line, tile):
    row = T.alloc_var("int32", init=T.if_then_else(arg.by_keys == 1, tile, line))
    column = T.alloc_var("int32", init=T.if_then_else(arg.by_keys == 1, line, tile))
    kind = T.alloc_var("int32", init=_emitted(arg, plane, row, column))
    beyond = (column + 1) * arg.block_N > arg.seqlen_k
    if beyond | ((arg.masks_queries == 1) & ((row + 1) * arg.block_M > arg.seqlen_q)):
        kind = T.min(kind, MIXED)
    return kind


def _emitted(arg: Any, plane: Any, row: Any, column: Any) -> Any:
    inputs = _inputs(arg, plane) | _ends_of_row(arg, row) | _ends_of_column(arg, column)
    tiles = {"row": row, "column": column}

    def wide(_: Emitter, side: str, number: int) -> list[Any]:
        bounds, load = arg.bounds[side], _loads(arg, side)[number]
        place = plane if load.by_plane else 0
        return [T.cast(bounds[number, end, place, tiles[side]], dtype_of_span(load.span)) for end in range(2)]

    return Emitter(inputs, arg.tensors, wide)(arg.analysis.kind)


def _packed_emitted(arg: Any, of: Any, plane: Any, line: Any, tile: Any, row: Any, column: Any) -> Any:
    """The kind by the mask, of a line's tile; `row` and `column` say which of its sequence's tiles it is."""

    def wide(_: Emitter, side: str, number: int) -> list[Any]:
        bounds, load = arg.bounds[side], _loads(arg, side)[number]
        place, tile_or_line = packed_lines.place_of_bounds(arg, of, load, side, plane, line, tile)
        return [T.cast(bounds[number, end, place, tile_or_line], dtype_of_span(load.span)) for end in range(2)]

    ends = _ends_of_row(arg, row, of) | _ends_of_column(arg, column, of)
    return Emitter(_inputs(arg, plane, of) | ends, arg.tensors, wide)(arg.analysis.kind)


@T.macro
def _bound(arg, number, lane):
    """Writes the bounds of wide loads of the number-th row of tiles, and then columns, of all planes."""
    for of in _sides(arg):
        if (number >= of.first) & (number < of.end):
            plane = T.alloc_var("int32", init=T.truncdiv(number - of.first, of.tiles))
            tile = T.alloc_var("int32", init=number - of.first - plane * of.tiles)
            for load, ends in enumerate(_bounds_by_warp(arg, of.side, plane, tile, lane)):
                for end, value in enumerate(ends):
                    if lane == 0:
                        of.bounds[load, end, plane, tile] = T.cast(value, "int64")


def _sides(arg: Any) -> list[SimpleNamespace]:
    """The sides with wide loads: where their bounds go, and the number of their first row of tiles among all."""
    sides, first = [], 0
    for side, bounds in arg.bounds.items():
        # In variables: TileLang's passes take seconds where such sums stand in conditions.
        tiles = T.alloc_var("int32", init=bounds.shape[3])[0]
        end = T.alloc_var("int32", init=first + bounds.shape[2] * bounds.shape[3])[0]
        sides.append(SimpleNamespace(side=side, bounds=bounds, tiles=tiles, first=first, end=end))
        first = end
    return sides


def _bounds_by_warp(arg: Any, side: str, plane: Any, tile: Any, lane: Any) -> list[Any]:
    """The bounds of each wide load of a side."""
    of = None
    if arg.packed:
        of = packed_lines.bounded_at(arg, side, plane, tile)
        plane, tile = of.plane, of.tile
    of_tile = _ends_of_row(arg, tile, of) if side == "row" else _ends_of_column(arg, tile, of)
    loads, found = _loads(arg, side), []
    emitter = Emitter(_inputs(arg, plane, of) | of_tile, arg.tensors, lambda _, __, number: found[number])
    for load in loads:
        found.append(emitter.ends_by_warp(load, lane))
    return found


def _loads(arg: Any, side: str) -> Any:
    return arg.analysis.row_loads if side == "row" else arg.analysis.column_loads


def _inputs(arg: Any, plane: Any, of: Any = None) -> dict[Any, Any]:
    """The inputs that are the same in a plane; `of`: of a packed call, a line or a sequence."""
    inputs: dict[Any, Any] = packed_lines.inputs_of(arg, of, plane) if arg.packed else {("seqlen_k",): arg.seqlen_k}
    if arg.analysis.by_batch and not arg.packed:
        inputs["b",] = T.alloc_var("int32", init=T.truncdiv(plane, arg.heads))[0]
    if arg.analysis.by_head and not arg.packed:
        inputs["h",] = T.alloc_var("int32", init=T.truncmod(plane, arg.heads))[0]
    inputs |= {(f"i{number}",): value for number, value in arg.ints.items()}
    return inputs | {("size", *of): value for of, value in arg.sizes.items()}


def _ends_of_row(arg: Any, row: Any, of: Any = None) -> dict[Any, Any]:
    if arg.packed:
        return _named("q", *packed_lines.ends_of_row(arg, of, row))
    offset = arg.seqlen_k - arg.seqlen_q
    first, last = row * arg.block_M + offset, T.min((row + 1) * arg.block_M, arg.seqlen_q) - 1 + offset
    return _named("q", first, last)


def _ends_of_column(arg: Any, column: Any, of: Any = None) -> dict[Any, Any]:
    if arg.packed:
        return _named("k", *packed_lines.ends_of_column(arg, of, column))
    return _named("k", column * arg.block_N, T.min((column + 1) * arg.block_N, arg.seqlen_k) - 1)


def _named(name: str, first: Any, last: Any) -> dict[Any, Any]:
    ends = ("first", first), ("last", last)
    return {(name, end): T.alloc_var("int32", init=value)[0] for end, value in ends}


def _as_int(condition: Any) -> Any:
    return T.if_then_else(condition, 1, 0)


def _low(both: Any) -> Any:
    return both % 2**EACH


def _high(both: Any) -> Any:
    return T.shift_right(both, EACH)
