"""Memory that nobody wrote is NaN, so that a result which depends on it is seen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic as deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, every new tensor of PyTorch that is not initialised is filled: NaN for floats, the largest integer.

    That holds for `torch.empty`, `empty_like`, `new_empty`, `empty_strided` and the scratch memory of PyTorch's own
    operators, on CPU and CUDA: outputs that a kernel forgets to write, and padding that it should not read, become NaN.
    It is PyTorch's switch for deterministic algorithms, which may choose slower algorithms; so only for tests.
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
