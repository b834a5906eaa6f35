"""The timed call of a direction: the forward pass, the backward pass, or both.

All implementations run their backward pass through PyTorch's autograd. Its time therefore includes everything that a
user pays for, also the kernels before and after the main one. `torch.autograd.grad` returns the gradients without
accumulating them. For the backward pass alone, the forward pass runs once beforehand and its graph is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileattn.bench.baselines.base import Prepared
from tileattn.bench.problem import Problem


def start(direction: str, prepared: Prepared, given: Problem) -> Callable[[], Any]:
    """Runs what precedes the timed call, and returns that call.

    direction: A key of `cases.DIRECTIONS`. The call returns o for "fwd", else the gradients in the order of
    `Problem.inputs`; these directions need grad mode, here and around the call.
    """
    if direction == "fwd":
        return prepared.call
    if direction == "fwdbwd":
        return _step(prepared, given)
    inputs, o = tuple(given.inputs().values()), prepared.call()
    return lambda: torch.autograd.grad(o, inputs, given.do, retain_graph=True)


def whole(direction: str, prepared: Prepared, given: Problem) -> Callable[[], Any]:
    """The call whose memory is measured. A backward pass includes its forward pass, whose saved tensors count."""
    return prepared.call if direction == "fwd" else _step(prepared, given)


def _step(prepared: Prepared, given: Problem) -> Callable[[], tuple[Tensor, ...]]:
    """A call of forward and backward."""
    inputs = tuple(given.inputs().values())
    return lambda: torch.autograd.grad(prepared.call(), inputs, given.do)
