"""What the pictures refuse, in one clear sentence each."""

from __future__ import annotations

from numbers import Integral
from typing import Any

# More tiles than these on a side are thinner than a pixel, and say no more than fewer do.
MOST_TILES = 512


def is_integer(value: Any) -> bool:
    """Python's and numpy's integers; True and False are none here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError unless all are integers of at least 1."""
    for name, size in sizes.items():
        if not is_integer(size) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def check_element(name: str, index: Any, count: int, of: str) -> None:
    """Raises ValueError unless it is an index, negative ones included, of something that has so many."""
    if not is_integer(index) or not -count <= index < count:
        raise ValueError(f"{name} must be one of the {count} {of}, got {index!r}")


def check_tile_count(length: int, name: str, block: int) -> None:
    """Raises ValueError where a picture cannot show all tiles of the argument `name`."""
    if -(-length // block) > MOST_TILES:
        raise ValueError(
            f"{length} in tiles of {name}={block} are more than {MOST_TILES} tiles, which no picture shows; take "
            f"a {name} of at least {-(-length // MOST_TILES)}"
        )
