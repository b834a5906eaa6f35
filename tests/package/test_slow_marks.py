"""The marks `slow_cases` and `slow_except` (tests/conftest.py) name cases that are there."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def test_each_names_a_case_of_its_test(request: pytest.FixtureRequest) -> None:
    """Of the tests that are collected besides this one. A misspelt name would leave a whole test out of `make test`."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU other cases are collected")
    if not all(map(importlib.util.find_spec, ("tilelang", "triton"))):
        pytest.skip("without TileLang or Triton fewer cases are collected")
    if any("::" in argument for argument in request.config.args):
        pytest.skip("a part of a test is collected")
    named = getattr(request.config, "named_cases", {})
    wrong = [f"{test}: {name}" for test, names in named.items() for name, is_it in names.items() if not is_it]
    assert wrong == []
