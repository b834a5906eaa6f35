"""Tables of prepared calls: what is checked and dispatched once for each combination of metadata and options.

Calls of attention (`prepared.py`), decode (`prepared_decode.py`) and append_kv (`append.py`) have a table each, a dict.
Its keys hold the metadata of the call's tensors and the options; :func:`facts` is that of one tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

MOST = 4096  # entries of a table; the bound is for programs whose sizes always vary

Prepared = TypeVar("Prepared")


def kept(table: dict[Any, Prepared], key: Hashable, prepared: Prepared) -> Prepared:
    """Stores what was prepared in a table, which is emptied first if it is full; returns it."""
    if len(table) >= MOST:
        table.clear()
    table[key] = prepared
    return prepared


def facts(x: Any) -> tuple[Any, ...] | None:
    """The metadata of a tensor, None for None. Raises AttributeError for anything else."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)
