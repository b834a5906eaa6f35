"""Groups of key/value heads: the transfer of one is hidden behind the computation of another.

Nothing hides the first transfer of a forward pass, so the first group is one head, and each may be larger than the one
before. In a backward pass it is the other way round: dk and dv, in float32, are twice as large as k and v, and nothing
hides the last transfer.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise

from .layout import Span


@functools.lru_cache(maxsize=256)
def forward_groups(kv_heads: int, groups: int) -> tuple[Span, ...]:
    """Sizes that grow by a factor, from one head on."""
    groups = min(groups, kv_heads)
    if groups <= 1:
        return ((0, kv_heads),)
    low, high = 1.0, float(kv_heads)
    for _ in range(40):  # the factor with which 1 + x + x^2 + ... is all heads
        factor = (low + high) / 2
        low, high = (factor, high) if sum(factor**i for i in range(groups)) < kv_heads else (low, factor)
    ends = [0, *(round(end) for end in accumulate(low**i for i in range(groups - 1)))]
    # Rounding may leave a group without a head.
    ends = [max(end, number) for number, end in enumerate(ends)]
    return tuple(pairwise([*ends, kv_heads]))


def backward_groups(kv_heads: int, groups: int) -> tuple[Span, ...]:
    """Sizes that shrink by a factor, to one head."""
    return tuple((kv_heads - stop, kv_heads - start) for start, stop in reversed(forward_groups(kv_heads, groups)))
