"""tileattn: exact attention for PyTorch, written in TileLang."""

from __future__ import annotations

import importlib
from types import ModuleType

from . import math
from .api import attention
from .fp8 import QuantizedFP8, quantize_fp8
from .masks import Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow
from .scores import ALiBi, Bias, ScoreMod, SoftCap
from .tuner.session import tuning

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
    "math",
    "quantize_fp8",
    "tuning",
]


def __getattr__(name: str) -> ModuleType:
    """`tileattn.nn` is imported when it is first used."""
    if name == "nn":
        return importlib.import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
