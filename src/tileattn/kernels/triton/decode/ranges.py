"""Ranges of keys for masks whose own ranges differ by head: the rows of a tile differ in it."""

import triton

# Triton's interpreter asks for this name in the module of each of its functions.
import triton.language as tl  # noqa: F401


@triton.jit
def all_keys(b, h, q_lo, q_hi, seqlen_k, tensors, numbers):
    """Keys that any row may see."""
    return 0, seqlen_k


@triton.jit
def no_keys(b, h, q_lo, q_hi, seqlen_k, tensors, numbers):
    """Keys that all rows are known to see."""
    return 0, 0
