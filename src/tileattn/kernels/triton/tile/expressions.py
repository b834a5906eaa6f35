"""Writes traced expressions as Triton functions.

A variant's program becomes a small module of text, which Triton then compiles (or interprets) like one that a person
has written. Under ``mask=Causal() & SlidingWindow(512, None), score_mod=SoftCap(30.0)`` it holds

    @triton.jit
    def allows(b, h, q, k, tensors, numbers):
        i0 = numbers[0]
        return (k <= q) & (k >= (q - i0))

    @triton.jit
    def score(score, b, h, q, k, tensors, numbers):
        f0 = numbers[1]
        return f0 * tanh(score * (1.0 / f0))

and functions of the same form for the ranges of tiles and for derivatives. What an expression uses more than once is
computed once and has a name.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from ....variant.derivative import derivative
from ....variant.expression import Expr, dtype_of, nodes, symbol
from ....variant.int32_range import leaves_int32
from ....variant.program import Program, program
from .paths import paths

_HEADER = """import triton
import triton.language as tl
from tileattn.kernels.triton.tile.arithmetic import clamped, floor_div, floor_mod, floor_mod_float, tanh
"""
_EXACT_HEADER = _HEADER.replace("tanh", "exact_tanh as tanh")

_POSITION = "b, h, q, k"
_OF_QUERIES = "b, h, q_lo, q_hi, seqlen_k"
_OF_KEYS = "b, h, k_lo, k_hi, seqlen_k"


@functools.lru_cache(maxsize=256)
def functions(key: str, wanted: tuple[bool, ...] = (), exact: bool = False) -> SimpleNamespace:
    """The Triton functions of a variant; None for a mask or a modification that it does not have.

    ``allows``, ``score``, ``kv_range``, ``full_range``, ``q_range``, ``full_q_range``; ``slope``, the derivative of the
    modified score with respect to the score; and ``slopes``, a tuple: with respect to each path that
    ``paths`` of paths.py names for the `wanted` tensors. `exact`: for results in float32.
    """
    namespace = load(source(key, wanted, exact), f"variant {key!r} {wanted} {exact}")
    names = ("allows", "score", "slope", "kv_range", "full_range", "q_range", "full_q_range")
    count = len(paths(key, wanted))
    return SimpleNamespace(
        **{name: namespace.get(name) for name in names},
        slopes=tuple(namespace[f"slope{index}"] for index in range(count)),
    )


def source(key: str, wanted: tuple[bool, ...] = (), exact: bool = False) -> str:
    """The text of :func:`functions`."""
    traced = program(key)
    write = functools.partial(_function, traced)
    parts = [f'"""{key or "full"}"""\n\n' + (_EXACT_HEADER if exact else _HEADER)]
    if traced.allows is not None:
        parts.append(write("allows", _POSITION, [traced.allows], like="q + k"))
    for name in ("kv_range", "full_range"):
        parts.append(write(name, _OF_QUERIES, getattr(traced, name)))
    for name in ("q_range", "full_q_range"):
        parts.append(write(name, _OF_KEYS, getattr(traced, name)))
    if traced.score is not None:
        takes = f"score, {_POSITION}"
        parts.append(write("score", takes, [traced.score], like="score"))
        parts.append(write("slope", takes, [derivative(traced.score, symbol("score"))], like="score"))
        for index, path in enumerate(paths(key, wanted)):
            parts.append(write(f"slope{index}", takes, [derivative(traced.score, path.load)], like="score"))
    return "\n\n".join(parts)


def load(text: str, name: str) -> dict[str, Any]:
    """Runs the text as a module. Triton reads functions' source again, and finds it where tracebacks do."""
    file = f"<tileattn: {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": "tileattn.kernels.triton.generated", "__file__": file}
    exec(compile(text, file, "exec"), scope)
    return scope


