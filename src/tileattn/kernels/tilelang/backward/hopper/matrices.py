"""Copies of 8 x 8 matrices of 16-bit elements between registers and shared memory on Hopper: stmatrix, ldmatrix.

Of each 16 columns of a product, a thread holds the elements in rows i, i + 8 and columns j, j + 1, j + 8, j + 9: those
are in four matrices. TileLang 0.1.15 generates stmatrix only for whole buffers, not for one of several stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import ir

from ...tile.hopper import WARP

_LDMATRIX, _STMATRIX = ir.Op.get("tl.ptx_ldmatrix"), ir.Op.get("tl.ptx_stmatrix")
_PACK = ir.Op.get("tl.pack_b16")


def element(lane: Any, warp: Any, n: int, e: Any) -> tuple[Any, Any]:
    """The row and column of the e-th of a thread's eight elements in the n-th group of 16 columns."""
    return warp * 16 + lane // 4 + e // 2 % 2 * 8, n * 16 + lane % 4 * 2 + e // 4 * 8 + e % 2


def transposed(buffer: Any, *stage: Any) -> Callable[[Any, Any, Any], Any]:
    """The place of a thread's matrix row in a tile that has the product's columns in rows."""
    return lambda lane, warp, n: buffer[(*stage, n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane % 16 // 8 * 8)]


@T.macro
def store_matrices(values, eight, columns, place_of, is_transposed, thread):
    """Stores a product from registers to shared memory, in 16 bits.

    Args:
        values: the product's fragment.
        eight: registers for eight elements.
        columns: the number of the product's columns.
        place_of: the place of a thread's matrix row, given lane, warp and the number of the group of 16 columns.
        is_transposed: whether columns become rows.
        thread: this thread's number.
    """
    lane, warp = thread % WARP, thread // WARP
    for n in T.unroll(columns // 16):
        for e in T.unroll(8):
            eight[e] = values[element(lane, warp, n, e)]
        place = place_of(lane, warp, n)
        pairs = [T.call_intrin("int32", _PACK, eight[e], eight[e + 1]) for e in (0, 2, 4, 6)]
        T.evaluate(
            T.call_intrin(
                "handle", _STMATRIX, int(is_transposed), 4, T.access_ptr(place, "w", extent=8), *pairs, "m8n8"
            )
        )


@T.macro
def load_transposed(values, eight, columns, place_of, thread):
    """Loads a fragment from shared memory; rows become columns. Arguments: see :func:`store_matrices`."""
    lane, warp = thread % WARP, thread // WARP
    for n in T.unroll(columns // 16):
        place = place_of(lane, warp, n)
        ends = [T.access_ptr(place, "r", extent=8), T.access_ptr(eight[0], "w", extent=8)]
        T.evaluate(T.call_intrin("handle", _LDMATRIX, 1, 4, *ends))
        for e in T.unroll(8):
            key, query = element(lane, warp, n, e)
            values[key, query] = eight[e]
