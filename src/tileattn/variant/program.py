"""Programs: the traced expressions of a variant, and the way back from a key to a mask and modifications.

:func:`program` turns a key into expressions, from which a backend generates code. :func:`restore` turns a key and
operands into a mask and modifications that run on tensors. :func:`with_alignment` adds the alignment of tensors in
memory to a key.

    >>> str(program("Causal()").allows)
    '(le k q)'
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call.inputs import Operands
from .evaluated import call, evaluated_mask, evaluated_mods, knows_ranges, values_of
from .expression import Expr, TensorSymbol, symbol
from .key import DTYPES, TENSOR, class_named, encode, field_names
from .masks import FIRST_POSITION, Mask
from .reading import evaluate, parse
from .tile_loads import TileLoad, find, is_aligned


@dataclasses.dataclass(frozen=True)
class Program:
    """The expressions of a variant, over ``b h q k``, ``score``, the ends of tiles and the variant's operands.

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
        """The number of operands."""
        return len(self.tensors) + self.ints + self.floats

    def __str__(self) -> str:
        """The canonical text of the forward pass: equal texts mean equal kernels, in any process.

        It leaves out the ranges of queries, which the forward pass does not use.
        """
        tensors = (f"{t.name}:{t.dtype}:{t.ones}{':aligned' * t.aligned}" for t in self.tensors)
        operands = " ".join(tensors) + f" i{self.ints} f{self.floats}"
        return f"{self.allows} | {self.kv_range} | {self.full_range} | {self.score} | {operands}"

    @property
    def backward_text(self) -> str:
        """The canonical text of the backward pass, which uses all ranges."""
        return f"{self} | {self.q_range} | {self.full_q_range}"

    @functools.cached_property
    def tile_loads(self) -> tuple[TileLoad, ...]:
        """The tile loads of the modification, whether or not their tensors are aligned."""
        return tuple(find(self.score))

    @functools.cached_property
    def copied_tile(self) -> tuple[TileLoad, torch.dtype] | None:
        """The first tile load whose tensor a kernel may copy by TMA, and the tensor's dtype; None if there is none."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.tensors if tensor.aligned}
        return next(((load, dtypes[load.name]) for load in self.tile_loads if load.name in dtypes), None)


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


def decode(key: str, operands: Operands) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The inverse of :func:`encode`: the mask and the modifications, as they can be given to a call again."""
    mask, mods = _Reader(key, operands).variant()
    return mask, tuple(mods)


@functools.lru_cache(maxsize=1024)
def has_ranges_only(key: str) -> bool:
    """Whether the mask of a key is one of the package's masks that know their ranges of keys, or several joined by `&`.

    So is a key without a mask.
    """
    mask, _ = _Reader(key).variant()
    return mask is None or knows_ranges(mask)


def restore(
    key: str, operands: Operands, dtype: torch.dtype = torch.float32
) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The mask and the modifications on the operands' values, to compute with.

    Users' functions compute floats in `dtype` (float32 or float64) or wider: see :mod:`tileattn.variant.evaluated`.
    """
    if not operands.tensors and not operands.ints and not operands.floats:
        return _restored_without_operands(key, dtype)
    return _restored(key, operands, dtype)


def _restored(key: str, operands: Operands, dtype: torch.dtype) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    mask, mods = decode(key, operands)
    values = values_of(operands)
    return evaluated_mask(mask, program(key), values, dtype), tuple(evaluated_mods(mods, _scores(key), values, dtype))


@functools.lru_cache(maxsize=1024)
def _restored_without_operands(key: str, dtype: torch.dtype) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    return _restored(key, Operands(), dtype)


def computed_in(
    dtype: torch.dtype, mask: Mask | None, score_mods: Sequence[Callable[..., Any]]
) -> tuple[Mask | None, tuple[Callable[..., Any], ...]]:
    """The same mask and modifications, with floats computed in `dtype` or wider.

    Tensors are converted once, so that their gradients are summed over all tiles before they are rounded.
    """
    key, operands = encode(mask, score_mods)
    tensors = [x.to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x for x in operands.tensors]
    return restore(key, dataclasses.replace(operands, tensors=tensors), dtype)


def with_alignment(key: str, tensors: Sequence[torch.Tensor]) -> str:
    """The key with a mark at each tensor that is read tile by tile and is aligned for it.

    Not a part of :func:`encode`, because it needs addresses, which traced tensors do not have. The operator adds the
    marks when it runs.
    """
    names = {load.name for load in program(key).tile_loads}
    if not names:
        return key
    return _marked(key, tuple(f"t{i}" in names and is_aligned(tensor) for i, tensor in enumerate(tensors)))


@functools.lru_cache(maxsize=1024)
def _marked(key: str, aligned: tuple[bool, ...]) -> str:
    marks = iter(aligned)
    return TENSOR.sub(lambda match: f"t:{match[1]}:{match[2]}{':aligned' * next(marks)}", key)


class _Reader:
    """Reads a key back into masks and modifications: on the operands' values if given, else on symbols."""

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
        if match := re.match(r"=(\d+)", self.rest):
            self._take(match[0])
            return int(match[1])
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
        cls = class_named(name)
        instance: Any = object.__new__(cls)
        for index, field in enumerate(field_names(cls)):
            if index:
                self._take(",")
            object.__setattr__(instance, field, self._value())
        self._take(")")
        return instance

    def _tensor(self) -> TensorSymbol | Expr | torch.Tensor:
        match = TENSOR.match(self.rest)
        assert match is not None
        self.rest = self.rest[match.end() :]
        ones = tuple(one == "1" for one in match[2])
        tensor = TensorSymbol(f"t{len(self.tensors)}", DTYPES[match[1]], ones, aligned=match[3] is not None)
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
