"""Variants: a mask and score modifications, taken apart into code and operands.

Kernels are compiled for the *code* of a variant and called with its *operands*: the numbers and tensors that its
masks and modifications carry. :func:`encode` takes a variant apart into a key, one line of text that says all about the
code, and :class:`Operands`. :func:`program` turns a key into traced expressions, for a backend to generate code from.

    >>> encode(Causal() & SlidingWindow(512, None), ())
    ('And(Causal(),SlidingWindow(i,-))', Operands(tensors=[], ints=[512], floats=[]))

The key of a user's function holds its traced expression, so that two functions that compute the same share a kernel.
:func:`with_alignment` adds to a key what only tensors in memory can tell.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from .evaluated import call, evaluated_mask, evaluated_mods, values_of
from .expression import Expr, TensorSymbol, symbol
from .masks import FIRST_POSITION, FunctionMask, Mask
from .reading import evaluate, parse
from .scores import ScoreMod
from .tile_loads import TileLoad, find, is_aligned
from .tracing import trace


def _constant_under_compile(fn: Any) -> Any:
    """Marks a function that torch.compile runs while it traces, instead of tracing it.

    The mark is what ``torch.compiler.assume_constant_result`` sets; that function itself would import all of Dynamo.
    """
    fn._dynamo_marked_constant = True
    return fn


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip


_KNOWN_DTYPES = frozenset(_DTYPES.values())


@dataclasses.dataclass
class Operands:
    """The run-time values of a variant, in the order of their appearance, by kind."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ints: list[int] = dataclasses.field(default_factory=list)
    floats: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Program:
    """What a variant computes, as expressions over ``b h q k``, ``score``, the ends of tiles and its operands.

    ``allows`` is None without a mask and ``score`` None without a modification. The ranges are pairs of expressions:
    ``kv_range`` and ``full_range`` over ``q_lo q_hi seqlen_k``, ``q_range`` and ``full_q_range`` over ``k_lo k_hi
    seqlen_k``. Operands are called ``i0 i1 ...`` (int32), ``f0 ...`` (float32) and ``t0 ...`` (tensors).
    """

    allows: Expr | bool | None
    kv_range: tuple[Any, Any]
    full_range: tuple[Any, Any]
    q_range: tuple[Any, Any]
    full_q_range: tuple[Any, Any]
    score: Expr | float | None
    tensors: tuple[TensorSymbol, ...]
    ints: int
    floats: int

    @property
    def operands(self) -> int:
        """How many operands there are."""
        return len(self.tensors) + self.ints + self.floats

    def __str__(self) -> str:
        """The canonical text: equal texts mean equal kernels, in any process.

        Of the forward pass, that is, which does not ask for ranges of queries.
        """
        tensors = (f"{t.name}:{t.dtype}:{t.ones}{':aligned' * t.aligned}" for t in self.tensors)
        operands = " ".join(tensors) + f" i{self.ints} f{self.floats}"
        return f"{self.allows} | {self.kv_range} | {self.full_range} | {self.score} | {operands}"

    @property
    def backward_text(self) -> str:
        """The canonical text of the backward pass, which asks for all."""
        return f"{self} | {self.q_range} | {self.full_q_range}"

    @functools.cached_property
    def tile_loads(self) -> tuple[TileLoad, ...]:
        """What the modification reads tile by tile, whether or not its tensor is aligned."""
        return tuple(find(self.score))

    @functools.cached_property
    def copied_tile(self) -> tuple[TileLoad, torch.dtype] | None:
        """The tile load whose tensor a kernel may copy by TMA, the first if there are several, and its dtype."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.tensors if tensor.aligned}
        return next(((load, dtypes[load.name]) for load in self.tile_loads if load.name in dtypes), None)


def normalize(mask: Any, score_mod: Any, causal: bool) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The mask and the tuple of score modifications that a user's arguments mean."""
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
    """The type of a wrong argument, or the class that was given in place of an instance."""
    return f"the class {value.__name__} (not an instance)" if isinstance(value, type) else type(value).__name__


