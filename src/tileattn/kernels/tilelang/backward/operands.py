"""Gradients of the tensors that score modifications read: how the kernel hands them over, and what is left to do.

Each load of a tensor in the expression, such as ``slopes[h]``, is a path by which the gradient of the modified scores
reaches an element. There are two ways to take it:

- **by key**: none of the load's indices depends on ``q``. All queries of a head add to the same element, and what a
  thread block has of them, it can add up: it writes one sum for each key of each head into a workspace (batch, heads,
  padded_k), which PyTorch's operations then bring to the elements (:func:`gather_by_key`). No two blocks write to the
  same place, so that the order of summation is fixed.
- **by score**: any other load, such as ``bias[b, h, q, k]``. Each score adds to its element in memory, in float32, by
  an atomic operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....call import BackwardCall
from ....derivative import float_loads
from ....expr import Expr, evaluate, nodes
from ....variant import Operands, program


@dataclass(frozen=True)
class Path:
    """One load of a tensor whose gradient is wanted.

    Attributes:
        load: the node ``(load name *indices)``.
        tensor: which of the variant's tensors it reads.
        by_key: whether its gradient is handed over as one sum for each key.
    """

    load: Expr
    tensor: int
    by_key: bool

    def indices(self, emit: Any, **position: Any) -> tuple[Any, ...]:
        """Of the element that a score reads, as a kernel's expressions; `emit` is its Emitter."""
        return tuple(emit(index, **position) for index in self.load.args[1:])


def paths(call: BackwardCall) -> tuple[Path, ...]:
    """All paths to the tensors whose gradients are wanted, in the order of the kernel's parameters."""
    traced = program(call.forward.variant)
    numbers = {tensor.name: index for index, tensor in enumerate(traced.tensors)}
    found = []
    for load in float_loads(traced.score):
        tensor = numbers[load.args[0]]
        if call.needs[4 + tensor]:
            found.append(Path(load, tensor, not _depends_on(load, "q")))
    return tuple(found)


def _depends_on(load: Expr, symbol: str) -> bool:
    return any(node.op == "symbol" and node.args[0] == symbol for index in load.args[1:] for node in nodes(index))


def add_by_key(gradient: torch.Tensor, path: Path, sums: torch.Tensor, operands: Operands) -> None:
    """Adds what a kernel has summed for each key to the gradient's elements.

    Args:
        gradient: float32, of the tensor's shape; added to.
        path: the load.
        sums: (batch, heads, seqlen_k), float32.
        operands: the variant's, for the load's indices.
    """
    batch, heads, seqlen_k = sums.shape
    if not _depends_on(path.load, "k"):
        sums = sums.sum(-1, keepdim=True)
    b, h, k = (torch.arange(size, device=sums.device) for size in (batch, heads, sums.shape[2]))
    values: dict[str, object] = {"b": b[:, None, None], "h": h[:, None], "k": k, "seqlen_k": seqlen_k}
    values |= {f"t{i}": tensor for i, tensor in enumerate(operands.tensors)}
    values |= {f"i{i}": number for i, number in enumerate(operands.ints)}
    values |= {f"f{i}": number for i, number in enumerate(operands.floats)}
    # A position beyond the tensor reads 0 in the kernels: nothing there has a gradient.
    indices, within = [], torch.ones((), dtype=torch.bool, device=sums.device)
    for index, size in zip(path.load.args[1:], gradient.shape, strict=True):
        place = torch.as_tensor(evaluate(index, values), device=sums.device)
        within = within & (place >= 0) & (place < size)
        indices.append(place.clamp(0, size - 1).expand(sums.shape))
    gradient.index_put_(tuple(indices), torch.where(within, sums, 0.0), accumulate=True)
