"""Lists of tiles in kernels: their parameters, and the line of a block's tiles; see ``tile_lists.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

NO_LISTS: dict[str, Any] = {"list_tiles": None, "list_counts": None, "list_batch": None, "list_head": None}
MIXED, ALL = 0, 1  # columns of the counts


def declare_lists(tensor: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The tensors of :class:`TileLists`; `tensor` declares a parameter of a name and a type."""
    lines = T.dynamic("list_lines")
    stride = T.dynamic("list_stride", "int64")  # a place in the lists may be beyond 2^31
    return {
        "list_tiles": tensor("list_tiles", T.StridedTensor([lines, T.dynamic("list_capacity")], [stride, 1], "int32")),
        "list_counts": tensor("list_counts", T.Tensor([lines, 2], "int32")),
    }


def declare_steps(scalar: Callable[[str, str], Any]) -> dict[str, Any]:
    """The numbers of :class:`TileLists`."""
    return {name: scalar(name, "int") for name in ("list_batch", "list_head")}


def line_of(arg: Any, b: Any, h: Any, number: Any) -> Any:
    """The line of the number-th row (or column) of tiles of a head."""
    return b * arg.list_batch + h * arg.list_head + number