def encode(mask: Mask | None, score_mods: Sequence[Callable[..., Any]]) -> tuple[str, Operands]:
    """Takes a variant apart into its key and its operands.

    Written so that torch.compile can trace it: its guards then hold for all that masks and modifications carry.
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
        fields = ",".join([_encode(getattr(value, name), operands) for name in _field_names(type(value))])
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


_TENSOR = re.compile(r"t:(\w+):([1n]*)(:aligned)?")


def with_alignment(key: str, tensors: Sequence[torch.Tensor]) -> str:
    """The key with a mark at each tensor that is read tile by tile and is aligned for that.

    Not part of :func:`encode`, for it asks for addresses, which tensors that are being traced do not have: the operator
    adds it when it runs.
    """
    names = {load.name for load in program(key).tile_loads}
    if not names:
        return key
    return _marked(key, tuple(f"t{i}" in names and is_aligned(tensor) for i, tensor in enumerate(tensors)))


@functools.lru_cache(maxsize=1024)
def _marked(key: str, aligned: tuple[bool, ...]) -> str:
    marks = iter(aligned)
    return _TENSOR.sub(lambda match: f"t:{match[1]}:{match[2]}{':aligned' * next(marks)}", key)


@_constant_under_compile
def _field_names(cls: type) -> tuple[str, ...]:
    """The operands' names of a class of masks or modifications."""
    return _registered_fields(cls)


@functools.cache
def _registered_fields(cls: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} must be a frozen dataclass, so that its operands are known")
    if _CLASSES.setdefault(cls.__name__, cls) is not cls:
        raise TypeError(f"two masks or score modifications are called {cls.__name__!r}: names must differ")
    return tuple(f.name for f in dataclasses.fields(cls))


def _encode_function(fn: Callable[..., Any], arguments: tuple[str, ...], operands: Operands) -> str:
    traced = trace(fn, arguments)
    parts = [_encode_tensor(tensor, operands) for tensor in traced.tensors]
    operands.ints += traced.ints
    operands.floats += traced.floats
    return "{" + ";".join([*parts, *("i" for _ in traced.ints), *("f" for _ in traced.floats), traced.text]) + "}"


@functools.lru_cache(maxsize=1024)
def program(key: str) -> Program:
    """Traces the variant that `key` describes."""
    reader = _Reader(key)
    mask, mods = reader.variant()
    b, h, q, k, score, seqlen_k = map(symbol, ("b", "h", "q", "k", "score", "seqlen_k"))
    queries = (b, h, symbol("q_lo"), symbol("q_hi"), seqlen_k)
    keys = (b, h, symbol("k_lo"), symbol("k_hi"), seqlen_k)
    result: Any = score
    for mod in mods:
        result = mod(result, b, h, q, k)
    return Program(
        allows=None if mask is None else mask.allows(b, h, q, k),
        kv_range=(0, seqlen_k) if mask is None else mask.kv_range(*queries),
        full_range=(0, seqlen_k) if mask is None else mask.full_range(*queries),
        q_range=(FIRST_POSITION, seqlen_k) if mask is None else mask.q_range(*keys),
        full_q_range=(FIRST_POSITION, seqlen_k) if mask is None else mask.full_q_range(*keys),
        score=result if mods else None,
        tensors=tuple(reader.tensors),
        ints=reader.ints,
        floats=reader.floats,
    )


@functools.lru_cache(maxsize=1024)
def _scores(key: str) -> tuple[Any, ...]:
    """The expression of each modification by itself."""
    _, mods = _Reader(key).variant()
    arguments = tuple(map(symbol, ("score", "b", "h", "q", "k")))
    return tuple(mod(*arguments) for mod in mods)


