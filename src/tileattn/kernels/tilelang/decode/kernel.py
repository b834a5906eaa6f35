"""The decode kernel of a call, in the schedule that its configuration belongs to."""

from __future__ import annotations

from typing import Any

from ....call.decoding import DecodeCall
from .config import Config
from .generic import generic_kernel
from .hopper.config import HopperDecodeConfig
from .hopper.kernel import hopper_kernel


def decode_kernel(call: DecodeCall, config: Config) -> Any:
    """The TileLang function ``decode``; its parameters are those of :func:`signature.declare`."""
    if isinstance(config, HopperDecodeConfig):
        return hopper_kernel(call, config)
    return generic_kernel(call, config)
