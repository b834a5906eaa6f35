"""Lists of the tiles of scores that a mask does not hide, made on the device before a launch. Imports no TileLang.

A kernel walks over a range of keys, which the mask's own ranges tell. No range can be read off a user's function, and
two masks joined by `|` have a hull at best. For these the interval analysis (:mod:`tileattn.variant.intervals`) says of
each tile whether it is hidden, whole or mixed, and kernels walk over lists: for each row of tiles the mixed ones, in
ascending order, then the whole ones. (For dk and dv: for each column of tiles.)

Here operations of PyTorch make them, of fixed shapes, and the host reads none of their results. So a CUDA graph
captures them with the call, and a replay finds what the mask's tensors then hold. TileLang's kernel of most masks
(tilelang/lists/) makes the same lists in one launch or a few.

The forward kernel's lines are in the order in which its queue hands rows out: the longest first, since a long row that
begins last keeps one multiprocessor busy while the others are done.

Memory: 4 bytes a tile, 8 or 12 a row of tiles; 4.2 MB for 131072 tokens in tiles of 128 by 128. A mask that depends on
the batch element or on the head has that for each of them. Bits of mixed tiles (tilelang/lists/bits.py) come on top.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.facts import AttentionCall
from ..call.inputs import Operands
from ..variant import sparse
from ..variant.evaluated import values_of
from ..variant.expression import Expr, TensorSymbol, has_symbol, nodes
from ..variant.intervals.tiles import Kind, grid, tile_kinds
from ..variant.intervals.values import Ends
from ..variant.key import class_named
from ..variant.masks import FunctionMask, Mask, Or
from ..variant.program import Program, has_ranges_only, program
from ..variant.reading import evaluate

# Below so many tiles of 128 by 128 a call is over before its lists would be made.
FEWEST_TILES, USUAL_TILE = 64, 128
# Planes are analysed together up to so many tiles, so that bounds in 64 bits take some 100 MB at most.
MOST_AT_ONCE = 2**21
LEAST_BLOCK = 16  # positions, whose matrix then has a 16th of a tile's scores at most


class Sizes(NamedTuple):
    """The sizes of a call that its lists depend on."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


class Cut(NamedTuple):
    """How a kernel cuts the scores into tiles, and walks over them.

    Attributes:
        block_M: rows of queries in a tile.
        block_N: keys in a tile.
        by_keys: whether there is a line for each tile of keys, which lists tiles of queries; else the other way round.
        masks_queries: whether a tile that ends beyond the last query counts as mixed. One that ends beyond the last key
            always does.
        longest_first: whether the lines of a plane are sorted (:func:`longest_first`) rather than in the rows' order.
        bits: whether the mask's bits are made for the mixed tiles (tilelang/lists/bits.py).
    """

    block_M: int
    block_N: int
    by_keys: bool = False
    masks_queries: bool = False
    longest_first: bool = False
    bits: bool = False


class TileLists(NamedTuple):
    """The tiles that a kernel visits.

    A *line* is a row of tiles (or a column, :class:`Cut`) of a plane: line number ``b * batch_step + h * head_step +
    i`` is the i-th of batch element b and head h. A step is 0 where the mask does not depend on the batch element, or
    on the head.

    Attributes:
        tiles: int32 (lines, capacity): each line's numbers of tiles, first the mixed ones, then the whole ones, each in
            ascending order. Behind them are those of the hidden tiles.
        counts: int32 (lines, 2): how many tiles are mixed, and how many are mixed or whole.
        batch_step, head_step: see above.
        rows: int32 (lines,), where lines are sorted: the row of tiles that each is of, from 0 in each plane. Else None,
            and the i-th line is of the i-th row.
        before: int32 (lines,), with bits: how many mixed tiles the lines before have, of all planes.
        bits: uint32 (tiles, words, rows, 4) of the first so many mixed tiles; see tilelang/lists/bits.py.
    """

    tiles: Tensor
    counts: Tensor
    batch_step: int
    head_step: int
    rows: Tensor | None = None
    before: Tensor | None = None
    bits: Tensor | None = None


