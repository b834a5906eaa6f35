"""`get_attention`: an attention module by its name, for configuration files and command lines."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..runtime.run import MaskLike
from .base import SelfAttention, check_positive
from .flash import FlashAttentionV1, FlashAttentionV2
from .grouped import GroupedQueryAttention, MultiQueryAttention
from .masked import MaskedAttention, SlidingWindowAttention
from .naive import NaiveAttention
from .triton_flash import TritonFlashAttention

CLASSES: dict[str, type[SelfAttention]] = {
    "naive": NaiveAttention,
    "flash_v1": FlashAttentionV1,
    "flash_v2": FlashAttentionV2,
    "sliding_window": SlidingWindowAttention,
    "gqa": GroupedQueryAttention,
    "grouped_query": GroupedQueryAttention,
    "mqa": MultiQueryAttention,
    "multi_query": MultiQueryAttention,
    "masked": MaskedAttention,
    "triton": TritonFlashAttention,
    "triton_flash": TritonFlashAttention,
}
# What an argument is that only this function lets be left out.
DEFAULTS = {"num_kv_heads": 1, "window_size": 4096}


def get_attention(
    name: str,
    embed_dim: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    block_size: int | None = None,
    dropout: float = 0.0,
    bias: bool = True,
    causal: bool = False,
    window_size: int | None = None,
    mask: MaskLike | None = None,
    chunk_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SelfAttention:
    """Creates the attention module called `name`.

    Args:
        name: "naive", "flash_v1", "flash_v2", "sliding_window", "gqa" or "grouped_query", "mqa" or "multi_query",
            "masked", "triton" or "triton_flash". Case does not matter, nor whether words are joined by ``_``, ``-`` or
            a space: "Flash-V2" is "flash_v2".
        embed_dim: width of x and of the output.
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values; None: num_heads; for "gqa" 1, which is "mqa"; "mqa" has 1.
        block_size: rows in a tile; None: 64. Only for "flash_v1" and "flash_v2".
        dropout: probability of dropping an attention weight in training; must be 0 for "triton".
        bias: whether the projections add a bias.
        causal: whether a position sees only itself and earlier positions.
        window_size: a position sees positions less than this far away; None: 4096. Only for "sliding_window".
        mask: a mask of :mod:`tileattn.masks` or a function. Only for "masked" and "naive".
        chunk_size: queries of a call with `attn_mask` that are computed at a time. Only for "masked".
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError, ValueError: no module has this name; the message lists the names.
        TypeError, ValueError: an argument is wrong, missing, or not one of this module.
    """
    cls = _class(name)
    if cls is MultiQueryAttention and num_kv_heads is not None:
        num_kv_heads = check_positive("num_kv_heads", num_kv_heads)
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads must be 1 or None for {name!r}, got {num_kv_heads}")
        num_kv_heads = None
    own: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "window_size": window_size,
        "mask": mask,
        "chunk_size": chunk_size,
    }
    given = {option: value for option, value in own.items() if value is not None}
    parameters = inspect.signature(cls).parameters
    for option in given:
        if option not in parameters:
            raise TypeError(f"{name!r} takes no {option}, got {given[option]!r}")
    for option in own:
        if option in parameters and option not in given and parameters[option].default is inspect.Parameter.empty:
            given[option] = DEFAULTS[option]
    return cls(embed_dim, num_heads, **given, dropout=dropout, bias=bias, causal=causal, device=device, dtype=dtype)


def _class(name: Any) -> type[SelfAttention]:
    accepted = f"name must be one of {', '.join(CLASSES)}"
    if not isinstance(name, str):
        raise TypeError(f"{accepted}, got {name!r}")
    folded = name.lower().replace("-", "_").replace(" ", "_")
    if folded not in CLASSES:
        raise ValueError(f"Unknown attention type: {accepted}, got {name!r}")
    return CLASSES[folded]
