"""Layers whose tensors are shards of the sequence: they go to a plan, or to PyTorch's ring, or are refused.

With ``register(context_parallel=plan)`` a layer's q, k and v are the rank's shards, and the plan's `attention` gets the
layer's variant, which means the whole sequence. Without a plan, the regions of PyTorch and accelerate
(``context_parallel``) are noticed: there a plain causal layer goes to PyTorch's ring, and any other is refused, for the
ring would leave its mask, its window or its sink out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ...call.scalars import as_float
from ...variant.masks import Causal, Mask, SlidingWindow
from ...variant.scores import SoftCap
from .mask import MaskParts
from .patterns import ShiftedWindow

_WHERE = 'attn_implementation="tileattn" on shards of the sequence'


class ContextParallel(Protocol):
    """What ``register(context_parallel=)`` takes, such as a ``tileattn.parallel.Plan``."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        score_mod: Any = None,
        sink: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of the whole sequence, of which each rank has a shard.

        Args:
            q: this rank's queries (batch, seqlen of the shard, heads, head_dim).
            k: its keys (batch, seqlen of the shard, kv_heads, head_dim).
            v: its values (batch, seqlen of the shard, kv_heads, head_dim_v).
            mask: a mask of positions in the whole sequence, or None.
            score_mod: score modifications in a list, or None.
            sink: one logit per head, or None.
            scale: factor of the scores; None: ``head_dim ** -0.5``.

        Returns:
            o (batch, seqlen of the shard, heads, head_dim_v).
        """
        ...


class Layer(NamedTuple):
    """The arguments of a layer's call, as for :func:`.attention.attend`."""

    module: torch.nn.Module
    mask: Any
    is_causal: bool | None
    sliding_window: int | None
    softcap: float | None
    sink: Tensor | None
    scaling: Any
    refused: dict[str, Any]
    """Arguments that must be None or 0: neither a plan nor the ring knows them."""


def attend_shards(plan: ContextParallel | None, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Attention of a layer whose q, k and v (batch, length, heads, head_dim) are shards of the sequence.

    plan: None in a region of PyTorch's.

    Raises:
        NotImplementedError: a part of the layer's attention would be left out.
    """
    for name, value in layer.refused.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{_WHERE} does not take {name}")
    if k.shape[1] != q.shape[1]:
        raise NotImplementedError(f"{_WHERE} takes no cache: got {q.shape[1]} queries and {k.shape[1]} keys")
    mask = _mask_of(layer)
    scale = None if layer.scaling is None else as_float("scaling", layer.scaling)
    if plan is None:
        _refuse_beside_causal(layer, mask)
        return _attend_in_ring(q, k, v, scale)
    mods = None if layer.softcap is None else [SoftCap(layer.softcap)]
    return plan.attention(q, k, v, mask=mask, score_mod=mods, sink=layer.sink, scale=scale)


def _mask_of(layer: Layer) -> Mask | None:
    """The layer's mask of positions in the whole sequence: causal, a window, or None."""
    mask = layer.mask
    if mask is None:
        causal = getattr(layer.module, "is_causal", None) if layer.is_causal is None else layer.is_causal
        window = _window_of(layer)
        if not causal and window is not None:
            raise NotImplementedError(f"{_WHERE} without a mask does not know how far a query sees to its right")
        return (Causal() if window is None else SlidingWindow(window - 1, 0)) if causal else None
    if not isinstance(mask, MaskParts):
        raise NotImplementedError(f"{_WHERE} does not take a mask of your own: its positions are the shard's")
    if mask.padding is not None or mask.sequences is not None or mask.dense is not None:
        what = "padding" if mask.padding is not None else "packed sequences" if mask.sequences is not None else "a mask"
        raise NotImplementedError(
            f"{_WHERE} does not take {what} that transformers found in the shard: pass an attention_mask of ones, and "
            f"documents to tileattn.parallel.Plan"
        )
    if isinstance(mask.window, ShiftedWindow):
        raise NotImplementedError(f"{_WHERE} takes no cache")
    return mask.window


def _window_of(layer: Layer) -> int | None:
    """The layer's window; accelerate takes masks away, but not the layer's own attribute."""
    window = layer.sliding_window
    return getattr(layer.module, "sliding_window", None) if window is None else window


def _refuse_beside_causal(layer: Layer, mask: Mask | None) -> None:
    """Raises for all but plain causal attention, in words that name what the ring would leave out."""
    lost = None
    if layer.sink is not None:
        lost = "sinks (s_aux)"
    elif layer.softcap is not None:
        lost = "a cap (softcap)"
    elif _window_of(layer) is not None or isinstance(mask, SlidingWindow):
        lost = "a window (sliding_window)"
    elif (kind := _type_of(layer.module)) not in (None, "full_attention"):
        lost = f"a mask of its own (layer type {kind!r})"
    elif not isinstance(mask, Causal):
        lost = "no causal mask"
    if lost is not None:
        raise NotImplementedError(
            f"{_WHERE}, in context_parallel of PyTorch or accelerate: {type(layer.module).__name__} has {lost}, and "
            f"PyTorch's ring knows plain causal attention only; use "
            f"tileattn.compat.transformers.register(context_parallel=tileattn.parallel.Plan(...))"
        )


def _type_of(module: torch.nn.Module) -> Any:
    types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return None if types is None or index is None else types[index]


def _attend_in_ring(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention by PyTorch's function, which the region has replaced by its ring."""
    if current_flash_attention_impl() != "tileattn":
        raise NotImplementedError(
            f"{_WHERE}, in context_parallel of PyTorch or accelerate: PyTorch's ring runs on tileattn's kernels only "
            f'after torch.nn.attention.activate_flash_attention_impl("tileattn")'
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)
