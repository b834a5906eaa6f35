"""Tests marked `gpu` are skipped without CUDA; `--kernels long` runs all lengths on the kernels for long sequences."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import torch

from tileattn.call import AttentionCall
from tileattn.kernels.tilelang import backend
from tileattn.kernels.tilelang.backward import backend as backward_backend
from tileattn.kernels.tilelang.config import Config
from tileattn.kernels.tilelang.defaults import LONG, default

if not torch.cuda.is_available():
    # Triton reads it when it is imported, and nothing imports it before a test does.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=("short", "long"),
        help="TileLang kernels of this bucket of lengths for calls of any length (default: what each call gets)",
    )


# What `backward.backend.SHORT` is under `--kernels`.
SHORT_QUERIES = {"short": 2**31, "long": 0}


def kernels_of(bucket: str) -> Callable[[AttentionCall, int], Config]:
    """What `backend.default` is under `--kernels`; benchmarks/precompile.py compiles the same."""
    seqlen = {"short": 1, "long": LONG}[bucket]

    def of_bucket(call: AttentionCall, _: int) -> Config:
        return default(call, seqlen)

    return of_bucket


def pytest_configure(config: pytest.Config) -> None:
    # No test reads or writes what this machine's user has tuned.
    os.environ["TILEATTN_TUNING_FILE"] = os.path.join(
        tempfile.gettempdir(), f"tileattn-tests-{os.getpid()}", "none.json"
    )
    bucket = config.getoption("--kernels")
    if bucket is not None:
        backend.default = kernels_of(bucket)  # type: ignore[assignment]
        backward_backend.SHORT = SHORT_QUERIES[bucket]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
