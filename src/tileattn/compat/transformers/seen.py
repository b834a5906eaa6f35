"""Which keys a query sees, from the arguments that transformers passes to an attention function."""

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
    """The visible keys, as arguments of :func:`tileattn.attention`.

    keys: how many keys to pass, from the first. causal, mask: as for `attention`. bias: added to the scores, or None.
    """

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
    """The visible keys of a call that is not packed; arguments as for :func:`.attention.attend`.

    A mask alone decides, as in transformers' eager attention. Without a mask, `is_causal` and `sliding_window` decide.

    Raises:
        TypeError, ValueError: the arguments contradict each other, or leave open which keys are visible.
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
    """The visible keys of a query's own sequence in a call with cu_seq_lens; arguments as for `seen`.

    The mask may also contain the sequences, which transformers reads from position_ids. That part is not used:
    cu_seq_lens gives the sequences.

    Raises:
        NotImplementedError: the mask contains more than the sequences and a window.
    """
    if mask is None:
        # Each sequence is taken to have as many keys as queries: checking would read lengths from the device.
        return Seen(kv_length, *_without_mask(module, q_length, q_length, is_causal, sliding_window))
    if not isinstance(mask, MaskParts):
        raise _not_packed("a mask of your own: leave attention_mask out")
    if mask.dense is not None:  # a dense mask includes the padding
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
    """The conjunction of the parts. A causal part becomes `causal`, so that a plain causal call has no other mask."""
    causal = isinstance(mask.window, Causal)
    rest: Any = None
    for part in mask.parts:
        if not isinstance(part, Causal):
            rest = part if rest is None else rest & part
    return Seen(keys, causal, rest)


def _check_agreement(module: torch.nn.Module, window: Mask | None, is_causal: bool | None) -> None:
    """Raises if a caller passes is_causal=False to a causal model: layers receive it, but `make_mask` does not."""
    causal = isinstance(window, Causal) or getattr(window, "right", None) == 0
    if causal and is_causal is False and getattr(module, "is_causal", False):
        raise ValueError(
            "is_causal=False contradicts the model's causal mask; set model.config.is_causal = False instead, from "
            "which transformers makes the mask"
        )


def _given(mask: Tensor, kv_length: int) -> Seen:
    """The visible keys under a user's mask: a tensor of bools, or of numbers to add to the scores."""
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
    """(causal, mask) of a layer whose model made no mask, from is_causal and sliding_window."""
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
