"""Similarity of two tensors as one number, as in TileLang's posts.

It only describes. Tests decide by the tolerance rule in `numerics`.
"""

from __future__ import annotations

from torch import Tensor


def similarity(x: Tensor, y: Tensor) -> float:
    """``2 <x, y> / (<x, x> + <y, y>)`` in float64: 1 for equal tensors, 0 for orthogonal ones, -1 for opposite ones.

    x and y have one shape, any dtypes. Two tensors of zeros (or without elements) are equal: 1. NaN if either has one.
    """
    x, y = x.double(), y.double()
    norms = float((x * x + y * y).sum())
    return 1.0 if norms == 0 else 2 * float((x * y).sum()) / norms


def dissimilarity(x: Tensor, y: Tensor) -> float:
    """``1 - similarity(x, y)``, computed as ``|x - y|^2 / (|x|^2 + |y|^2)``, which does not cancel near 0."""
    x, y = x.double(), y.double()
    norms = float((x * x + y * y).sum())
    return 0.0 if norms == 0 else float(((x - y) ** 2).sum()) / norms
