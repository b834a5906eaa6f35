"""One projection or three: turns the entries of a state dict from the one form to the other, in place."""

from __future__ import annotations

from typing import Any

import torch

THREE = ("q_proj", "k_proj", "v_proj")


def fuse(state_dict: dict[str, Any], prefix: str) -> None:
    """Joins `q_proj`, `k_proj` and `v_proj` below `prefix` to `qkv_proj`, where all three are there and it is not."""
    for kind in ("weight", "bias"):
        parts, whole = [f"{prefix}{name}.{kind}" for name in THREE], f"{prefix}qkv_proj.{kind}"
        if whole not in state_dict and all(part in state_dict for part in parts):
            state_dict[whole] = torch.cat([state_dict.pop(part) for part in parts])


def split(state_dict: dict[str, Any], prefix: str) -> None:
    """Splits `qkv_proj` below `prefix` into `q_proj`, `k_proj` and `v_proj`, where it is there and none of these is."""
    for kind in ("weight", "bias"):
        parts, whole = [f"{prefix}{name}.{kind}" for name in THREE], f"{prefix}qkv_proj.{kind}"
        if whole in state_dict and not any(part in state_dict for part in parts):
            state_dict.update(zip(parts, state_dict.pop(whole).chunk(3)))
