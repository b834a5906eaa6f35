"""Masks and score modifications on a part of a call: some queries, some keys, some heads.

A part numbers its batch elements, heads and positions from 0. These wrappers add what is missing. The shifts are
operands, so another shift compiles nothing. `Causal`, `SlidingWindow`, `SoftCap`, `ALiBi` and `Bias` need no wrapper
where queries and keys are shifted alike: the first three depend on differences of positions alone, and the tensors of
the last two are sliced. `localized` does all that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...call.inputs import Operands
from ...variant.key import encode
from ...variant.mask_bounds import Range
from ...variant.masks import FIRST_POSITION, And, Causal, Mask, Or, SlidingWindow
from ...variant.math import where
from ...variant.scores import ALiBi, Bias, ScoreMod, SoftCap

ScoreFn = Callable[..., Any]
View = tuple[slice, ...] | None
"""The part of an operand that a part of a call reads; None for the whole."""


@dataclass(frozen=True, eq=False)
class ShiftedMask(Mask):
    """A mask at other indices: ``mask.allows(b + self.b, h + self.h, q + self.q, k + self.k)``.

    Args:
        mask: the mask of the whole call.
        b, h, q, k: what is added to the part's indices.
        seqlen_k: the number of keys of the whole call.
    """

    mask: Mask
    b: int
    h: int
    q: int
    k: int
    seqlen_k: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.mask.allows(b + self.b, h + self.h, q + self.q, k + self.k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self._keys(self.mask.kv_range, b, h, q_lo, q_hi)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self._keys(self.mask.full_range, b, h, q_lo, q_hi)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self._queries(self.mask.q_range, b, h, k_lo, k_hi)

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self._queries(self.mask.full_q_range, b, h, k_lo, k_hi)

    def _keys(self, of: Callable[..., Range], b: Any, h: Any, q_lo: Any, q_hi: Any) -> Range:
        lo, hi = of(b + self.b, h + self.h, q_lo + self.q, q_hi + self.q, self.seqlen_k)
        return lo - self.k, hi - self.k

    def _queries(self, of: Callable[..., Range], b: Any, h: Any, k_lo: Any, k_hi: Any) -> Range:
        lo, hi = of(b + self.b, h + self.h, k_lo + self.k, k_hi + self.k, self.seqlen_k)
        return lo - self.q, hi - self.q


@dataclass(frozen=True, eq=False)
class ShiftedScore(ScoreMod):
    """A score modification at other indices; arguments as `ShiftedMask`."""

    mod: ScoreFn
    b: int
    h: int
    q: int
    k: int

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.mod(score, b + self.b, h + self.h, q + self.q, k + self.k)


@dataclass(frozen=True, eq=False)
class FromKey(Mask):
    """All queries see the keys from `first` on."""

    first: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= self.first

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self.first, seqlen_k

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return self.first, seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return where(k_lo >= self.first, FIRST_POSITION, seqlen_k), seqlen_k


class Part(NamedTuple):
    """A part of a call: some rows of queries of one sequence over some of its keys.

    Attributes:
        sequence: the number of the document; None if batch elements are not documents.
        queries: positions of the queries, (start, stop).
        keys: positions of the keys, (start, stop).
        heads: the query heads, (start, stop).
        rows: rows of a bias that has those of this rank only; None for a bias of all rows.
        seqlen_k: the length of the sequence.
    """

    sequence: int | None
    queries: tuple[int, int]
    keys: tuple[int, int]
    heads: tuple[int, int]
    rows: tuple[int, int] | None
    seqlen_k: int

    @property
    def shifts(self) -> tuple[int, int, int, int]:
        """What to add to b, h, q and k of the part. A part's last query is at the position of its last key."""
        q = self.queries[1] - (self.keys[1] - self.keys[0])
        return self.sequence or 0, self.heads[0], q, self.keys[0]


