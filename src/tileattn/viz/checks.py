"""Checks of the pictures' arguments; each failure is one clear error."""

from __future__ import annotations

from numbers import Integral
from typing import Any

# The most tiles on a side of a picture: more would be thinner than a pixel.
MOST_TILES = 512


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or numpy; False for bools."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError unless all are integers of at least 1."""
    for name, size in sizes.items():
        if not is_integer(size) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def check_element(name: str, index: Any, count: int, of: str) -> None:
    """Raises ValueError unless the argument `name` is a valid index, negative ones included, of `count` elements.

    of: the name of the elements, for the message.
    """
    if not is_integer(index) or not -count <= index < count:
        raise ValueError(f"{name} must be one of the {count} {of}, got {index!r}")


def check_tile_count(length: int, name: str, block: int) -> None:
    """Raises ValueError if `length` has more tiles of `block` than a picture shows; `name` names the argument."""
    if -(-length // block) > MOST_TILES:
        raise ValueError(
            f"{length} in tiles of {name}={block} are more than {MOST_TILES} tiles, which no picture shows; take "
            f"a {name} of at least {-(-length // MOST_TILES)}"
        )