def _function(traced: Program, name: str, takes: str, values: Iterable[Any], like: str | None = None) -> str:
    """The text of one function; with `like`, its value has that expression's shape."""
    writer = _Writer(traced)
    values = list(values)
    writer.name_shared(values)
    results = [writer(value) for value in values]
    if like is not None:
        results = [_shaped(result, value, like) for result, value in zip(results, values, strict=True)]
    lines = [*writer.unpacked(), *writer.lines, f"return {', '.join(map(_bare, results))}"]
    return f"@triton.jit\ndef {name}({takes}, tensors, numbers):\n" + "".join(f"    {line}\n" for line in lines)


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    depth = list(itertools.accumulate((c == "(") - (c == ")") for c in text))
    return text[1:-1] if text.startswith("(") and depth and depth.index(0) == len(text) - 1 else text


def _shaped(text: str, value: Any, like: str) -> str:
    """A constant, or what has fewer dimensions than a tile, spread over it."""
    used = {node.args[0] for node in nodes(value) if node.op == "symbol"}
    if "score" in used or {"q", "k"} <= used:
        return text
    zeros = f"tl.zeros_like({like})"
    return f"{zeros} == 0 if {text} else {zeros} != 0" if isinstance(value, bool) else _spread(text, value, zeros)


def _spread(text: str, value: Any, zeros: str) -> str:
    return f"({zeros} == 0) & ({text})" if dtype_of(value) == "bool" else f"{zeros} + {text}"


class _Writer:
    """Writes the expressions of one function.

    The function finds its operands in two tuples: in `tensors` the pointer, the sizes and the strides of each, in
    `numbers` the integers and then the floats.
    """

    def __init__(self, traced: Program) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.used: set[str] = set()
        self.places: dict[str, str] = {}
        self.wide = {tensor.name for tensor in traced.tensors if tensor.dtype == torch.int64}
        at = 0
        for tensor in traced.tensors:
            parts = [
                tensor.name,
                *(f"{tensor.name}_{part}{axis}" for part in ("size", "stride") for axis in range(tensor.ndim)),
            ]
            for part in parts:
                self.places[part], at = f"tensors[{at}]", at + 1
        numbers = [f"i{index}" for index in range(traced.ints)] + [f"f{index}" for index in range(traced.floats)]
        self.places |= {name: f"numbers[{index}]" for index, name in enumerate(numbers)}

    def unpacked(self) -> list[str]:
        """Lines that give the operands that are used their names."""
        return [f"{name} = {place}" for name, place in self.places.items() if name in self.used]

    def name_shared(self, values: list[Any]) -> None:
        """Computes what occurs more than once, beginning with the smallest."""
        shared = [node for node, count in _references(values) if count > 1 and node.op not in ("symbol", "size")]
        for node in sorted(shared, key=lambda node: len(str(node))):
            name = f"x{len(self.names)}"
            self.lines.append(f"{name} = {self(node)}")
            self.names[str(node)] = name

    def __call__(self, value: Any) -> str:
        if not isinstance(value, Expr):
            return _constant(value)
        name = self.names.get(str(value))
        if name is not None:
            return name
        if value.op == "symbol":
            return self._operand(str(value.args[0]))
        if value.op == "size":
            return self._operand(f"{value.args[0]}_size{value.args[1]}")
        if value.op == "load":
            return self._load(value)
        return self._operation(value)

    def _operand(self, name: str) -> str:
        self.used.add(name)
        return name

    def _load(self, value: Expr) -> str:
        tensor, *indices = value.args
        offsets = []
        for axis, index in enumerate(indices):
            if isinstance(index, int) and index == 0:
                continue
            size, stride = (self._operand(f"{tensor}_{part}{axis}") for part in ("size", "stride"))
            offsets.append(f"clamped({self(index)}, {size}) * {stride}")
        element = f"tl.load({' + '.join([self._operand(tensor), *offsets])})"
        if value.dtype == "bool":
            return f"({element} != 0)"
        return element if tensor in self.wide else f"{element}.to(tl.{_TYPES[value.dtype]})"

    def _operation(self, value: Expr) -> str:
        op, args = value.op, value.args
        if op == "where":
            condition, *branches = args
            return f"tl.where({self(condition)}, {', '.join(self._as(value.dtype, arg) for arg in branches)})"
        if op in ("and", "or", "not"):
            return _OPS[op](*map(self, args))
        kind = "float" if value.dtype == "float" or "float" in map(dtype_of, args) else "int"
        if op == "div" and not _varies(args[1]) and isinstance(args[1], Expr):
            # One quotient for a whole tile.
            return f"({self._as('float', args[0])} * (1.0 / {self._as('float', args[1])}))"
        texts = [self._as(kind, arg) for arg in args]
        if leaves_int32(value):
            texts[0] = f"tl.cast({texts[0]}, tl.int64)"
        if op == "div" and not isinstance(args[1], Expr) and args[1] == 0:
            texts[1] = f"tl.full([], {texts[1]}, tl.float32)"  # Python refuses to divide its own numbers by 0
        return _OPS.get(f"{op} {kind}", _OPS.get(op))(*texts)

    def _as(self, kind: str, value: Any) -> str:
        """`value` as a float, or an integer."""
        text = self(value)
        if dtype_of(value) == kind:
            return text
        return (
            _constant(float(value) if kind == "float" else int(value))
            if not isinstance(value, Expr)
            else (f"tl.cast({text}, tl.{_TYPES[kind]})")
        )


