"""Bits of mixed tiles: which calls have them, and how they are made. Imports no compiler.

In a mixed tile an attention kernel evaluates the mask for each score, and so does each head that shares the plane of
tiles. Here a kernel of its own (bits_kernel.py) evaluates it once for each mixed tile of a plane. It writes a bit for
each score, 2 kB for a tile of 128 by 128: uint32 (tiles, words, rows, 4), a word for each row of a tile, each 128 of
its columns, and t = 0 .. 3: of columns 2t and 2t + 1 of each eight. Rows are those of a line: queries, or keys for dk
and dv. Attention kernels load a word and hide by it (tile/mixed_bits.py).

The mixed tiles of all lines are counted along, and the first ones have bits, up to `MOST_BYTES`; in the others kernels
evaluate the mask. So all sizes follow from the lengths, and the host reads nothing. Bits belong to the lists and are
kept with them (kept_lists.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....call.facts import AttentionCall, device_arch
from ....call.inputs import Operands
from ....variant.expression import Expr, has_symbol, nodes
from ....variant.program import Program, program
from ...tile_lists import Cut, Sizes, TileLists, depends_on, is_listed
from ..host import as_bytes
from .library import BitsJob, bits_function, read_by_mask

# Heads and batch elements that share a plane of tiles, from which on its bits are made. Making them takes about as long
# as evaluating the mask in the attention kernels of one or two heads.
FEWEST_SHARING = 4
# Operations for each score, from which on a mask has bits: a comparison of positions alone is as fast without, and
# blocks in a tensor (one load) are mostly as large as tiles, none of which is mixed then.
FEWEST_OPERATIONS = 3
MOST_BYTES = 2**27  # of the bits of a call's tiles
BLOCKS = 132 * 8  # eight of 128 threads for each multiprocessor of an H100 or H200, of which two to four run at once
WORD_COLUMNS, BYTES_OF_ROW = 128, 16  # a row of a tile has four words of 4 bytes for each 128 columns


def bits_pay(call: AttentionCall, q_shape: torch.Size) -> bool:
    """Whether a listed call of this size, (batch, seqlen, heads, head_dim), has bits of its mixed tiles."""
    if call.packed or not may_have_bits(call.variant):
        return False
    traced, (batch, _, heads, _) = program(call.variant), q_shape
    sharing = (1 if depends_on(traced, "b") else batch) * (1 if depends_on(traced, "h") else heads)
    return sharing >= FEWEST_SHARING


@functools.lru_cache(maxsize=1024)
def may_have_bits(variant: str) -> bool:
    """Whether dense calls of a variant whose mask is listed have bits, if enough heads share them."""
    return is_listed(variant) and operations(program(variant).allows) >= FEWEST_OPERATIONS


def operations(allows: Any) -> int:
    """The different operations of a mask that are computed for each score: of both positions, and loads by one."""

    def counts(node: Expr) -> bool:
        of_q, of_k = has_symbol(node, "q"), has_symbol(node, "k")
        return (of_q and of_k) or (node.op == "load" and (of_q or of_k))

    return len({str(node) for node in nodes(allows) if counts(node)})


def bits_jobs(variant: str, arch: str) -> tuple[BitsJob, ...]:
    """The kernel that makes the bits of a listed variant, if there may be any."""
    return (BitsJob(variant, arch),) if variant and arch == "sm_90a" and may_have_bits(variant) else ()


def with_bits(
    variant: str, operands: Operands, sizes: Sizes, cut: Cut, lists: TileLists, device: torch.device
) -> TileLists:
    """The lists of a call with the bits of their mixed tiles."""
    return by_function(bits_function(variant, device_arch(device)), program(variant), operands, sizes, cut, lists)


def by_function(
    function: Callable[..., Any], traced: Program, operands: Operands, sizes: Sizes, cut: Cut, lists: TileLists
) -> TileLists:
    """The same by the compiled kernel."""
    bits, before = new_bits(cut, lists)
    by_batch, by_head = depends_on(traced, "b"), depends_on(traced, "h")
    read = read_by_mask(traced)
    length = sizes.seqlen_k if cut.by_keys else sizes.seqlen_q
    function(
        lists.tiles,
        lists.counts,
        lists.counts.view(-1) if lists.rows is None else lists.rows,
        before,
        bits,
        *(as_bytes(tensor) for number, tensor in enumerate(operands.tensors) if f"t{number}" in read),
        min(bits.shape[0], BLOCKS),
        int(lists.rows is not None),
        int(cut.by_keys),
        sizes.seqlen_q,
        sizes.seqlen_k,
        cut.block_M,
        cut.block_N,
        -(-length // (cut.block_N if cut.by_keys else cut.block_M)),
        sizes.heads if by_head else 1,
        int(by_batch),
        int(by_head),
        *(number for index, number in enumerate(operands.ints) if f"i{index}" in read),
        *(number for index, number in enumerate(operands.floats) if f"f{index}" in read),
    )
    return lists._replace(before=before, bits=bits)


def new_bits(cut: Cut, lists: TileLists) -> tuple[Tensor, Tensor]:
    """Room for the bits, not yet filled, and how many mixed tiles the lines before each line have."""
    rows, columns = (cut.block_N, cut.block_M) if cut.by_keys else (cut.block_M, cut.block_N)
    words = -(-columns // WORD_COLUMNS)
    tiles = max(min(lists.tiles.numel(), MOST_BYTES // (BYTES_OF_ROW * words * rows)), 1)
    bits = torch.empty(tiles, words, rows, 4, dtype=torch.uint32, device=lists.tiles.device)
    mixed = lists.counts[:, 0]
    return bits, mixed.cumsum(0, dtype=torch.int32) - mixed
