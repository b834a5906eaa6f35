"""The kernel that evaluates a mask in the mixed tiles of lists, once for all heads, and writes a bit for each score.

Attention kernels then hide scores by these bits (tile/mixed_bits.py). A block takes every so many-th of the mixed tiles
that have bits. It finds a tile's line by a search in the sums of the lines' mixed tiles, so that the host need not know
how many there are, and a line with many is shared by many blocks. A word has 32 columns: 2t and 2t + 1 of each eight.
Each word is written by one thread; equal calls give equal bits.

The mask is the expression that attention kernels evaluate. Positions beyond the last query or key are hidden.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....variant.program import Program
from ..build.compile import OWN_BOUNDS
from ..tile.distance import DistanceEmitter, allowed_at
from ..tile.expressions import Emitter
from ..tile.key_words import COLUMNS
from ..tile.mask import Visibility
from ..tile.parameters import operand

THREADS = 128
BITS_OF_WORD = 32
SECOND_ROW = 8  # of a thread, behind its first one
NUMBERS = (
    "blocks", "sorts", "by_keys", "seqlen_q", "seqlen_k", "block_M", "block_N", "lines", "heads", "by_batch", "by_head",
)  # fmt: skip


def bits_kernel(traced: Program, read: frozenset[str]) -> Any:
    """The function ``mask_bits(tiles, counts, rows, before, bits, *tensors, *numbers, *ints, *floats)``.

    tiles, counts, rows, before, bits: of :class:`TileLists`; without an order ``rows`` is any tensor of int32. tensors,
    ints, floats: those in `read`, which the mask reads. numbers: int32, of NUMBERS. ``blocks``: at most as many
    as ``bits`` has tiles; ``lines``: of a plane; ``heads``: planes of a batch element; ``sorts``, ``by_keys``,
    ``by_batch``, ``by_head``: 0 or 1.
    """
    builder = Builder()
    with builder.prim_func("mask_bits"):
        every, stride = T.dynamic("every"), T.dynamic("stride", "int64")
        arg = SimpleNamespace(traced=traced)
        shape = [every, T.dynamic("width")]
        arg.tiles = builder.prim_func_arg("tiles", T.StridedTensor(shape, [stride, 1], "int32"))
        arg.counts = builder.prim_func_arg("counts", T.Tensor([every, 2], "int32"))
        arg.rows = builder.prim_func_arg("rows", T.Tensor([T.dynamic("rows_size")], "int32"))
        arg.before = builder.prim_func_arg("before", T.Tensor([every], "int32"))
        shape = [T.dynamic("bit_tiles"), T.dynamic("words"), T.dynamic("tile_rows"), 4]
        arg.bits = builder.prim_func_arg("bits", T.Tensor(shape, "uint32"))
        tensors = [symbol for symbol in traced.tensors if symbol.name in read]
        arg.operands = {symbol.name: builder.prim_func_arg(symbol.name, operand(symbol)) for symbol in tensors}
        for name in NUMBERS:
            setattr(arg, name, builder.prim_func_arg(name, T.int32()))
        for kind, count, number in (("i", traced.ints, T.int32), ("f", traced.floats, T.float32)):
            names = [f"{kind}{index}" for index in range(count) if f"{kind}{index}" in read]
            arg.operands |= {name: builder.prim_func_arg(name, number()) for name in names}
        _kernel(arg)
    return builder.get().with_attr(OWN_BOUNDS, True)


@T.macro
def _kernel(arg):
    with T.Kernel(arg.blocks, threads=THREADS) as block:
        thread = T.get_thread_binding()
        last = arg.before.shape[0] - 1
        mixed = T.alloc_var("int32", init=arg.before[last] + arg.counts[last, 0])
        tiles = T.alloc_var("int32", init=T.cast(T.min(mixed, arg.bits.shape[0]), "int32"))
        for turn in T.serial(T.truncdiv(T.max(tiles - block, 0) + arg.blocks - 1, arg.blocks)):
            place = T.alloc_var("int32", init=block + turn * arg.blocks)
            line = T.alloc_var("int32", init=_line_of(arg, place))
            plane = T.alloc_var("int32", init=T.truncdiv(line, arg.lines))
            number = T.alloc_var("int32", init=line - plane * arg.lines)
            if arg.sorts == 1:
                number = arg.rows[line]
            tile = T.alloc_var("int32", init=arg.tiles[line, place - arg.before[line]])
            b = T.alloc_var("int32", init=T.truncdiv(plane, arg.heads) * arg.by_batch)
            h = T.alloc_var("int32", init=T.truncmod(plane, arg.heads) * arg.by_head)
            if arg.by_keys == 1:
                _write_words(arg, thread, place, b, h, tile, number, True)
            else:
                _write_words(arg, thread, place, b, h, number, tile, False)


@T.macro
def _line_of(arg, place):
    """The last line before which there are at most `place` mixed tiles: the one whose tile has that place."""
    low = T.alloc_var("int32", init=0)
    high = T.alloc_var("int32", init=arg.before.shape[0] - 1)
    while low < high:
        middle = T.alloc_var("int32", init=T.truncdiv(low + high + 1, 2))
        if arg.before[middle] <= place:
            low = middle
        else:
            high = middle - 1
    return low


@T.macro
def _write_words(arg, thread, place, b, h, row_tile, column_tile, keys_first):
    """The words of a tile of queries and a tile of keys. keys_first: whether the words' rows are keys.

    A thread writes the words of two rows, 8 apart, at once: half of their diagonals are the same.
    """
    visible = Visibility(arg.traced, Emitter(arg.operands), arg.seqlen_k)
    emit = DistanceEmitter(arg.operands, clamps=True)
    half = T.alloc_var("int32", init=T.cast(arg.bits.shape[2], "int32") // 2)
    q_lo = T.alloc_var("int32", init=row_tile * arg.block_M + arg.seqlen_k - arg.seqlen_q)
    k_lo = T.alloc_var("int32", init=column_tile * arg.block_N)
    pairs = T.alloc_var("int32", init=T.cast(arg.bits.shape[1], "int32") * half * 4)
    for step in T.serial(T.truncdiv(pairs + (THREADS - 1), THREADS)):
        number = T.alloc_var("int32", init=step * THREADS + thread)
        if number < pairs:
            n = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(number, 4), half))
            of_rows = T.alloc_var("int32", init=T.truncdiv(number, 4) - n * half)
            row = T.alloc_var("int32", init=T.truncdiv(of_rows, 8) * 16 + T.truncmod(of_rows, 8))
            column = T.alloc_var("int32", init=n * COLUMNS + T.truncmod(number, 4) * 2)
            q = T.alloc_var("int32", init=q_lo + (column if keys_first else row))
            k = T.alloc_var("int32", init=k_lo + (row if keys_first else column))
            distance = T.alloc_var("int32", init=q - k)
            at = SimpleNamespace(b=b, h=h, q=q, k=k, distance=distance)
            first = T.alloc_var("uint32", init=T.uint32(0))
            second = T.alloc_var("uint32", init=T.uint32(0))
            for j in T.unroll(BITS_OF_WORD):
                first = first | _bit(arg, visible, emit, at, 0, j, keys_first)
                second = second | _bit(arg, visible, emit, at, SECOND_ROW, j, keys_first)
            arg.bits[place, n, row, T.truncmod(number, 4)] = first
            arg.bits[place, n, row + SECOND_ROW, T.truncmod(number, 4)] = second


def _bit(arg: Any, visible: Any, emit: Any, at: Any, of_row: int, j: Any, keys_first: bool) -> Any:
    """The j-th bit of a word, of the row `of_row` behind the thread's first one."""
    of_column = j // 2 * 8 + j % 2
    more_q, more_k = (of_column, of_row) if keys_first else (of_row, of_column)
    q, k = at.q + more_q, at.k + more_k
    seen = allowed_at(visible, emit, at.b, at.h, q, k, at.distance + (more_q - more_k)) & (q < arg.seqlen_k)
    return T.if_then_else(seen, T.shift_left(T.uint32(1), T.cast(j, "uint32")), T.uint32(0))
