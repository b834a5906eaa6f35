"""A cache of launches: each is prepared once and repeated with other tensors.

Triton finds the compiled kernel of a launch by inspecting every argument, which takes longer than the launch. A pass
over tensors of one shape repeats the same launches. Everything but the tensors is kept here, including the compiled
kernel, for tensors with the same properties. Triton's settings (``triton.knobs``) and hooks are as they were then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Described
from .tile_sizes import Config

MOST = 64  # launches of one pass that are kept


class Launch(NamedTuple):
    """What a kernel is launched with besides tensors and the variant's operands.

    Attributes:
        kernel: a function of ``triton.jit``.
        grid: how many programs there are, in three dimensions.
        config: how the kernel is compiled.
        constants: its last arguments.
        described: which of its first arguments come as descriptors.
    """

    kernel: Any
    grid: tuple[int, int, int]
    config: Config
    constants: tuple[Any, ...]
    described: Mapping[int, Described]


class LaunchCache:
    """The launches of one pass over tensors of one shape."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def __call__(
        self, work_out: Callable[..., Launch], *arguments: Any, numbers: tuple[float, ...] | None = None
    ) -> None:
        """Launches ``work_out(*arguments)`` on the current device; ``work_out`` is called the first time only.

        arguments: the kernel's first ones: tensors, sizes, None, and tuples of them.
        numbers: the next argument, unless it is None: numbers of which a kernel is compiled for many values.
        """
        key = (work_out.__name__, *map(_look, arguments), *map(_kind, numbers or ()))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            known = self._known[key] = _Known(work_out(*arguments))
        if all(known.launch.grid):
            known(list(arguments) if numbers is None else [*arguments, numbers])


class _Known:
    """A launch that can be repeated."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.compiled: Any = None

    def __call__(self, arguments: list[Any]) -> None:
        kernel, grid, config, constants, described = self.launch
        for place, facts in described.items():
            arguments[place] = facts.of(arguments[place])
        if self.compiled is not None:
            self.compiled[grid](*arguments, *constants)
            return
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled = kernel[grid](*arguments, *constants, **options)  # None in the interpreter
        # Inside triton.AsyncCompileMode, of Triton 3.7, it is a future.
        self.compiled = compiled.result() if hasattr(compiled, "result") else compiled


def _look(argument: Any) -> Any:
    """The properties of an argument by which Triton tells compiled kernels apart, and on which launches depend.

    On AMD Triton looks at the size of a tensor's storage as well, which bounds no more than shape and strides do.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.stride(), argument.data_ptr() % 16
    if isinstance(argument, tuple):
        return tuple(map(_look, argument))
    return argument


def _kind(number: float) -> Any:
    """The property by which Triton tells apart the numbers in a tuple.

    It compiles integers of a tuple for 1, for multiples of 16 and for others (seen in 3.7.1), also where
    do_not_specialize names the tuple. What it has compiled for 1 is wrong for any other number.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        return type(number)
    if number == 1 or not -(2**31) <= number < 2**31:
        return number
    return int, number % 16 == 0


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
