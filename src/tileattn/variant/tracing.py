"""A user's mask or score function as an expression: the function runs once, on symbols.

What it computes becomes one line of text. A captured tensor that meets a symbol becomes an operand (``t0``, ``t1``, ...
in the order of the text). A captured number becomes a constant of the text.

    >>> slopes = torch.ones(4)
    >>> trace(lambda score, b, h, q, k: score + 2 * slopes[h], ("score", "b", "h", "q", "k")).text
    '(add score (mul 2 (load t0 h)))'

Under torch.compile, Dynamo traces the function together with the code around it, and its guards hold for all that the
function captures (:mod:`tileattn.variant.compiled_tracing`). A number that Dynamo does not take for a constant
becomes an operand (``i0``, ``f0``, ...).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .expression import Expr, TensorSymbol, captured, dtype_of, symbol, text_of


@dataclass
class Traced:
    """A function's text, and the values of the operands that the text names ``t0 ...``, ``i0 ...`` and ``f0 ...``."""

    text: str = ""
    tensors: list[torch.Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)

    def write(self, value: Any) -> str:
        """The text of an expression, in which operands are numbered as they come."""
        if not isinstance(value, Expr):
            return text_of(value)
        if value.op == "symbol":
            return value.args[0]
        if value.op == "number":
            return self._number(value.args[0], value.dtype)
        words = [self._tensor(arg.tensor) if isinstance(arg, TensorSymbol) else self.write(arg) for arg in value.args]
        return f"({value.op} {' '.join(words)})"

    def _tensor(self, tensor: Any) -> str:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return f"t{index}"
        self.tensors.append(tensor)
        return f"t{len(self.tensors) - 1}"

    def _number(self, number: Any, dtype: str) -> str:
        if dtype == "int":
            self.ints.append(number)
            return f"i{len(self.ints) - 1}"
        self.floats.append(number)
        return f"f{len(self.floats) - 1}"


def trace(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Traced:
    """Runs `fn` on the symbols called `arguments`: ``b h q k`` for a mask, ``score b h q k`` for a modification.

    Raises:
        TypeError: the function does something that no kernel can, or returns something else than a mask or a
            modification must; the message says what to write.
    """
    if torch.compiler.is_dynamo_compiling():
        from .compiled_tracing import run

        result = run(fn, arguments)
    else:
        result = run_eagerly(fn, arguments)
    _check(fn, arguments, result)
    traced = Traced()
    traced.text = traced.write(result)
    return traced


def run_eagerly(fn: Callable[..., Any], arguments: tuple[str, ...]) -> Any:
    """What `fn` computes of the symbols called `arguments`: an expression or a number."""
    symbols = [symbol(name) for name in arguments]
    try:
        result = with_captures(fn, _stand_in)(*symbols)
    except (TypeError, AttributeError):
        _check_takes(fn, arguments)
        result = fn(*symbols)  # on the tensors themselves, with which it may compute: `(2 * slopes)[h]`
    return _stand_in(result)


def _check(fn: Callable[..., Any], arguments: tuple[str, ...], result: Any) -> None:
    if not isinstance(result, (Expr, bool, int, float)):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name} must return a value computed from ({', '.join(arguments)}), got {type(result).__name__}"
        )
    is_mask, is_condition = arguments[0] != "score", dtype_of(result) == "bool"
    if is_mask != is_condition:
        raise TypeError(
            f"{'a mask must return a condition, such as (q >= k)' if is_mask else 'a score_mod must return a number'}, "
            f"got {'a condition' if is_condition else 'the number'} {text_of(result)}"
        )


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
