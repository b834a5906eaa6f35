"""The TileLang functions of the backward pass, by kernel name and configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilelang.language.eager.builder import Builder

from ....call.facts import BackwardCall
from ....variant.program import program
from ..build.compile import DESCRIPTORS_IN_LOOPS, OWN_BARRIERS, USED_COLUMNS
from . import finish, generic, prepare, queries
from .amd import queries as amd
from .amd.config import AmdBackwardConfig
from .config import BackwardConfig, read_together
from .defaults import MainConfig, QueriesConfig, adds_dq, default, finished, listed_as, prepared, queries_default
from .hopper import keys as hopper
from .hopper import queries as hopper_queries
from .hopper import wide as hopper_wide
from .hopper.config import HopperBackwardConfig, HopperQueriesConfig, HopperWideConfig, leaving
from .operand_gradients import paths
from .signature import declare_finish, declare_main, declare_prepare, declare_queries


def kernel(call: BackwardCall, name: str) -> Any:
    """The TileLang function of one of a call's kernels, by name, with the default tiles."""
    return kernel_of(call, name, default(call))


def kernel_of(call: BackwardCall, name: str, config: MainConfig) -> Any:
    """The TileLang function of one of a call's kernels, by name, with this configuration of the main kernel."""
    if name == "main":
        return amd.main_kernel(call, config) if isinstance(config, AmdBackwardConfig) else main_kernel(call, config)
    if name == "queries":
        tiles = listed_as(config, queries_default(call))
        return amd.queries_kernel(call, tiles) if isinstance(tiles, AmdBackwardConfig) else queries_kernel(call, tiles)
    return prepare_kernel(call) if name == "prepare" else finish_kernel(call, config)


def prepare_kernel(call: BackwardCall) -> Any:
    """The function ``prepare``, whose parameters are those of :func:`signature.declare_prepare`."""
    forward = dataclasses.replace(call.forward, aligned=call.aligned)
    clears = adds_dq(call)
    builder = Builder()
    with builder.prim_func("prepare"):
        prepare.body(forward, call.dlse, clears, prepared(call))(declare_prepare(builder, forward, call.dlse, clears))
    return builder.get()


def main_kernel(call: BackwardCall, config: MainConfig) -> Any:
    """The function ``main``, whose parameters are those of :func:`signature.declare_main`."""
    forward, traced, operand_paths = read_together(call), program(call.forward.variant), paths(call)
    builder = Builder()
    with builder.prim_func("main"):
        adds_dq = not call.deterministic if isinstance(config, BackwardConfig) else config.adds_dq
        own = not isinstance(config, BackwardConfig)
        leaves = (leaving(config, forward, operand_paths) or (None,))[0]
        listed = own and config.listed
        some_keys = own and not forward.packed
        arguments = declare_main(
            builder,
            forward,
            traced,
            operand_paths,
            adds_dq,
            hopper=own,
            leaving=leaves,
            split=config.split,
            listed=listed,
            some_keys=some_keys,
            bits=(config.block_N, config.block_M) if own and config.bits else None,
        )
        if isinstance(config, HopperWideConfig):
            hopper_wide.body(forward, config, traced)(arguments)
        elif isinstance(config, HopperBackwardConfig):
            hopper.body(forward, config, traced, operand_paths, adds_dq)(arguments)
        else:
            generic.body(forward, config, traced, operand_paths, adds_dq)(arguments)
    # Where dq is added up too, the descriptors have been measured as they are. If groups are split, ptxas would spill
    # them: they are computed from the head, which then is in a register.
    function = builder.get().with_attr(OWN_BARRIERS, own)
    used = config.used_columns(forward) if isinstance(config, HopperBackwardConfig) else {}
    if used:
        function = function.with_attr(USED_COLUMNS, [number for pair in used.items() for number in pair])
    return function.with_attr(DESCRIPTORS_IN_LOOPS, own and (config.split or not adds_dq))


def queries_kernel(call: BackwardCall, config: QueriesConfig) -> Any:
    """The function ``queries``, whose parameters are those of :func:`signature.declare_queries`."""
    forward, traced = read_together(call), program(call.forward.variant)
    builder = Builder()
    with builder.prim_func("queries"):
        if isinstance(config, HopperQueriesConfig):
            hopper_queries.body(forward, config, traced)(
                declare_queries(builder, forward, traced, hopper=True, listed=config.listed)
            )
        else:
            queries.body(forward, config, traced)(declare_queries(builder, forward, traced))
    own = isinstance(config, HopperQueriesConfig)
    return builder.get().with_attr(OWN_BARRIERS, own).with_attr(DESCRIPTORS_IN_LOOPS, own)


def finish_kernel(call: BackwardCall, config: MainConfig) -> Any:
    """The function ``finish``, whose parameters are those of :func:`signature.declare_finish`.

    config: of the main kernel, whose sums of dq it reads.
    """
    order = config.order(call.forward) if isinstance(config, HopperBackwardConfig) else None
    builder = Builder()
    with builder.prim_func("finish"):
        arguments = declare_finish(builder, call.forward, order is not None)
        finish.body(call.forward, order, finished(call, config))(arguments)
    return builder.get()
