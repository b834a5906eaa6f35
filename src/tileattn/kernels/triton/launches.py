"""Launches, of which the first says all and the others only where tensors lie.

Triton finds the compiled kernel of a launch by looking at every argument, which takes longer than the launch. A pass
over tensors of one shape launches the same again and again: what it needs besides tensors is kept here, the compiled
kernel included, for tensors that look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .arguments import Tiles
from .config import Config

MOST = 64  # of one pass that are kept


class Launch(NamedTuple):
    """A kernel, and what it is launched with besides tensors and the variant's operands.

    Attributes:
        kernel: the one.
        programs: how many.
        config: how it is compiled.
        constants: its last arguments.
        described: which of its first arguments come as descriptors, and of which tiles.
    """

    kernel: Any
    programs: int
    config: Config
    constants: tuple[Any, ...]
    described: Mapping[int, Tiles]


class Launches:
    """Those of one pass over tensors of one shape."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def __call__(self, first: Callable[..., Launch], *arguments: Any) -> None:
        """Launches on the current device what ``first(*arguments)`` says; it is asked the first time only.

        arguments: the kernel's first ones: tensors, numbers, None, and tuples of them.
        """
        looks = (first.__name__, *map(_look, arguments))
        known = self._known.get(looks)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            known = self._known[looks] = _Known(first(*arguments))
        if known.launch.programs:
            known(list(arguments))


class _Known:
    """A launch that can be repeated with tensors that look the same."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.compiled: Any = None

    def __call__(self, arguments: list[Any]) -> None:
        kernel, programs, config, constants, described = self.launch
        for place, tiles in described.items():
            arguments[place] = tiles.of(arguments[place])
        if self.compiled is not None:
            self.compiled[programs, 1, 1](*arguments, *constants)
            return
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self.compiled = kernel[(programs,)](*arguments, *constants, **options)  # None in the interpreter


def _look(argument: Any) -> Any:
    """At least what Triton tells compiled kernels apart by, and what launches depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.stride(), argument.data_ptr() % 16
    if isinstance(argument, tuple):
        return tuple(map(_look, argument))
    return None if isinstance(argument, float) else argument
