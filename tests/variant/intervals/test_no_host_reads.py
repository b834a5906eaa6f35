"""The analysis reads no tensor on the host, so that it runs in a CUDA graph.

On the meta device no element can be read, and no shape can depend on elements: any attempt raises. A dispatch mode
refuses what a graph cannot capture besides: copies between the host and the device.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tools.random_masks import KINDS, Generator
from tests.variant.intervals.test_patterns import PATTERNS
from tests.variant.intervals.test_soundness import RULES, rectangle
from tileattn import math as tm
from tileattn.variant.intervals.tiles import grid, numbers, tile_kinds, traced
from tileattn.variant.intervals.values import Ends

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item", "_unique2", "is_nonzero")


class OnDevice(TorchDispatchMode):
    """Every operation has operands on one device alone, and reads none of them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in READS), func
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        assert all(each.device.type == self.device for each in tensors), (func, tensors)
        self.count += 1
        return result


def on_meta(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in values.items()}


def kinds_on(device: str, allows: Any, values: dict[str, Any]) -> tuple[Tensor, int]:
    """Of 8 x 8 tiles in 3 batch elements and 2 heads."""
    with OnDevice(device) as mode:
        b, h = numbers(3, 4, device), numbers(2, 3, device)
        kinds = tile_kinds(allows, values, *grid(120, 128, 16, 16, device), b, h)
    return kinds, mode.count


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    case = rectangle(RULES[rule])
    kinds, _ = kinds_on("meta", case.expr, on_meta(case.values))
    assert kinds.device.type == "meta"
    assert kinds_on("cpu", case.expr, case.values)[0].shape == kinds.shape


LONG = ("anything", "bits", "choices")  # 5 to 10 s each


@pytest.mark.slow_cases("quotients and remainders", "floats", "affine comparisons, joined", reason="5 s each")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LONG)) for kind in KINDS])
def test_random_expressions(kind: str) -> None:
    for seed in range(40):
        case = Generator(Random(seed), kind, 64).mask()
        kinds_on("meta", case.expr, on_meta(case.values))


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str) -> None:
    allows, values = traced(PATTERNS[name])
    kinds_on("meta", allows, on_meta(values))


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip
LOADS: dict[str, Callable[[Tensor, Tensor], Callable[..., Any]]] = {
    "of a position": lambda table, index: lambda b, h, q, k: tm.load(table, q),
    "of a difference": lambda table, index: lambda b, h, q, k: tm.load(table, q - k + 60),
    "clamped": lambda table, index: lambda b, h, q, k: tm.load(table, tm.minimum(tm.maximum(k - 7, 0), 99)),
    "nested": lambda table, index: lambda b, h, q, k: tm.load(table, tm.load(index, q)),
    "nested, of a sum": lambda table, index: lambda b, h, q, k: tm.load(table, tm.load(index, q) + k),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("load", LOADS)
def test_loads(dtype: torch.dtype, load: str) -> None:
    table, index = (torch.arange(128) % 3).to(dtype), torch.arange(128).flip(0)
    element = LOADS[load](table, index)
    for case in (
        rectangle(lambda b, h, q, k: element(b, h, q, k) + 0 > 0),
        rectangle(lambda b, h, q, k: element(b, h, q, k) + 1 == element(b, h, q, k) * 2),
    ):
        kinds, _ = kinds_on("meta", case.expr, on_meta(case.values))
        assert kinds.shape[-2:] == (8, 8)


def test_positions_without_a_span() -> None:
    """A packed call's positions come from lengths on the device."""
    ends = torch.arange(0, 64, 16, device="meta")
    q, k = (ends[:, None], ends[:, None] + 15), Ends(ends, ends + 15, width=15)
    case = rectangle(RULES["the same on both sides"])
    assert tile_kinds(case.expr, {}, q, k, 0, torch.arange(2, device="meta")[:, None, None]).shape == (2, 4, 4)


def test_few_operations() -> None:
    """A number of operations that does not depend on lengths, of masks with a load: they are launches on a GPU."""

    def count(seqlen: int) -> int:
        ids = torch.zeros(1, seqlen, dtype=torch.int32, device="meta")
        case = rectangle(lambda b, h, q, k: (q >= k) & (tm.load(ids, b, q) == tm.load(ids, b, k)))
        with OnDevice("meta") as mode:
            tile_kinds(case.expr, case.values, *grid(seqlen, seqlen, 128, 128, "meta"), numbers(1, 4, "meta"))
        return mode.count

    assert count(1024) == count(65536) <= 85
