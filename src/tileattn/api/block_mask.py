"""`block_mask`: what a mask does to blocks of scores, found once and used by many calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..call.scalars import as_int
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.sparse.blocks import as_block_size, for_call
from ..variant.sparse.known_blocks import known_blocks

if TYPE_CHECKING:
    from ..runtime.run import MaskLike


def block_mask(
    mask: MaskLike,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
) -> Mask:
    """The same mask, with the knowledge of which blocks of scores it hides, and which it leaves whole.

    The interval analysis says it of most masks' tiles in every call (docs/design/intervals.md), and needs no
    block_mask. This function is for masks of which it cannot tell: arbitrary bit tests, tables that are read by tables.
    Their blocks that the analysis calls mixed are evaluated, all pairs of positions, in parts of 2^24 pairs. In the
    mask that is returned they are hidden, whole or mixed as they are, and it is evaluated in mixed ones only.

    Args:
        mask: as in :func:`tileattn.attention`, for dense calls; a causal call has it as ``Causal() & mask``.
        batch: of the calls that the mask is for. Blocks of a mask that does not depend on ``b`` are found once for all.
        heads: of the queries. Blocks of a mask that does not depend on ``h`` are found once for all.
        seqlen_q: the number of queries.
        seqlen_k: the number of keys. In calls of other lengths the mask that is returned raises an error.
        block_size: as in :class:`tileattn.BlockSparse`.
        device: where the mask's tensors are, and the calls; None: the device of its tensors, or the CPU.

    Returns:
        A mask, with one byte for each block, which combines with others by ``&`` and ``|``. It holds for the numbers
        and tensors of the mask as they are now: if a tensor is written, make another. Floats are computed in float32
        by PyTorch; where a kernel's rounding decides, its blocks may differ.

    Raises:
        TypeError, ValueError: an argument is wrong, or the mask's tensors do not fit it.

    Waits for the device once. Source: the block masks of FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    given, _ = normalize(mask, None, False)
    if given is None:
        raise TypeError("block_mask: mask must be a tileattn mask or a function mask(b, h, q, k), got None")
    batch, heads, seqlen_q, seqlen_k = (
        _size(name, size)
        for name, size in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))
    )
    size = as_block_size("block_mask", block_size)
    in_call = for_call(given, lambda: (batch, heads, heads, seqlen_q, seqlen_k), lambda: seqlen_k - seqlen_q)
    assert in_call is not None
    in_call.check(batch, heads, seqlen_q, seqlen_k)
    tensors = encode(in_call, ())[1].tensors
    where = torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")
    for tensor in tensors:
        if tensor.device.type != where.type:
            raise ValueError(f"block_mask: device must be that of the mask's tensors, {tensor.device}, got {where}")
    with torch.no_grad():
        return known_blocks(in_call, batch, heads, seqlen_q, seqlen_k, size, where)


def _size(name: str, given: Any) -> int:
    size = as_int(given)
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"block_mask: {name} must be an int of at least 1, got {given!r}")
    if size < 1:
        raise ValueError(f"block_mask: {name} must be an int of at least 1, got {size}")
    return size
