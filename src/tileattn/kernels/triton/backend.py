"""The Triton backend as dispatch sees it: its refusals, and the preparation of both passes."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ...call.facts import AttentionCall, BackwardCall, Gradients
from ...variant.program import program
from ..packages import absence, asked_for_any_machine
from .interpreter import INTERPRET, interpreted

MAX_HEAD_DIM = 256


def refusal(call: AttentionCall) -> str | None:
    """The reason why the kernels do not run a call, or None if they do."""
    return refusal_device(call.arch) or _refusal_call(call)


def reservation(call: AttentionCall) -> str | None:
    """Why the kernels run a call only where they are named, or None."""
    return reservation_device(call.arch)


def reservation_device(arch: str) -> str | None:
    """Why the kernels run on a device only where they are named, or None."""
    if arch == "cpu":
        return "Triton's interpreter is there for tests: name it, backend='triton'"
    return None


def refusal_device(arch: str) -> str | None:
    """The reason why the kernels do not run on a device, or None if they do."""
    if arch == "cpu" and (asked_for_any_machine() or not interpreted()):
        return f"it needs a GPU; on a CPU Triton's interpreter runs it, where {INTERPRET}=1 is set before Python starts"
    nvidia = re.fullmatch(r"sm_(\d+)a?", arch)
    if arch != "cpu" and not arch.startswith("gfx") and (nvidia is None or int(nvidia[1]) < 80):
        return f"device {arch!r} is neither an NVIDIA GPU from sm_80 on nor an AMD GPU"
    return absence("triton", "triton")


def _refusal_call(call: AttentionCall) -> str | None:
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype must be float16, bfloat16 or float32, not {call.dtype}"
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} must lie in 1 .. {MAX_HEAD_DIM}, not {size}"
    if call.packed:
        return "the Triton kernels do not take packed sequences"
    if call.dropout:
        return "the Triton kernels have no dropout"
    if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):
        return "tensors of masks and score modifications must not be float64"
    return None


def prepare(
    call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    from .forward.launch import Forward  # imports Triton

    return Forward(call, q_shape, k_shape, scale)


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    from .backward.launch import Backward

    return Backward(call, q_shape, k_shape, scale)
