"""How tileattn traces FlexAttention's mask and score functions, which PyTorch calls with tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...variant.expression import Expr, captured
from ...variant.masks import FunctionMask, Mask
from ...variant.row_numbers import RowMask, RowScore
from ...variant.tracing.eager import with_captures

Mod = Callable[..., Any]

DEEPEST = 8  # functions within functions whose tensors are replaced; a function that captures itself has no end


class Position(Expr):
    """A traced position that also has what PyTorch's own mask functions ask of a tensor: ``b.new_ones((), ...)``.

    ``and_masks``, ``or_masks`` and ``noop_mask`` of PyTorch begin with such a constant. Libraries call them.
    """

    __slots__ = ()

    @property
    def device(self) -> torch.device:
        """Any device: the constants below have none."""
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """That of one number: ``h.new_zeros(h.shape)``."""
        return torch.Size(())

    def new_ones(self, size: Any = (), **options: Any) -> Any:
        """The number 1, or True."""
        return _constant(1, size, options.get("dtype"))

    def new_zeros(self, size: Any = (), **options: Any) -> Any:
        """The number 0, or False."""
        return _constant(0, size, options.get("dtype"))


def _constant(value: int, size: Any, dtype: torch.dtype | None) -> Any:
    if tuple(size) != ():
        raise TypeError(f"a traced position makes numbers only, with size (), got size {tuple(size)}")
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype is not None and dtype.is_floating_point else value


class _Constants(TorchFunctionMode):
    """The same constants under torch.compile, where positions are tensors on "meta"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = f"{func.__name__}"  # a string; Dynamo takes func.__name__ itself for something unknown
        if name == "new_ones" or name == "new_zeros":
            size = args[1] if len(args) > 1 else kwargs["size"]
            return _constant(int(name == "new_ones"), size, kwargs.get("dtype"))
        return func(*args, **kwargs)


def _position(x: Any) -> Any:
    return Position(x.op, x.args, x.dtype) if isinstance(x, Expr) else x


def _traced(mod: Mod, *arguments: Any) -> Any:
    """The mod's value for traced arguments.

    Tensors that the mod and the functions in it capture become symbols, so that their sizes are run-time values:
    ``ids[q_idx.clamp(max=ids.shape[0] - 1)]`` needs no other kernel for another length. A function that computes with
    a whole tensor needs the tensor itself.
    """
    try:
        return _with_symbols(mod)(*arguments)
    except (TypeError, AttributeError, ValueError):
        return mod(*arguments)


def _with_symbols(value: Any, depth: int = DEEPEST) -> Any:
    if isinstance(value, torch.Tensor):
        return captured(value) if value.ndim else captured(value).whole()
    if depth and isinstance(value, (types.FunctionType, functools.partial)):
        return with_captures(value, functools.partial(_with_symbols, depth=depth - 1))
    if type(value) is tuple:
        return tuple(_with_symbols(item, depth) for item in value)
    return value


def traceable_mask(mask_mod: Mod) -> Mod:
    """The mask_mod for :class:`tileattn.FunctionMask`, with positions that PyTorch's functions accept."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with _Constants():
                return mask_mod(b, h, q, k)
        return _traced(mask_mod, _position(b), _position(h), _position(q), _position(k))

    return mask


def mask_of_function(mask_mod: Mod, shift: int) -> Mask:
    """The mask of a mask_mod, in a call with ``shift = KV_LEN - Q_LEN``."""
    return by_row(FunctionMask(traceable_mask(mask_mod)), shift)


def by_row(mask: FunctionMask, shift: int) -> Mask:
    """The mask that takes rows. Calls with Q_LEN = KV_LEN need no shift, and share their kernels with other calls."""
    return mask if shift == 0 else RowMask(mask, shift)


def score_of_function(score_mod: Mod, shift: int) -> Mod:
    """The score modification of a score_mod, in a call with ``shift = KV_LEN - Q_LEN``."""

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return score_mod(score, b, h, q, k)
        return _traced(score_mod, score, _position(b), _position(h), _position(q), _position(k))

    return mod if shift == 0 else RowScore(mod, shift)
