"""What a mask function of transformers says, found by running it on symbols.

transformers describes a mask as a function ``(batch, head, query, key) -> bool`` of positions, put together from a few
small ones: causal, sliding window, packed sequences, and so on. :func:`understood` runs it once on the symbols of this
module and hands back what it allows in a form from which tiles can be skipped; of a function that does anything else
with positions it hands back None. It looks at what a function does, not at its name, and torch.compile can trace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NotUnderstood(Exception):
    """The function does something with positions that is none of the known patterns."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Keys from ``q - left`` to ``q + right`` (None: no bound) with the same number as the query in `sequences`.

    sequences: integer tensor (batch, positions), which sequence each position belongs to; None: all to one.
    """

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None

    def __and__(self, other: Any) -> Pattern:
        if not isinstance(other, Pattern) or (self.sequences is not None and other.sequences is not None):
            raise NotUnderstood
        sequences = self.sequences if other.sequences is None else other.sequences
        return Pattern(_smaller(self.left, other.left), _smaller(self.right, other.right), sequences)

    def __bool__(self) -> bool:
        raise NotUnderstood

    # transformers' conjunction moves each part to the device of the first.
    device = None

    def to(self, device: Any) -> Pattern:
        return self


def understood(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern that a mask function describes, or None."""
    try:
        pattern = mask_function(Index(), Index(), Query(0), Key(0))
    except (NotUnderstood, TypeError, AttributeError):  # the last two: operations that the symbols do not have
        return None
    if not isinstance(pattern, Pattern) or any(
        bound is not None and bound < 0 for bound in (pattern.left, pattern.right)
    ):
        return None
    return pattern


class Index:
    """A batch element or a head; below, also a position."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``tensor[b, q]``: a number of each position, of which only equality is understood."""
        if getattr(func, "__name__", "") != "__getitem__" or len(args[1]) != 2:
            raise NotUnderstood
        batch, position = args[1]
        if type(batch) is not Index or not isinstance(position, (Query, Key)) or position.offset:
            raise NotUnderstood
        return Numbers(args[0], type(position))


@dataclass(frozen=True, eq=False)
class Position(Index):
    """A position plus a number."""

    offset: int

    def __add__(self, number: int) -> Position:
        return type(self)(self.offset + _number(number))

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return Distance(self, other)
        return type(self)(self.offset - _number(other))

    def new_ones(self, shape: tuple[()], dtype: torch.dtype) -> Pattern:
        """What transformers' conjunction begins with: True."""
        return Pattern()

    def __eq__(self, other: Any) -> Any:
        raise NotUnderstood

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __ge__(self, other: Any) -> Pattern:
        if isinstance(other, Position):
            return other <= self
        if _number(other) > self.offset:
            raise NotUnderstood
        return Pattern()  # positions are not negative: ``q >= 0`` is how transformers writes True

    def __lt__(self, other: Position) -> Pattern:
        return self + 1 <= other

    def __gt__(self, other: Position) -> Pattern:
        return other + 1 <= self

    def __le__(self, other: Any) -> Pattern:
        distance = _between(self, other)
        if isinstance(self, Key):  # k + offset <= q + other.offset
            return Pattern(right=distance)
        return Pattern(left=distance)


class Query(Position):
    """Of a query."""


class Key(Position):
    """Of a key."""


@dataclass(frozen=True, eq=False)
class Distance:
    """Of a query from a key."""

    of: Position
    to: Position
    absolute: bool = False

    def __abs__(self) -> Distance:
        return Distance(self.of, self.to, absolute=True)

    def __le__(self, number: int) -> Pattern:
        if self.of.offset or self.to.offset or type(self.of) is type(self.to):
            raise NotUnderstood
        bound = _number(number)
        if self.absolute:
            return Pattern(bound, bound)
        return Pattern(left=bound) if isinstance(self.of, Query) else Pattern(right=bound)

    def __lt__(self, number: int) -> Pattern:
        return self <= _number(number) - 1


@dataclass(frozen=True, eq=False)
class Numbers:
    """What a tensor (batch, positions) says of queries, or of keys."""

    tensor: Tensor
    of: type[Position]

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, Numbers) or other.tensor is not self.tensor or other.of is self.of:
            raise NotUnderstood
        return Pattern(sequences=self.tensor)

    __hash__ = None  # type: ignore[assignment]


def _between(smaller: Any, larger: Any) -> int:
    """By how much the larger may be passed: of ``k + a <= q + b``, b - a."""
    if not isinstance(larger, Position) or type(smaller) is type(larger):
        raise NotUnderstood
    passed: int = larger.offset - smaller.offset
    return passed


def _number(value: Any) -> int:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise NotUnderstood
    return value  # type: ignore[return-value]


def _smaller(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)
