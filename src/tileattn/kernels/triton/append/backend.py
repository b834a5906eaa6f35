"""append_kv as dispatch sees it: refusals, and the preparation. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call.appending import AppendCall, AppendInputs
from ..backend import refusal_device, reservation_device

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refusal(call: AppendCall) -> str | None:
    """The reason why the kernel does not run a call, or None if it does."""
    reason = refusal_device(call.arch)
    if reason is not None:
        return reason
    if call.dtype not in _DTYPES:
        return f"dtype must be float16, bfloat16 or float32, not {call.dtype}"
    if call.table_dtype not in (None, *_DTYPES):
        return f"cos and sin must be float16, bfloat16 or float32, not {call.table_dtype}"
    return None


def reservation(call: AppendCall) -> str | None:
    """Why the kernel runs a call only where it is named, or None."""
    return reservation_device(call.arch)


def prepare(call: AppendCall) -> Callable[[AppendInputs], Tensor | None]:
    """See :class:`tileattn.runtime.append_dispatch.AppendPhase`."""
    from .launch import Append  # imports Triton

    return Append(call)
