"""Tests marked `gpu` are skipped without CUDA; `--kernels long` runs all lengths on the kernels for long sequences."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from tileattn.kernels.tilelang import buckets
from tileattn.measure import busy

if not torch.cuda.is_available():
    # Triton reads it when it is imported, and nothing imports it before a test does.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Importing the packages and collecting makes millions of objects that stay, which the garbage collector would look at
# again and again: a quarter of the time that collecting takes.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=tuple(buckets.BUCKETS),
        help="TileLang kernels of this bucket of lengths for calls of any length (default: what each call gets)",
    )


def pytest_configure(config: pytest.Config) -> None:
    busy.STAT = Path("/absent")  # there `tileattn bench` would see the tests that run beside it
    # No test reads or writes what this machine's user has tuned.
    os.environ["TILEATTN_TUNING_FILE"] = os.path.join(
        tempfile.gettempdir(), f"tileattn-tests-{os.getpid()}", "none.json"
    )
    bucket = config.getoption("--kernels")
    if bucket is not None:
        only = buckets.only(bucket)
        only.__enter__()
        config.add_cleanup(lambda: only.__exit__(None, None, None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is there now is left out of later collections
    gc.enable()
