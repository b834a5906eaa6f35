"""Gradients of the tensors that score modifications read.

Each load of a tensor in the expression, such as ``slopes[h]``, is a *path* by which the gradients of scores reach its
elements. The kernel for dk and dv hands over what went along a path in a workspace of its own:

- where none of the load's indices depends on ``q``, one sum for each key of each head, (batch, heads, seqlen_k): a
  program visits all queries of its keys;
- otherwise the gradient of each score, (batch, heads, seqlen_q, seqlen_k). That is as much memory as standard
  attention takes; but the gradient of a tensor that is this large is not asked for on long sequences.

PyTorch's operations then bring the parts to their elements (:func:`add_up`), in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....call.inputs import Operands
from ....variant.reading import evaluate
from ..tile.paths import Path


def workspace(path: Path, q: Tensor, k: Tensor) -> Tensor:
    """What the kernel fills for a path: where it does not write, nothing has a gradient."""
    rows = (q.shape[1],) if path.spread else ()
    return q.new_zeros((q.shape[0], q.shape[2], *rows, k.shape[1]), dtype=torch.float32)


def add_up(
    index: int, found: Sequence[Path], parts: Sequence[Tensor], operands: Operands, first_position: int
) -> Tensor:
    """The gradient of one of the variant's tensors, in its dtype.

    Args:
        index: which.
        found: all paths, to this tensor and to others.
        parts: the workspace of each.
        operands: the variant's, for the loads' indices.
        first_position: of the queries.
    """
    tensor = operands.tensors[index]
    total = tensor.new_zeros(tensor.shape, dtype=torch.float32)
    for path, part in zip(found, parts, strict=True):
        if path.tensor == index:
            _add(total, path, part, operands, first_position)
    return total.to(tensor.dtype)


def _add(total: Tensor, path: Path, part: Tensor, operands: Operands, first_position: int) -> None:
    summed = [dim for dim, axis in enumerate(path.axes) if axis not in path.symbols]
    part = part.sum(summed, keepdim=True) if summed else part
    if not total.ndim:
        total += part.sum()
        return
    values: dict[str, Any] = {}
    for kind, operand in (("t", operands.tensors), ("i", operands.ints), ("f", operands.floats)):
        values |= {f"{kind}{number}": value for number, value in enumerate(operand)}
    for dim, axis in enumerate(path.axes):
        positions = torch.arange(part.shape[dim], device=part.device) + (first_position if axis == "q" else 0)
        values[axis] = positions.view(-1, *[1] * (part.ndim - dim - 1))
    places, within = [], torch.ones((), dtype=torch.bool, device=part.device)
    for place, size in zip(path.load.args[1:], total.shape, strict=True):
        place = torch.as_tensor(evaluate(place, values), device=part.device)
        within = within & (place >= 0) & (place < size)
        places.append(place.clamp(0, size - 1).expand(part.shape))
    total.index_put_(tuple(places), torch.where(within, part, 0.0), accumulate=True)
