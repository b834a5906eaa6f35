"""tileattn: exact attention for PyTorch, written in TileLang."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "ALiBi",
    "Bias",
    "BlockSparse",
    "CacheStep",
    "Causal",
    "DecodePlan",
    "Dilated",
    "Documents",
    "FixedSplit",
    "FunctionMask",
    "GlobalTokens",
    "ImageTextDocuments",
    "KeyPadding",
    "LayerCache",
    "Mask",
    "Neighborhood",
    "PagedKVCache",
    "PrefixLM",
    "QuantizedFP8",
    "ScoreMod",
    "SlidingWindow",
    "SoftCap",
    "Strided",
    "Unpadded",
    "append_kv",
    "attention",
    "block_mask",
    "check_blocks",
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


def _is_command() -> bool:
    """Whether this process is `tileattn ...` or `python -m tileattn ...`."""
    program = next(iter(getattr(sys, "argv", ())), "")
    if program == "-m":  # Python is about to look for the module that it will run
        given = sys.orig_argv
        return "-m" in given and given[given.index("-m") + 1] == "tileattn"
    return program.replace("\\", "/").rpartition("/")[2] in ("tileattn", "tileattn.exe")


def _activate_flash_attention() -> Any:
    """Called by `torch.nn.attention.activate_flash_attention_impl("tileattn")`, which keeps the returned handle."""
    return importlib.import_module(".compat.torch_sdpa", __name__).Handle()


# The names are imported at once, because their modules register operators that PyTorch looks up by name, as
# `torch.export.load` does. Only in the process of the command `tileattn` does `__getattr__` import them when they are
# first used: importing torch takes seconds, and `tileattn bench --help` needs none of it.
if TYPE_CHECKING or not _is_command():
    from torch.nn.attention import register_flash_attention_impl

    from . import math as math  # not in __all__: `import *` would hide Python's `math`
    from .api.append import append_kv
    from .api.attention import attention
    from .api.block_mask import block_mask
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
    from .masks import (
        BlockSparse,
        Causal,
        Dilated,
        Documents,
        FunctionMask,
        GlobalTokens,
        ImageTextDocuments,
        KeyPadding,
        Mask,
        Neighborhood,
        PrefixLM,
        SlidingWindow,
        Strided,
        check_blocks,
    )
    from .scores import ALiBi, Bias, ScoreMod, SoftCap
    from .tuner.session import tuning

    # This makes the name known to PyTorch; the user activates the implementation.
    register_flash_attention_impl("tileattn", register_fn=_activate_flash_attention)

if TYPE_CHECKING:  # at run time `__getattr__` imports these when they are first used
    __version__: str
    from . import nn as nn
    from . import parallel as parallel
    from . import viz as viz
    from .profiling import profile as profile
    from .profiling import profile_all as profile_all
else:  # with a `__getattr__`, a type checker would accept every misspelt name
    # Where the names above are imported from.
    _MODULES = (
        "api.append",
        "api.attention",
        "api.block_mask",
        "api.cache_step",
        "api.decode",
        "api.kv_cache",
        "api.merge",
        "api.padding",
        "api.sdpa",
        "api.varlen",
        "call.cache_status",
        "call.decoding",
        "call.fp8",
        "call.packed_status",
        "masks",
        "scores",
        "tuner.session",
    )

    def __getattr__(name: str) -> Any:
        """Imports `nn`, `parallel`, `viz`, `profile`, `profile_all` at first use; in the command's process all."""
        if name == "__version__":
            return importlib.import_module(".installation", __name__).version()
        if name in ("math", "nn", "parallel", "viz"):
            return importlib.import_module(f".{name}", __name__)
        if name in ("profile", "profile_all"):
            # Importing a module sets the package's attribute of that name, so the module is not called "profile".
            return getattr(importlib.import_module(".profiling", __name__), name)
        if name in __all__:
            modules = (importlib.import_module(f".{module}", __name__) for module in _MODULES)
            found = next(getattr(module, name) for module in modules if hasattr(module, name))
            return globals().setdefault(name, found)  # so that the next use costs nothing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
