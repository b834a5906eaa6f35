"""Lists of tiles (tile_lists.py) that calls find again, and what a launch passes of them. For every backend.

Layers of a model, and steps of a training, call with one mask. So lists are kept for the last few combinations of a
mask, sizes and tiles. What a mask's tensor holds may change: lists are found again only for the same tensor objects at
the same versions, which PyTorch counts up when it writes in place. It does not see writes through ``.data`` or by
kernels of other packages; ``torch.autograd.graph.increment_version(tensor)`` tells it.

Nothing is kept of, or found by, a call that is captured in a CUDA graph: there the lists are made in every replay.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.graph_memory import is_of_a_graph
from ..call.inputs import Operands
from .tile_lists import Cut, Sizes, TileLists, tensors_of

MOST_KEPT, MOST_BYTES = 32, 2**28

Make = Callable[[str, Operands, Sizes, Cut, torch.device], TileLists]


class _Kept(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    lists: TileLists

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in arguments_of(self.lists)[0])


# The least recently used first. Each is used on one stream only, on which it was made: no other need wait for it, and
# the memory of one that is dropped is free for what that stream runs next.
_kept: OrderedDict[Hashable, _Kept] = OrderedDict()
_lock = threading.Lock()


def lists_of(make: Make, variant: str, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device) -> TileLists:
    """The lists of a call, made now or found.

    Args:
        make: makes them; a backend's own, or :func:`tileattn.kernels.tile_lists.make_lists`, of which the other
            arguments are.
    """
    read = [operands.tensors[number] for number in tensors_of(variant)]
    on_gpu = device.type == "cuda"
    # Tensors of inference mode have no versions.
    if (on_gpu and is_of_a_graph(device)) or any(tensor.is_inference() for tensor in read):
        return make(variant, operands, sizes, cut, device)
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else None
    key = make, variant, sizes, cut, device, stream, tuple(operands.ints), tuple(operands.floats), tuple(map(id, read))
    versions = tuple(tensor._version for tensor in read)
    with _lock:
        found = _kept.get(key)
        if found is not None and found.versions == versions and _are(found.tensors, read):
            _kept.move_to_end(key)
            return found.lists
    lists = make(variant, operands, sizes, cut, device)
    _keep(key, _Kept(tuple(map(weakref.ref, read)), versions, lists))
    return lists


def arguments_of(lists: TileLists | None) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors and the numbers that a kernel takes of them."""
    if lists is None:
        return (), ()
    tensors = (lists.tiles, lists.counts) if lists.rows is None else (lists.tiles, lists.counts, lists.rows)
    return tensors, (lists.batch_step, lists.head_step)


def forget_lists() -> None:
    """Drops all lists that are kept."""
    with _lock:
        _kept.clear()


def _are(references: tuple[weakref.ref[Tensor], ...], tensors: list[Tensor]) -> bool:
    return all(reference() is tensor for reference, tensor in zip(references, tensors, strict=True))


def _keep(key: Hashable, kept: _Kept) -> None:
    with _lock:
        # Lists of a tensor that is gone are never found again. `BlockSparse` has new tensors in each call.
        for other in [key for key, each in _kept.items() if any(tensor() is None for tensor in each.tensors)]:
            del _kept[other]
        _kept[key] = kept
        _kept.move_to_end(key)
        total = sum(each.bytes for each in _kept.values())
        while len(_kept) > 1 and (len(_kept) > MOST_KEPT or total > MOST_BYTES):
            total -= _kept.popitem(last=False)[1].bytes
