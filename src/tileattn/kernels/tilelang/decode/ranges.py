"""What the ranges of keys of a variant depend on. Imports no TileLang."""

from __future__ import annotations

from typing import Any

from ....variant.expression import Expr, has_symbol, nodes
from ....variant.program import Program


def differs_by_head(bound: Any) -> bool:
    """Whether an end of a range is another one for each head."""
    return has_symbol(bound, "h")


def mask_differs_by_head(traced: Program) -> bool:
    """Whether a mask is another one for each head."""
    return any(has_symbol(each, "h") for each in (traced.allows, *traced.kv_range, *traced.full_range))


def names_in_range(traced: Program) -> set[str]:
    """The names of the symbols and tensors that the range of a job's keys is computed from; empty for all keys."""
    names = {
        str(node.args[0])
        for bound in traced.kv_range
        if isinstance(bound, Expr)
        for node in nodes(bound)
        if node.op in ("symbol", "load", "size")
    }
    # A job has several heads. Where their ranges differ, all of them visit all keys.
    return set() if "h" in names else names


def numbers_in_range(traced: Program) -> list[tuple[str, str]]:
    """The names and kinds ("int" or "float") of the variant's numbers among these, in their order."""
    names = names_in_range(traced)
    numbers = [(f"i{i}", "int") for i in range(traced.ints)] + [(f"f{i}", "float") for i in range(traced.floats)]
    return [each for each in numbers if each[0] in names]


def text_of_range(traced: Program) -> str:
    """Equal texts mean equal planning kernels."""
    names = names_in_range(traced)
    if not names:
        return "all keys"
    tensors = [f"{t.name}:{t.dtype}:{t.ones}{':aligned' * t.aligned}" for t in traced.tensors if t.name in names]
    return f"{traced.kv_range} {tensors} {numbers_in_range(traced)}"