@functools.lru_cache(maxsize=1024)
def is_listed(variant: str) -> bool:
    """Whether the mask of a variant key is walked by lists in calls that are long enough (:func:`pays`).

    Masks that know their ranges, and their intersections, are not; nor are classes of other packages that define them.
    Neither is a mask that reads a matrix of queries and keys: bounds of its tiles would take several passes over it. A
    matrix of blocks of them, such as `BlockSparse` has, is small enough.
    """
    if has_ranges_only(variant) or not any(map(_may_have_gaps, _classes(variant))):
        return False
    return not any(_is_of_pairs(node) for node in nodes(program(variant).allows))


def has_function(variant: str) -> bool:
    """Whether a user's function is a part of the mask of a variant key."""
    return FunctionMask in _classes(variant)


def _classes(variant: str) -> list[type]:
    """The classes of a key's masks, in any order; keys write `Class(field,...)`, and functions in braces."""
    mask = re.sub(r"\{[^}]*\}", "", variant).split("+")[0]
    return [class_named(name) for name in re.findall(r"(\w+)\(", mask)]


def _may_have_gaps(cls: type) -> bool:
    """Whether one range of keys may say less of a row of tiles than the analysis does."""
    if cls is Or or cls.__module__.startswith(sparse.__name__):
        return True
    own = [getattr(cls, name) is not getattr(Mask, name) for name in ("kv_range", "full_range")]
    return not all(own)


def _is_of_pairs(node: Expr) -> bool:
    if node.op != "load":
        return False
    indices = [index for index in node.args[1:] if has_symbol(index, "q") or has_symbol(index, "k")]
    return len(indices) > 1 and not any(map(_is_of_blocks, indices))


def _is_of_blocks(index: Expr) -> bool:
    """Whether an index counts blocks of positions."""
    return index.op == "floordiv" and isinstance(index.args[1], int) and index.args[1] >= LEAST_BLOCK


