"""The launch of the kernel of append_kv."""

from __future__ import annotations

import torch
from torch import Tensor

from ....call import cache_status
from ....call.appending import AppendCall, AppendInputs
from ..launch_cache import on_device
from .kernel import append_kernel

WARPS = 1  # a program has one head of one row


class Append:
    """append_kv for any tensors of a call; see :class:`tileattn.runtime.append_dispatch.AppendPhase`."""

    def __init__(self, call: AppendCall) -> None:
        dims = (call.head_dim, call.head_dim_v, call.rotary_dim)
        padded = (call.head_dim, call.head_dim_v, max(call.rotary_dim // 2, 1))
        self.facts = (*dims, *map(_power_of_two, padded), call.interleaved)

    def __call__(self, inputs: AppendInputs) -> Tensor | None:
        cache_status.raise_pending()
        k, q, k_cache, sequences = inputs.k, inputs.q, inputs.k_cache, inputs.seqlens_k.shape[0]
        q_rows, heads = (0, 0) if q is None else q.shape[1:3]
        rows, kv_heads = max(k.shape[1], q_rows), k.shape[2]
        if 0 in (k.shape[0], rows, sequences):  # no row is of a sequence
            return None if q is None else q.clone(memory_format=torch.contiguous_format)
        rotated = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        is_empty = not k_cache.numel() or not inputs.capacity
        cache = (0, 0, 1) if is_empty else (inputs.capacity, k_cache.shape[0], k_cache.shape[1])
        angles = 0 if inputs.cos is None else inputs.cos.shape[0]
        with on_device(k.device):
            append_kernel[(k.shape[0] * rows, 2 * kv_heads + heads)](
                *inputs[:5],
                cache_status.status_of(k.device),
                *inputs[5:11],
                rotated,
                inputs.q_positions,
                *(k.shape[1], q_rows, rows, kv_heads, heads, sequences, sequences.bit_length(), *cache, angles),
                *_strides_of_ints(inputs),
                _strides(inputs),
                self.facts,
                num_warps=WARPS,
            )
        if k.is_cuda:
            cache_status.report(k.device)
        else:  # the interpreter
            cache_status.check_caches()
        return rotated


def _strides(inputs: AppendInputs) -> tuple[tuple[int, ...], ...]:
    """See :func:`append_kernel`; empty for what is not given."""
    rows = [() if x is None else x.stride()[:-1] for x in (*inputs[:4], inputs.q)]
    tables = () if inputs.cos is None or inputs.sin is None else (inputs.cos.stride(0), inputs.sin.stride(0))
    return (*rows, tables)


def _strides_of_ints(inputs: AppendInputs) -> list[int]:
    """Those of page_table, positions and q_positions, two for each."""
    given = (inputs.page_table, inputs.positions, inputs.q_positions)
    return [stride for x in given for stride in ((0, 0) if x is None else x.stride())]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
