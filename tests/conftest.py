"""Tests marked `gpu` are skipped without CUDA; `--kernels long` runs all lengths on the kernels for long sequences."""

from __future__ import annotations

import gc
import os
import re
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


def pytest_itemcollected(item: pytest.Item) -> None:
    """`slow_cases` and `slow_except` name cases of a test by their ids, in which * is anything."""
    for mark in (*item.iter_markers("slow_cases"), *item.iter_markers("slow_except")):
        if _is_named(item, mark.args) == (mark.name == "slow_cases"):
            item.add_marker(pytest.mark.slow(reason=mark.kwargs["reason"]))


def _named_cases(config: pytest.Config) -> dict[str, dict[str, bool]]:
    """By test, whether each pattern of its marks has named a case."""
    if not hasattr(config, "named_cases"):
        config.named_cases = {}  # type: ignore[attr-defined]
    return config.named_cases  # type: ignore[attr-defined, no-any-return]


def _is_named(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns is the case's id. What each has named is noted for test_slow_marks.py."""
    name = item.callspec.id  # type: ignore[attr-defined]
    found = {pattern: bool(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name)) for pattern in patterns}
    noted = _named_cases(item.config).setdefault(item.nodeid.partition("[")[0], {})
    noted.update({pattern: noted.get(pattern, False) or is_it for pattern, is_it in found.items()})
    return any(found.values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is there now is left out of later collections
    gc.enable()
