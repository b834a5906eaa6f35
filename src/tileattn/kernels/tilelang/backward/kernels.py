"""The TileLang functions of the backward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilelang.language.eager.builder import Builder

from ....call import BackwardCall
from ....variant import program
from ..compile import OWN_BARRIERS
from . import finish, generic, hopper, prepare, queries
from .config import BackwardConfig, default_queries, read_together
from .defaults import MainConfig, default
from .hopper_config import HopperBackwardConfig
from .operands import paths
from .signature import declare_finish, declare_main, declare_prepare, declare_queries


def kernel(call: BackwardCall, name: str) -> Any:
    """The TileLang function of a call that has this name, with the default tiles."""
    if name == "main":
        return main_kernel(call, default(call))
    if name == "queries":
        return queries_kernel(call, default_queries(call))
    return prepare_kernel(call) if name == "prepare" else finish_kernel(call)


def prepare_kernel(call: BackwardCall) -> Any:
    """The function ``prepare``, whose parameters are those of :func:`signature.declare_prepare`."""
    forward = dataclasses.replace(call.forward, aligned=call.aligned)
    builder = Builder()
    with builder.prim_func("prepare"):
        arguments = declare_prepare(builder, forward, call.dlse, not call.deterministic)
        prepare.body(forward, call.dlse, not call.deterministic)(arguments)
    return builder.get()


def main_kernel(call: BackwardCall, config: MainConfig) -> Any:
    """The function ``main``, whose parameters are those of :func:`signature.declare_main`."""
    forward, traced, found = read_together(call), program(call.forward.variant), paths(call)
    adds_dq, own_barriers = not call.deterministic, isinstance(config, HopperBackwardConfig)
    builder = Builder()
    with builder.prim_func("main"):
        arguments = declare_main(builder, forward, traced, found, adds_dq, own_barriers)
        if isinstance(config, HopperBackwardConfig):
            hopper.body(forward, config, traced, found, adds_dq)(arguments)
        else:
            generic.body(forward, config, traced, found, adds_dq)(arguments)
    return builder.get().with_attr(OWN_BARRIERS, own_barriers)


def queries_kernel(call: BackwardCall, config: BackwardConfig) -> Any:
    """The function ``queries``, whose parameters are those of :func:`signature.declare_queries`."""
    forward, traced = read_together(call), program(call.forward.variant)
    builder = Builder()
    with builder.prim_func("queries"):
        queries.body(forward, config, traced)(declare_queries(builder, forward, traced))
    return builder.get()


def finish_kernel(call: BackwardCall) -> Any:
    """The function ``finish``, whose parameters are those of :func:`signature.declare_finish`."""
    config = default(call)
    order = config.order(call.forward) if isinstance(config, HopperBackwardConfig) else None
    builder = Builder()
    with builder.prim_func("finish"):
        finish.body(call.forward, order)(declare_finish(builder, call.forward, order is not None))
    return builder.get()
