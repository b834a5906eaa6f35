"""Nine sparse masks that people write, for tests of the tiles that kernels visit and for benchmarks/any_mask.py.

Each is a mask of tileattn and the same as a `mask_mod` of FlexAttention, written as its documentation would. Numbers
and tensors are operands of a kernel, so one kernel serves all lengths of a pattern. Of "blocks" the mask is that of a
call, whose bounds of rows and columns are there already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn import (
    BlockSparse,
    Causal,
    Dilated,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
)
from tileattn.variant.math import load
from tileattn.variant.sparse.blocks import CallSizes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NAMES = (
    "dilated",
    "strided",
    "local-global",
    "neighborhood",
    "images-text",
    "windows-by-head",
    "loaded-windows",
    "loaded-ids",
    "blocks",
)
BLOCK, SEEN = 128, 0.1  # of "blocks": rows and keys of a block, and how many are seen
IMAGE = 256  # tokens of an image


class Pattern(NamedTuple):
    """A mask in both forms. `by_head`: whether it depends on the head."""

    mask: Mask
    mask_mod: MaskMod
    by_head: bool = False


def pattern(name: str, seqlen: int, heads: int, device: torch.device | str, seed: int = 0) -> Pattern:
    """One of `NAMES`, for as many queries as keys.

    Args:
        seqlen: tokens, at least 256.
        heads: of queries.
        device: of the tensors that some of them read. On "meta" they have no values.
        seed: of the lengths of documents.
    """
    return _MAKERS[name](seqlen, heads, torch.device(device), seed)


def _dilated(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    left = min(4096, seqlen // 2) - 1

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= q - left) & ((q - k) % 4 == 0)

    return Pattern(Dilated(left, dilation=4), mod)


def _strided(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k <= 127) | ((q - k) % 128 == 0))

    return Pattern(Strided(128, 127), mod)


def _local_global(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    width, tokens = min(1024, seqlen // 8), 64

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= q - width) & (k <= q + width)) | (k < tokens) | (q < tokens)

    return Pattern(SlidingWindow(width, width) | GlobalTokens(tokens), mod)


def _neighborhood(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    """A square image, or nearly: positions beyond its last whole row see nothing."""
    columns = math.isqrt(seqlen)
    rows, window = seqlen // columns, 13

    def start(i: Tensor, count: int) -> Tensor:
        return (i - window // 2).clamp(0, count - window)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row, column = start(q // columns, rows), start(q % columns, columns)
        k_row, k_column = k // columns, k % columns
        near = (k_row >= row) & (k_row < row + window) & (k_column >= column) & (k_column < column + window)
        return near & (q < rows * columns) & (k < rows * columns)

    return Pattern(Neighborhood((rows, columns), (window, window)), mod)


def _images_text(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    documents, place = _documents(seqlen, seed)
    period = 2 * IMAGE
    images = torch.where(place % period < IMAGE, place // period, -1)
    documents, images = documents.to(device), images.to(device)
    image = torch.where(images < 0, -1, documents * seqlen + images)  # of each document its own

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        together = (image[q] >= 0) & (image[q] == image[k])
        return (documents[q] == documents[k]) & ((k <= q) | together)

    return Pattern(ImageTextDocuments(documents, images), mod)


def _windows_by_head(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < 64 * (h + 1) * (h + 1))

    return Pattern(FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < 64 * (h + 1) * (h + 1))), mod, by_head=True)


def _loaded_windows(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    """From 64 keys to half of the sequence, by equal factors from head to head."""
    factor = (seqlen / 128) ** (1 / max(heads - 1, 1))
    windows = torch.tensor([round(64 * factor**h) for h in range(heads)], dtype=torch.int32, device=device)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= windows[h])

    mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(windows, h))
    return Pattern(mask, mod, by_head=True)


def _loaded_ids(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    ids = _documents(seqlen, seed)[0].to(torch.int32).to(device)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    return Pattern(FunctionMask(lambda b, h, q, k: load(ids, q) == load(ids, k)), mod)


def _blocks(seqlen: int, heads: int, device: torch.device, seed: int) -> Pattern:
    count = -(-seqlen // BLOCK)
    blocks = torch.rand(1, heads, count, count, generator=torch.Generator().manual_seed(seed)) < SEEN
    seen = blocks.to(device)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[0, h, q // BLOCK, k // BLOCK]

    mask = BlockSparse(seen, BLOCK).in_call(CallSizes(1, heads, heads, seqlen, seqlen, 0))
    return Pattern(mask, mod, by_head=True)


def _documents(seqlen: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of each position its document, and its place in it; int64 (seqlen,). About eight documents, of odd lengths."""
    cuts = torch.rand(7, generator=torch.Generator().manual_seed(seed)).mul(seqlen).long().sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), cuts])
    position = torch.arange(seqlen)
    number = torch.searchsorted(cuts, position, right=True)
    return number, position - starts[number]


_MAKERS = {
    "dilated": _dilated,
    "strided": _strided,
    "local-global": _local_global,
    "neighborhood": _neighborhood,
    "images-text": _images_text,
    "windows-by-head": _windows_by_head,
    "loaded-windows": _loaded_windows,
    "loaded-ids": _loaded_ids,
    "blocks": _blocks,
}
