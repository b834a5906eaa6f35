"""The executable specification: what tileattn's kernels compute, in plain PyTorch that is meant to be read.

Read it in this order; each file adds one idea to the one before:

1. :mod:`~tileattn.reference.standard`: attention as the textbook writes it, with the matrix of scores in memory.
2. :mod:`~tileattn.reference.online_softmax`: the softmax of a row whose scores arrive a few at a time.
3. :mod:`~tileattn.reference.tiled`: FlashAttention, which puts that inside a loop over tiles, so that the matrix of
   scores never exists. In the loop orders of FlashAttention 1 and of FlashAttention 2.

4. :mod:`~tileattn.reference.backward`: its gradients, from probabilities that are computed again tile by tile.

The forward passes are differentiable by autograd, and all run on any device. No backend imports this package; the tests
hold both to the same oracle.
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
