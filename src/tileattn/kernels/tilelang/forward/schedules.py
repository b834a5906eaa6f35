"""The forward kernel of a call, in the schedule that its configuration belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....call.facts import AttentionCall
from .amd.config import AmdConfig
from .amd.kernel import amd_kernel
from .kernel import forward_kernel

if TYPE_CHECKING:
    from .defaults import Config


def kernel_of(call: AttentionCall, config: Config) -> Any:
    """The TileLang function ``forward``: of the generic or the Hopper schedule (forward.py), or of AMD's."""
    return amd_kernel(call, config) if isinstance(config, AmdConfig) else forward_kernel(call, config)
