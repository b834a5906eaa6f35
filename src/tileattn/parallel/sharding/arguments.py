"""The arguments of `Plan`: their checks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...call.scalars import as_int
from ..torch_names import is_group, mesh_group
from .layout import LAYOUTS


def as_group(group: Any) -> Any:
    """A process group of which this process is a member; None means the default group."""
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        raise ValueError(
            "group must be a process group or a DeviceMesh, got None without a default group; call "
            "torch.distributed.init_process_group first (torchrun starts the processes)"
        )
    if isinstance(group, int):
        raise TypeError(f"group must be a process group, a DeviceMesh of one dimension or None, got {group!r}")
    if is_group(group):
        if dist.get_rank(group) < 0:
            raise ValueError("group must hold this process, got one that does not")
        return group
    found = mesh_group(group)
    if found is None:
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension or None, got {type(group).__name__}"
        )
    return found


def as_seqlen(seqlen: Any) -> int:
    """The number of tokens."""
    seqlen = as_int(seqlen)
    if not isinstance(seqlen, int) or isinstance(seqlen, bool):
        raise TypeError(f"seqlen must be an int, the tokens of the whole sequence, got {seqlen!r}")
    if seqlen < 0:
        raise ValueError(f"seqlen must be at least 0, got {seqlen}")
    return seqlen


def as_bounds(documents: Any, seqlen: int) -> list[int]:
    """cu_seqlens as a list of ints."""
    if isinstance(documents, Tensor):
        if documents.ndim != 1 or documents.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"documents must be cu_seqlens, int32 or int64 (documents + 1,), got {documents.dtype} "
                f"{tuple(documents.shape)}"
            )
        documents = documents.tolist()
    if not isinstance(documents, (list, tuple)) or any(not isinstance(end, int) for end in documents):
        raise TypeError(f"documents must be cu_seqlens, a list of ints or an integer tensor, got {documents!r}")
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != seqlen:
        raise ValueError(f"documents must be cu_seqlens from 0 to seqlen = {seqlen}, got {_ends(documents)}")
    for number, (start, stop) in enumerate(itertools.pairwise(documents)):
        if stop < start:
            raise ValueError(f"documents must not decrease, got {stop} after {start} (document {number})")
    return list(documents)


def _ends(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 4 else f"{values[0]} ... {values[-1]}"


def check_layout(name: Any, bounds: list[int] | None, mask: Any) -> None:
    """Raises ValueError if layout, documents and mask do not go together."""
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {name!r}")
    if (name == "documents") != (bounds is not None):
        given = "documents=" if bounds is not None else "no documents="
        raise ValueError(f"layout='documents' goes with documents=cu_seqlens, got layout={name!r} and {given}")
    if mask is not None and bounds is None:
        raise ValueError("mask of a plan says whose areas documents are dealt by, got one without documents=")


def as_node(node: Any, ranks: int) -> int:
    """The number of ranks of a node."""
    given = as_int(node)
    if node is None:
        given = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return given if 1 <= given <= ranks and ranks % given == 0 else 1 if given < ranks else ranks
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"node must be an int or None, got {node!r}")
    if given < 1 or ranks % given:
        raise ValueError(f"node must divide the {ranks} ranks of the group, got {given}")
    return given


def dim_of_rows(name: str, x: Any, rows: int) -> int:
    """The dimension of a tensor's rows."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor (batch, rows, ...) or (rows,), got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{name} must be (batch, rows, ...) or (rows,), got a tensor without dimensions")
    dim = min(1, x.ndim - 1)
    if x.shape[dim] != rows:
        raise ValueError(f"{name} must have {rows} rows in dimension {dim}, got shape {tuple(x.shape)}")
    return dim
