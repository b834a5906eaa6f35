"""The place of a block of a Hopper kernel in the grid, and the roles of its warps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ...tile.hopper import WARP
from .config import CONSUMERS

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


def place_of(arg: Any, at: Any, name: str, tiles: Any) -> SimpleNamespace:
    """The tile of a block, and its pair of a batch element and a head.

    `side` pairs run side by side in the grid: first the first tile of each, then the second of each, and so on.

    Args:
        arg: the kernel's parameters.
        at: the block's place (places.py).
        name: the name of the variable for the number of tiles.
        tiles: the number of tiles of each head.

    Returns:
        `tiles` and `side` in variables, the number of the `pair`, and the block's `place` among the blocks of its
        `side` pairs: its tile has the number ``place // side``.
    """
    bind = Builder.current().bind
    tiles, side = bind(name, tiles), bind("side", arg.side_by_side)
    turn, place = T.truncdiv(at.block, side * tiles), T.truncmod(at.block, side * tiles)
    turn, place = bind("turn", turn), bind("place", place)
    pair = bind("pair", T.alloc_var("int32", init=turn * side + T.truncmod(place, side)))
    return SimpleNamespace(tiles=tiles, side=side, place=place, pair=pair[0])


@T.macro
def take_part(w, registers, produce, consume):
    """The roles of the warpgroups: the last is the producer, the others are consumers.

    Args:
        registers: per thread of the producer warpgroup, and of a consumer warpgroup.
        produce, consume: emit the work of the producer and of a consumer warpgroup.
    """
    if w.thread >= CONSUMERS:
        T.set_max_nreg(registers[0], 0)
        produce()
    else:
        T.set_max_nreg(registers[1], 1)
        consume()


@T.macro
def load_in_two_warps(w, load_first, load_second):
    """The roles of the first two producer warps. (There is no `else`: with an empty one TileLang emits other code.)"""
    if w.thread < CONSUMERS + WARP:
        load_first()
    elif w.thread < CONSUMERS + 2 * WARP:
        load_second()
