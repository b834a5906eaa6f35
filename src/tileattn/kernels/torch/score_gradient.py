"""Gradients through the score modifications, on one tile of scores.

Autograd differentiates only the score modifications, one tile at a time. A tensor that they read and that needs a
gradient is replaced by a :class:`Watched`. The elements that a tile reads become leaves of the tile's graph, so that a
tile's cost depends on the elements it reads, not on the size of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...variant.scores import Bias
from .mask import ScoreMatrix


class Watched:
    """Stands for a tensor in score modifications: it records the elements they read and sums their gradients.

    dtype: of the call's scores. The sum and the elements read are in this dtype, or in the tensor's dtype if that is
    wider. In a narrower dtype, gradients of elements that several scores read would be rounded before summation.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> None:
        self.tensor = tensor
        if total is None:
            total = torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, dtype), device=tensor.device)
        self.total = total
        # The reads of the current tile: index, the elements' shape, the elements.
        self.reads: list[tuple[Any, torch.Size, Tensor]] = []
        # The shape of a tile that the mask cuts through; None for other tiles. Elements are expanded to it: each
        # score then has its own gradient. Where the mask hides a score, the derivative may be infinite, and
        # 0 * inf = NaN must not enter a sum.
        self.tile: torch.Size | None = None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def __getitem__(self, index: Any) -> Tensor:
        elements = self.tensor[index].detach().to(self.total.dtype)
        shape = elements.shape
        if self.tile is not None and _broadcasts(shape, self.tile):
            elements = elements.expand(self.tile)
        self.reads.append((index, shape, elements.requires_grad_()))
        return elements

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            f"a score modification must read its tensors element by element (`tensor[h, k]`, tileattn.math.load), so "
            f"that kernels and gradients know what it reads; it asked for `tensor.{name}`"
        )

    def part(self, index: Any) -> Watched:
        """A part of the tensor; its gradients are added to this tensor's."""
        return Watched(self.tensor[index], self.total.dtype, self.total[index])

    def add(self, index: Any, gradient: Tensor) -> None:
        """Adds the gradient of the elements at an index, in which an element may occur several times."""
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, Tensor) for i in index):
            index = tuple(torch.as_tensor(i, device=self.total.device) for i in index)
            self.total.index_put_(index, gradient.to(self.total.dtype), accumulate=True)
        else:
            self.total[index] += gradient

    def gradient(self) -> Tensor:
        """The sum of the gradients, in the tensor's dtype."""
        return self.total.to(self.tensor.dtype)


@contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records, even inside a torch.library operator, where it is otherwise disabled."""
    with (
        torch.enable_grad(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
    ):
        yield


def only_biases(matrix: ScoreMatrix) -> bool:
    """Whether the modifications only add biases, so that autograd is not needed."""
    return all(isinstance(mod, Bias) for mod in matrix.score_mods)


def add_biases(matrix: ScoreMatrix, rows: slice, keys: slice, scores: Tensor) -> None:
    """Adds the biases to a tile of scores (batch, heads, rows, keys), in place."""
    for mod in matrix.score_mods:
        scores += matrix.cut(mod.tensor.tensor if isinstance(mod.tensor, Watched) else mod.tensor, rows, keys)


def add_to_gradients(matrix: ScoreMatrix, rows: slice, keys: slice, ds: Tensor) -> None:
    """Adds the gradient of a tile of scores, ds (batch, heads, rows, keys), to the biases' gradients."""
    for mod in matrix.score_mods:
        if isinstance(mod.tensor, Watched):
            total = matrix.cut(mod.tensor.total, rows, keys)
            total += ds.sum_to_size(total.shape)


def _broadcasts(shape: torch.Size, tile: torch.Size) -> bool:
    return len(shape) <= len(tile) and all(size in (1, full) for size, full in zip(shape[::-1], tile[::-1]))


def through_score_mods(
    scores: Tensor, modified: Tensor, ds: Tensor, watched: Sequence[Watched], forbidden: Tensor | None
) -> Tensor | None:
    """The gradient of a tile of scores; adds to the gradients of the watched tensors.

    Args:
        scores: a leaf of autograd's graph.
        modified: the modified scores, as a function of `scores` and the watched tensors.
        ds: the gradient of `modified`.
        watched: the tensors that the modifications read.
        forbidden: where the mask hides keys, or None.

    Returns:
        The gradient, or None if `modified` does not depend on `scores`.
    """
    reads = [(tensor, *read) for tensor in watched for read in tensor.reads]
    for tensor in watched:
        tensor.reads = []
    if not modified.requires_grad:
        return None
    leaves = (scores, *(elements for *_, elements in reads))
    of_scores, *of_reads = torch.autograd.grad(modified, leaves, ds, allow_unused=True)
    for (tensor, index, shape, _), gradient in zip(reads, of_reads, strict=True):
        if gradient is not None:
            if forbidden is not None and gradient.shape == scores.shape:
                gradient = gradient.masked_fill(forbidden, 0.0)
            tensor.add(index, gradient.sum_to_size(shape))
    return of_scores
