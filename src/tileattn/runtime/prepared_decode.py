"""Prepared decode phases: a cache of checked and dispatched plain decode calls, which keeps the host's latency low.

A plain call is eager and has no mask but causal, no tree, no score modification and no sink, and an `out` in memory of
its own. Its arguments are checked and its backend is chosen once for each combination of tensor metadata and options,
as for attention (:mod:`tileattn.runtime.prepared`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..call.decoding import DecodeInputs
from ..tuner import state
from .dispatch import PreparedDecode

PHASES: dict[tuple[Any, ...], PreparedDecode] = {}
MOST = 4096  # phases in the cache; the bound is for programs whose sizes always vary
state.forgets(PHASES.clear)  # prepared phases depend on the tuner's results

# DecodeInputs(*fields) for a tuple of all fields, in a third of the time.
inputs_of = partial(tuple.__new__, DecodeInputs)


def key_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    out: Any,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """All that the checks and the choice of the backend depend on; None for arguments that only the checks can name.

    Whether `out` shares memory with another tensor is no part of it: such an `out` has no key.

    options: max_seqlen_q, causal, scale, splits, return_lse and backend.
    """
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
            return None
        if out is not None and _shares(out, (q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q)):
            return None
        key = (
            q.shape, k_cache.shape, v_cache.shape, q.stride(), k_cache.stride(), v_cache.stride(),
            q.dtype, k_cache.dtype, v_cache.dtype, q.device, k_cache.device, v_cache.device,
            (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16, _facts(seqlens_k), _facts(page_table),
            _facts(cu_seqlens_q), _facts(out), *options, *map(type, options),  # 1 == True, but must not find its phase
        )  # fmt: skip
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key


def _facts(tensor: Any) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _shares(out: torch.Tensor, tensors: tuple[Any, ...]) -> bool:
    """Whether `out` is in the storage of another tensor, where it may or may not share memory with it."""
    own = out.untyped_storage().data_ptr()
    return any(x is not None and x.untyped_storage().data_ptr() == own for x in tensors)


def keep(key: tuple[Any, ...], phase: PreparedDecode) -> None:
    """Stores a phase whose call has been checked."""
    if len(PHASES) >= MOST:
        PHASES.clear()
    PHASES[key] = phase
