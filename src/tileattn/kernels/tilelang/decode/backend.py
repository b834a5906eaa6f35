"""The decode phase of the TileLang backend as dispatch sees it: its refusals; launch.py has the launches."""

from __future__ import annotations

import torch

from ....call.decoding import DecodeCall
from ....variant.program import program
from ...bundles.installed import absence
from ..architecture import ARCHITECTURES
from .launch import prepare as prepare

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def refusal(call: DecodeCall) -> str | None:
    """The reason why the kernels do not run a call, or None if they do."""
    if call.arch not in ARCHITECTURES:
        return f"device {call.arch!r} is not one of {', '.join(ARCHITECTURES)}"
    if call.arch.startswith("gfx"):
        return f"decode runs on NVIDIA GPUs only, not {call.arch}"
    if (reason := absence(call.arch)) is not None:
        return reason
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, not {call.dtype}"
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if size % 8 or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"{name} must be a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):
        return "tensors of masks and score modifications must not be float64"
    return None


def reservation(call: DecodeCall) -> str | None:
    """None: what the kernels run, they run by default."""
    return None
