"""Lists of tiles in kernels: their parameters, and the line of a block's tiles; see ``tile_lists.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tvm import tirx

NO_LISTS: dict[str, Any] = {"list_tiles": None, "list_counts": None, "list_batch": None, "list_head": None}
MIXED, ALL = 0, 1  # columns of the counts
ANY_NUMBER = 2**40


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


def tile_of_line(arg: Any, line: Any, step: Any) -> Any:
    """The step-th tile of a line."""
    return _unchecked(arg.list_tiles)[index_of(line), index_of(step)]


def mixed_of_line(arg: Any, line: Any) -> Any:
    """How many tiles of a line are mixed."""
    return _unchecked(arg.list_counts)[index_of(line), MIXED]


def length_of_line(arg: Any, line: Any) -> Any:
    """How many tiles of a line are visited."""
    return _unchecked(arg.list_counts)[index_of(line), ALL]


def _unchecked(tensor: Any) -> Any:
    """The tensor without its sizes: TileLang compares each index with a size that it does not know, in registers."""
    shape = [T.int64(ANY_NUMBER)] * 2
    return tirx.decl_buffer(shape, tensor.dtype, f"{tensor.name}_of_lines", data=tensor.data, strides=tensor.strides)


def index_of(number: Any) -> Any:
    """An index, which is known not to be negative."""
    return T.cast(T.cast(number, "uint32"), "int64")
