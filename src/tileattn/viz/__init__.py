"""Pictures of attention: what a mask visits, what attention attends to, how the online softmax gets there, its cost.

To be read in this order; each file computes something (in torch, without matplotlib) and draws it:

    tiles      which tiles of keys a kernel visits for each tile of queries: full, partial, skipped
    weights    the attention weights of small inputs
    softmax    the online softmax's m, l and the scale of o along a row, tile by tile
    lengths    time and memory against the sequence length, from a result file of the benchmark
    dashboard  a whole result file: speed, share of the ceiling, error and memory of every case
    style      what all pictures share
    checks     what they refuse
    demo       `tileattn demo`, a page in the browser

>>> figure = draw_tiles(tile_map(SlidingWindow(256, 0), 1024, 1024, block_M=128, block_N=64))
>>> figure.savefig("window.png")

Every `draw_...` returns a matplotlib figure that needs no display. matplotlib is imported when something is drawn:
pip install 'tileattn[plot]'.
"""

from .dashboard import draw_dashboard
from .lengths import draw_lengths
from .softmax import SoftmaxStep, draw_softmax, row_scores, softmax_steps
from .tiles import TileMap, draw_tiles, kernel_tiles, tile_map
from .weights import attention_weights, draw_weights

__all__ = [
    "TileMap",
    "tile_map",
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
