"""Which configuration, and so which schedule, the main kernel of a call gets."""

from __future__ import annotations

import functools

from ....call import BackwardCall
from .config import BackwardConfig, is_valid, kept_derivatives, preferences, read_together
from .hopper_config import HopperBackwardConfig, hopper_preferences
from .operands import paths

MainConfig = BackwardConfig | HopperBackwardConfig


@functools.lru_cache(maxsize=1024)
def default(call: BackwardCall) -> MainConfig:
    """The first configuration that fits: of the Hopper schedule, else of the generic one."""
    forward = read_together(call)
    for config in hopper_preferences(forward, paths(call)):
        if config.is_valid(forward):
            return config
    for generic in preferences(forward, kept_derivatives(call)):
        if is_valid(forward, generic):
            return generic
    raise NotImplementedError(f"no tile of the backward kernel fits {forward}")
