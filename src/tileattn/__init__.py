"""tileattn: exact attention for PyTorch, written in TileLang."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.nn.attention import register_flash_attention_impl

from . import math as math  # not in __all__: `import *` would hide Python's `math`
from .api.append import append_kv
from .api.attention import attention
from .api.cache_step import CacheStep, LayerCache
from .api.decode import decode, decode_plan
from .api.kv_cache import PagedKVCache
from .api.merge import merge
from .api.padding import Unpadded, pad_input, unpad_input
from .api.sdpa import scaled_dot_product_attention
from .api.varlen import varlen_attention
from .call.cache_status import check_caches
from .call.decoding import DecodePlan, FixedSplit
from .call.fp8 import QuantizedFP8, quantize_fp8
from .call.packed_status import check_packed
from .masks import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow
from .scores import ALiBi, Bias, ScoreMod, SoftCap
from .tuner.session import tuning

if TYPE_CHECKING:  # at run time `__getattr__` below imports these when they are first used
    from . import nn as nn
    from . import viz as viz
    from .profiling import profile as profile
    from .profiling import profile_all as profile_all

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Bias",
    "CacheStep",
    "Causal",
    "DecodePlan",
    "Documents",
    "FixedSplit",
    "FunctionMask",
    "KeyPadding",
    "LayerCache",
    "Mask",
    "PagedKVCache",
    "PrefixLM",
    "QuantizedFP8",
    "ScoreMod",
    "SlidingWindow",
    "SoftCap",
    "Unpadded",
    "append_kv",
    "attention",
    "check_caches",
    "check_packed",
    "decode",
    "decode_plan",
    "merge",
    "pad_input",
    "quantize_fp8",
    "scaled_dot_product_attention",
    "tuning",
    "unpad_input",
    "varlen_attention",
]


def _activate_flash_attention() -> Any:
    """Called by `torch.nn.attention.activate_flash_attention_impl("tileattn")`, which keeps the returned handle."""
    return importlib.import_module(".compat.torch_sdpa", __name__).Handle()


# This makes the name known to PyTorch; the user activates the implementation.
register_flash_attention_impl("tileattn", register_fn=_activate_flash_attention)


if not TYPE_CHECKING:  # with a `__getattr__`, a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        """Imports `nn`, `viz`, `profile` and `profile_all` at their first use, so that `import tileattn` stays fast."""
        if name in ("nn", "viz"):
            return importlib.import_module(f".{name}", __name__)
        if name in ("profile", "profile_all"):
            # Importing a module sets the package's attribute of that name, so the module is not called "profile".
            return getattr(importlib.import_module(".profiling", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
