"""Lists of tiles in the forward kernel: lines sorted by length, and the queue's order of them; see tile_lists.py.

A row of tiles that takes long must begin early, or it ends after all others. So the lines of a head are sorted, and the
queue hands out the first few of all heads before heads follow one another (or so many side by side).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import tirx

from ...tile.lists import ANY_NUMBER, NO_LISTS, declare_lists, declare_steps

NO_SORTED_LISTS: dict[str, Any] = NO_LISTS | {"list_rows": None, "list_ahead": None}


def declare_sorted_lists(tensor: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The tensors of :class:`TileLists`, of sorted lines; `tensor` declares a parameter of a name and a type."""
    rows = T.Tensor([T.dynamic("list_sorted")], "int32")
    return declare_lists(tensor) | {"list_rows": tensor("list_rows", rows)}


def declare_sorted_steps(scalar: Callable[[str, str], Any]) -> dict[str, Any]:
    """The numbers of :class:`TileLists`, and how many lines of each head come before all others."""
    return declare_steps(scalar) | {"list_ahead": scalar("list_ahead", "int")}


def pair_and_line(arg: Any, tile: Any, tiles: Any) -> tuple[Any, Any]:
    """Of task number `tile` the pair of a batch element and a head, and which of the pair's lines it walks over.

    First `list_ahead` lines of each pair, the pairs side by side; then the others, `side_by_side` pairs at a time.

    Args:
        tiles: lines of a pair.
    """
    pairs = arg.batch * arg.heads
    ahead = tile < arg.list_ahead * pairs
    rest, side = tile - arg.list_ahead * pairs, arg.side_by_side
    tasks = side * (tiles - arg.list_ahead)
    pair = T.truncdiv(rest, tasks) * side + T.truncmod(T.truncmod(rest, tasks), side)
    line = T.truncdiv(T.truncmod(rest, tasks), side) + arg.list_ahead
    return T.if_then_else(ahead, T.truncmod(tile, pairs), pair), T.if_then_else(ahead, T.truncdiv(tile, pairs), line)


def row_of_line(arg: Any, line: Any) -> Any:
    """The row of tiles that a line is of."""
    # Without the tensor's size, as in tile/lists.py.
    rows = tirx.decl_buffer([T.int64(ANY_NUMBER)], "int32", "rows_of_lines", data=arg.list_rows.data)
    return rows[T.cast(T.cast(line, "uint32"), "int64")]
