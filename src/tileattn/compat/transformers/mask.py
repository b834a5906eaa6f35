"""Attention masks between transformers and tileattn: what they are made of, instead of (batch, 1, queries, keys) bools.

transformers makes a model's masks once for all layers, through the function that is registered for an attention
implementation (:func:`make_mask`), and hands what it returns to each layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call.inputs import Operands
from ...variant.key import encode
from ...variant.masks import Causal, Documents, KeyPadding, Mask, SlidingWindow
from ...variant.program import restore
from .patterns import DenseMask, ShiftedWindow
from .symbols import Pattern, understood


@dataclass(frozen=True, eq=False)
class MaskParts:
    """A boolean mask (batch, 1, q_length, kv_length), held as what it is made of, for tileattn's attention to read.

    It is no tensor. A model that computes with its mask, instead of handing it on to its attention, gets an error: what
    it would do depends on whether it expects bools or numbers to be added, which tileattn cannot know.

    Attributes:
        shape: as above.
        device: where its tensors are.
        keys: how many of the keys, from the first on, any query may see; the parts know no others.
        window: which keys are near enough, or None for all.
        sequences: which keys are of the same packed sequence, or None.
        padding: which keys are no padding, or None.
        dense: a mask that none of the other parts can say, or None.
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    keys: int
    window: Mask | None = None
    sequences: Mask | None = None
    padding: Mask | None = None
    dense: Mask | None = None

    ndim = 4
    dtype = torch.bool

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The parts that there are."""
        parts = (self.window, self.sequences, self.padding, self.dense)
        return tuple(part for part in parts if part is not None)

    def tensor(self) -> Tensor:
        """The mask itself: bool (batch, 1, q_length, kv_length)."""
        batch, _, q_length, kv_length = self.shape
        b, q, k = (torch.arange(size, device=self.device) for size in (batch, q_length, self.keys))
        index = (b[:, None, None, None], 0, (q + (self.keys - q_length))[:, None], k)
        everything = torch.ones(batch, 1, q_length, self.keys, dtype=torch.bool, device=self.device)
        return F.pad(reduce(and_, (part.allows(*index) for part in self.parts), everything), (0, kv_length - self.keys))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> MaskParts:
        """On another device, as where a model's layers are on several."""
        if isinstance(device, torch.dtype):
            raise _is_no_tensor(f"to({device})")
        device = torch.device(device)
        window, sequences, padding, dense = (
            _moved(part, device) for part in (self.window, self.sequences, self.padding, self.dense)
        )
        return replace(self, device=device, window=window, sequences=sequences, padding=padding, dense=dense)

    def contiguous(self) -> MaskParts:
        """Itself: newer versions of transformers ask every mask for it."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _is_no_tensor(f"torch's {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(str(_is_no_tensor(name)))

    def __getitem__(self, index: Any) -> Any:
        raise _is_no_tensor("indexing")


def _is_no_tensor(operation: str) -> NotImplementedError:
    return NotImplementedError(
        f"this model computes with its attention mask ({operation}), which is no tensor with "
        f'attn_implementation="tileattn": load the model with attn_implementation="eager" or "sdpa"'
    )


def _moved(part: Mask | None, device: torch.device) -> Mask | None:
    if part is None:
        return None
    key, operands = encode(part, ())
    return restore(key, Operands([t.to(device) for t in operands.tensors], operands.ints, operands.floats))[0]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | MaskParts | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> MaskParts:
    """What transformers calls to make a mask; arguments as of its ``sdpa_mask``, of which those for others are ignored.

    Nothing waits for the device: whether a padding mask hides anything is not asked.

    Raises:
        ValueError: attention_mask is not (batch, keys).
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(attention_mask, MaskParts):  # made ahead, as `generate` does with a static cache
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, keys), or (batch, heads or 1, queries, keys), "
            f"got {tuple(attention_mask.shape)}"
        )
    device = torch.device(device)
    shape = (batch_size, 1, q_length, kv_length)
    mask_function = mask_function or causal_mask_function
    # A function of the user's own (use_vmap) may do with positions what the symbols cannot tell.
    pattern = None if use_vmap else understood(mask_function)
    shift = q_offset - kv_offset - (kv_length - q_length)
    aligned = not isinstance(shift, Tensor) and shift == 0
    stop = kv_offset + kv_length
    in_one_place = pattern is not None and (
        pattern.sequences is None or (aligned and pattern.sequences.shape[1] >= stop)
    )
    if pattern is None or not in_one_place:
        dense = _dense(shape, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device)
        return MaskParts(shape, device, kv_length, dense=dense)
    keys, window = _window(pattern, q_length, kv_length, shift, device)
    sequences = None if pattern.sequences is None else Documents(pattern.sequences[:, kv_offset:stop])
    padding = None if attention_mask is None else _padding(attention_mask, kv_offset, keys)
    return MaskParts(shape, device, keys, window, sequences, padding)


def _window(
    pattern: Pattern, q_length: int, kv_length: int, shift: int | Tensor, device: torch.device
) -> tuple[int, Mask | None]:
    """How many keys can be seen at all, and the window. The last query stands `shift` behind the last key."""
    left, right, keys = pattern.left, pattern.right, kv_length
    if left is None and right is None:
        return keys, None
    if isinstance(shift, Tensor):
        return keys, ShiftedWindow(left, right, shift.reshape(1).to(torch.int32))
    if shift < 0 and right == 0 and q_length > 1:
        keys, shift = kv_length + shift, 0  # nobody sees the unused slots behind the last query
    if shift != 0:
        # On the device, so that a compiled step of a generation is the same for all places.
        place = torch.full((1,), shift, dtype=torch.int32, device=device)
        return keys, ShiftedWindow(left, right, place)
    left = None if left is None or left >= keys - 1 else left
    right = None if right is None or right >= q_length - 1 else right
    if left is None and right == 0:
        return keys, Causal()
    return keys, None if left is None and right is None else SlidingWindow(left, right)


def _padding(attention_mask: Tensor, kv_offset: int, keys: int) -> Mask:
    """What a padding mask from position 0 on says of some keys; those beyond it are not there yet."""
    missing = kv_offset + keys - attention_mask.shape[1]
    if missing > 0:
        attention_mask = F.pad(attention_mask, (0, missing))
    return KeyPadding(attention_mask[:, kv_offset : kv_offset + keys].to(torch.bool))


def _dense(
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    use_vmap: bool,
    device: torch.device,
) -> Mask:
    from transformers.masking_utils import sdpa_mask

    batch_size, _, q_length, kv_length = shape
    seen = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return DenseMask(seen)
