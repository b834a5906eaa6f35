"""The cache key of a compiled TileLang kernel: it depends on each fact of a call and on each version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang.build import library
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.config import ForwardConfig, HopperConfig
from tileattn.kernels.tilelang.forward.defaults import Config
from tileattn.kernels.tilelang.packed.library import plan_key

CALL = AttentionCall(torch.bfloat16, 128, 128, arch="sm_90a")
FP8_CALL = replace(CALL, dtype=FP8)
TILES = {"generic": ForwardConfig(128, 64, 2, 256), "hopper": HopperConfig(128, 128)}
# One change of each fact.
CHANGES: dict[str, Any] = {
    "dtype": torch.float16,
    "head_dim": 120,
    "head_dim_v": 120,
    "variant": "Causal()",
    "sink": True,
    "aligned": False,
    "return_lse": False,
    "dropout": True,
    "packed": True,
    "arch": "sm_100a",
}


@pytest.mark.parametrize("fact", CHANGES)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_each_fact_is_in_the_key(tile: Config, fact: str) -> None:
    """The configuration is fixed: defaults often differ by call, and would make the keys differ anyway."""
    assert launch.cache_key(CALL, tile) != launch.cache_key(replace(CALL, **{fact: CHANGES[fact]}), tile)


def test_the_configuration_is_in_the_key() -> None:
    tiles = [ForwardConfig(128, 64, 2, 256), ForwardConfig(64, 64, 2, 256), ForwardConfig(128, 32, 2, 256)]
    tiles += [ForwardConfig(128, 64, 1, 256), ForwardConfig(128, 64, 2, 128)]
    assert len({launch.cache_key(CALL, tile) for tile in tiles}) == len(tiles)


def test_facts_of_the_other_kernels() -> None:
    key = launch.transpose_key(FP8_CALL)
    assert key != launch.transpose_key(replace(FP8_CALL, head_dim_v=64))
    assert key != launch.transpose_key(replace(FP8_CALL, arch="sm_100a"))
    assert plan_key("sm_90a") != plan_key("sm_80")


# What makes a key of each kind of kernel.
KEYS: dict[str, Callable[[], str]] = {
    "forward": lambda: launch.cache_key(CALL, TILES["generic"]),
    "transpose": lambda: launch.transpose_key(FP8_CALL),
    "plan": lambda: plan_key("sm_90a"),
}


@pytest.mark.parametrize("key", KEYS)
def test_each_version_is_in_the_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of TileLang and of the compiler behind it. Tileattn's is not: the sources' digest says more."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(library, "version", lambda package: versions.get(package, "1"))
    monkeypatch.setattr(library, "device_compiler", lambda: versions.get("cuda", "1"))
    seen = []
    for changed in ({}, {"tileattn": "2"}, {"tilelang": "2"}, {"cuda": "2"}):
        versions.clear()
        versions.update(changed)
        library.toolchain.cache_clear()
        seen.append(KEYS[key]())
    library.toolchain.cache_clear()
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
