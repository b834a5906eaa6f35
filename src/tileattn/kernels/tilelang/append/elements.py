"""What a thread does with its piece of a head (pieces.py): loads it, rotates it, stores it.

`low` and `high` are the thread's registers, 16 bytes each. A plain piece, and a rotated one of neighbouring pairs, is
in `low`. Of a rotated piece in two halves `low` has the first elements of the pairs, `high` the second ones.
"""

from __future__ import annotations

import tilelang.language as T


@T.macro
def move(pieces, x, b, i, h, piece, low, high, to_registers):
    """Loads or stores the elements of a piece of head h in row i of x (batch, rows, heads, head_dim)."""
    if pieces.rotated > 0:
        if piece < pieces.rotated:
            if pieces.interleaved:
                _move_run(x, b, i, h, piece * (2 * pieces.pairs), 2 * pieces.pairs, pieces.step, low, to_registers)
            else:
                _move_run(x, b, i, h, piece * pieces.pairs, pieces.pairs, pieces.step, low, to_registers)
                second = pieces.rotary_dim // 2 + piece * pieces.pairs
                _move_run(x, b, i, h, second, pieces.pairs, pieces.step, high, to_registers)
    if pieces.plain > 0:
        if piece >= pieces.rotated:
            first = pieces.rotary_dim + (piece - pieces.rotated) * pieces.width
            _move_run(x, b, i, h, first, pieces.width, pieces.step, low, to_registers)


@T.macro
def rotate(pieces, cos, sin, position, piece, low, high):
    """(a, b) -> (a cos - b sin, a sin + b cos), in float32, for the pairs of a piece; nothing for a plain piece, or
    where there is no such row of cos and sin."""
    if (piece < pieces.rotated) & (position >= 0) & (position < cos.shape[0]):
        # [pairs]
        c = T.alloc_local([pieces.pairs], cos.dtype)
        s = T.alloc_local([pieces.pairs], cos.dtype)
        _load_angles(pieces, cos, position, piece, c)
        _load_angles(pieces, sin, position, piece, s)
        for j in T.unroll(pieces.pairs):
            if pieces.interleaved:
                _turn(low, 2 * j, low, 2 * j + 1, c, s, j)
            else:
                _turn(low, j, high, j, c, s, j)


@T.macro
def _turn(first, at_first, second, at_second, c, s, j):
    cosine, sine = T.cast(c[j], "float32"), T.cast(s[j], "float32")
    a = T.alloc_var("float32", init=T.cast(first[at_first], "float32"))
    b = T.alloc_var("float32", init=T.cast(second[at_second], "float32"))
    first[at_first] = T.cast(a * cosine - b * sine, first.dtype)
    second[at_second] = T.cast(a * sine + b * cosine, second.dtype)


@T.macro
def _move_run(x, b, i, h, first, count, step, registers, to_registers):
    at_once = min(count, step)
    for n in T.unroll(count // at_once):
        for e in T.vectorized(at_once):
            if to_registers:
                registers[n * at_once + e] = x[b, i, h, first + n * at_once + e]
            else:
                x[b, i, h, first + n * at_once + e] = registers[n * at_once + e]


@T.macro
def _load_angles(pieces, table, position, piece, registers):
    at_once = min(pieces.pairs, pieces.table_step)
    for n in T.unroll(pieces.pairs // at_once):
        for e in T.vectorized(at_once):
            registers[n * at_once + e] = table[position, piece * pieces.pairs + n * at_once + e]
