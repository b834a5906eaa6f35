"""Masks: which query position may see which key position.

A mask is an object with five methods, which every backend uses:

- ``allows(b, h, q, k)``: whether query position ``q`` may see key position ``k`` (batch ``b``, query head ``h``).
- ``kv_range(b, h, q_lo, q_hi, seqlen_k)``: the keys that *any* query in ``q_lo..q_hi`` can see, as ``(lo, hi)`` with
  ``hi`` excluded. Tiles outside are skipped. The range may be too large, never too small.
- ``full_range(b, h, q_lo, q_hi, seqlen_k)``: the keys that *all* queries in ``q_lo..q_hi`` see. In tiles inside the
  mask is not evaluated. The range may be too small, never too large; ``lo >= hi`` means no keys.
- ``q_range`` and ``full_q_range(b, h, k_lo, k_hi, seqlen_k)``: the queries that see *any*, or *all*, of the keys
  ``k_lo..k_hi``. The backward pass needs them, because its outer loop is over keys.

Positions are aligned bottom-right, as in flash-attn: row ``i`` of the queries is at ``q = i + seqlen_k - seqlen_q``,
so the last query is at the last key. With more queries than keys the first positions are negative. Ranges of keys may
reach outside ``[0, seqlen_k)``, ranges of queries outside ``[seqlen_k - seqlen_q, seqlen_k)``: callers clamp them. The
tiles that callers ask about end at the last query or key at the latest.

Masks combine with ``&`` and ``|``. A new mask is a frozen dataclass that subclasses :class:`Mask`. Numbers and tensors
among its fields are run-time values: another window size recompiles nothing. Whether a field is ``None`` is known at
compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .mask_bounds import Range, checked_size, document_bounds, hull, intersection, joined, padding_bounds
from .math import load, maximum, where

FIRST_POSITION = -(2**30)  # less than all query positions; sums with sizes stay within int32


class Mask:
    """Base class of all masks. The module's description explains its methods."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Whether query position q may see key position k. Broadcasts over torch tensors."""
        raise NotImplementedError

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        """Keys that any query position in q_lo..q_hi (both included) can see."""
        return 0, seqlen_k

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        """Keys that all query positions in q_lo..q_hi (both included) see."""
        return 0, 0

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        """Query positions that can see any key in k_lo..k_hi (both included)."""
        return FIRST_POSITION, seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        """Query positions that see all keys in k_lo..k_hi (both included)."""
        return 0, 0

    def __init_subclass__(cls, **options: Any) -> None:
        """Resets q_range and full_q_range to the defaults of :class:`Mask` in a class that redefines ``allows``.

        Ranges that the class itself defines stay. Inherited ranges may be wrong for the new ``allows``.
        """
        super().__init_subclass__(**options)
        if "allows" in vars(cls):
            for name in ("q_range", "full_q_range"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Mask, name))

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Raises ValueError if a tensor of the mask does not fit the call."""

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))


def _as_mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        raise TypeError(f"masks combine with masks, got {type(value).__name__}; wrap a function in FunctionMask")
    return value


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees the keys up to its own position."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, q_hi + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, q_lo + 1

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return k_lo, seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return k_hi, seqlen_k


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """A query at ``q`` sees the keys from ``q - left`` to ``q + right``, both included, as in flash-attn.

    Args:
        left: the number of keys seen before the query's own position, 0 or more; None for no bound.
        right: the number of keys seen after it, 0 or more; None for no bound. By default it is 0, which makes the
            window causal, as in Mistral: a query sees ``left + 1`` keys, its own included. ``SlidingWindow(w, w)`` is
            symmetric.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            size = getattr(self, name)
            if size is not None:
                object.__setattr__(self, name, checked_size(f"SlidingWindow: {name}", size, "an int or None"))

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        if self.left is None and self.right is None:
            return k == k
        if self.left is None:
            return k <= q + self.right
        if self.right is None:
            return k >= q - self.left
        return (k >= q - self.left) & (k <= q + self.right)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        lo = 0 if self.left is None else q_lo - self.left
        hi = seqlen_k if self.right is None else q_hi + self.right + 1
        return lo, hi

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        lo = 0 if self.left is None else q_hi - self.left
        hi = seqlen_k if self.right is None else q_lo + self.right + 1
        return lo, hi

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        lo = FIRST_POSITION if self.right is None else k_lo - self.right
        hi = seqlen_k if self.left is None else k_hi + self.left + 1
        return lo, hi

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        lo = FIRST_POSITION if self.right is None else k_hi - self.right
        hi = seqlen_k if self.left is None else k_lo + self.left + 1
        return lo, hi


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """A query sees the first ``prefix`` keys and the keys up to its own position.

    Args:
        prefix: an int, or an integer tensor (batch,) with one length for each sequence, on the queries' device.
    """

    prefix: int | torch.Tensor

    def __post_init__(self) -> None:
        if isinstance(self.prefix, torch.Tensor) and self.prefix.ndim:
            _check_integer("PrefixLM: prefix", self.prefix)
        else:
            accepted = "an int or an integer tensor (batch,)"
            object.__setattr__(self, "prefix", checked_size("PrefixLM: prefix", self.prefix, accepted))

    def _length(self, b: Any) -> Any:
        return self.prefix if isinstance(self.prefix, int) or not hasattr(self.prefix, "ndim") else load(self.prefix, b)

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self._length(b)) | (k <= q)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, maximum(self._length(b), q_hi + 1)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, maximum(self._length(b), q_lo + 1)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return where(k_lo < self._length(b), FIRST_POSITION, k_lo), seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return where(k_hi < self._length(b), FIRST_POSITION, k_hi), seqlen_k

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        if isinstance(self.prefix, torch.Tensor) and tuple(self.prefix.shape) not in ((batch,), (1,)):
            raise ValueError(f"PrefixLM: prefix must have shape ({batch},), got {tuple(self.prefix.shape)}")


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A query sees the keys of its own document, in sequences that hold several documents.

    The ids may be in any order. If equal ids are adjacent, as after packing, the tiles of other documents are skipped.
    A position before the first key (seqlen_q > seqlen_k) belongs to no document.

    Args:
        ids: integer tensor (batch, seqlen_k), or (seqlen_k,) for all batch elements: the document of each position.
            Any values are allowed. int64 ids are renumbered, because kernels compare in 32 bits.
    """

    ids: torch.Tensor
    # For each position, bounds that hold for every tile that begins (`first`) or ends (`last`) at the position.
    first: torch.Tensor = field(init=False, repr=False)
    last: torch.Tensor = field(init=False, repr=False)
    # For each position, the run of adjacent equal ids around it.
    run_start: torch.Tensor = field(init=False, repr=False)
    run_end: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.ids, torch.Tensor):
            raise TypeError(f"Documents: ids must be an integer tensor, got {type(self.ids).__name__}")
        _check_integer("Documents: ids", self.ids)
        if self.ids.ndim not in (1, 2):
            raise ValueError(
                f"Documents: ids must have shape (batch, seqlen) or (seqlen,), got {tuple(self.ids.shape)}"
            )
        ids = self.ids if self.ids.ndim == 2 else self.ids[None]
        numbers, *bounds = document_bounds(ids)
        fields = (ids if ids.dtype != torch.int64 else numbers, *bounds)
        for name, value in zip(("ids", "first", "last", "run_start", "run_end"), fields):
            object.__setattr__(self, name, value.to(torch.int32).contiguous())

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= 0) & (load(self.ids, b, maximum(q, 0)) == load(self.ids, b, k))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.first, b, maximum(q_lo, 0)), load(self.last, b, maximum(q_hi, 0)) + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        start, end = load(self.run_start, b, maximum(q_lo, 0)), load(self.run_end, b, maximum(q_lo, 0)) + 1
        return start, where((q_lo >= 0) & (q_hi < end), end, start)

    # Visibility is symmetric, except for queries before the first key.
    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self.kv_range(b, h, k_lo, k_hi, seqlen_k)

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return self.full_range(b, h, k_lo, k_hi, seqlen_k)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        if self.ids.shape[0] not in (1, batch) or self.ids.shape[1] != seqlen_k:
            raise ValueError(
                f"Documents: ids must have shape (batch, seqlen_k) = ({batch}, {seqlen_k}) or ({seqlen_k},), "
                f"got {tuple(self.ids.shape)}"
            )


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """A query sees the keys that are not padding. ``key_padding_mask`` of :func:`tileattn.attention` becomes one.

    Padding may lie anywhere. Tiles before a sequence's first kept key and after its last are skipped. Within the
    longest run of kept keys the mask is not evaluated; with padding on one side only, that run holds all kept keys.
    Construction launches several small kernels, so build one KeyPadding for all layers.

    Args:
        keep: bool tensor (batch, seqlen_k), or (1, seqlen_k) for all sequences, on the queries' device: True where a
            key may be seen. (The ``key_padding_mask`` of ``torch.nn.MultiheadAttention`` has the opposite meaning.)
    """

    keep: torch.Tensor
    # For each sequence: the span from the first to the last kept key, and the longest run of kept keys; ends excluded.
    begin: torch.Tensor = field(init=False, repr=False)
    end: torch.Tensor = field(init=False, repr=False)
    run_begin: torch.Tensor = field(init=False, repr=False)
    run_end: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_key_padding("KeyPadding: keep", self.keep)
        for name, value in zip(("begin", "end", "run_begin", "run_end"), padding_bounds(self.keep)):
            object.__setattr__(self, name, value.to(torch.int32))

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return load(self.keep, b, k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.begin, b), load(self.end, b)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return load(self.run_begin, b), load(self.run_end, b)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        some = (k_lo < load(self.end, b)) & (k_hi >= load(self.begin, b))
        return where(some, FIRST_POSITION, seqlen_k), seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        all_of_them = (k_lo >= load(self.run_begin, b)) & (k_hi < load(self.run_end, b))
        return where(all_of_them, FIRST_POSITION, seqlen_k), seqlen_k

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        if self.keep.shape[0] not in (1, batch) or self.keep.shape[1] != seqlen_k:
            raise ValueError(
                f"a key padding mask must have shape (batch, seqlen_k) = ({batch}, {seqlen_k}) or (1, {seqlen_k}), got "
                f"{tuple(self.keep.shape)}"
            )


def check_key_padding(name: str, keep: Any) -> None:
    """Raises TypeError or ValueError unless keep is a bool tensor (batch, seqlen_k)."""
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
        given = keep.dtype if isinstance(keep, torch.Tensor) else type(keep).__name__
        instead = ""
        if isinstance(keep, torch.Tensor) and not keep.dtype.is_floating_point:
            instead = "; if it is 1 where a key may be seen, pass mask.bool()"
        raise TypeError(
            f"{name} must be a bool tensor (batch, seqlen_k), True where a key may be seen, got {given}{instead}"
        )
    if keep.ndim != 2:
        raise ValueError(f"{name} must have shape (batch, seqlen_k), got {tuple(keep.shape)}")


def _check_integer(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{name} must be an integer tensor, got {tensor.dtype}")


@dataclass(frozen=True, eq=False)
class FunctionMask(Mask):
    """A user's own function ``mask(b, h, q, k) -> bool``.

    The `torch` backend and TileLang's kernels for sm_90a skip the tiles of which the interval analysis finds that it
    hides them. On other GPUs it is evaluated in every tile; a subclass of :class:`Mask` that also defines the ranges
    lets tiles be skipped there, too. Numbers that the function captures are compile-time constants. Tensors that it
    captures are read at run time.
    """

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"FunctionMask: fn must be a function fn(b, h, q, k) -> bool, got {self.fn!r}")

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.fn(b, h, q, k)


@dataclass(frozen=True, eq=False)
class And(Mask):
    """A query sees the keys that both masks allow. Built by ``x & y``."""

    x: Mask
    y: Mask

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.x.allows(b, h, q, k) & self.y.allows(b, h, q, k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.kv_range(b, h, q_lo, q_hi, seqlen_k) for mask in (self.x, self.y)))

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.full_range(b, h, q_lo, q_hi, seqlen_k) for mask in (self.x, self.y)))

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.q_range(b, h, k_lo, k_hi, seqlen_k) for mask in (self.x, self.y)))

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return intersection(*(mask.full_q_range(b, h, k_lo, k_hi, seqlen_k) for mask in (self.x, self.y)))

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self.x.check(batch, heads, seqlen_q, seqlen_k)
        self.y.check(batch, heads, seqlen_q, seqlen_k)


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """A query sees the keys that at least one mask allows. Built by ``x | y``."""

    x: Mask
    y: Mask

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.x.allows(b, h, q, k) | self.y.allows(b, h, q, k)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return hull(*(mask.kv_range(b, h, q_lo, q_hi, seqlen_k) for mask in (self.x, self.y)))

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        ranges = (mask.full_range(b, h, q_lo, q_hi, seqlen_k) for mask in (self.x, self.y))
        return joined((0, seqlen_k), *ranges)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return hull(*(mask.q_range(b, h, k_lo, k_hi, seqlen_k) for mask in (self.x, self.y)))

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        ranges = (mask.full_q_range(b, h, k_lo, k_hi, seqlen_k) for mask in (self.x, self.y))
        return joined((FIRST_POSITION, seqlen_k), *ranges)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self.x.check(batch, heads, seqlen_q, seqlen_k)
        self.y.check(batch, heads, seqlen_q, seqlen_k)
