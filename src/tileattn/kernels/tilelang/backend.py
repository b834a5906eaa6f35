"""The TileLang backend as dispatch sees it: its refusals. forward/ and backward/ have the launches."""

from __future__ import annotations

import torch

from ...call.facts import AttentionCall
from ...call.fp8 import FP8
from ...variant.program import program
from ..bundles.installed import absence
from .architecture import ARCHITECTURES
from .backward.launch import backward_space as backward_space
from .backward.launch import prepare_backward as prepare_backward
from .forward.launch import prepare as prepare
from .forward.launch import space as space

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def refusal(call: AttentionCall) -> str | None:
    """The reason why the kernels do not run a call, or None if they do."""
    if call.arch not in ARCHITECTURES:
        return f"device {call.arch!r} is not one of {', '.join(ARCHITECTURES)}"
    if (reason := absence(call.arch)) is not None:
        return reason
    if call.packed:
        reason = _refusal_packed(call)
        if reason is not None:
            return reason
    if call.dtype not in (torch.float16, torch.bfloat16, FP8):
        return f"dtype must be float16, bfloat16 or float8_e4m3fn, not {call.dtype}"
    if call.dtype == FP8:
        return _refusal_fp8(call) or _refusal_variant(call)
    return _refusal_head_dims(call, 8) or _refusal_variant(call)


def _refusal_packed(call: AttentionCall) -> str | None:
    if call.dtype == FP8:
        return "packed sequences must be float16 or bfloat16, not float8_e4m3fn"
    if call.arch.startswith("gfx"):
        return f"packed sequences run on NVIDIA GPUs only, not {call.arch}"
    return None


def _refusal_fp8(call: AttentionCall) -> str | None:
    if call.needs_grad:
        return "fp8 has no backward pass (an input requires grad)"
    if call.arch != "sm_90a":
        return f"fp8 runs on sm_90a only, not {call.arch}"
    if not call.aligned:
        return "fp8 q, k and v must begin at, and step by, multiples of 16 bytes"
    return _refusal_head_dims(call, 16, " in fp8")


def _refusal_head_dims(call: AttentionCall, step: int, where: str = "") -> str | None:
    for name, size in (("head_dim", call.head_dim), ("head_dim_v", call.head_dim_v)):
        if size % step or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"{name} must be a multiple of {step} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}{where}, not {size}"
    return None


def _refusal_variant(call: AttentionCall) -> str | None:
    if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):
        return "tensors of masks and score modifications must not be float64"
    return None
