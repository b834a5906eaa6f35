"""Variant keys: a mask and score modifications, split into code and operands.

Kernels are compiled for the *code* of a variant and called with its *operands*: the numbers and tensors that its
masks and modifications carry. :func:`encode` splits a variant into a key, one line of text that determines the code,
and :class:`Operands`. :mod:`tileattn.variant.program` turns a key back into expressions and objects.

    >>> from tileattn import Causal, SlidingWindow
    >>> encode(Causal() & SlidingWindow(512, None), ())
    ('And(Causal(),SlidingWindow(i,-))', Operands(tensors=[], ints=[512], floats=[]))

The key of a user's function contains its traced expression, so two functions with equal expressions share a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from ..call.inputs import Operands
from .masks import FunctionMask, Mask
from .scores import ScoreMod
from .tracing.trace import trace
from .tree_mask import TreeMask


def constant_under_compile(fn: Any) -> Any:
    """Marks a function that torch.compile runs while it traces, instead of tracing it.

    The mark is what ``torch.compiler.assume_constant_result`` sets; that function itself would import all of Dynamo.
    """
    fn._dynamo_marked_constant = True
    return fn


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip


_KNOWN_DTYPES = frozenset(DTYPES.values())


def normalize(mask: Any, score_mod: Any, causal: bool) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The mask (None for none) and the tuple of score modifications for a user's arguments."""
    if mask is not None and not isinstance(mask, Mask):
        if not callable(mask) or isinstance(mask, (type, ScoreMod)):
            instead = (
                "; a tensor (..., seqlen_q, seqlen_k) goes to tileattn.scaled_dot_product_attention(attn_mask=), a "
                "padding mask (batch, seqlen_k) to tileattn.KeyPadding"
            ) * isinstance(mask, torch.Tensor)
            raise TypeError(
                f"mask must be a tileattn mask or a function mask(b, h, q, k), got {_described(mask)}{instead}"
            )
        mask = FunctionMask(mask)
    if causal:
        mask = CAUSAL if mask is None else CAUSAL & mask
    if score_mod is None:
        return mask, ()
    mods = tuple(score_mod) if isinstance(score_mod, (list, tuple)) else (score_mod,)
    for mod in mods:
        if not callable(mod) or isinstance(mod, type):
            raise TypeError(
                f"score_mod must be a function score_mod(score, b, h, q, k), a tileattn score modification, or a "
                f"sequence of them, got {_described(mod)}"
                + "; a tensor that is added to the scores is tileattn.Bias(tensor)"
                * isinstance(mod, torch.Tensor)
            )
    return mask, mods


def _described(value: Any) -> str:
    """The type of a wrong argument, or the class itself if a class was given instead of an instance."""
    return f"the class {value.__name__} (not an instance)" if isinstance(value, type) else type(value).__name__


def encode(mask: Mask | None, score_mods: Sequence[Callable[..., Any]]) -> tuple[str, Operands]:
    """Splits a variant into its key and its operands.

    torch.compile can trace this function, so its guards cover all numbers and tensors of masks and modifications.
    """
    operands = Operands()
    parts = [] if mask is None else [_encode(mask, operands)]
    for mod in score_mods:
        parts.append("+" + _encode(mod, operands))
    return "".join(parts), operands


def _encode(value: Any, operands: Operands) -> str:
    if value is None:
        return "-"
    if isinstance(value, FunctionMask):
        return f"FunctionMask({_encode_function(value.fn, ('b', 'h', 'q', 'k'), operands)})"
    if isinstance(value, (Mask, ScoreMod)):
        constants = getattr(type(value), "CONSTANTS", ())
        fields = ",".join(
            [
                f"={getattr(value, name)}" if name in constants else _encode(getattr(value, name), operands)
                for name in field_names(type(value))
            ]
        )
        return f"{type(value).__name__}({fields})"
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, operands)
    if isinstance(value, (float, torch.SymFloat)):
        operands.floats.append(value)  # type: ignore[arg-type]
        return "f"
    if isinstance(value, (int, torch.SymInt)):
        operands.ints.append(value)  # type: ignore[arg-type]
        return "i"
    if isinstance(value, Real):  # of numpy
        return _encode(float(value) if not isinstance(value, Integral) else int(value), operands)
    if not callable(value):
        raise TypeError(
            f"the fields of a mask or score modification must be numbers, tensors, masks, score modifications or None, "
            f"got {type(value).__name__}"
        )
    return _encode_function(value, ("score", "b", "h", "q", "k"), operands)


def _encode_tensor(value: torch.Tensor, operands: Operands) -> str:
    if value.dtype not in _KNOWN_DTYPES:
        raise TypeError(
            f"tensors of a mask or score modification must be bool, integers or floats of 16 bits or more, got "
            f"{value.dtype}; convert it, as with .float()"
        )
    operands.tensors.append(value)
    ones = "".join(["1" if size == 1 else "n" for size in value.shape])
    return f"t:{str(value.dtype).removeprefix('torch.')}:{ones}"


TENSOR = re.compile(r"t:(\w+):([1n]*)(:aligned)?")


@constant_under_compile
def field_names(cls: type) -> tuple[str, ...]:
    """The field names of a class of masks or modifications. Each field holds an operand."""
    return _registered_fields(cls)


@functools.cache
def _registered_fields(cls: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} must be a frozen dataclass, so that its operands are known")
    if CLASSES.setdefault(cls.__name__, cls) is not cls:
        raise TypeError(f"two masks or score modifications are called {cls.__name__!r}: names must differ")
    return tuple(f.name for f in dataclasses.fields(cls))


def _encode_function(fn: Callable[..., Any], arguments: tuple[str, ...], operands: Operands) -> str:
    traced = trace(fn, arguments)
    parts = [_encode_tensor(tensor, operands) for tensor in traced.tensors]
    operands.ints += traced.ints
    operands.floats += traced.floats
    return "{" + ";".join([*parts, *("i" for _ in traced.ints), *("f" for _ in traced.floats), traced.text]) + "}"


def _subclasses(cls: type) -> dict[str, type]:
    by_name: dict[str, type] = {}
    sub: type
    for sub in cls.__subclasses__():
        by_name |= {sub.__name__: sub} | _subclasses(sub)
    return by_name


def class_named(name: str) -> type:
    """The class of masks or modifications that a key names. Raises KeyError if its module is not imported."""
    if name not in CLASSES:
        for defined, cls in (_subclasses(Mask) | _subclasses(ScoreMod)).items():
            CLASSES.setdefault(defined, cls)
    return CLASSES[name]


# Keys are also read in processes that have encoded nothing, so all classes of the package must be known here.
CLASSES: dict[str, type] = {TreeMask.__name__: TreeMask} | _subclasses(Mask) | _subclasses(ScoreMod)
CAUSAL = CLASSES["Causal"]()
