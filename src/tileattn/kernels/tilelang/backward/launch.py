"""Loading the compiled backward kernels; imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....call import BackwardCall
from ....variant import program
from ...cache import KernelCache, default_folder
from ..launch import _load, _toolchain
from .amd_config import AmdBackwardConfig
from .config import read_together
from .defaults import MainConfig, adds_dq, default, finished, prepared, queries_default
from .hopper_config import HopperBackwardConfig
from .operands import paths

Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """The kernels of one call; `main` adds up dq, or `queries` computes it."""

    prepare: Kernel
    main: Kernel
    finish: Kernel | None
    queries: Kernel | None


@functools.cache
def backward_kernels(call: BackwardCall, config: MainConfig | None = None) -> Kernels:
    """The compiled kernels of a call, from the cache on disk or compiled now (some seconds each).

    Args:
        call: the static facts.
        config: of the main kernel (:mod:`.space`); None takes the default.
    """
    names = kernel_names(call)
    found = {name: _load(ensure_compiled(call, name, config))[name] for name in names}
    return Kernels(found["prepare"], found["main"], found.get("finish"), found.get("queries"))


def kernel_names(call: BackwardCall) -> tuple[str, ...]:
    """Which kernels a call takes."""
    return ("prepare", "main", "finish" if adds_dq(call) else "queries")


def ensure_compiled(call: BackwardCall, name: str, config: MainConfig | None = None) -> Path:
    """The shared library of one of a call's kernels, compiled if the cache does not hold it."""

    def build(path: Path) -> None:
        from ..compile import build_library
        from .space import kernel_of

        build_library(kernel_of(call, name, config or default(call)), call.forward.arch, path)

    return KernelCache(default_folder()).find_or_build(cache_key(call, name, config), build)


def cache_key(call: BackwardCall, name: str, config: MainConfig | None = None) -> str:
    """All that decides what one of a call's compiled kernels is.

    Only the main kernel and that for dq alone depend on the variant; the others serve any.
    """
    return f"backward | {name} | {_facts(call, name, config or default(call))} | {_source_digest()} | {_toolchain()}"


def _facts(call: BackwardCall, name: str, main: MainConfig) -> str:
    forward = read_together(call)
    shape = f"{forward.dtype} {forward.arch} {forward.head_dim}"
    if forward.packed:
        parts = {"prepare": prepared(call), "finish": finished(call, main)}
        shape = f"packed {parts.get(name, '')} {shape}"
    if name == "finish":
        return f"{shape} {main.order(forward) if isinstance(main, HopperBackwardConfig) else 'row by row'}"
    if name == "prepare":
        sums = f"dq={adds_dq(call)}"
        return f"{shape} {forward.head_dim_v} dlse={call.dlse} aligned={call.aligned} {sums}"
    config = queries_default(call) if name == "queries" else main
    facts = f"{shape} {forward.head_dim_v} aligned={forward.aligned} dropout={forward.dropout} | {config}"
    if isinstance(config, AmdBackwardConfig):
        facts += f" {_amd_digest()}"
    if name == "main":
        facts += f" | dq={adds_dq(call)} {[(str(path.load), path.way) for path in paths(call)]}"
    return f"{facts} | {program(forward.variant).backward_text}"


# Of this package and of the forward pass, the modules that generate kernels.
OWN_SOURCES = ("config", "finish", "generic", "hopper", "hopper_config", "hopper_queries", "hopper_wide")
OWN_SOURCES += (
    "kernels",
    "layouts",
    "operands",
    "order",
    "places",
    "prepare",
    "queries",
    "signature",
    "slopes",
    "tensors",
)
OWN_SOURCES += ("tile", "variables", "visible")
AMD_SOURCES = ("amd", "amd_config")  # in the keys of AMD's kernels alone
SHARED_SOURCES = ("compile", "nvcc", "config", "dropout", "expressions", "generic", "mask", "ragged", "records")
SHARED_SOURCES += ("signature", "dependent_launch", "simplify", "softmax")


@functools.cache
def _amd_digest() -> str:
    """Of the code that AMD's kernels add to that below."""
    folder = Path(__file__).parent
    files = [*(folder / f"{name}.py" for name in AMD_SOURCES), folder.parent / "amd_tensors.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@functools.cache
def _source_digest() -> str:
    """Of the code that generates backward kernels, so that editing it recompiles them."""
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in OWN_SOURCES]
    files += [folder.parent / f"{name}.py" for name in SHARED_SOURCES]
    files += [folder.parents[2] / f"{name}.py" for name in ("derivative", "dropout")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
