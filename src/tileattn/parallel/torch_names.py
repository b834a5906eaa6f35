"""What this package needs of torch.distributed beyond its documented functions, in one place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist


def default_store() -> Any:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Any) -> Any:
    """The same store by a connection of its own, if it can be had.

    A thread that waits for a key keeps its connection to itself, and others that use it wait, too.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older PyTorch, or a store that cannot
        return store


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


_before_kernels: dict[tuple[int, tuple[int, ...]], tuple[Any, Any]] = {}


def before_kernels(group: Any, device: Any, number: int) -> Any:
    """A group of the same ranks whose transfers on a GPU begin before kernels that wait; all of its ranks ask together.

    A transfer that begins beside an attention kernel needs multiprocessors, which the kernel fills until its end. On a
    stream of high priority it comes first. Transfers of groups with different numbers run side by side. The group lives
    as long as the default group, as all subgroups do.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    store, kept = default_store(), _before_kernels.get((number, ranks))
    if kept is not None and kept[0] is store:
        return kept[1]
    if not is_nccl(group):
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    fast = dist.new_group(list(ranks), backend="nccl", pg_options=options, use_local_synchronization=True)
    # NCCL connects at the first call, in which all ranks must take part.
    dist.all_reduce(torch.zeros(1, device=device), group=fast)
    _before_kernels[number, ranks] = store, fast
    return fast


def is_nccl(group: Any) -> bool:
    """Whether NCCL carries the group's tensors on GPUs."""
    try:
        return group._get_backend(torch.device("cuda")).name() == "nccl"
    except RuntimeError:  # it has none for GPUs
        return False


def is_capturing(x: Any) -> bool:
    """Whether a call on this tensor is captured in a CUDA graph."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(fn: Function) -> Function:
    """A function that torch.compile runs as it is, with a break of the graph before and behind it.

    ``torch.compiler.disable`` does that, but imports all of Dynamo, so it is asked once Dynamo is there.
    """
    reason = "tileattn.parallel exchanges tensors with other ranks, which is not traced: leave fullgraph=True out"
    disabled: list[Any] = []

    @functools.wraps(fn)
    def run(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return fn(*arguments, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(fn, reason=reason))
        return disabled[0](*arguments, **options)

    # The marks of ``torch.compiler.disable``, for a function that Dynamo is about to trace.
    run._torchdynamo_disable, run._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
