"""Selects the kernels of one bucket of lengths for calls of any length, for tests and tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...call.facts import AttentionCall
from .backward import launch as backward_launch
from .forward import launch as forward_launch
from .forward.defaults import LONG, Config, default

# By name: the length that the forward pass is told, and the number of queries up to which the backward pass counts
# sequences as short.
BUCKETS = {"short": (1, 2**31), "long": (LONG, 0)}


@contextmanager
def only(bucket: str) -> Iterator[None]:
    """Inside, calls of any length get this bucket's kernels."""
    length, short = BUCKETS[bucket]

    def of_bucket(call: AttentionCall, _: int) -> Config:
        return default(call, length)

    before = forward_launch.default, backward_launch.SHORT
    forward_launch.default, backward_launch.SHORT = of_bucket, short  # type: ignore[assignment]
    try:
        yield
    finally:
        forward_launch.default, backward_launch.SHORT = before
