"""Symbolic execution of transformers' mask functions, so that tiles can be skipped.

transformers describes a mask as a function ``(batch, head, query, key) -> bool`` of positions, composed of small
functions: causal, sliding window, packed sequences, and so on. :func:`understood` runs the function once on the symbols
of this module and returns the :class:`Pattern` that it allows, or None if the function does anything else with
positions. It depends on what the function computes, not on its name. torch.compile can trace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NotUnderstood(Exception):
    """The function does something with positions that no :class:`Pattern` expresses."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """The keys from ``q - left`` to ``q + right`` (None: no bound) that have the query's number in `sequences`.

    sequences: integer tensor (batch, positions), the number of each position's sequence; None: one sequence.
    numbered: whether the window compares position numbers read from a tensor. Newer versions of transformers number the
        positions of each packed sequence from 0; within one sequence, such a window equals a window of positions.
    """

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None
    numbered: bool = False

    def __and__(self, other: Any) -> Pattern:
        if not isinstance(other, Pattern) or (self.sequences is not None and other.sequences is not None):
            raise NotUnderstood
        sequences = self.sequences if other.sequences is None else other.sequences
        bounds = _smaller(self.left, other.left), _smaller(self.right, other.right)
        return Pattern(*bounds, sequences, self.numbered or other.numbered)

    def __bool__(self) -> bool:
        raise NotUnderstood

    # transformers' conjunction reads the first part's device and moves the others to it.
    device = None

    def to(self, device: Any) -> Pattern:
        return self


def understood(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern that a mask function describes, or None."""
    try:
        pattern = mask_function(Index(), Index(), Query(), Key())
    except (NotUnderstood, TypeError, AttributeError):  # TypeError, AttributeError: an operation the symbols lack
        return None
    if not isinstance(pattern, Pattern) or (pattern.numbered and pattern.sequences is None):
        return None
    if any(bound is not None and bound < 0 for bound in (pattern.left, pattern.right)):
        return None
    return pattern


class Index:
    """A batch element or a head; the subclass :class:`Position` is a position."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles ``tensor[b, position]``, which reads a number for each position."""
        if getattr(func, "__name__", "") != "__getitem__" or len(args[1]) != 2:
            raise NotUnderstood
        batch, position = args[1]
        if type(batch) is not Index or not isinstance(position, Position) or not position.plain:
            raise NotUnderstood
        return type(position)(numbers=args[0])


@dataclass(frozen=True, eq=False)
class Position(Index):
    """A position, or with `numbers` (batch, positions) that tensor's entry for the position; plus `offset`."""

    offset: int = 0
    numbers: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether this is the position itself, without a table and an offset."""
        return self.numbers is None and self.offset == 0

    def __add__(self, number: int) -> Position:
        return type(self)(self.offset + _number(number), self.numbers)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return Distance(self, other)
        return type(self)(self.offset - _number(other), self.numbers)

    def new_ones(self, shape: tuple[()], dtype: torch.dtype) -> Pattern:
        """A pattern that allows all keys: transformers' conjunction starts with ``q.new_ones((), dtype=bool)``."""
        return Pattern()

    def __eq__(self, other: Any) -> Any:
        if not self.comparable_with(other) or self.offset or other.offset or self.numbers is None:
            raise NotUnderstood
        return Pattern(sequences=self.numbers)

    def __ne__(self, other: Any) -> Any:
        raise NotUnderstood

    __hash__ = None  # type: ignore[assignment]

    def __ge__(self, other: Any) -> Pattern:
        if isinstance(other, Position):
            return other <= self
        if self.numbers is not None or _number(other) > self.offset:
            raise NotUnderstood
        return Pattern()  # positions are not negative: ``q >= 0`` is how transformers writes True

    def __lt__(self, other: Position) -> Pattern:
        return self + 1 <= other

    def __gt__(self, other: Position) -> Pattern:
        return other + 1 <= self

    def __le__(self, other: Any) -> Pattern:
        if not self.comparable_with(other):
            raise NotUnderstood
        distance = other.offset - self.offset
        numbered = self.numbers is not None
        if isinstance(self, Key):  # k + offset <= q + other.offset
            return Pattern(right=distance, numbered=numbered)
        return Pattern(left=distance, numbered=numbered)

    def comparable_with(self, other: Any) -> bool:
        """Whether one is a query's and the other a key's position, and both use the same table of numbers."""
        return isinstance(other, Position) and type(self) is not type(other) and self.numbers is other.numbers


class Query(Position):
    """A query's position."""


class Key(Position):
    """A key's position."""


@dataclass(frozen=True, eq=False)
class Distance:
    """The difference ``of - to`` of two positions, one a query's and one a key's; its absolute value if `absolute`."""

    of: Position
    to: Position
    absolute: bool = False

    def __abs__(self) -> Distance:
        return Distance(self.of, self.to, absolute=True)

    def __le__(self, number: int) -> Pattern:
        window = self.of <= self.to + _number(number)
        return window & (self.to <= self.of + number) if self.absolute else window

    def __lt__(self, number: int) -> Pattern:
        return self <= _number(number) - 1


def _number(value: Any) -> int:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise NotUnderstood
    return value  # type: ignore[return-value]


def _smaller(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)
