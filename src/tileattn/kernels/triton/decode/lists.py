"""Which decode calls visit the tiles of lists only, where a mask may hide tiles between others, and these lists.

There is a *line* for each tile of query rows or, where the mask depends on the head, for each kv head of it: the tiles
that not all of its rows hide (kernels/decode_boxes.py). A line of T tiles is, in int32,

    how many of its tiles are mixed, and how many are mixed or whole
    the numbers of the mixed tiles, then of the whole ones, each in ascending order; T places, and one that nobody reads

With a FixedSplit each part of the keys walks over its own tiles, from the first to the last. All tiles count as mixed
then, and in place of the two counts there is one for each part: how many of the line's tiles lie before it; at last how
many there are.

PyTorch's operations make lines before the kernel, or as a plan that the layers of a step share. Nothing is read on the
host, so that a CUDA graph makes them in each replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from ....variant.program import program
from ...decode_boxes import Boxes
from ...tile_lists import is_listed
from ..tile_sizes import Config
from .splits import group_of

# Tiles of keys of all tiles of rows and kv heads, at the capacity, from which on lists are made: fewer are read before
# the some 100 operations are done. An estimate, and that of TileLang's calls whose lines are made by operations.
FEWEST_TILES = 2**17
MOST_TILES = 2**27  # of all lines, which would take 0.5 GB


def row_tiles(sizes: DecodeSizes, packed: bool, config: Config) -> int:
    """The number of tiles of query rows in a call, with those that sizes alone cannot rule out; see sequences.py."""
    group = group_of(sizes)
    if packed:
        return sizes.total_q * group // config.block_M + sizes.batch + 1
    return sizes.batch * -(-sizes.max_seqlen_q * group // config.block_M)


def lines_of(call: DecodeCall, sizes: DecodeSizes, config: Config) -> Lines | None:
    """The lines of a call; None where its kernel goes by the mask's range of keys.

    With a FixedSplit a mask has one kernel, whatever the sizes of calls. It finds all tiles in lines that are not made.
    """
    if (
        not call.variant
        or not is_listed(call.variant)
        or 0 in (sizes.batch, sizes.total_q, sizes.heads, sizes.capacity)
    ):
        return None
    items = row_tiles(sizes, call.packed, config)
    boxes: Boxes = Boxes.of(program(call.variant), sizes, config.block_M, config.block_N, items)
    pays = items * sizes.kv_heads * boxes.tiles >= FEWEST_TILES and boxes.all_tiles <= MOST_TILES
    return Lines(boxes, call.fixed // config.block_N, pays) if pays or call.fixed else None


class Lines(NamedTuple):
    """How a call's lines are made.

    Attributes:
        boxes: of which they are.
        part: tiles of a fixed part; 0 without a FixedSplit.
        made: whether there are lines; else one list of all tiles, by which a kernel for lines visits the same tiles
            as without.
    """

    boxes: Boxes
    part: int
    made: bool

    @property
    def counts(self) -> int:
        """Numbers of a line before those of its tiles."""
        return -(-self.boxes.tiles // self.part) + 1 if self.part else 2

    @property
    def arguments(self) -> tuple[int, int, int]:
        """What kernels take: numbers of a line, of these its counts, and lines of a tile of rows."""
        return (self.counts + self.boxes.tiles + 1, self.counts, self.boxes.planes) if self.made else (0, 0, 1)

    def make(self, inputs: DecodeInputs) -> Tensor:
        """All lines, (tiles of rows, planes, numbers), int32."""
        boxes, device = self.boxes, inputs.q.device
        if not self.made:
            return torch.arange(boxes.tiles + 1, dtype=torch.int32, device=device)
        lines = torch.empty(boxes.items, boxes.planes, self.arguments[0], dtype=torch.int32, device=device)
        for items, seen, whole in boxes.parts(inputs, device):
            self.fill(seen, whole, lines[items])
        return lines

    def fill(self, seen: Tensor, whole: Tensor, lines: Tensor) -> None:
        """Writes lines of what is visited and what is whole, bool (items, planes, tiles)."""
        tiles, counts = self.boxes.tiles, self.counts
        if self.part:
            place = seen.cumsum(-1)
            lines[..., 0] = 0
            ends = torch.arange(1, counts, device=lines.device) * self.part - 1
            lines[..., 1:counts] = place[..., ends.clamp(max=tiles - 1)]
        else:
            mixed, whole = seen & ~whole, seen & whole
            place, of_whole = mixed.cumsum(-1), whole.cumsum(-1)
            lines[..., 0] = place[..., -1]
            lines[..., 1] = place[..., -1] + of_whole[..., -1]
            place = (of_whole + place[..., -1:]).where(whole, place)
        # What is hidden is written behind all tiles that there can be.
        place = (place - 1).where(seen, tiles) + counts
        numbers = torch.arange(tiles, dtype=torch.int32, device=lines.device)
        lines.scatter_(-1, place, numbers.expand(place.shape))
