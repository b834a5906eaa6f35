"""Products that leave out padding of the head dim: which columns, what is lowered, and what ptxas makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward.test_lowering import assert_registers_suffice, backward_of
from tests.tools.lowering import TILES, make_call
from tileattn import Bias, Causal, SlidingWindow
from tileattn.kernels.tilelang.backward.defaults import default, short_default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig
from tileattn.kernels.tilelang.backward.kernels import main_kernel
from tileattn.kernels.tilelang.backward.shares.choice import split
from tileattn.kernels.tilelang.backward.space import candidates
from tileattn.kernels.tilelang.build.compile import device_source

TILE = HopperBackwardConfig(64, unpadded=True)
STEPS = re.compile(
    r"ki\w* < (\d+);[^\n]*\n\s*"
    r"tl::wgmma_(ss|rs)<[^>]*?kFloat32, 64, (\d+), 16, (true|false), (true|false)"
)


def products(dim: int, config: HopperBackwardConfig) -> list[tuple[int, str, int, bool, bool]]:
    """Of each product its steps, where the first operand lies, columns, and which operands have theirs in rows."""
    source = device_source(main_kernel(backward_of(make_call(dim=dim)), config), "sm_90a")
    found = STEPS.findall(source)
    return [(int(steps), kind, int(n), a == "true", b == "true") for steps, kind, n, a, b in found]


@pytest.mark.parametrize(
    ("dims", "used"),
    [
        ((80, 80), {96: 80}),
        ((112, 112), {128: 112}),
        ((72, 72), {96: 80}),
        ((112, 80), {128: 112, 96: 80}),
        ((128, 112), {}),  # one width for both: the larger head dim needs all of it
        ((96, 96), {}),
        ((64, 64), {}),
    ],
)
def test_used_columns(dims: tuple[int, int], used: dict[int, int]) -> None:
    call = make_call(dim=dims[0], dim_v=dims[1])
    assert TILE.used_columns(call) == used
    assert HopperBackwardConfig(64).used_columns(call) == {}


@pytest.mark.slow_cases("80-96", reason="lowers and assembles a kernel, 6 s")
@pytest.mark.parametrize(("dim", "width"), [(80, 96), pytest.param(112, 128, marks=pytest.mark.slow)])
def test_products_have_the_columns_of_the_head_dim(dim: int, width: int) -> None:
    padded, unpadded = products(dim, HopperBackwardConfig(64)), products(dim, TILE)
    assert len(padded) == len(unpadded) == 5
    s, dp, dv, dq, dk = unpadded
    for product in (s, dp):  # over the head dim
        assert product == (dim // 16, "ss", 64, False, False)
    for product in (dv, dk):  # whose columns are the head dim
        assert product == (4, "rs", dim, False, True)
    assert dq == padded[3]  # its warpgroups share whole panels of K
    assert padded[0][0] == width // 16
    assert padded[2][2] == width


@pytest.mark.slow(reason="6 s")
def test_other_head_dims_keep_their_kernel() -> None:
    assert products(96, TILE) == products(96, HopperBackwardConfig(64))


EXCHANGE: dict[str, Any] = {"adders": 2, "stores_first": True, "words": True}
CALLS = {
    "plain-80": backward_of(make_call(dim=80)),
    "causal-80": backward_of(make_call(Causal(), dim=80)),
    "plain-112": backward_of(make_call(dim=112)),
    "causal-112": backward_of(make_call(Causal(), dim=112)),
    "causal-128/80": backward_of(make_call(Causal(), dim=128, dim_v=80)),
    "packed-causal-112": backward_of(make_call(Causal(), dim=112, packed=True)),
    "window-112": backward_of(make_call(SlidingWindow(5, 0), dim=112)),
    "dropout-80": backward_of(make_call(dim=80, dropout=True)),
    "bias-tiles-80": backward_of(make_call(None, Bias(TILES), dim=80)),
    "deterministic-causal-112": backward_of(make_call(Causal(), dim=112), deterministic=True),
}


def test_calls_with_padding_leave_it_out() -> None:
    """With the tiles and the exchange of dS that were measured with it."""
    chosen = {name: default(call) for name, call in CALLS.items()}
    assert all(isinstance(config, HopperBackwardConfig) and config.unpadded for config in chosen.values())
    tiles = {name: config.block_M for name, config in chosen.items() if "causal" in name}
    assert tiles == {
        "causal-80": 64,
        "causal-112": 64,
        "causal-128/80": 80,
        "packed-causal-112": 64,
        "deterministic-causal-112": 80,
    }
    assert chosen["plain-80"] == HopperBackwardConfig(64, unpadded=True, **EXCHANGE)
    assert chosen["plain-112"] == HopperBackwardConfig(80, unpadded=True, **EXCHANGE)
    assert chosen["causal-80"] == chosen["causal-112"] == TILE
    assert short_default(CALLS["causal-112"]) is None
    for dim in (64, 96, 128, 160):
        config = default(backward_of(make_call(dim=dim)))
        assert isinstance(config, HopperBackwardConfig)
        assert not config.unpadded


@pytest.mark.parametrize(("name", "block_M"), [("plain-80", 64), ("plain-112", 80), ("causal-112", 64)])
def test_shares_leave_it_out(name: str, block_M: int) -> None:
    config = split(CALLS[name], default(CALLS[name]), 2)
    assert config == HopperBackwardConfig(block_M, split=True, unpadded=True)


def test_so_do_all_configurations_of_the_tuner() -> None:
    for call, unpadded in ((CALLS["plain-80"], True), (backward_of(make_call(dim=96)), False)):
        found = candidates(call)
        assert len(found) > 1
        assert {config.unpadded for config in found if isinstance(config, HopperBackwardConfig)} == {unpadded}


@pytest.mark.slow  # each is lowered and assembled in seconds
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", ["plain-80", "plain-112", "causal-112"])
def test_nothing_is_spilled_or_serialised(name: str, shares: int, tmp_path: Path) -> None:
    assert_registers_suffice(CALLS[name], shares, tmp_path)
