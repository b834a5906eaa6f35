"""transformers' attention masks as tileattn's masks, instead of a bool tensor (batch, 1, queries, keys).

transformers calls :func:`make_mask`, the function registered for the attention implementation, once for all layers of
a model and passes the result, a :class:`MaskParts`, to each layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call.inputs import Operands
from ...runtime.few_queries import MOST_QUERIES
from ...runtime.operators import is_traced
from ...variant.key import encode
from ...variant.masks import Causal, Documents, KeyPadding, Mask, SlidingWindow
from ...variant.program import restore
from .patterns import DenseMask, ShiftedWindow
from .symbols import Pattern, understood


@dataclass(frozen=True, eq=False)
class MaskParts:
    """A boolean mask (batch, 1, q_length, kv_length) as the conjunction of tileattn's masks.

    It is not a tensor. If a model computes with its mask instead of only passing it to its attention, it gets an error:
    the result would depend on whether the model expects bools or numbers to add, which tileattn cannot know.

    Attributes:
        shape: (batch, 1, q_length, kv_length).
        device: the device of the parts' tensors.
        keys: no query sees a key from this index on; the parts describe only the keys before it.
        window: allows keys by their distance from the query; None: all.
        sequences: allows keys of the query's packed sequence; None: all.
        padding: allows keys that are not padding; None: all.
        dense: a mask in memory, for masks that the other parts cannot express; None: all.
        filled: int32 (batch,), of a causal step on a static cache: how many slots are filled; the queries stand at the
            last of them. None for other calls. It says the same as the window, which is shifted.
        calls: the calls that the layers of the step share (layers.py).
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    keys: int
    window: Mask | None = None
    sequences: Mask | None = None
    padding: Mask | None = None
    dense: Mask | None = None
    filled: Tensor | None = None
    calls: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    ndim = 4
    dtype = torch.bool

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The parts that are not None."""
        parts = (self.window, self.sequences, self.padding, self.dense)
        return tuple(part for part in parts if part is not None)

    def tensor(self) -> Tensor:
        """The mask as a bool tensor (batch, 1, q_length, kv_length)."""
        batch, _, q_length, kv_length = self.shape
        b, q, k = (torch.arange(size, device=self.device) for size in (batch, q_length, self.keys))
        index = (b[:, None, None, None], 0, (q + (self.keys - q_length))[:, None], k)
        everything = torch.ones(batch, 1, q_length, self.keys, dtype=torch.bool, device=self.device)
        return F.pad(reduce(and_, (part.allows(*index) for part in self.parts), everything), (0, kv_length - self.keys))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> MaskParts:
        """A copy on another device, for models whose layers are on several devices."""
        if isinstance(device, torch.dtype):
            raise _is_no_tensor(f"to({device})")
        device = torch.device(device)
        window, sequences, padding, dense = (
            _moved(part, device) for part in (self.window, self.sequences, self.padding, self.dense)
        )
        filled = None if self.filled is None else self.filled.to(device)
        return MaskParts(self.shape, device, self.keys, window, sequences, padding, dense, filled)

    def contiguous(self) -> MaskParts:
        """Returns self; newer versions of transformers call this method of every mask."""
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
    of_shard: bool = False,
    **_: Any,
) -> MaskParts:
    """The function that transformers calls to make a mask; the arguments are those of its ``sdpa_mask``.

    There is no host-device synchronisation: on a GPU a padding mask is kept even if it hides nothing. With `of_shard`
    the lengths are those of a shard of the sequence. Then a window that is wider than the shard stays, and a padding
    mask is read, also on a GPU, for one that hides nothing is all that shards may have.

    Raises:
        ValueError: attention_mask does not have shape (batch, keys).
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(attention_mask, MaskParts):  # `generate` with a static cache makes the mask before the model runs
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape (batch, keys), or (batch, heads or 1, queries, keys), "
            f"got {tuple(attention_mask.shape)}"
        )
    device = torch.device(device)
    shape = (batch_size, 1, q_length, kv_length)
    mask_function = mask_function or causal_mask_function
    # A user's function (use_vmap) may compute with positions in ways that the symbols do not support.
    pattern = None if use_vmap else understood(mask_function)
    shift = q_offset - kv_offset - (kv_length - q_length)
    aligned = not isinstance(shift, Tensor) and shift == 0
    stop = kv_offset + kv_length
    expressible = pattern is not None and (
        pattern.sequences is None or (aligned and pattern.sequences.shape[1] >= stop)
    )
    if pattern is None or not expressible:
        dense = _dense(shape, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device)
        return MaskParts(shape, device, kv_length, dense=dense)
    keys, window = _window(pattern, q_length, kv_length, shift, device, of_shard)
    sequences = None if pattern.sequences is None else Documents(pattern.sequences[:, kv_offset:stop])
    is_read = attention_mask is not None and (of_shard or attention_mask.device.type == "cpu")
    if attention_mask is not None and is_read and not is_traced(attention_mask):
        # The keys that the last query may see: of a static cache, those before the unused slots.
        seen = min(keys, kv_length + int(shift)) if pattern.right == 0 else keys
        if attention_mask.shape[1] >= kv_offset + seen and attention_mask.all():
            attention_mask = None
    padding = None if attention_mask is None else _padding(attention_mask, kv_offset, keys)
    filled = None
    if isinstance(window, ShiftedWindow) and pattern.right == 0 and sequences is None and q_length <= MOST_QUERIES:
        filled = _filled(batch_size, kv_length, shift, device)
    return MaskParts(shape, device, keys, window, sequences, padding, filled=filled)


def _window(
    pattern: Pattern, q_length: int, kv_length: int, shift: int | Tensor, device: torch.device, of_shard: bool
) -> tuple[int, Mask | None]:
    """The number of keys that any query can see, and the window.

    shift: the last query's position in the sequence minus the last key's. of_shard: whether the lengths are a shard's,
    so that they make no bound superfluous.
    """
    left, right, keys = pattern.left, pattern.right, kv_length
    if left is None and right is None:
        return keys, None
    if isinstance(shift, Tensor):
        return keys, ShiftedWindow(left, right, shift.reshape(1).to(torch.int32))
    if shift < 0 and right == 0 and q_length > 1:
        keys, shift = kv_length + shift, 0  # no query sees the unused cache slots after the last query
    if shift != 0:
        # A tensor, so that torch.compile does not compile a generation step again for each shift.
        return keys, ShiftedWindow(left, right, torch.full((1,), shift, dtype=torch.int32, device=device))
    if not of_shard:
        left = None if left is None or left >= keys - 1 else left
        right = None if right is None or right >= q_length - 1 else right
    if left is None and right == 0:
        return keys, Causal()
    return keys, None if left is None and right is None else SlidingWindow(left, right)


def _filled(batch_size: int, kv_length: int, shift: int | Tensor, device: torch.device) -> Tensor | None:
    """How many slots of a static cache are filled; None if queries stand behind the last slot, as with other caches."""
    if isinstance(shift, Tensor):
        return (shift + kv_length).to(torch.int32).expand(batch_size).contiguous()
    return torch.full((batch_size,), kv_length + shift, dtype=torch.int32, device=device) if shift < 0 else None


def _padding(attention_mask: Tensor, kv_offset: int, keys: int) -> Mask:
    """The padding mask of `keys` keys from kv_offset on. Keys after the end of attention_mask are unused and hidden."""
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
    """The mask as a tensor in memory, made by transformers' `sdpa_mask`."""
    from transformers.masking_utils import sdpa_mask

    batch_size, _, q_length, kv_length = shape
    visible = sdpa_mask(
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
    return DenseMask(visible)
