"""Gradients of the tensors that score modifications read: how the kernel hands them over, and what is left to do.

Each load of a tensor in the expression, such as ``slopes[h]``, is a *path* by which the gradients of scores reach its
elements. A path is taken in one of four ways:

- ``BY_KEY``: none of the load's indices depends on ``q``. All queries of a head then add to the same element, and a
  block of threads, which visits all queries of its keys, adds them up itself. It writes one sum for each key of each
  head into a workspace (batch, heads, padded_k).
- ``STORED``: every element is read by one score at most, as ``bias[b, h, q, k]``. The gradients are stored where they
  belong, in a tensor of the same shape and dtype.
- ``ADDED``: any other. Each score adds to its element, in float32, by an atomic operation.
- ``SPREAD``: the same where the result must not depend on the order of additions (``deterministic=True``): each score
  has a place of its own in a workspace (batch, heads, seqlen_q, seqlen_k), in float32. That is as much memory as
  standard attention takes, but the gradient of a tensor that is this large is not asked for on long sequences.

Where the Hopper schedule copies a bias's tiles by TMA, its gradient, STORED or ADDED, leaves in such tiles as well.

What a workspace holds, PyTorch's operations bring to the elements, in a fixed order (:func:`add_up`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....call.facts import BackwardCall
from ....call.inputs import Operands
from ....variant.derivative import float_loads
from ....variant.expression import Expr, nodes
from ....variant.program import program
from ....variant.reading import evaluate

BY_KEY, STORED, ADDED, SPREAD = "by key", "stored", "added", "spread"
# Symbols that stand for the dimensions of workspaces.
AXES = {BY_KEY: ("b", "h", "k"), SPREAD: ("b", "h", "q", "k")}


@dataclass(frozen=True)
class Path:
    """One load of a tensor whose gradient is wanted.

    Attributes:
        load: the node ``(load name *indices)``.
        tensor: which of the variant's tensors it reads.
        way: how its gradient is handed over.
    """

    load: Expr
    tensor: int
    way: str

    def indices(self, emit: Any, **position: Any) -> tuple[Any, ...]:
        """Of the element that a score reads, as a kernel's expressions; `emit` is its Emitter."""
        return tuple(emit(index, **position) for index in self.load.args[1:])


@functools.lru_cache(maxsize=1024)
def paths(call: BackwardCall) -> tuple[Path, ...]:
    """All paths to the tensors whose gradients are wanted, in the order of the kernel's parameters."""
    traced = program(call.forward.variant)
    numbers = {tensor.name: index for index, tensor in enumerate(traced.tensors)}
    found = []
    for load in float_loads(traced.score):
        tensor = numbers[load.args[0]]
        if call.needs[4 + tensor]:
            found.append(Path(load, tensor, _way(load, call.deterministic)))
    return tuple(found)


def _way(load: Expr, deterministic: bool) -> str:
    indices = load.args[1:]
    if "q" not in symbols_of(indices):
        return BY_KEY
    # Where b and h are indices as well, a row may be shifted by anything that they decide: no two scores meet.
    steps = [_step(index, {"q", "k"}) for index in indices]
    if None not in steps and set(steps) >= {"b", "h", "q", "k"}:
        return STORED
    return SPREAD if deterministic else ADDED


def symbols_of(indices: Sequence[Any]) -> set[str]:
    """Which of ``b h q k`` the indices depend on."""
    found = {node.args[0] for index in indices for node in nodes(index) if node.op == "symbol"}
    return found & {"b", "h", "q", "k"}


def _step(index: Any, own: set[str] | None = None) -> str | None:
    """The one of ``b h q k`` that the index is, plus or minus what is the same everywhere; "" if it is only that.

    Beside one of `own`, what depends on others counts as the same.
    """
    found = symbols_of([index])
    if not found:
        return ""
    moving = found & (own or found) or found
    if not isinstance(index, Expr) or len(moving) > 1:
        return None
    if index.op == "symbol":
        return str(index.args[0])
    x, y = (*index.args, None)[:2]
    moves_x, moves_y = (bool(symbols_of([term]) & moving) for term in (x, y))
    if index.op == "add" or (index.op == "sub" and not moves_y):
        return _step(x, own) if not moves_y else _step(y, own) if not moves_x else None
    return None


