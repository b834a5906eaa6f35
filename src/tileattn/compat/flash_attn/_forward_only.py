"""Results without a backward pass: those of calls that read a cache. A backward pass through one raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor


class _ForwardOnly(torch.autograd.Function):
    """The identity on o, with an error as its backward pass."""

    @staticmethod
    def forward(ctx: Any, name: str, o: Tensor, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError(
            f"{ctx.name}: a call that reads a cache has no gradients, as in flash-attn; use flash_attn_func, or "
            f"flash_attn_varlen_func without block_table"
        )


def forward_only(name: str, o: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
    """o, which the function `name` computed from the inputs. If one requires grad, a backward pass through o raises.

    flash-attn computes such calls too, and leaves the gradient out without a word.
    """
    differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not differentiable or not torch.is_grad_enabled():
        return o
    result: Tensor = _ForwardOnly.apply(name, o, *differentiable)
    return result
