"""Bits of mixed tiles in attention kernels: their parameters, their words, and scores hidden by them.

A kernel before (lists/bits_kernel.py) wrote, for each mixed tile of a plane, a word for each row of the tile and t = 0
.. 3: the bits of columns 2t and 2t + 1 of each eight, as key_words.py has them. A thread loads the words of its rows
while the products are computed. Tiles behind the last one that has bits evaluate the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import tirx

from .key_words import COLUMNS, hide_by_word
from .lists import ANY_NUMBER, index_of, mixed_of_line

NO_BITS: dict[str, Any] = {"mixed_before": None, "mixed_bits": None}
NO_PLACE = 2**30  # of a line without mixed tiles


def declare_bits(tensor: Callable[[str, Any], Any], rows: int, columns: int) -> dict[str, Any]:
    """The tensors `before` and `bits` of :class:`TileLists`; `tensor` declares a parameter of a name and a type.

    Args:
        rows, columns: of a tile. Rows are the queries of a line's tiles, or its keys.
    """
    shape = [T.dynamic("bit_tiles"), -(-columns // COLUMNS), rows, 4]
    return {
        "mixed_before": tensor("mixed_before", T.Tensor([T.dynamic("bit_lines")], "int32")),
        "mixed_bits": tensor("mixed_bits", T.Tensor(shape, "uint32")),
    }


def place_of_line(arg: Any, line: Any) -> Any:
    """The place of the bits of a line's first mixed tile, the next ones following; :data:`NO_PLACE` if it has none."""
    # Without the tensor's size, as in lists.py.
    before = tirx.decl_buffer([T.int64(ANY_NUMBER)], "int32", "before_lines", data=arg.mixed_before.data)
    return T.if_then_else(mixed_of_line(arg, line) > 0, before[index_of(line)], NO_PLACE)


def has_bits(arg: Any, place: Any) -> Any:
    """Whether the tile at a place has bits."""
    return place < arg.mixed_bits.shape[0]


@T.macro
def load_bits(words, arg, place, first_row):
    """The words of the tile at a place, of the rows from `first_row` on."""
    for n, word in enumerate(words):
        for i, t in T.Parallel(word.shape[0], 4):
            word[i, t] = _unchecked(arg.mixed_bits)[index_of(place), n, first_row + i, t]


def _unchecked(bits: Any) -> Any:
    return tirx.decl_buffer([T.int64(ANY_NUMBER), *bits.shape[1:]], "uint32", "bits_of_tiles", data=bits.data)


@T.macro
def hide_by_bits(acc_s, words):
    """s[i, j] = -inf where the bit is 0."""
    for n, word in enumerate(words):
        hide_by_word(acc_s, word, n)
