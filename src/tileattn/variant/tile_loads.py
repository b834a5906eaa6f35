"""Loads of whole tiles: elements of a captured tensor that follow the matrix of scores, row by row, key by key.

``bias[b, h, q, k]`` and :class:`tileattn.Bias` read, for a tile of scores, a tile of their tensor. A kernel may copy it
at once, as it does with keys, instead of fetching each element where it is used. What such a copy asks of the tensor's
memory (:func:`is_aligned`) becomes part of the variant's key: see ``variant.with_alignment``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .expression import Expr, nodes

_COPIED = (torch.float16, torch.bfloat16, torch.float32)
_MAX_NDIM = 5  # of a tensor map
_VARYING = ("q", "k", "score")


@dataclass(frozen=True)
class TileLoad:
    """A node ``(load name *outer row k)`` of an expression, `row` being ``q`` plus what is the same in all of a tile.

    Attributes:
        text: of the node, by which it is found again.
        name: the tensor's.
        outer: the indices in front of the last two, the same in all of a tile.
        row: the index of the tile's first row, if ``q`` is the position of its first query.
    """

    text: str
    name: str
    outer: tuple[Any, ...]
    row: Any

    def differs_by(self, symbol: str) -> bool:
        """Whether each batch element (``b``), or head (``h``), has a tile of its own; else they share one."""
        return any(node.op == "symbol" and node.args[0] == symbol for index in self.outer for node in nodes(index))


def find(expr: Any) -> Iterator[TileLoad]:
    """The tile loads of an expression, each once."""
    found = {load.text: load for load in map(_as_tile_load, nodes(expr)) if load is not None}
    yield from found.values()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tile of the tensor's last two dimensions can be copied by TMA: rows begin at multiples of 16 bytes."""
    step = 16 // tensor.element_size() if tensor.dtype in _COPIED else 0
    *outer, last = tensor.stride()
    # A size of 1 counts as well: its stride is in the tensor map, although nobody steps by it.
    return step > 0 and last == 1 and tensor.data_ptr() % 16 == 0 and not any(s == 0 or s % step for s in outer)


def _as_tile_load(node: Expr) -> TileLoad | None:
    if node.op != "load" or not 2 <= len(node.args) - 1 <= _MAX_NDIM:
        return None
    name, *outer, row, key = node.args
    if str(key) != "k" or not _steps_with_q(row) or any(map(_varies, outer)):
        return None
    return TileLoad(str(node), name, tuple(outer), row)


def _steps_with_q(index: Any) -> bool:
    """Whether the index is ``q`` plus or minus something that is the same in all of a tile."""
    if not isinstance(index, Expr) or index.op not in ("symbol", "add", "sub"):
        return False
    if index.op == "symbol":
        return bool(index.args[0] == "q")
    x, y = index.args
    return (_steps_with_q(x) and not _varies(y)) or (index.op == "add" and _steps_with_q(y) and not _varies(x))


def _varies(index: Any) -> bool:
    """Whether the value differs within a tile, or has to be read from memory itself."""
    return any(node.op == "load" or (node.op == "symbol" and node.args[0] in _VARYING) for node in nodes(index))
