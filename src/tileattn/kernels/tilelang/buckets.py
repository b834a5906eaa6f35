"""Selects the kernels of one bucket of lengths for calls of any size, for tests and tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...call.facts import AttentionCall
from .backward import launch as backward_launch
from .forward import launch as forward_launch
from .forward.defaults import LONG, Config, default, wide

# By name: the length that the forward pass is told, and the number of queries up to which the backward pass counts
# sequences as short. Of calls that have a wide tile, "wide" takes that.
BUCKETS = {"short": (1, 2**31), "long": (LONG, 0), "wide": (LONG, 0)}


@contextmanager
def only(bucket: str) -> Iterator[None]:
    """Inside, calls of any length get this bucket's kernels."""
    length, short = BUCKETS[bucket]

    def of_bucket(call: AttentionCall, *_: object) -> Config:
        return (wide(call) if bucket == "wide" else None) or default(call, length)

    before = forward_launch.default, forward_launch.chosen, backward_launch.SHORT
    forward_launch.default, forward_launch.chosen = of_bucket, of_bucket  # type: ignore[assignment]
    backward_launch.SHORT = short
    try:
        yield
    finally:
        forward_launch.default, forward_launch.chosen, backward_launch.SHORT = before
