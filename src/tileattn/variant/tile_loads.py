"""Tile loads: loads that read a tile of a captured tensor for each tile of scores.

``bias[b, h, q, k]`` and :class:`tileattn.Bias` are such loads: rows of the tensor follow queries, its last dimension
follows keys. A kernel may copy the whole tile at once, as it does with keys, instead of loading each element where it
is used. Such a copy requires alignment (:func:`is_aligned`), which becomes a part of the variant's key: see
:func:`tileattn.variant.program.with_alignment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .expression import Expr, nodes

_COPIED = (torch.float16, torch.bfloat16, torch.float32)
_MAX_NDIM = 5  # the most dimensions of a TMA tensor map
_VARYING = ("q", "k", "score")


@dataclass(frozen=True)
class TileLoad:
    """A node ``(load name *outer row k)`` of an expression, where `row` is ``q`` plus a value constant within a tile.

    Attributes:
        text: the node's text, which identifies the node.
        name: the tensor's name.
        outer: the indices before the last two; they are constant within a tile.
        row: the row index as an expression of ``q``. At the tile's first query it gives the tile's first row.
    """

    text: str
    name: str
    outer: tuple[Any, ...]
    row: Any

    def differs_by(self, symbol: str) -> bool:
        """Whether the tile differs between batch elements (``"b"``) or heads (``"h"``); if not, they share one."""
        return any(node.op == "symbol" and node.args[0] == symbol for index in self.outer for node in nodes(index))


def find(expr: Any) -> Iterator[TileLoad]:
    """The tile loads of an expression, each once."""
    by_text = {load.text: load for load in map(_as_tile_load, nodes(expr)) if load is not None}
    yield from by_text.values()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tile of the tensor's last two dimensions can be copied by TMA: rows begin at multiples of 16 bytes."""
    step = 16 // tensor.element_size() if tensor.dtype in _COPIED else 0
    *outer, last = tensor.stride()
    # The stride of a dimension of size 1 counts as well: it is not used, but it is in the tensor map.
    return step > 0 and last == 1 and tensor.data_ptr() % 16 == 0 and not any(s == 0 or s % step for s in outer)


def _as_tile_load(node: Expr) -> TileLoad | None:
    if node.op != "load" or not 2 <= len(node.args) - 1 <= _MAX_NDIM:
        return None
    name, *outer, row, key = node.args
    if str(key) != "k" or not _steps_with_q(row) or any(map(_varies, outer)):
        return None
    return TileLoad(str(node), name, tuple(outer), row)


def _steps_with_q(index: Any) -> bool:
    """Whether the index is ``q`` plus or minus a value that is constant within a tile."""
    if not isinstance(index, Expr) or index.op not in ("symbol", "add", "sub"):
        return False
    if index.op == "symbol":
        return bool(index.args[0] == "q")
    x, y = index.args
    return (_steps_with_q(x) and not _varies(y)) or (index.op == "add" and _steps_with_q(y) and not _varies(x))


def _varies(index: Any) -> bool:
    """Whether the value may differ within a tile. A value that is loaded from memory counts as different."""
    return any(node.op == "load" or (node.op == "symbol" and node.args[0] in _VARYING) for node in nodes(index))
