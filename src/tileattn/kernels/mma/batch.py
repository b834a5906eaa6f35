"""Compiles many kernels of the ladder in parallel threads; NVRTC releases Python's global lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .launch import ensure_compiled
from .rungs import Kernel

MAX_THREADS = 16


def compile_all(kernels: Sequence[Kernel], arch: str) -> list[Exception | None]:
    """Compiles the kernels that are not in the cache. Returns the exception of each kernel, or None."""

    def attempt(kernel: Kernel) -> Exception | None:
        try:
            ensure_compiled(kernel, arch)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(attempt, kernels))
