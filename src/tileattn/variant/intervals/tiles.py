"""What a mask does to tiles of scores: hides all of it, none of it, or a part of it.

>>> from tileattn import SlidingWindow
>>> kinds = tile_kinds(*traced(SlidingWindow(100, 0)), *grid(512, 512, 128, 128))
>>> kinds
tensor([[1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1]], dtype=torch.int8)
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..evaluated import values_of
from ..key import encode
from ..masks import Mask
from ..program import program
from .evaluator import Evaluator
from .values import Bools, Ends


class Kind(IntEnum):
    """What a mask does to a tile. MIXED: some scores are seen and some hidden, or the analysis cannot tell."""

    HIDDEN = 0
    MIXED = 1
    WHOLE = 2


def traced(mask: Mask) -> tuple[Any, dict[str, Any]]:
    """A mask's expression `allows`, and the values of its operands."""
    key, operands = encode(mask, ())
    return program(key).allows, values_of(operands)


Positions = Ends | tuple[Tensor, Tensor]


def grid(seqlen_q: int, seqlen_k: int, block_M: int, block_N: int, device: Any = "cpu") -> tuple[Ends, Ends]:
    """The positions of all tiles: those of the queries (rows, 1), aligned bottom-right, and of the keys (columns,)."""
    q = torch.arange(0, seqlen_q, block_M, device=device)
    k = torch.arange(0, seqlen_k, block_N, device=device)
    offset = seqlen_k - seqlen_q
    q_hi, k_hi = (q + (block_M - 1)).clamp(max=seqlen_q - 1), (k + (block_N - 1)).clamp(max=seqlen_k - 1)
    return (
        Ends(q[:, None] + offset, q_hi[:, None] + offset, (offset, seqlen_k - 1), block_M - 1),
        Ends(k, k_hi, (0, seqlen_k - 1), block_N - 1),
    )


def numbers(count: int, dims: int, device: Any = "cpu") -> Ends:
    """The numbers of batch elements or heads from 0, as tensors (count, 1, ...) with `dims` dimensions."""
    number = torch.arange(count, device=device).view(-1, *[1] * (dims - 1))
    return Ends(number, number, (0, count - 1), 0)


def tile_kinds(
    allows: Any,
    values: dict[str, Any],
    q: Positions,
    k: Positions,
    b: int | Tensor | Ends = 0,
    h: int | Tensor | Ends = 0,
    *,
    cuts: int = 0,
) -> Tensor:
    """The kind of each tile, int8 values of `Kind`.

    HIDDEN and WHOLE are never wrong. MIXED may be a tile that is hidden or whole; with `cuts` there are fewer.

    Without cuts nothing waits for a device: no element of a tensor on one is read on the host, and shapes do not depend
    on elements, so the call may be captured in a CUDA graph. Positions are tensors there; what bounds them is known if
    they come as `Ends` with a span and a width, as `grid` and `numbers` give them.

    Args:
        allows: the traced expression of a mask, or a bool.
        values: the values of its operands, by their names.
        q, k: the first and last position of each tile; int64, broadcastable, on the device of the values.
        b, h: the batch element and the head, numbers or int64 tensors that broadcast with the positions.
        cuts: how often tiles that stay mixed are cut into four, which are then asked. Reads tensors on the host.

    Returns:
        In the common shape of q, k, b and h.
    """
    device = q[0].device
    positions = {"q": Ends(*q), "k": Ends(*k), "b": _ends(b), "h": _ends(h)}
    shape = torch.broadcast_shapes(*(ends.first.shape for ends in positions.values() if isinstance(ends, Ends)))
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int8, device=device)
    evaluate = Evaluator(values, positions, device)
    found = evaluate(allows)
    assert isinstance(found, Bools)
    kinds = (found.lo.to(torch.int8) + found.hi.to(torch.int8)).expand(shape)
    if cuts == 0:
        return kinds.contiguous()
    mixed = kinds == Kind.MIXED
    kinds = kinds.clone()
    of_b, of_h = (
        (each.first if isinstance(each, Ends) else torch.full((), each, device=device)).expand(shape)[mixed]
        for each in (positions["b"], positions["h"])
    )
    boxes = [end.expand(shape)[mixed] for end in (*q[:2], *k[:2])]
    kinds[mixed] = _cut(allows, values, boxes, of_b, of_h, cuts)
    return kinds


def _ends(number: int | Tensor | Ends) -> int | Ends:
    """Of a batch element or a head, which is the same in all of a tile."""
    if isinstance(number, (int, Ends)):
        return number
    number = number.long()
    return Ends(number, number)


def _cut(allows: Any, values: dict[str, Any], boxes: list[Tensor], b: Tensor, h: Tensor, cuts: int) -> Tensor:
    """The kinds of mixed tiles (tiles,), from those of their quarters."""
    q_lo, q_hi, k_lo, k_hi = (end[:, None] for end in boxes)
    rows, columns = _halves(q_lo, q_hi), _halves(k_lo, k_hi)
    q = tuple(torch.cat([end] * 2, dim=1) for end in rows)
    k = tuple(end.repeat_interleave(2, dim=1) for end in columns)
    b, h = b[:, None], h[:, None]
    kinds = tile_kinds(allows, values, q, k, b, h)  # type: ignore[arg-type]
    shape = kinds.shape
    unclear = (kinds == Kind.MIXED).any(1) & ~((kinds == Kind.HIDDEN).any(1) & (kinds == Kind.WHOLE).any(1))
    if cuts > 1 and bool(unclear.any()):
        again = unclear[:, None] & (kinds == Kind.MIXED)
        parts = [end.expand(shape)[again] for end in (*q, *k)]
        kinds[again] = _cut(allows, values, parts, b.expand(shape)[again], h.expand(shape)[again], cuts - 1)
    return common(kinds, 1)


def common(kinds: Tensor, dim: int) -> Tensor:
    """The kind of what consists of tiles along a dimension."""
    least, greatest = kinds.amin(dim), kinds.amax(dim)
    return torch.where(least == greatest, least, Kind.MIXED).to(torch.int8)


def _halves(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The first and last positions of both halves, side by side. One position alone is its own half, twice."""
    middle = (lo + hi) >> 1
    return torch.cat([lo, torch.minimum(middle + 1, hi)], dim=1), torch.cat([middle, hi], dim=1)
