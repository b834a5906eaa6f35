"""The Triton backend's decode phase as dispatch sees it: its refusals, and the preparation of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....call.decoding import DecodeCall, DecodeSizes, Splits
from ....variant.program import program
from ..backend import MAX_HEAD_DIM, refusal_device, reservation_device

if TYPE_CHECKING:
    from .launch import Decode


def refusal(call: DecodeCall) -> str | None:
    """The reason why the kernels do not run a call, or None if they do."""
    return refusal_device(call.arch) or _refusal_call(call)


def reservation(call: DecodeCall) -> str | None:
    """Why the kernels run a call only where they are named, or None."""
    return reservation_device(call.arch)


def _refusal_call(call: DecodeCall) -> str | None:
    if call.packed_keys:
        return "the Triton kernels do not take packed sequences"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype must be float16, bfloat16 or float32, not {call.dtype}"
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} must lie in 1 .. {MAX_HEAD_DIM}, not {size}"
    if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):
        return "tensors of masks and score modifications must not be float64"
    return None


def prepare(call: DecodeCall, sizes: DecodeSizes, scale: float, splits: Splits) -> Decode:
    """See :class:`tileattn.runtime.dispatch.DecodePhase`."""
    from .launch import Decode  # imports Triton

    return Decode(call, sizes, scale, splits)
