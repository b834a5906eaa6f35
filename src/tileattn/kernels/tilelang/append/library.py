"""The compiled kernels of append_kv: libraries and jobs. Imports neither TileLang nor its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....call.appending import AppendCall
from ..build.library import find_or_compile, load
from .job import AppendJob


@functools.cache
def append_function(call: AppendCall) -> Callable[..., Any]:
    """The compiled kernel of a call, from the cache on disk or compiled now."""
    return load(ensure_append_compiled(call))["append"]


def ensure_append_compiled(call: AppendCall) -> Path:
    """The shared library of :func:`append_function`."""
    return find_or_compile(AppendJob(call))


def append_key(call: AppendCall) -> str:
    """The cache key of a call's kernel."""
    return AppendJob(call).key
