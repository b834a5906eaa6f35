"""Tracing of a user's function in eager mode: the function runs on symbols and returns an expression.

:mod:`tileattn.variant.tracing.trace` uses this module directly. :mod:`tileattn.variant.tracing.compiled` uses it if
Dynamo could not trace the function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ..expression import captured, symbol


def run_eagerly(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Any:
    """The expression or number that `fn` returns for the symbols called `arguments`."""
    symbols = [symbol(name) for name in arguments]
    try:
        result = with_captures(fn, _stand_in)(*symbols)
    except (TypeError, AttributeError):
        _check_takes(fn, arguments)
        result = fn(*symbols)  # with the tensors themselves, so that it may compute with them: `(2 * slopes)[h]`
    return _stand_in(result)


def _check_takes(fn: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Raises TypeError unless the function can be called with these arguments. Called after the function has failed."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        what, name = "score_mod" if arguments[0] == "score" else "mask", getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{what} must be a function {what}({', '.join(arguments)}), got {name}{signature}: {error}"
        ) from None


def _stand_in(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return captured(value) if value.ndim else captured(value).whole()


def with_captures(fn: Callable[..., Any], replace: Callable[[Any], Any]) -> Callable[..., Any]:
    """A copy of the function in which each tensor in its closure, globals or defaults is replaced.

    Tensors that the function reaches in another way are not replaced. They can be traced as well, but their sizes
    become constants of the text; the sizes of a replaced tensor are run-time values.
    """
    if isinstance(fn, functools.partial):
        keywords = {name: replace(value) for name, value in fn.keywords.items()}
        return functools.partial(with_captures(fn.func, replace), *map(replace, fn.args), **keywords)
    if not isinstance(fn, types.FunctionType):
        return fn
    cells = tuple(types.CellType(replace(cell.cell_contents)) for cell in fn.__closure__ or ())
    names = {name for name in fn.__code__.co_names if isinstance(fn.__globals__.get(name), torch.Tensor)}
    scope = (
        {**fn.__globals__, **{name: replace(fn.__globals__[name]) for name in sorted(names)}}
        if names
        else fn.__globals__
    )
    defaults = tuple(map(replace, fn.__defaults__)) if fn.__defaults__ else None
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, defaults, cells)
    if fn.__kwdefaults__:
        copy.__kwdefaults__ = {name: replace(value) for name, value in fn.__kwdefaults__.items()}
    return copy