class LocalVariant(NamedTuple):
    """The variant of a part.

    Attributes:
        key: the variant key.
        ints, floats: its numbers.
        views: for each tensor of the variant, in order, what the part reads of it.
    """

    key: str
    ints: list[int]
    floats: list[float]
    views: list[View]

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """The operands of the part, from the tensors of the whole variant."""
        return Operands(
            [x if view is None else x[view] for x, view in zip(tensors, self.views)], self.ints, self.floats
        )


def localized(mask: Mask | None, mods: Sequence[ScoreFn], part: Part, hidden: int = 0) -> LocalVariant:
    """The variant of a part of a call with this mask and these modifications.

    hidden: as many of the part's first keys are hidden from all queries.
    """
    views: list[View] = [None] * len(encode(mask, ())[1].tensors)
    local = []
    for mod in mods:
        new, of_mod = _localized_mod(mod, part)
        local.append(new)
        views += of_mod
    of_part = _localized_mask(mask, part)
    if hidden:
        of_part = FromKey(hidden) if of_part is None else of_part & FromKey(hidden)
    key, operands = encode(of_part, local)
    assert len(views) == len(operands.tensors)
    return LocalVariant(key, operands.ints, operands.floats, views)


def _localized_mask(mask: Mask | None, part: Part) -> Mask | None:
    b, h, q, k = part.shifts
    if mask is None or (q == k and is_relative(mask)):
        return mask
    if (window := _as_window(mask)) is not None:
        # k + part's k <= q + part's q + right, and the same on the left
        left = None if window.left is None else window.left + k - q
        right = None if window.right is None else window.right + q - k
        first, last = part.queries[0] - q, part.queries[1] - 1 - q  # in the part
        keys = part.keys[1] - part.keys[0]
        if (left is None or last - left <= 0) and (right is None or first + right >= keys - 1):
            return None  # all see all
        if (left is None or left >= 0) and (right is None or right >= 0):
            return SlidingWindow(left, right)
    if (b, h, q, k) == (0, 0, 0, 0) and part.seqlen_k == part.keys[1]:
        return mask
    return ShiftedMask(mask, b, h, q, k, part.seqlen_k)


def _as_window(mask: Mask) -> SlidingWindow | None:
    if type(mask) is Causal:
        return SlidingWindow(None, 0)
    return mask if type(mask) is SlidingWindow else None


def is_relative(mask: Mask | None) -> bool:
    """Whether a mask depends on ``q - k`` alone."""
    if isinstance(mask, (And, Or)):
        return is_relative(mask.x) and is_relative(mask.y)
    return mask is None or type(mask) in (Causal, SlidingWindow)


def _localized_mod(mod: ScoreFn, part: Part) -> tuple[ScoreFn, list[View]]:
    b, h, q, k = part.shifts
    heads = slice(*part.heads)
    if type(mod) is SoftCap:
        return mod, []
    if type(mod) is Bias:
        view = _view_of_bias(mod.tensor, part)
        return Bias(mod.tensor[view]), [view]
    if type(mod) is ALiBi:
        slopes = mod.slopes
        view = (_of_sequence(slopes, part), heads) if slopes.ndim == 2 else (heads,)
        sliced = ALiBi(slopes[view])
        return (sliced if q == k else ShiftedScore(sliced, 0, 0, q, k)), [view]
    tensors = encode(None, (mod,))[1].tensors
    if (b, h, q, k) == (0, 0, 0, 0):
        return mod, [None] * len(tensors)
    return ShiftedScore(mod, b, h, q, k), [None] * len(tensors)


def _view_of_bias(tensor: Tensor, part: Part) -> tuple[slice, ...]:
    """The rows and keys of the part. A bias with one row, or one head, or one batch element has it for all."""
    heads = slice(None) if tensor.shape[1] == 1 else slice(*part.heads)
    rows = slice(None) if tensor.shape[2] == 1 else slice(*(part.rows or part.queries))
    return _of_sequence(tensor, part), heads, rows, slice(*part.keys)


def _of_sequence(tensor: Tensor, part: Part) -> slice:
    if part.sequence is None or tensor.shape[0] == 1:
        return slice(None)
    return slice(part.sequence, part.sequence + 1)
