"""The forward kernel of a call, in the schedule that its configuration belongs to."""

from __future__ import annotations

from typing import Any

from tilelang.language.eager.builder import Builder

from ....call.facts import AttentionCall
from ....variant.program import program
from ..build.compile import DESCRIPTORS_IN_LOOPS, OWN_BARRIERS
from . import generic
from .amd.config import AmdConfig
from .amd.kernel import amd_kernel
from .config import Config, HopperConfig
from .hopper import kernel as hopper
from .signature import declare


def kernel_of(call: AttentionCall, config: Config | AmdConfig) -> Any:
    """The TileLang function ``forward``: of the generic or the Hopper schedule, or of AMD's."""
    return amd_kernel(call, config) if isinstance(config, AmdConfig) else forward_kernel(call, config)


def forward_kernel(call: AttentionCall, config: Config) -> Any:
    """The TileLang function ``forward``; its parameters are those of :func:`signature.declare`."""
    traced = program(call.variant)
    persistent = isinstance(config, HopperConfig)
    listed = isinstance(config, HopperConfig) and config.listed
    bits = None
    if isinstance(config, HopperConfig) and config.bits:
        bits = config.cluster * config.block_M, config.block_N
    builder = Builder()
    with builder.prim_func("forward"):
        arguments = declare(builder, call, traced, persistent, listed, bits)
        if isinstance(config, HopperConfig):
            hopper.body(call, config, traced)(arguments)
        else:
            generic.body(call, config, traced)(arguments)
    # The Hopper schedule places its barriers itself.
    function = builder.get().with_attr(OWN_BARRIERS, persistent)
    # The pattern takes registers that descriptors would be kept in: of wide heads, which have many.
    crowded = call.dropout and max(call.head_dim, call.head_dim_v) > 128
    return function.with_attr(DESCRIPTORS_IN_LOOPS, persistent and crowded)
