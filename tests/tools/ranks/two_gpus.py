"""Tests on two GPUs: their marks, and the pool of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tools.ranks.pools import Pool, pool, returned

LIMIT = 150.0  # seconds; a kernel may have to be compiled
MARKS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def two() -> Pool:
    """The pool of two ranks with NCCL."""
    return pool(2, "cuda")


def on_both(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returned on both ranks; fails if it raised."""
    return returned(two().run(function, *arguments, limit=LIMIT))
