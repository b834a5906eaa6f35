"""Prepared decode phases: a table of checked and dispatched plain decode calls, which keeps the host's latency low.

A plain call is eager, has no tree, masks and score modifications that hold numbers alone (a window, a soft cap), and an
`out` in memory of its own. Its arguments are checked and its backend is chosen once for each combination of tensor
metadata and options, as for attention (:mod:`tileattn.runtime.prepared`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..call.decoding import DecodeInputs
from ..call.inputs import Operands
from ..tuner import state
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.scores import ScoreMod
from .dispatch import PreparedDecode
from .tables import facts

PHASES: dict[tuple[Any, ...], PreparedDecode] = {}
state.forgets(PHASES.clear)  # prepared phases depend on the tuner's results

# DecodeInputs(*fields) for a tuple of all fields, in a third of the time.
inputs_of = partial(tuple.__new__, DecodeInputs)


def numbers_of(mask: Any, score_mod: Any, causal: bool) -> tuple[str, Operands] | None:
    """The variant's key and operands (:func:`tileattn.variant.key.encode`) if its operands are numbers alone.

    None for one with tensors, which must be checked, and for a user's function, whose tracing takes longer than that.
    """
    mods = score_mod if isinstance(score_mod, (list, tuple)) else () if score_mod is None else (score_mod,)
    if not isinstance(mask, (Mask, type(None))) or not all(isinstance(mod, ScoreMod) for mod in mods):
        return None
    variant, operands = encode(*normalize(mask, score_mod, causal))
    return None if operands.tensors else (variant, operands)


def key_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    sink: Any,
    out: Any,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """All that the checks and the choice of the backend depend on; None for arguments that only the checks can name.

    Whether `out` shares memory with another tensor is no part of it: such an `out` has no key.

    options: the variant's key, max_seqlen_q, causal, scale, splits, return_lse and backend.
    """
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
            return None
        if sink is not None and sink.requires_grad:
            return None
        tensors = (q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink)
        if out is not None and (out.requires_grad or _shares(out, tensors)):
            return None
        key = (
            q.shape, k_cache.shape, v_cache.shape, q.stride(), k_cache.stride(), v_cache.stride(),
            q.dtype, k_cache.dtype, v_cache.dtype, q.device, k_cache.device, v_cache.device,
            (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16, facts(seqlens_k), facts(page_table),
            facts(cu_seqlens_q), facts(sink), facts(out),
            *options, *map(type, options),  # 1 == True, but must not find its phase
        )  # fmt: skip
        hash(key)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return key


def _shares(out: torch.Tensor, tensors: tuple[Any, ...]) -> bool:
    """Whether `out` is in the storage of another tensor, where it may or may not share memory with it."""
    own = out.untyped_storage().data_ptr()
    return any(x is not None and x.untyped_storage().data_ptr() == own for x in tensors)
