"""The backward kernels for AMD's CDNA 3 (gfx942: MI300X): main and queries.

They are the generic schedule's kernels with packed products and wide copies (see tile/amd.py). They have not run on an
MI300X; see docs/mi300x.md.
"""

from __future__ import annotations

from typing import Any

from tilelang.language.eager.builder import Builder

from .....call.facts import BackwardCall
from .....variant.program import program
from ...tile.amd import aligned_rows, copied_by, packed
from .. import generic, queries
from ..config import read_together
from ..operand_gradients import paths
from ..signature import declare_main, declare_queries
from .config import AmdBackwardConfig


def main_kernel(call: BackwardCall, config: AmdBackwardConfig) -> Any:
    """The function ``main``, whose parameters are those of :func:`signature.declare_main`."""
    forward, traced, operand_paths = read_together(call), program(call.forward.variant), paths(call)
    adds_dq = not call.deterministic
    builder = Builder()
    with builder.prim_func("main"):
        arguments = _with_aligned_rows(declare_main(builder, forward, traced, operand_paths, adds_dq), forward.aligned)
        generic.body(forward, config, traced, operand_paths, adds_dq)(arguments)
    return _with_options(builder.get(), config, forward.aligned)


def queries_kernel(call: BackwardCall, config: AmdBackwardConfig) -> Any:
    """The function ``queries``, whose parameters are those of :func:`signature.declare_queries`."""
    forward, traced = read_together(call), program(call.forward.variant)
    builder = Builder()
    with builder.prim_func("queries"):
        arguments = _with_aligned_rows(declare_queries(builder, forward, traced), forward.aligned)
        queries.body(forward, config, traced)(arguments)
    return _with_options(builder.get(), config, forward.aligned)


def _with_aligned_rows(arguments: Any, aligned: bool) -> Any:
    """The kernel's parameters; if they are aligned, with strides that TileLang knows to be multiples of eight."""
    if aligned:
        for name in ("q", "k", "v", "do"):
            setattr(arguments, name, aligned_rows(getattr(arguments, name)))
    return arguments


def _with_options(function: Any, config: AmdBackwardConfig, aligned: bool) -> Any:
    """The function with the configuration's options on its copies and products."""
    return packed(copied_by(function, config.coalesced_width) if aligned else function, config.k_pack)
