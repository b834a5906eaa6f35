"""The decode kernel of a call, in the schedule that its configuration belongs to."""

from __future__ import annotations

from typing import Any

from ....call.decoding import DecodeCall
from .config import GenericConfig
from .generic import generic_kernel


def decode_kernel(call: DecodeCall, config: GenericConfig) -> Any:
    """The TileLang function ``decode``; its parameters are those of :func:`signature.declare`."""
    return generic_kernel(call, config)
