"""How a block of threads of a Hopper kernel finds its place, and each of its warps its part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ...tile.hopper import WARP
from .config import CONSUMERS

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


def place_of(arg: Any, at: Any, name: str, tiles: Any) -> SimpleNamespace:
    """Which tile a block has, of which pair of a batch element with a head.

    `side` heads stand side by side in the grid, and each begins with its first tiles. Returns the number of the pair,
    and of the block's place among those of its `side` heads.

    Args:
        arg: the kernel's parameters.
        at: where the block is (places.py).
        name: of the variable for the number of tiles.
        tiles: of each head.
    """
    bind = Builder.current().bind
    tiles, side = bind(name, tiles), bind("side", arg.side_by_side)
    turn, place = T.truncdiv(at.block, side * tiles), T.truncmod(at.block, side * tiles)
    turn, place = bind("turn", turn), bind("place", place)
    pair = bind("pair", T.alloc_var("int32", init=turn * side + T.truncmod(place, side)))
    return SimpleNamespace(tiles=tiles, side=side, place=place, pair=pair[0])


@T.macro
def take_part(w, registers, produce, consume):
    """Each warpgroup in its role.

    Args:
        registers: of a thread of the producer warpgroup, and of one of a consumer warpgroup.
        produce, consume: what these do.
    """
    if w.thread >= CONSUMERS:
        T.set_max_nreg(registers[0], 0)
        produce()
    else:
        T.set_max_nreg(registers[1], 1)
        consume()


@T.macro
def load_in_two_warps(w, load_first, load_second):
    """What the first two producer warps do. (Without an `else`: with an empty one TileLang emits other code.)"""
    if w.thread < CONSUMERS + WARP:
        load_first()
    elif w.thread < CONSUMERS + 2 * WARP:
        load_second()
