"""Calls that the layers of a step share, so that only the first layers pay for checks, encodings and plans.

A mask (:class:`.mask.MaskParts`) is made once for the layers of a model, in each step. It keeps their calls: the first
call of a kind is an ordinary one, which checks its arguments. The second prepares the shared call, which it and all
later ones make. So a mask that one layer uses costs nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import shared_calls
from ...runtime.shared_calls import SharedCall
from ...variant.scores import SoftCap
from .mask import MaskParts
from .seen import seen
from .step import is_step, variant_of_step

_NUMBERS = (float, int, type(None))  # whose values a key may hold


def key_of(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scaling: Any,
    softcap: Any,
    is_causal: Any,
    backend: str | None,
) -> tuple[Any, ...] | None:
    """What a call depends on besides the mask and the tensors' values; None for a call that is not shared."""
    if type(scaling) not in _NUMBERS or type(softcap) not in _NUMBERS:
        return None
    options = (scaling, softcap, is_causal, getattr(module, "is_causal", None), backend)
    return shared_calls.key_of(q, k, v, sink, options)


def attend_again(
    mask: Any,
    key: tuple[Any, ...],
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
) -> Tensor:
    """Computes o of a call whose key is in `mask.calls`; q, k and v are (batch, length, heads, head_dim)."""
    found = mask.calls[key]
    if found is None:
        found = mask.calls[key] = _prepared(mask, key, module, q, k, v, sink)
    call: SharedCall
    call, keys = found
    if keys is not None:
        k, v = k[:, :keys], v[:, :keys]
    return call(q, k, v, sink)


def _prepared(
    mask: MaskParts,
    key: tuple[Any, ...],
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
) -> tuple[SharedCall, int | None]:
    """The shared call, and the number of keys to pass to it; None: all."""
    scaling, softcap, is_causal, _, backend = shared_calls.options_of(key)
    scale, caps = None if scaling is None else float(scaling), None if softcap is None else [SoftCap(softcap)]
    if mask.filled is not None and is_step(mask, q, k, v, sink, 0.0):
        causal, of_step = variant_of_step(mask)
        return shared_calls.shared_decode(q, k, v, sink, mask.filled, of_step, caps, causal, scale, backend), None
    what = seen(module, mask, q.shape[1], k.shape[1], is_causal, None)
    keys = what.keys if what.keys < k.shape[1] else None
    k, v = k[:, :keys], v[:, :keys]
    return shared_calls.shared_attention(q, k, v, sink, what.mask, caps, what.causal, scale, backend), keys
