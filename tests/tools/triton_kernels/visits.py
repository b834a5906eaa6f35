"""Counts the tiles that Triton's kernels visit in its interpreter, by what they do in each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def count_visits(monkeypatch: pytest.MonkeyPatch, *kernels: ModuleType) -> dict[str, int]:
    """From here on "products" counts matrix products, and "masked" how often these modules' kernels ask their mask."""
    from triton.runtime.interpreter import InterpreterBuilder

    count = {"products": 0, "masked": 0}
    real_product, real_visible = InterpreterBuilder.create_dot, kernels[0].visible

    def product(*arguments: Any) -> Any:
        count["products"] += 1
        return real_product(*arguments)

    def visible(*arguments: Any) -> Any:
        count["masked"] += 1
        return real_visible(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    for module in kernels:
        monkeypatch.setattr(module, "visible", visible)
    return count
