"""append_kv as dispatch sees it: refusals, and the launch of the kernel. Imports no TileLang."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call import cache_status
from ....call.appending import AppendCall, AppendInputs
from ...bundles.installed import absence
from ..architecture import ARCHITECTURES
from .library import append_function

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refusal(call: AppendCall) -> str | None:
    """The reason why the kernel does not run a call, or None if it does."""
    if call.arch not in ARCHITECTURES:
        return f"device {call.arch!r} is not one of {', '.join(ARCHITECTURES)}"
    if (reason := absence(call.arch)) is not None:
        return reason
    if call.dtype not in _DTYPES:
        return f"dtype must be float16, bfloat16 or float32, not {call.dtype}"
    if call.table_dtype not in (None, *_DTYPES):
        return f"cos and sin must be float16, bfloat16 or float32, not {call.table_dtype}"
    return None


def prepare(call: AppendCall) -> Callable[[AppendInputs], Tensor | None]:
    """See :class:`tileattn.runtime.append_dispatch.AppendPhase`."""

    def append(inputs: AppendInputs) -> Tensor | None:
        cache_status.raise_pending()
        k, q, sequences = inputs.k, inputs.q, inputs.seqlens_k.shape[0]
        rows = k.shape[1] if q is None else max(k.shape[1], q.shape[1])
        if 0 in (k.shape[0], rows, sequences):  # no row is of a sequence
            return None if q is None else q.clone(memory_format=torch.contiguous_format)
        rotated = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        is_empty = not inputs.k_cache.numel() or not inputs.capacity
        append_function(call)(
            *map(_with_unit_stride, (k, inputs.v)),
            *(_filled(_with_unit_stride(cache)) for cache in (inputs.k_cache, inputs.v_cache)),
            inputs.seqlens_k,
            cache_status.status_of(k.device),
            *(() if inputs.page_table is None else (_filled(inputs.page_table),)),
            *(() if inputs.cu_seqlens_q is None else (inputs.cu_seqlens_q,)),
            *(_with_unit_stride(table) for table in (inputs.cos, inputs.sin) if table is not None),
            *(() if inputs.positions is None else (inputs.positions,)),
            *(() if q is None or rotated is None else (_with_unit_stride(q), rotated)),
            *(() if inputs.q_positions is None else (inputs.q_positions,)),
            0 if is_empty else inputs.capacity,
            0 if is_empty else inputs.k_cache.shape[0],
            rows,
            sequences.bit_length(),
        )
        cache_status.report(k.device)
        return rotated

    return append


def _with_unit_stride(x: Tensor) -> Tensor:
    """The same tensor; a last dimension of size 1, which may have any stride, gets the stride that kernels expect."""
    return x if x.stride(-1) == 1 else x.as_strided(x.shape, (*x.stride()[:-1], 1))


def _filled(x: Tensor) -> Tensor:
    """The tensor, or in place of an empty one a tensor with elements: kernels take no empty ones."""
    return x if x.numel() else x.new_zeros([max(size, 1) for size in x.shape])
