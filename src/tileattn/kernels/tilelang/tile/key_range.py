"""Masks under which each query sees one range of keys, found in a mask's expression (no compiler is imported here)."""

from __future__ import annotations

from typing import Any

from ....variant.expression import Expr, dtype_of, has_symbol
from ....variant.program import Program

_LOWER, _UPPER = {"ge": 0, "gt": 1}, {"lt": 0, "le": 1}  # what is added to the other side of a comparison of k


class KeyRange:
    """The keys from the largest of ``lower`` on, below the smallest of ``upper`` and seqlen_k.

    Each bound is an integer expression of the query, and what is to be added to it.
    """

    def __init__(self, lower: list[tuple[Any, int]], upper: list[tuple[Any, int]]) -> None:
        self.lower, self.upper = lower, upper


def key_range(program: Program) -> KeyRange | None:
    """The range of keys that each query sees; None if the mask is not known to leave one range, or there is none."""
    found = KeyRange([], [])
    return found if program.allows is not None and _collect(program.allows, found) else None


def _collect(allows: Any, found: KeyRange) -> bool:
    if not isinstance(allows, Expr):
        return False
    if allows.op == "and":
        return all(_collect(arg, found) for arg in allows.args)
    if allows.op not in (*_LOWER, *_UPPER):
        return False
    key, bound = allows.args
    if str(key) != "k" or dtype_of(bound) != "int" or has_symbol(bound, "k"):
        return False
    terms, added = (found.lower, _LOWER) if allows.op in _LOWER else (found.upper, _UPPER)
    terms.append((bound, added[allows.op]))
    return True
