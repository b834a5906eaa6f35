"""A user's function, run on symbols: what it computes becomes an expression.

:mod:`tileattn.variant.tracing` calls this directly, and :mod:`tileattn.variant.compiled_tracing` where Dynamo could
not trace the function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from .expression import captured, symbol


def run_eagerly(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Any:
    """What `fn` computes of the symbols called `arguments`: an expression or a number."""
    symbols = [symbol(name) for name in arguments]
    try:
        result = with_captures(fn, _stand_in)(*symbols)
    except (TypeError, AttributeError):
        _check_takes(fn, arguments)
        result = fn(*symbols)  # on the tensors themselves, with which it may compute: `(2 * slopes)[h]`
    return _stand_in(result)


def _check_takes(fn: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Raises unless the function can be called with these arguments; asked only once it has failed."""
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
    """The function, with each tensor that its closure, globals or defaults hold replaced.

    A tensor that it reaches in another way meets a symbol as it is, which does as well, but for its sizes: those of a
    stand-in are run-time values, those of a tensor are constants of the text.
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
