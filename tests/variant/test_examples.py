"""The examples in the docstrings of `tileattn.variant` run, and show what is printed."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tileattn.variant

MODULES = [module.name for module in pkgutil.iter_modules(tileattn.variant.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"tileattn.variant.{name}")).failed == 0
