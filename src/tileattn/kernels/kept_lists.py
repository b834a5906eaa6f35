"""Lists of tiles (tile_lists.py) that calls find again, and what a launch passes of them. For every backend.

Layers of a model, and steps of a training, call with one mask. So lists are kept for the last few combinations of a
mask, sizes and tiles. What a mask's tensor holds may change, and so may the cumulative lengths of a packed call: lists
are found again only for the same tensor objects at the same versions, which PyTorch counts up when it writes in place.
It does not see writes through ``.data``, by kernels of other packages, by the replay of a CUDA graph, or by a
collective such as ``torch.distributed.broadcast``; ``torch.autograd.graph.increment_version(tensor)`` tells it.

Nothing is kept of, or found by, a call that is captured in a CUDA graph: there the lists are made in every replay.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.facts import Packed
from ..call.graph_memory import is_of_a_graph
from ..call.inputs import Operands
from .tile_lists import Cut, Sizes, TileLists, tensors_of

MOST_KEPT, MOST_BYTES = 32, 2**29

Make = Callable[[str, Operands, Sizes, Cut, torch.device], TileLists]
MakePacked = Callable[[str, Operands, Packed, Any, Cut, Tensor], TileLists]


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
    key = make, variant, sizes, cut
    return _found_or_made(key, operands, variant, (), device, lambda: make(variant, operands, sizes, cut, device))


def packed_lists_of(
    make: MakePacked, variant: str, operands: Operands, packed: Packed, sizes: Hashable, cut: Cut, work: Tensor
) -> TileLists:
    """The lists of a packed call, made now or found.

    Args:
        make: makes them; the other arguments are its.
        packed: where the sequences lie; the work list follows from that and from the sizes.
        sizes: what the host knows of them.
    """
    key, bounds = (make, variant, sizes, cut), (packed.cu_seqlens_q, packed.cu_seqlens_k)
    return _found_or_made(
        key, operands, variant, bounds, work.device, lambda: make(variant, operands, packed, sizes, cut, work)
    )


def _found_or_made(
    of_call: Hashable,
    operands: Operands,
    variant: str,
    bounds: tuple[Tensor, ...],
    device: torch.device,
    make_now: Callable[[], TileLists],
) -> TileLists:
    """Lists that were kept for the same call, numbers and tensors, else new ones.

    Args:
        of_call: what else the lists depend on, that the host knows.
        bounds: tensors that they depend on beside the mask's.
    """
    read = [*(operands.tensors[number] for number in tensors_of(variant)), *bounds]
    on_gpu = device.type == "cuda"
    # Tensors of inference mode have no versions.
    if (on_gpu and is_of_a_graph(device)) or any(tensor.is_inference() for tensor in read):
        return make_now()
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else None
    key = of_call, device, stream, tuple(operands.ints), tuple(operands.floats), tuple(map(id, read))
    versions = tuple(tensor._version for tensor in read)
    with _lock:
        found = _kept.get(key)
        if found is not None and found.versions == versions and _are(found.tensors, read):
            _kept.move_to_end(key)
            return found.lists
    lists = make_now()
    _keep(key, _Kept(tuple(map(weakref.ref, read)), versions, lists))
    return lists


def arguments_of(lists: TileLists | None) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors and the numbers that a kernel takes of them."""
    if lists is None:
        return (), ()
    given = (lists.tiles, lists.counts, lists.rows, lists.before, lists.bits)
    return tuple(each for each in given if each is not None), (lists.batch_step, lists.head_step)


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
