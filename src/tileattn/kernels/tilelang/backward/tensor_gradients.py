"""The gradients of a variant's tensors: what the main kernel writes them to, and what is added up afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.facts import BackwardCall
from ....call.inputs import Operands
from .operand_gradients import AXES, STORED, Path
from .workspaces import BatchWorkspaces, PackedWorkspaces


def written_to(
    operand_paths: tuple[Path, ...],
    workspaces: BatchWorkspaces | PackedWorkspaces,
    operands: Operands,
    leaves: int | None,
) -> list[Tensor]:
    """What the main kernel writes the gradients of each path to.

    leaves: the path whose gradient the kernel stores by TMA; None for none.
    """
    return [_workspace(path, workspaces, operands, number == leaves) for number, path in enumerate(operand_paths)]


def _workspace(path: Path, workspaces: BatchWorkspaces | PackedWorkspaces, operands: Operands, leaves: bool) -> Tensor:
    """The zeroed workspace that the main kernel writes a path's gradients to.

    Args:
        leaves: whether the kernel stores by TMA, for which rows must begin at multiples of 16 bytes.
    """
    tensor = operands.tensors[path.tensor]
    shape = workspaces.shapes.get(path.way, tensor.shape)
    dtype = tensor.dtype if path.way == STORED else torch.float32
    if not leaves:
        return tensor.new_zeros(shape, dtype=dtype)
    *outer, columns = shape
    step = 16 // dtype.itemsize
    return tensor.new_zeros((*outer, -(-columns // step) * step), dtype=dtype)[..., :columns]


def tensor_gradients(
    call: BackwardCall,
    operand_paths: tuple[Path, ...],
    parts: list[Tensor],
    operands: Operands,
    workspaces: BatchWorkspaces | PackedWorkspaces,
) -> tuple[Tensor | None, ...]:
    """The gradients of the variant's tensors; None where none is wanted."""
    return tuple(
        _tensor_gradient(index, operand_paths, parts, operands, workspaces) if need else None
        for index, need in enumerate(call.needs[4:])
    )


def _tensor_gradient(
    index: int,
    operand_paths: tuple[Path, ...],
    parts: list[Tensor],
    operands: Operands,
    workspaces: BatchWorkspaces | PackedWorkspaces,
) -> Tensor:
    """The gradient of one of the variant's tensors, from what the main kernel wrote for each path."""
    tensor = operands.tensors[index]
    its = [(path, part) for path, part in zip(operand_paths, parts) if path.tensor == index]
    whole = [part for path, part in its if path.way not in AXES]
    if len(its) == len(whole) == 1:
        return whole[0].to(tensor.dtype)
    total = tensor.new_zeros(tensor.shape, dtype=torch.float32)
    for part in whole:
        total += part
    for path, part in its:
        if path.way in AXES:
            workspaces.add_up(total, path, part, operands)
    return total.to(tensor.dtype)
