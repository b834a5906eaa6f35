"""FlexAttention's mask and score functions: how they are joined, and how they are checked.

A ``mask_mod(b, h, q_idx, kv_idx)`` and a ``score_mod(score, b, h, q_idx, kv_idx)`` count queries and keys from 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.nn.attention import flex_attention as torch_flex

Mod = Callable[..., Any]


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """A mask_mod that hides nothing."""
    return batch == batch


def and_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that allows what all of the given ones allow; everything if none is given.

    Raises:
        RuntimeError: one is not callable, as in PyTorch.
    """
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if not mask_mods:
            return b == b
        result = mask_mods[0](b, h, q_idx, kv_idx)
        for mask in mask_mods[1:]:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that allows what at least one of the given ones allows; nothing if none is given.

    Raises:
        RuntimeError: one is not callable, as in PyTorch.
    """
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if not mask_mods:
            return b != b
        result = mask_mods[0](b, h, q_idx, kv_idx)
        for mask in mask_mods[1:]:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _check_callable(mask_mods: tuple[Any, ...]) -> None:
    for mod in mask_mods:
        if not callable(mod):
            raise RuntimeError(f"All inputs should be callable mask_mods, got {type(mod).__name__}")


def is_noop(mask_mod: Any) -> bool:
    """Whether the mask_mod is known to hide nothing, so that it need not be evaluated."""
    return mask_mod is noop_mask or mask_mod is torch_flex.noop_mask


def check_mod(name: str, mod: Any, arguments: tuple[str, ...]) -> None:
    """Raises TypeError unless `mod` is a function of these arguments."""
    expected = f"{name} must be a function {name}({', '.join(arguments)})"
    if not callable(mod) or isinstance(mod, type):
        raise TypeError(f"{expected}, got {type(mod).__name__}")
    try:
        signature = inspect.signature(mod)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{expected}, got {getattr(mod, '__name__', type(mod).__name__)}{signature}: {error}") from None