def _references(values: Iterable[Any]) -> list[tuple[Expr, int]]:
    """All nodes of different texts, and how many others (or results) each is a part of."""
    nodes_by_text: dict[str, Expr] = {}
    count: Counter[str] = Counter()

    def visit(value: Any) -> None:
        if isinstance(value, Expr):
            count[str(value)] += 1
            if nodes_by_text.setdefault(str(value), value) is value:
                for arg in value.args if count[str(value)] == 1 else ():
                    visit(arg)

    for value in values:
        visit(value)
    return [(node, count[text]) for text, node in nodes_by_text.items()]


_TYPES = {"float": "float32", "int": "int32", "bool": "int1"}


def _constant(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    kind = next(kind for kind in (bool, int, float) if isinstance(value, kind))  # NumPy's are written otherwise
    text = repr(kind(value))
    return f"({text})" if text.startswith("-") else text


def _varies(value: Any) -> bool:
    """Whether it differs among the scores of a tile."""
    return any(node.op == "symbol" and node.args[0] in ("score", "q", "k") for node in nodes(value))


def _infix(sign: str) -> Callable[[str, str], str]:
    return lambda x, y: f"({x} {sign} {y})"


def _call(name: str) -> Callable[..., str]:
    return lambda *args: f"{name}({', '.join(args)})"


_OPS: dict[str, Callable[..., str]] = {
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _infix("/"),
    "floordiv int": _call("floor_div"),
    "floordiv float": lambda x, y: f"tl.floor({x} / {y})",
    "mod int": _call("floor_mod"),
    "mod float": _call("floor_mod_float"),
    "lt": _infix("<"),
    "le": _infix("<="),
    "gt": _infix(">"),
    "ge": _infix(">="),
    "eq": _infix("=="),
    "ne": _infix("!="),
    "and": _infix("&"),
    "or": _infix("|"),
    "not": lambda x: f"({x} == 0)",
    "min": _call("tl.minimum"),
    "max": _call("tl.maximum"),
    "abs": _call("tl.abs"),
    "tanh": _call("tanh"),
    "sigmoid": _call("tl.sigmoid"),
    "exp": _call("tl.exp"),
    "exp2": _call("tl.exp2"),
    "log": _call("tl.log"),
    "log2": _call("tl.log2"),
    "sqrt": _call("tl.sqrt"),
    "sin": _call("tl.sin"),
    "cos": _call("tl.cos"),
    "float": lambda x: x,
    "int": lambda x: f"tl.cast({x}, tl.int32)",
}
