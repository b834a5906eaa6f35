"""What a mask's tensors hold: which answers about keys depend on it, and for how long an answer is kept.

A tensor may be written in place between two calls, and the keys that its mask reaches change with it. An answer that
was read off a tensor is therefore kept for the tensor object at its `_version`, which PyTorch counts up with each write
in place. It does not see writes through ``.data``, by kernels of other packages, by the replay of a CUDA graph, or by a
collective such as ``torch.distributed.broadcast``; ``torch.autograd.graph.increment_version(tensor)`` tells it.

A CUDA graph replays the transfers that it captured, whatever its tensors then hold. There only answers count that no
write changes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from ...call.inputs import Operands
from ...variant.evaluated import knows_ranges
from ...variant.expression import nodes
from ...variant.key import encode
from ...variant.masks import And, Documents, KeyPadding, Mask, Or
from ...variant.program import program
from ...variant.sparse.known_blocks import KnownBlocks
from ...variant.sparse.patterns import ImageTextDocuments

_BOUNDED = (Documents, KeyPadding, ImageTextDocuments, KnownBlocks)  # bounds are tensors of their own, made once
_MOST_KEPT = 128


class Ask(Enum):
    """What an answer about a mask's keys may rest on.

    NOW: the mask's own ranges and its expression, with what tensors hold now.
    RANGES: the mask's own ranges, with what tensors hold now.
    LASTING: only what no write to a tensor changes. Of masks without tensors, and of those whose bounds are computed
        when they are made, that is all.
    """

    NOW = "now"
    RANGES = "ranges"
    LASTING = "lasting"


def ask_of(mask: Mask | None, tensors: Sequence[Tensor], capturing: bool) -> Ask:
    """What a call may ask its mask.

    Args:
        mask: of the call.
        tensors: of the mask.
        capturing: whether the call is captured in a CUDA graph.
    """
    if mask is None or not tensors or capturing or (knows_ranges(mask) and is_settled(mask)):
        return Ask.LASTING
    if any(tensor.is_inference() for tensor in tensors):  # they have no versions: nothing is kept
        return Ask.LASTING if is_settled(mask) else Ask.RANGES
    return Ask.NOW


def is_settled(mask: Mask) -> bool:
    """Whether no write to a tensor changes what `mask.kv_range` answers."""
    if type(mask) in (And, Or):
        return is_settled(mask.x) and is_settled(mask.y)  # type: ignore[attr-defined]
    return type(mask) in _BOUNDED or not reads_tensors(mask)


def reads_tensors(mask: Mask) -> bool:
    """Whether `mask.kv_range` reads tensors."""
    if type(mask) in (And, Or):
        return reads_tensors(mask.x) or reads_tensors(mask.y)  # type: ignore[attr-defined]
    if type(mask).kv_range is Mask.kv_range:
        return False
    bounds = program(encode(mask, ())[0]).kv_range
    return any(node.op == "load" for bound in bounds for node in nodes(bound))


class _Entry(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    found: dict[Any, Any]


class Kept:
    """What a plan has computed for masks: of the last few masks, and of tensors as long as they are there."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, key: str, operands: Operands, ask: Ask) -> dict[Any, Any]:
        """What was computed for a mask by what it was asked: a dictionary to read and to write.

        key, operands: of the mask as the user gave it (`tileattn.variant.key.encode`).
        """
        if ask is Ask.RANGES:
            return {}
        tensors = operands.tensors
        place = key, ask, tuple(operands.ints), tuple(operands.floats), tuple(map(id, tensors))
        versions = tuple(tensor._version for tensor in tensors) if ask is Ask.NOW else ()
        entry = self._entries.get(place)
        if entry is None or entry.versions != versions or any(ref() is not x for ref, x in zip(entry.tensors, tensors)):
            self._drop()
            entry = self._entries[place] = _Entry(tuple(map(weakref.ref, tensors)), versions, {})
        self._entries.move_to_end(place)
        return entry.found

    def _drop(self) -> None:
        """Drops what is never found again, since a tensor is gone, and the least recently used."""
        gone = [place for place, entry in self._entries.items() if any(ref() is None for ref in entry.tensors)]
        for place in gone:
            del self._entries[place]
        while len(self._entries) >= _MOST_KEPT:
            self._entries.popitem(last=False)
