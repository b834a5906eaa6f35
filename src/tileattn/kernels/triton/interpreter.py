"""Triton's interpreter, which runs kernels on a CPU instead of compiling them."""

from __future__ import annotations

import os

INTERPRET = "TRITON_INTERPRET"


def interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them; it looks once, when it is imported."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "on", "yes", "y")
