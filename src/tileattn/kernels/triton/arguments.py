"""How tensors reach the kernels: as pointers with strides, or as descriptors of what the hardware copies (TMA)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...call.inputs import Operands
from .plan import Plan
from .shared_memory import padded


class Described(NamedTuple):
    """What a descriptor says of a tensor and its tiles; the arguments of Triton's TensorDescriptor."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    def of(self, x: Tensor) -> TensorDescriptor:
        """The descriptor of this tensor."""
        return TensorDescriptor(x, *self)


def described(x: Tensor, rows: int, plan: Plan) -> Described:
    """A tensor (bshd) whose tiles are `rows` of one head."""
    batch, seqlen, heads, head_dim = x.shape
    if plan.tma == 3:
        return Described([batch, seqlen, heads * head_dim], [*x.stride()[:2], 1], [1, rows, head_dim])
    return Described(list(x.shape), list(x.stride()), [1, rows, 1, padded(head_dim)])


def dimensions(*tensors: Tensor) -> int:
    """Of the descriptors of tensors (bshd) that are aligned; 0 where they cannot have any.

    Three where the heads of a position lie side by side, else four. A descriptor cannot step by 0, nor be empty.
    """
    if any(x.numel() == 0 or 0 in x.stride() for x in tensors):
        return 0
    return 3 if all(x.stride(2) == x.shape[3] == padded(x.shape[3]) for x in tensors) else 4


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of each tensor (bshd) those of its first three dimensions."""
    return tuple(x.stride()[:3] for x in tensors)


def of_operands(operands: Operands) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A variant's operands as tile/expressions.py takes them: (pointer, sizes, strides) of each tensor, and numbers.

    Kernels read the ends of ranges from tensors before they know that there is no key: an empty one becomes one of 0.
    """
    found: list[Any] = []
    for tensor in operands.tensors:
        if tensor.numel() == 0:
            tensor = tensor.new_zeros([max(size, 1) for size in tensor.shape])
        found += [tensor.detach(), *tensor.shape, *tensor.stride()]
    return tuple(found), (*operands.ints, *operands.floats)
