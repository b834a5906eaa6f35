"""Sparse patterns: masks that are usual for long contexts and for documents with images.

Positions are those of :mod:`tileattn.variant.masks`: of each sequence by itself, also in packed calls, aligned
bottom-right. With more queries than keys the first queries have negative positions; each mask says what these see.
Sizes are run-time values, so another size compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...call.scalars import as_int
from ..mask_bounds import Range, checked_size, document_bounds
from ..masks import FIRST_POSITION, Mask
from ..math import load, maximum, where

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def checked_step(name: str, step: Any, accepted: str) -> Any:
    """The step as an int from 1 to 2**30 - 1. Raises TypeError or ValueError for any other value."""
    step = checked_size(name, step, accepted)
    if step < 1:
        raise ValueError(f"{name} must lie in 1 .. 2**30 - 1, got {step}")
    return step


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A query sees every ``dilation``-th key of a sliding window, its own position included.

    A query at ``q`` sees the keys ``k`` from ``q - left`` to ``q + right`` for which ``q - k`` is a multiple of
    ``dilation``. A query before the first key sees the keys of its window as any other does.

    Args:
        left: the length of the window before the query's position, in keys, 0 or more; None for no bound.
        right: its length behind the position; None for no bound. By default it is 0, which makes the mask causal.
        dilation: the distance between two keys that are seen, 1 or more. 1 is ``SlidingWindow(left, right)``.

    Raises:
        TypeError, ValueError: a size is no integer in its range.

    Source: the dilated sliding window of Longformer (Beltagy et al. 2020, arXiv 2004.05150), whose window of ``w`` keys
    is ``left = (w - 1) * dilation`` here.
    """

    left: int | None
    right: int | None = 0
    dilation: int = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            size = getattr(self, name)
            if size is not None:
                object.__setattr__(self, name, checked_size(f"Dilated: {name}", size, "an int or None"))
        object.__setattr__(self, "dilation", checked_step("Dilated: dilation", self.dilation, "an int of at least 1"))

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = (q - k) % self.dilation == 0
        if self.left is not None:
            seen = (k >= q - self.left) & seen
        return seen if self.right is None else (k <= q + self.right) & seen

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        lo = 0 if self.left is None else q_lo - self.left
        return lo, seqlen_k if self.right is None else q_hi + self.right + 1

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        lo = FIRST_POSITION if self.right is None else k_lo - self.right
        return lo, seqlen_k if self.left is None else k_hi + self.left + 1


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """A query sees the ``local`` keys before its own position, and of all earlier keys every ``stride``-th; causal.

    A query at ``q`` sees the keys ``k <= q`` for which ``q - k <= local`` or ``q - k`` is a multiple of ``stride``. So
    it always sees its own position. A query before the first key sees nothing.

    Args:
        stride: the distance between two keys that are seen, 1 or more.
        local: the number of keys seen just before the query's position, 0 or more.

    Raises:
        TypeError, ValueError: a size is no integer in its range.

    Source: the strided pattern of Sparse Transformers (Child et al. 2019, arXiv 1904.10509), both of whose parts this
    mask joins with ``local = stride``.
    """

    stride: int
    local: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", checked_step("Strided: stride", self.stride, "an int of at least 1"))
        object.__setattr__(self, "local", checked_size("Strided: local", self.local, "an int of 0 or more"))

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k <= self.local) | ((q - k) % self.stride == 0))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return 0, q_hi + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        return q_hi - self.local, q_lo + 1

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return k_lo, seqlen_k

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return k_hi, k_lo + self.local + 1


