"""Masks under which one range of queries sees a key, found in a mask's bounds (no compiler is imported here)."""

from __future__ import annotations

import re
from typing import Any

from ....variant.expression import Expr, nodes
from ....variant.program import Program


def is_exact(traced: Program) -> bool:
    """Whether the mask's two ranges for a single key are the same expressions.

    The queries that can see the key then all see it: one range of queries, for every key.
    """

    def of_one_key(bounds: tuple[Any, Any]) -> list[str]:
        return [re.sub(r"\bk_(lo|hi)\b", "k", str(bound)) for bound in bounds]

    return of_one_key(traced.q_range) == of_one_key(traced.full_q_range)


def reads_memory(traced: Program) -> bool:
    """Whether the mask's ranges load anything."""
    return any(node.op == "load" for bound in (*traced.q_range, *traced.full_q_range) for node in nodes(bound))


def is_known(traced: Program) -> bool:
    """Whether some keys' ranges may be known: there is a mask, and it says which queries see all of several keys.

    False for ranges with more than the one condition of `Documents`, such as those of `KeyPadding` and `PrefixLM`:
    TileLang 0.1.15 takes minutes to lower them for single keys.
    """
    if traced.allows is None or _conditions(traced) > 1:
        return False
    return is_exact(traced) or (reads_memory(traced) and isinstance(traced.full_q_range[1], Expr))


def _conditions(traced: Program) -> int:
    return sum(node.op == "where" for bound in (*traced.q_range, *traced.full_q_range) for node in nodes(bound))
