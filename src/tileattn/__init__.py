"""tileattn: exact attention for PyTorch, written in TileLang."""

from __future__ import annotations

import importlib
from typing import Any

from . import math
from .api import attention
from .fp8 import QuantizedFP8, quantize_fp8
from .masks import Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow
from .packed_status import check_packed
from .scores import ALiBi, Bias, ScoreMod, SoftCap
from .tuner.session import tuning
from .varlen import varlen_attention

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Bias",
    "Causal",
    "Documents",
    "FunctionMask",
    "Mask",
    "PrefixLM",
    "QuantizedFP8",
    "ScoreMod",
    "SlidingWindow",
    "SoftCap",
    "attention",
    "check_packed",
    "math",
    "quantize_fp8",
    "tuning",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    """What only some need is imported when it is first used: `tileattn.nn`, `tileattn.viz`, `tileattn.profile`."""
    if name in ("nn", "viz"):
        return importlib.import_module(f".{name}", __name__)
    if name in ("profile", "profile_all"):
        # The module has another name than the function: importing a module sets the package's attribute of its name.
        return getattr(importlib.import_module(".profiling", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
