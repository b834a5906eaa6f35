"""FlexAttention's mask and score functions: how they are joined, and how tileattn traces them.

A ``mask_mod(b, h, q_idx, kv_idx)`` and a ``score_mod(score, b, h, q_idx, kv_idx)`` count queries and keys from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from ...variant.expression import Expr
from ...variant.masks import FunctionMask, Mask
from ...variant.row_numbers import RowMask, RowScore

Mod = Callable[..., Any]


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """A mask_mod that hides nothing."""
    return batch == batch


def and_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that allows what all of the given ones allow; everything if none is given.

    Raises:
        RuntimeError: one is not callable, as in PyTorch.
    """
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if not mask_mods:
            return b == b
        result = mask_mods[0](b, h, q_idx, kv_idx)
        for mask in mask_mods[1:]:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that allows what at least one of the given ones allows; nothing if none is given.

    Raises:
        RuntimeError: one is not callable, as in PyTorch.
    """
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if not mask_mods:
            return b != b
        result = mask_mods[0](b, h, q_idx, kv_idx)
        for mask in mask_mods[1:]:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _check_callable(mask_mods: tuple[Any, ...]) -> None:
    for mod in mask_mods:
        if not callable(mod):
            raise RuntimeError(f"All inputs should be callable mask_mods, got {type(mod).__name__}")


def is_noop(mask_mod: Any) -> bool:
    """Whether the mask_mod is known to hide nothing, so that it need not be evaluated."""
    return mask_mod is noop_mask or mask_mod is torch_flex.noop_mask


def check_mod(name: str, mod: Any, arguments: tuple[str, ...]) -> None:
    """Raises TypeError unless `mod` is a function of these arguments."""
    expected = f"{name} must be a function {name}({', '.join(arguments)})"
    if not callable(mod) or isinstance(mod, type):
        raise TypeError(f"{expected}, got {type(mod).__name__}")
    try:
        signature = inspect.signature(mod)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{expected}, got {getattr(mod, '__name__', type(mod).__name__)}{signature}: {error}") from None


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


def traceable_mask(mask_mod: Mod) -> Mod:
    """The mask_mod for :class:`tileattn.FunctionMask`, with positions that PyTorch's functions accept."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with _Constants():
                return mask_mod(b, h, q, k)
        return mask_mod(_position(b), _position(h), _position(q), _position(k))

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
        return score_mod(score, _position(b), _position(h), _position(q), _position(k))

    return mod if shift == 0 else RowScore(mod, shift)
