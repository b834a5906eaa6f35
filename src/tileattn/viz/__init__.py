"""Pictures of attention: the tiles that a mask visits, attention weights, the online softmax, time and memory.

Each of the first six files computes data (in torch, without matplotlib) and draws it. Read them in this order:

    tiles      which tiles of scores a kernel visits under a mask: full, partial, skipped
    mask_tiles which tiles any mask hides, cuts through or leaves whole
    weights    the attention weights of small inputs
    softmax    the online softmax's m, l, alpha and o along a row, tile by tile
    lengths    time and memory against the sequence length, from a result file of the benchmark
    dashboard  a whole result file: speed, share of the ceiling, error and memory of every case
    style      figures, colours and titles that all pictures share
    checks     checks of arguments
    demo       `tileattn demo`, a page in the browser

>>> figure = draw_tiles(tile_map(SlidingWindow(256, 0), 1024, 1024, block_M=128, block_N=64))
>>> figure.savefig("window.png")

Every `draw_...` returns a matplotlib figure that needs no display. matplotlib is imported when something is drawn; the
extra `plot` installs it.
"""

from .dashboard import draw_dashboard
from .lengths import draw_lengths
from .mask_tiles import mask_tiles
from .softmax import SoftmaxStep, draw_softmax, row_scores, softmax_steps
from .tiles import TileMap, draw_tiles, kernel_tiles, tile_map
from .weights import attention_weights, draw_weights

__all__ = [
    "TileMap",
    "tile_map",
    "mask_tiles",
    "kernel_tiles",
    "draw_tiles",
    "attention_weights",
    "draw_weights",
    "SoftmaxStep",
    "row_scores",
    "softmax_steps",
    "draw_softmax",
    "draw_lengths",
    "draw_dashboard",
]
