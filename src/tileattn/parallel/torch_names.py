"""What this package needs of torch.distributed beyond its documented functions, in one place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def prefixed(prefix: str, store: Any) -> Any:
    """A part of a store, whose keys begin with a prefix."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def is_group(value: Any) -> bool:
    """Whether it is a process group."""
    return isinstance(value, dist.ProcessGroup)


def mesh_group(value: Any) -> Any:
    """The process group of a DeviceMesh of one dimension; None if the value is no mesh."""
    if "DeviceMesh" not in (cls.__name__ for cls in type(value).__mro__):
        return None
    if value.ndim != 1:
        names = ", ".join(map(repr, value.mesh_dim_names or ())) or "none has a name"
        raise ValueError(
            f"group must be a process group or a DeviceMesh of one dimension, got a mesh of shape "
            f"{tuple(value.mesh.shape)}; select a dimension of it, as in mesh[name] (names: {names})"
        )
    return value.get_group()