@dataclass(frozen=True, eq=False)
class GlobalTokens(Mask):
    """Global tokens see all keys, and all queries see them. Made to be joined with a local mask.

    ``SlidingWindow(256, 256) | GlobalTokens(4)`` is Longformer's mask. A query before the first key is no global
    token; it sees the global tokens.

    Args:
        tokens: the number of first positions that are global, an int of 0 or more; or which positions are: a bool
            tensor (batch, seqlen_k), or (1, seqlen_k) for all sequences, on the queries' device. In a packed call
            batch is the number of sequences and seqlen_k is max_seqlen_k.

    Raises:
        TypeError, ValueError: tokens is neither; or, in a call, the tensor does not have these sizes.

    Source: global attention of Longformer (Beltagy et al. 2020, arXiv 2004.05150).
    """

    tokens: int | torch.Tensor

    def __post_init__(self) -> None:
        accepted = "an int of 0 or more, or a bool tensor (batch, seqlen_k)"
        tokens = as_int(self.tokens)
        if isinstance(tokens, torch.Tensor):
            if tokens.dtype != torch.bool:
                raise TypeError(f"GlobalTokens: tokens must be {accepted}, got a tensor of {tokens.dtype}")
            if tokens.ndim != 2:
                raise ValueError(f"GlobalTokens: tokens must be {accepted}, got shape {tuple(tokens.shape)}")
        else:
            object.__setattr__(self, "tokens", checked_size("GlobalTokens: tokens", tokens, accepted))

    @property
    def _is_count(self) -> bool:
        # Tensors, and the symbols that stand for them while the mask is traced, have dimensions.
        return not hasattr(self.tokens, "ndim")

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        if self._is_count:
            return (k < self.tokens) | ((q >= 0) & (q < self.tokens))
        return load(self.tokens, b, k) | ((q >= 0) & load(self.tokens, b, maximum(q, 0)))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        if not self._is_count:
            return 0, seqlen_k
        return 0, where((q_hi >= 0) & (q_lo < self.tokens), seqlen_k, self.tokens)

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        if not self._is_count:
            return 0, 0
        return 0, where((q_lo >= 0) & (q_hi < self.tokens), seqlen_k, self.tokens)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        if not self._is_count:
            return FIRST_POSITION, seqlen_k
        return where(k_lo < self.tokens, FIRST_POSITION, 0), where(k_lo < self.tokens, seqlen_k, self.tokens)

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        if not self._is_count:
            return 0, 0
        return where(k_hi < self.tokens, FIRST_POSITION, 0), where(k_hi < self.tokens, seqlen_k, self.tokens)

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        if isinstance(self.tokens, torch.Tensor) and tuple(self.tokens.shape) not in ((batch, seqlen_k), (1, seqlen_k)):
            raise ValueError(
                f"GlobalTokens: tokens must have shape (batch, seqlen_k) = ({batch}, {seqlen_k}) or (1, {seqlen_k}), "
                f"got {tuple(self.tokens.shape)}"
            )


@dataclass(frozen=True, eq=False)
class ImageTextDocuments(Mask):
    """Documents of text and images: text is causal, the positions of an image see each other, documents are apart.

    A query sees the keys of its own document up to its own position, and all keys of the image that it belongs to.
    A query before the first key belongs to no document and sees nothing.

    Args:
        documents: integer tensor (batch, seqlen_k), or (seqlen_k,) for all batch elements: the document of each
            position; any values, in any order. In a packed call batch is the number of sequences and seqlen_k is
            max_seqlen_k.
        images: integer tensor of the same shape: the image of each position, negative for text. Positions with the
            same number and the same document are one image, so numbers may begin again in each document.

    Raises:
        TypeError, ValueError: a tensor is not of integers or not of these shapes; or, in a call, does not fit it.

    Source: the mixed mask of Transfusion (Zhou et al. 2024, arXiv 2408.11039), in packed documents.
    """

    documents: torch.Tensor
    images: torch.Tensor
    # For each position, bounds that hold for every tile that begins (`first`) or ends (`last`) at the position.
    first: torch.Tensor = field(init=False, repr=False)
    last: torch.Tensor = field(init=False, repr=False)
    image_first: torch.Tensor = field(init=False, repr=False)
    image_last: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("documents", "images"):
            _check_ids(f"ImageTextDocuments: {name}", getattr(self, name))
        if self.documents.shape != self.images.shape:
            raise ValueError(
                f"ImageTextDocuments: images must have the shape of documents {tuple(self.documents.shape)}, got "
                f"{tuple(self.images.shape)}"
            )
        documents, images = (x if x.ndim == 2 else x[None] for x in (self.documents, self.images))
        number, first, last, *_ = document_bounds(documents)
        seqlen = documents.shape[1]
        position = torch.arange(seqlen, device=documents.device)
        # One number for each image of each document. Of text every position has its own.
        pair = number * (seqlen + 1) + document_bounds(images)[0]
        image, image_first, image_last, *_ = document_bounds(
            torch.where(images < 0, seqlen * (seqlen + 1) + position, pair)
        )
        fields = (number, image, first, last, image_first, image_last)
        for name, value in zip(("documents", "images", "first", "last", "image_first", "image_last"), fields):
            object.__setattr__(self, name, value.to(torch.int32).contiguous())

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        row = maximum(q, 0)
        of_document = (k <= q) & (load(self.documents, b, row) == load(self.documents, b, k))
        return (q >= 0) & (of_document | (load(self.images, b, row) == load(self.images, b, k)))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Range:
        last = maximum(q_hi, load(self.image_last, b, maximum(q_hi, 0)))
        return load(self.first, b, maximum(q_lo, 0)), where(q_hi >= 0, last + 1, 0)

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> Range:
        return load(self.image_first, b, k_lo), load(self.last, b, k_hi) + 1

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        if self.documents.shape[0] not in (1, batch) or self.documents.shape[1] != seqlen_k:
            raise ValueError(
                f"ImageTextDocuments: documents and images must have shape (batch, seqlen_k) = ({batch}, {seqlen_k}) "
                f"or ({seqlen_k},), got {tuple(self.documents.shape)}"
            )


def _check_ids(name: str, ids: Any) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS:
        given = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be an integer tensor (batch, seqlen_k) or (seqlen_k,), got {given}")
    if ids.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (batch, seqlen_k) or (seqlen_k,), got {tuple(ids.shape)}")