def add_up(gradient: Tensor, path: Path, parts: Tensor, operands: Operands, first_position: int, seqlen_k: int) -> None:
    """Adds what a workspace holds to the gradient's elements.

    Args:
        gradient: float32, of the tensor's shape; added to.
        path: the load, BY_KEY or SPREAD.
        parts: the workspace without padding: its dimensions are those that AXES names.
        operands: the variant's, for the load's indices.
        first_position: of the queries.
        seqlen_k: the number of keys.
    """
    axes, used = AXES[path.way], symbols_of(path.load.args[1:])
    summed = [dim for dim, axis in enumerate(axes) if axis not in used]
    parts = parts.sum(summed, keepdim=True) if summed else parts
    values = values_of(operands) | {"seqlen_k": seqlen_k}
    starts = {"b": 0, "h": 0, "q": first_position, "k": 0}
    steps = [_step(index) for index in path.load.args[1:]]
    offsets = [evaluate(index, values | starts) for index in path.load.args[1:]]
    named = [step for step in steps if step]
    if None in steps or len(set(named)) < len(named) or not all(isinstance(offset, int) for offset in offsets):
        for dim, axis in enumerate(axes):
            along = torch.arange(parts.shape[dim], device=parts.device) + starts[axis]
            values[axis] = along.view(-1, *[1] * (len(axes) - dim - 1))
        add_anywhere(gradient, path, parts, values)
    else:
        _add_window(gradient, parts, axes, steps, offsets)


def _add_window(
    gradient: Tensor, parts: Tensor, axes: Sequence[str], steps: Sequence[Any], offsets: Sequence[int]
) -> None:
    """Where each dimension of the tensor runs along an axis, from an offset, or is one element of it."""
    target, source = [], [slice(None)] * len(axes)
    for size, step, offset in zip(gradient.shape, steps, offsets, strict=True):
        length = parts.shape[axes.index(step)] if step else 1
        lo, hi = max(offset, 0), min(offset + length, size)  # beyond the tensor kernels read 0
        if lo >= hi:
            return
        target.append(slice(lo, hi))
        if step:
            source[axes.index(step)] = slice(lo - offset, hi - offset)
    # Dimensions in the tensor's order; those that are one element of it stay, as ones.
    order = [axes.index(step) for step in steps if step]
    window = parts[tuple(source)]
    window = window.permute(*order, *(dim for dim in range(len(axes)) if dim not in order))
    gradient[tuple(target)] += window.reshape(gradient[tuple(target)].shape)


def values_of(operands: Operands) -> dict[str, Any]:
    """The variant's operands by the names that expressions have for them."""
    kinds = (("t", operands.tensors), ("i", operands.ints), ("f", operands.floats))
    return {f"{kind}{index}": value for kind, values in kinds for index, value in enumerate(values)}


def add_anywhere(gradient: Tensor, path: Path, parts: Tensor, values: dict[str, Any]) -> None:
    """Where indices are computed in other ways, so that parts may meet in one element.

    Args:
        gradient: of the tensor's shape; added to.
        path: the load.
        parts: what is added.
        values: of the symbols in the load's indices; integers that broadcast to the parts.
    """
    indices, within = [], torch.ones((), dtype=torch.bool, device=parts.device)
    for index, size in zip(path.load.args[1:], gradient.shape, strict=True):
        place = evaluate(index, values)
        if not isinstance(place, Tensor):  # filled in: a copy of it would wait for the device
            place = torch.full((), place, device=parts.device)
        within = within & (place >= 0) & (place < size)
        indices.append(place.clamp(0, size - 1).expand(parts.shape))
    gradient.index_put_(tuple(indices), torch.where(within, parts, 0.0), accumulate=True)
