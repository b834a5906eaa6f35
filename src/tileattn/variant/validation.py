"""Checks of a mask and score modifications against a call: the shapes and the device of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .masks import Mask
from .scores import ScoreMod


def check_variant(
    mask: Mask | None, mods: Sequence[Callable[..., Any]], batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Raises TypeError or ValueError if a tensor of the mask or a modification does not fit a call of these sizes."""
    if mask is not None:
        mask.check(batch, heads, seqlen_q, seqlen_k)
    for mod in mods:
        if isinstance(mod, ScoreMod):
            mod.check(batch, heads, seqlen_q, seqlen_k)


def check_operand_devices(tensors: Sequence[torch.Tensor], q: torch.Tensor) -> None:
    """Raises ValueError if a tensor of a mask or modification is on another device than q."""
    for tensor in tensors:
        if tensor.device != q.device:
            raise ValueError(
                f"tensors of a mask or score modification must be on q's device {q.device}, got one with shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