def pays(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether a call of these sizes, (batch, seqlen, heads, head_dim), takes its tiles from lists.

    Its kernels must be those of the Hopper schedules, which the caller knows.
    """
    if not call.variant or call.packed or call.dtype.itemsize != 2:
        return False
    tiles = math.prod(-(-shape[1] // USUAL_TILE) for shape in (q_shape, k_shape))
    return tiles >= FEWEST_TILES and is_listed(call.variant)


@functools.lru_cache(maxsize=1024)
def tensors_of(variant: str) -> tuple[int, ...]:
    """The numbers of the tensors, among those of the operands, that the mask reads."""
    traced = program(variant)
    expressions = (traced.allows, *traced.kv_range, *traced.full_range)
    loads = [node.args[0] for each in expressions for node in nodes(each) if node.op in ("load", "size")]
    names = {each.name if isinstance(each, TensorSymbol) else str(each) for each in loads}
    return tuple(sorted(int(name[1:]) for name in names))


def make_lists(variant: str, operands: Operands, sizes: Sizes, cut: Cut, device: torch.device) -> TileLists:
    """The lists of a call.

    Args:
        variant: the key of a mask, and of score modifications, which have no part in it.
        operands: of the variant; tensors on the device.
        sizes: all at least 1.
    """
    traced, values = program(variant), values_of(operands)
    q, k = grid(sizes.seqlen_q, sizes.seqlen_k, cut.block_M, cut.block_N, device)
    rows, columns = len(q[0]), len(k[0])
    lines, capacity = (columns, rows) if cut.by_keys else (rows, columns)
    by_batch, by_head = (depends_on(traced, name) for name in "bh")
    batch, heads = sizes.batch if by_batch else 1, sizes.heads if by_head else 1
    planes = batch * heads
    tiles = torch.empty(planes * lines, capacity, dtype=torch.int32, device=device)
    counts = torch.empty(planes * lines, 2, dtype=torch.int32, device=device)
    order = torch.empty(planes * lines, dtype=torch.int32, device=device) if cut.longest_first else None
    at_once = max(MOST_AT_ONCE // (rows * columns), 1)
    for first in range(0, planes, at_once):
        plane = torch.arange(first, min(first + at_once, planes), device=device)[:, None, None]
        b = numbers_of(plane // heads, batch) if by_batch else 0
        h = numbers_of(plane % heads, heads) if by_head else 0
        kinds = kinds_of(traced, values, sizes.seqlen_k, q, k, b, h)
        kinds = _ends_masked(kinds.expand(len(plane), rows, columns), sizes, cut)
        kinds = kinds.transpose(1, 2).contiguous() if cut.by_keys else kinds
        part = slice(first * lines, (first + len(plane)) * lines)
        if order is not None:
            rows_of_lines = longest_first(kinds)
            order[part] = rows_of_lines.reshape(-1)
            kinds = kinds.gather(1, rows_of_lines[:, :, None].expand_as(kinds))
        fill_lists(kinds.reshape(-1, capacity), tiles[part], counts[part])
    return TileLists(tiles, counts, heads * lines * by_batch, lines * by_head, order)


def longest_first(kinds: Tensor) -> Tensor:
    """The lines of each plane in the order in which blocks should take them; of kinds, int8 (planes, lines, capacity).

    By the tiles that are visited, a mixed one counted twice: on an H200 the mask's expression made it take 1.5 times as
    long as a whole one and more. Equal lines follow from the last to the first, as without lists.
    """
    cost = (kinds != Kind.HIDDEN).sum(2) + (kinds == Kind.MIXED).sum(2)
    return kinds.shape[1] - 1 - cost.flip(1).sort(dim=1, descending=True, stable=True).indices


def fill_lists(kinds: Tensor, tiles: Tensor, counts: Tensor) -> None:
    """Writes lists and counts (:class:`TileLists`) of kinds, int8 (lines, capacity)."""
    rank = (kinds + 2) % 3  # mixed 0, whole 1, hidden 2
    tiles.copy_(rank.sort(dim=1, stable=True).indices)
    counts[:, 0] = (kinds == Kind.MIXED).sum(1)
    counts[:, 1] = (kinds != Kind.HIDDEN).sum(1)


def depends_on(traced: Program, name: str) -> bool:
    """Whether the tiles of a mask may depend on the batch element "b", or on the head "h"."""
    expressions = (traced.allows, *traced.kv_range, *traced.full_range)
    return any(has_symbol(each, name) for each in expressions)


def numbers_of(numbers: Tensor, count: int) -> Ends:
    """Numbers of batch elements or heads, of which there are `count`."""
    return Ends(numbers, numbers, (0, count - 1), 0)


def kinds_of(
    traced: Program, values: Mapping[str, Any], seqlen_k: int | Tensor, q: Ends, k: Ends, b: int | Ends, h: int | Ends
) -> Tensor:
    """The kinds of all tiles, by the mask's expression and by its own ranges."""
    kinds = tile_kinds(traced.allows, dict(values), q, k, b, h)
    of_b, of_h = (each.first if isinstance(each, Ends) else each for each in (b, h))
    position = {**values, "b": of_b, "h": of_h, "q_lo": q.first, "q_hi": q.last, "seqlen_k": seqlen_k}
    if any(isinstance(bound, Expr) and str(bound) != "seqlen_k" for bound in traced.kv_range):
        lo, hi = (evaluate(bound, position) for bound in traced.kv_range)
        kinds = kinds.where((k.last >= lo) & (k.first < hi), Kind.HIDDEN)
    if any(isinstance(bound, Expr) for bound in traced.full_range):
        lo, hi = (evaluate(bound, position) for bound in traced.full_range)
        kinds = kinds.where((k.first < lo) | (k.last >= hi), Kind.WHOLE)
    return kinds.to(torch.int8)


def _ends_masked(kinds: Tensor, sizes: Sizes, cut: Cut) -> Tensor:
    """The kinds, where whole tiles that end beyond the last key, or query, are mixed: kernels mask them."""
    beyond = [(2, sizes.seqlen_k % cut.block_N), (1, cut.masks_queries and sizes.seqlen_q % cut.block_M)]
    dims = [dim for dim, rest in beyond if rest]
    if dims:
        kinds = kinds.clone()
    for dim in dims:
        kinds.select(dim, -1).clamp_(max=Kind.MIXED)
    return kinds
