"""Autocast around the torch backend's operations."""

from __future__ import annotations

import contextlib

import torch

from ...call.facts import has_autocast


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context without autocast, which has already cast q, k and v and must not cast the scores."""
    if torch._C._is_any_autocast_enabled() and has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
