"""Fills uninitialised memory with NaN, so that results that depend on it become visible."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic as deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills every uninitialised tensor that PyTorch makes inside: floats with NaN, integers with their maximum.

    It covers `torch.empty`, `empty_like`, `new_empty`, `empty_strided` and the scratch memory of PyTorch's own
    operators, on CPU and CUDA. Outputs that a kernel does not write, and padding that it must not read, become NaN. For
    tests only: it turns on PyTorch's deterministic algorithms, which may be slower.
    """
    mode = torch.get_deterministic_debug_mode()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            # Operators without a deterministic algorithm say so; here only the filled memory is of interest.
            warnings.filterwarnings("ignore", message=".*determinis.*", category=UserWarning)
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