def restore(
    key: str, operands: Operands, dtype: torch.dtype = torch.float32
) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The inverse of :func:`encode`: the mask and the modifications, on the operands' values.

    What users wrote computes floats in `dtype` at least (float32 or float64): see :mod:`tileattn.variant.evaluated`.
    """
    if not operands.tensors and not operands.ints and not operands.floats:
        return _restored_without_operands(key, dtype)
    return _restored(key, operands, dtype)


def _restored(key: str, operands: Operands, dtype: torch.dtype) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    mask, mods = _Reader(key, operands).variant()
    values = values_of(operands)
    return evaluated_mask(mask, program(key), values, dtype), tuple(evaluated_mods(mods, _scores(key), values, dtype))


@functools.lru_cache(maxsize=1024)
def _restored_without_operands(key: str, dtype: torch.dtype) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    return _restored(key, Operands(), dtype)


def computed_in(
    dtype: torch.dtype, mask: Mask | None, score_mods: Sequence[Callable[..., Any]]
) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The same mask and modifications, computing floats in `dtype` at least."""
    return restore(*encode(mask, score_mods), dtype)


class _Reader:
    """Reads a key back into masks and modifications, on symbols or, where operands are given, on their values."""

    def __init__(self, key: str, operands: Operands | None = None) -> None:
        self.rest = key
        self.operands = operands
        self.tensors: list[TensorSymbol] = []
        self.ints = 0
        self.floats = 0

    def variant(self) -> tuple[Any, list[Any]]:
        mask = self._value() if self.rest and not self.rest.startswith("+") else None
        mods = []
        while self.rest:
            self._take("+")
            mods.append(self._value())
        return mask, mods

    def _take(self, text: str) -> None:
        if not self.rest.startswith(text):
            raise ValueError(f"variant key: expected {text!r} at {self.rest!r}")
        self.rest = self.rest[len(text) :]

    def _value(self) -> Any:
        if match := re.match(r"(\w+)\(", self.rest):
            return self._instance(match[1])
        if self.rest.startswith("{"):
            return self._function()
        if self.rest.startswith("t:"):
            return self._tensor()
        kind, self.rest = self.rest[0], self.rest[1:]
        if kind == "-":
            return None
        if kind == "i":
            self.ints += 1
            return self.operands.ints[self.ints - 1] if self.operands else symbol(f"i{self.ints - 1}")
        self.floats += 1
        return self.operands.floats[self.floats - 1] if self.operands else symbol(f"f{self.floats - 1}")

    def _instance(self, name: str) -> Any:
        self._take(name + "(")
        cls = _CLASSES[name]
        instance: Any = object.__new__(cls)
        for index, field in enumerate(_field_names(cls)):
            if index:
                self._take(",")
            object.__setattr__(instance, field, self._value())
        self._take(")")
        return instance

    def _tensor(self) -> TensorSymbol | Expr | torch.Tensor:
        match = _TENSOR.match(self.rest)
        assert match is not None
        self.rest = self.rest[match.end() :]
        ones = tuple(one == "1" for one in match[2])
        tensor = TensorSymbol(f"t{len(self.tensors)}", _DTYPES[match[1]], ones, aligned=match[3] is not None)
        self.tensors.append(tensor)
        if self.operands:
            return self.operands.tensors[len(self.tensors) - 1]
        return tensor if tensor.ndim else tensor.whole()

    def _function(self) -> Callable[..., Any]:
        self._take("{")
        first = len(self.tensors)
        # The function's own t0, t1, ... are the variant's t<first>, ..., and so are its i0, ... and f0, ...
        values: dict[str, Any] = {}
        counts = {"i": 0, "f": 0}
        while match := re.match(r"(i|f);|t:", self.rest):
            if kind := match[1]:
                values[f"{kind}{counts[kind]}"] = self._value()
                counts[kind] += 1
            else:
                self._tensor()
            self._take(";")
        text, self.rest = self.rest.split("}", 1)
        tensors = {f"t{index}": tensor for index, tensor in enumerate(self.tensors[first:])}
        expr = parse(text, tensors)
        return functools.partial(call, evaluate(expr, values) if values else expr, {}, torch.float32)


def _subclasses(cls: type) -> dict[str, type]:
    found: dict[str, type] = {}
    sub: type
    for sub in cls.__subclasses__():
        found |= {sub.__name__: sub} | _subclasses(sub)
    return found


_CLASSES: dict[str, type] = _subclasses(Mask) | _subclasses(ScoreMod)
CAUSAL = _CLASSES["Causal"]()
