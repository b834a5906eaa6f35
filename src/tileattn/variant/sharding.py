"""How a variant's tensors are divided with a call whose batch or heads are divided among ranks.

A rank that has some of the batch elements or heads counts `b` and `h` from 0 among its own. A tensor that is read at
`[b, ...]` or `[h]` must then be cut along that dimension. Any other use of the divided index (``h % 2``, say) would
mean another batch element or head, so there is no answer for it.
"""

from __future__ import annotations

import functools
from typing import Any

from .expression import Expr, nodes
from .program import program


@functools.lru_cache(maxsize=1024)
def dims_of(key: str, index: str) -> tuple[int | None, ...] | None:
    """For each tensor of a variant, the dimension that is read at an index; None for a tensor that is not.

    Args:
        key: the variant's key.
        index: ``"b"`` or ``"h"``.

    Returns:
        A dimension, or None, for each of the operands' tensors, in order. None instead of all if the variant uses the
        index in any other way, so that it cannot be cut.
    """
    of_key = program(key)
    ranges = (of_key.kv_range, of_key.full_range, of_key.q_range, of_key.full_q_range)
    expressions = [of_key.allows, of_key.score, *(end for each in ranges for end in each)]
    found: dict[str, int | None] = {tensor.name: None for tensor in of_key.tensors}
    loads, uses = set(), 0
    for node in (node for expression in expressions for node in nodes(expression)):
        uses += _is(node, index)
        if node.op == "load":
            name, *at = node.args
            for dim, each in enumerate(at):
                if _is(each, index):
                    loads.add((name, dim))
                    uses -= 1
    found |= dict(loads)
    sizes = {node.args for expression in expressions for node in nodes(expression) if node.op == "size"}
    if uses or len(loads) != len(dict(loads)) or loads & sizes:
        return None
    return tuple(found.values())


def _is(value: Any, index: str) -> bool:
    return isinstance(value, Expr) and value.op == "symbol" and value.args[0] == index
