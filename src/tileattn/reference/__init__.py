"""The executable specification of tileattn's kernels, in plain PyTorch that is meant to be read.

Read the files in this order; each adds one idea:

1. :mod:`~tileattn.reference.standard`: attention by its definition, with the matrix of scores in memory.
2. :mod:`~tileattn.reference.online_softmax`: the softmax of a row whose scores arrive in parts.
3. :mod:`~tileattn.reference.tiled`: FlashAttention. A loop over tiles runs the online softmax, so the matrix of scores
   is never stored. Both loop orders: FlashAttention's and FlashAttention-2's.
4. :mod:`~tileattn.reference.backward`: the gradients, from probabilities that are recomputed tile by tile.

Autograd can differentiate the forward passes. All functions run on any device. No backend imports this package; tests
compare the reference and the backends with the same oracle.
"""

from .backward import Gradients, flash_attention_2_backward
from .online_softmax import RowState, online_softmax
from .standard import standard_attention
from .tiled import flash_attention_1, flash_attention_2

__all__ = [
    "standard_attention",
    "RowState",
    "online_softmax",
    "flash_attention_1",
    "flash_attention_2",
    "Gradients",
    "flash_attention_2_backward",
]
