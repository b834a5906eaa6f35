"""Selects the kernels of one bucket of lengths for calls of any size, for tests and tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...call.facts import AttentionCall, BackwardCall
from .backward import launch as backward_launch
from .backward.defaults import MainConfig, short_default
from .forward import launch as forward_launch
from .forward.defaults import LONG, Config, default, wide

# By name: the length that the forward pass is told. Of calls that have a wide tile, "wide" takes that. The backward
# pass counts all sequences as short, or none.
BUCKETS = {"short": 1, "long": LONG, "wide": LONG}


@contextmanager
def only(bucket: str) -> Iterator[None]:
    """Inside, calls of any length get this bucket's kernels."""
    length = BUCKETS[bucket]

    def of_bucket(call: AttentionCall, *_: object) -> Config:
        return (wide(call) if bucket == "wide" else None) or default(call, length)

    def of_backward(call: BackwardCall, *_: object) -> MainConfig | None:
        return short_default(call) if bucket == "short" else None

    before = forward_launch.default, forward_launch.chosen, backward_launch.of_lengths
    forward_launch.default, forward_launch.chosen = of_bucket, of_bucket  # type: ignore[assignment]
    backward_launch.of_lengths = of_backward
    try:
        yield
    finally:
        forward_launch.default, forward_launch.chosen, backward_launch.of_lengths = before
