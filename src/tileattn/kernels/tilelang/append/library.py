"""The compiled kernels of append_kv: keys and libraries. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....call.appending import AppendCall
from ..build.library import find_or_compile, key_of, load


@functools.cache
def append_function(call: AppendCall) -> Callable[..., Any]:
    """The compiled kernel of a call, from the cache on disk or compiled now."""
    return load(ensure_append_compiled(call))["append"]


def ensure_append_compiled(call: AppendCall) -> Path:
    """The shared library of :func:`append_function`."""

    def kernel() -> Any:
        from .kernel import append_kernel

        return append_kernel(call)

    return find_or_compile(append_key(call), kernel, call.arch)


def append_key(call: AppendCall) -> str:
    """The cache key of a call's kernel."""
    return key_of(str(call), "append.kernel")
