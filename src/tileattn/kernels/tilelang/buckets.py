"""The kernels for one bucket of lengths, for calls of any length: tests and tools see all of them at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...call.facts import AttentionCall
from .backward import launch as backward_launch
from .forward import launch as forward_launch
from .forward.defaults import LONG, Config, default

# By name: a length that the forward pass takes for the shorter sequence, and up to how many queries the backward pass
# takes sequences for short.
BUCKETS = {"short": (1, 2**31), "long": (LONG, 0)}


@contextmanager
def only(bucket: str) -> Iterator[None]:
    """Inside, calls get this bucket's kernels, whatever their lengths are."""
    length, short = BUCKETS[bucket]

    def of_bucket(call: AttentionCall, _: int) -> Config:
        return default(call, length)

    before = forward_launch.default, backward_launch.SHORT
    forward_launch.default, backward_launch.SHORT = of_bucket, short  # type: ignore[assignment]
    try:
        yield
    finally:
        forward_launch.default, backward_launch.SHORT = before
