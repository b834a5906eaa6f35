"""Which keys a query of a layer may see: from what transformers hands to an attention function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...variant.masks import Causal, Mask, SlidingWindow
from .mask import MaskParts
from .patterns import DenseMask, ShiftedWindow


@dataclass(frozen=True)
class Seen:
    """What to ask :func:`tileattn.attention` for: the first `keys` of the keys, a mask, and a bias of the scores."""

    keys: int
    causal: bool = False
    mask: Mask | None = None
    bias: Tensor | None = None


def seen(
    module: torch.nn.Module,
    mask: MaskParts | Tensor | None,
    q_length: int,
    kv_length: int,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Seen:
    """For queries and keys that are not packed; arguments as of :func:`.attention.attend`.

    A mask has the last word, as in transformers' own eager attention; without one, ``is_causal`` and
    ``sliding_window`` have.

    Raises:
        TypeError, ValueError: they contradict each other, or do not say which keys are meant.
    """
    if isinstance(mask, MaskParts):
        _check_agreement(module, mask.window, is_causal)
        if mask.shape[2:] != (q_length, kv_length):
            raise ValueError(
                f"attention_mask was made for {mask.shape[2]} queries and {mask.shape[3]} keys, and the layer has "
                f"{q_length} and {kv_length}"
            )
        return _joined(mask, mask.keys)
    if isinstance(mask, Tensor):
        return _given(mask, kv_length)
    if mask is not None:
        raise TypeError(
            f"attention_mask must be what tileattn made, a tensor (batch or 1, heads or 1, queries or 1, keys) of bool "
            f"or float, or None, got {type(mask).__name__}"
        )
    return Seen(kv_length, *_without_mask(module, q_length, kv_length, is_causal, sliding_window))


def seen_when_packed(
    module: torch.nn.Module,
    mask: MaskParts | Tensor | None,
    q_length: int,
    kv_length: int,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Seen:
    """For sequences that cu_seq_lens packs: what a query sees of its own sequence.

    Which keys are of its sequence the mask may say as well, where position_ids told it; cu_seq_lens says it here.

    Raises:
        NotImplementedError: the mask asks for more than the sequences and a window.
    """
    if mask is None:
        # Lengths are equal within each sequence: not asked, for they are on the device.
        return Seen(kv_length, *_without_mask(module, q_length, q_length, is_causal, sliding_window))
    if not isinstance(mask, MaskParts):
        raise _not_packed("a mask of your own: leave attention_mask out")
    if mask.dense is not None:  # padding, if there is any, is part of it
        raise _not_packed(
            "a mask that is no window, such as the chunks of Llama 4 or a function of your own: this model cannot be "
            "packed by cu_seq_lens; use position_ids that begin anew with each sequence"
        )
    if mask.padding is not None:
        raise _not_packed("a padding mask: packed sequences have no padding, leave attention_mask out")
    if isinstance(mask.window, ShiftedWindow):
        raise _not_packed("a static cache")
    _check_agreement(module, mask.window, is_causal)
    return _joined(MaskParts(mask.shape, mask.device, mask.keys, mask.window), mask.keys)


def _not_packed(reason: str) -> NotImplementedError:
    return NotImplementedError(f'attn_implementation="tileattn": cu_seq_lens cannot go with {reason}')


def _joined(mask: MaskParts, keys: int) -> Seen:
    """The parts; a causal mask apart from the others, so that a plain causal call is one."""
    causal = isinstance(mask.window, Causal)
    rest: Any = None
    for part in mask.parts:
        if not isinstance(part, Causal):
            rest = part if rest is None else rest & part
    return Seen(keys, causal, rest)


def _check_agreement(module: torch.nn.Module, window: Mask | None, is_causal: bool | None) -> None:
    """A model's caller may pass is_causal=False, which reaches the layers but not the function that makes masks."""
    causal = isinstance(window, Causal) or getattr(window, "right", None) == 0
    if causal and is_causal is False and getattr(module, "is_causal", False):
        raise ValueError(
            "is_causal=False contradicts the model's causal mask; set model.config.is_causal = False instead, from "
            "which transformers makes the mask"
        )


def _given(mask: Tensor, kv_length: int) -> Seen:
    """A user's own mask."""
    if mask.ndim != 4:
        raise ValueError(
            f"attention_mask must have shape (batch or 1, heads or 1, queries or 1, keys), got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attention_mask must be bool, True where a query sees a key, or floating-point, added to the scores, got "
            f"{mask.dtype}"
        )
    if mask.dtype == torch.bool:
        return Seen(kv_length, mask=DenseMask(mask))
    return Seen(kv_length, bias=mask)


def _without_mask(
    module: torch.nn.Module, q_length: int, kv_length: int, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, Mask | None]:
    """(causal, mask) of a layer without a mask: its model did not ask for one, which only is_causal can mean."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError(
            f"{type(module).__name__} has neither a mask nor is_causal: tileattn cannot know which keys its queries see"
        )
    near = sliding_window is None or kv_length <= sliding_window
    if not is_causal:
        if not near:
            raise ValueError(
                f"sliding_window={sliding_window} without a mask and with is_causal=False: tileattn cannot know how "
                f"far a query sees to its right"
            )
        return False, None
    if 1 < q_length != kv_length:
        raise ValueError(
            f"a causal layer without a mask has {q_length} queries and {kv_length} keys: tileattn cannot know where "
            f"the queries stand"
        )
    if near:
        return q_length > 1, None
    assert sliding_window is not None
    return False, SlidingWindow(sliding_window - 1, 0)
