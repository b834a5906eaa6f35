"""Copies of 8 x 8 matrices of 16-bit elements between registers and shared memory on Hopper: stmatrix, ldmatrix.

Of each 16 columns of a product, a thread holds the elements in rows i, i + 8 and columns j, j + 1, j + 8, j + 9: those
are in four matrices. TileLang 0.1.15 generates stmatrix only for whole buffers, not for one of several stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import ir

from .hopper import WARP

_LDMATRIX, _STMATRIX = ir.Op.get("tl.ptx_ldmatrix"), ir.Op.get("tl.ptx_stmatrix")
_PACK = ir.Op.get("tl.pack_b16")


def accumulator_layout(rows: int, columns: int) -> Any:
    """The layout in which wgmma leaves a product and reads a 16-bit first operand: 16 rows in each warp."""
    return T.Fragment([rows, columns], forward_thread_fn=thread_of, forward_index_fn=register_of)


def thread_of(i: Any, j: Any) -> Any:
    """The thread that holds a product's element."""
    return i // 16 * 32 + i % 8 * 4 + j % 8 // 2


def register_of(i: Any, j: Any) -> Any:
    """The number of the element among those that the thread holds."""
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def element(lane: Any, warp: Any, n: int, e: Any) -> tuple[Any, Any]:
    """The row and column of the e-th of a thread's eight elements in the n-th group of 16 columns."""
    return warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2


def transposed(buffer: Any, *stage: Any) -> Callable[[Any, Any, Any], Any]:
    """The place of a thread's matrix row in a tile that has the product's columns in rows."""
    return lambda lane, warp, n: buffer[(*stage, n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8)]


def straight(buffer: Any, *stage: Any) -> Callable[[Any, Any, Any], Any]:
    """The place of a thread's matrix row in a tile that has the product's rows in rows."""
    return lambda lane, warp, n: buffer[(*stage, warp * 16 + lane % 16, n * 16 + lane // 16 * 8)]


@T.macro
def store_matrices(values, eight, columns, place_of, is_transposed, thread, words=False):
    """Stores a product from registers to shared memory, in 16 bits.

    Args:
        values: the product's fragment.
        eight: registers for eight elements.
        columns: the number of the product's columns.
        place_of: the place of a thread's matrix row, given lane, warp and the number of the group of 16 columns.
        is_transposed: whether columns become rows.
        thread: this thread's number.
        words: whether elements are read two at a time. nvcc then stores the registers that the product reads next, and
            copies none, but ptxas may have too few for that.
    """
    lane, warp = thread % WARP, thread // WARP
    for n in T.unroll(columns // 16):
        for e in T.vectorized(8) if words else T.unroll(8):
            eight[e] = values[element(lane, warp, n, e)]
        place = place_of(lane, warp, n)
        if words:
            pairs = [T.reinterpret(eight[e : e + 2], "int32") for e in (0, 2, 4, 6)]
        else:
            pairs = [T.call_intrin("int32", _PACK, eight[e], eight[e + 1]) for e in (0, 2, 4, 6)]
        T.evaluate(
            T.call_intrin(
                "handle", _STMATRIX, int(is_transposed), 4, T.access_ptr(place, "w", extent=8), *pairs, "m8n8"
            )
        )


@T.macro
def load_matrices(values, eight, columns, place_of, is_transposed, thread):
    """Loads a fragment from shared memory. Arguments: see :func:`store_matrices`."""
    lane, warp = thread % WARP, thread // WARP
    for n in T.unroll(columns // 16):
        place = place_of(lane, warp, n)
        ends = [T.access_ptr(place, "r", extent=8), T.access_ptr(eight[0], "w", extent=8)]
        T.evaluate(T.call_intrin("handle", _LDMATRIX, int(is_transposed), 4, *ends))
        for e in T.unroll(8):
            row, column = element(lane, warp, n, e)
            values[row, column] = eight[e]


class Words:
    """A tile of bfloat16 in registers, two neighbouring columns to a word, in the layout of a product.

    Its elements are read as float32: one shift or one mask each. From registers of bfloat16 nvcc takes two instructions
    for every second element.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.columns = columns
        self.words = T.alloc_fragment([rows, columns // 2], "int32")
        self.four = T.alloc_local([4], "int32")
        layout = T.Fragment(
            [rows, columns // 2],
            forward_thread_fn=lambda i, j: thread_of(i, 2 * j),
            forward_index_fn=lambda i, j: register_of(i, 2 * j) // 2,
        )
        T.annotate_layout({self.words: layout})

    def __getitem__(self, place: tuple[Any, Any]) -> Any:
        i, j = place
        return T.reinterpret((self.words[i, j // 2] << (16 - j % 2 * 16)) & -(2**16), "float32")


@T.macro
def load_words(tile, place_of, thread):
    """Loads `Words` from shared memory. Arguments: see :func:`store_matrices`."""
    lane, warp = thread % WARP, thread // WARP
    for n in T.unroll(tile.columns // 16):
        ends = [T.access_ptr(place_of(lane, warp, n), "r", extent=8), T.access_ptr(tile.four[0], "w", extent=4)]
        T.evaluate(T.call_intrin("handle", _LDMATRIX, 0, 4, *ends))
        for e in T.unroll(4):
            row, column = element(lane, warp, n, 2 * e)
            tile.words[row, column // 2] = tile.four[e]
