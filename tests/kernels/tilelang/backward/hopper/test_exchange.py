"""How dS and dQ go through shared memory in dense calls without modifications: lowered and assembled, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward.test_lowering import assert_registers_suffice, backward_of
from tests.tools.lowering import make_call
from tileattn import Causal, SoftCap
from tileattn.call.facts import BackwardCall
from tileattn.kernels.tilelang.backward.defaults import MainConfig, default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig
from tileattn.kernels.tilelang.backward.shares.choice import split

CALLS = {
    "plain-64": backward_of(make_call(dim=64)),
    "causal-64": backward_of(make_call(Causal(), dim=64)),
    "plain-128": backward_of(make_call()),
}


def exchange_of(config: MainConfig) -> tuple[int, bool, bool]:
    assert isinstance(config, HopperBackwardConfig)
    return config.adders, config.stores_first, config.words


@pytest.mark.parametrize("name", CALLS)
def test_both_halves_of_dq_have_a_warp_each(name: str) -> None:
    config = default(CALLS[name])
    assert isinstance(config, HopperBackwardConfig)
    assert config.adders == 2
    assert config.words == name.startswith("plain")
    assert config.stores_first == (name != "plain-64")


@pytest.mark.parametrize(
    "call",
    [
        backward_of(make_call(Causal())),
        backward_of(make_call(dim=96)),
        backward_of(make_call(packed=True)),
        backward_of(make_call(), deterministic=True),
        backward_of(make_call(None, SoftCap(30.0))),
    ],
    ids=["causal", "dim", "packed", "deterministic", "scored"],
)
def test_other_calls_keep_one_warp(call: BackwardCall) -> None:
    config = default(call)
    assert exchange_of(config) == (1, False, False)


@pytest.mark.parametrize("name", CALLS)
def test_shares_keep_what_gained_beside_them(name: str) -> None:
    config = split(CALLS[name], default(CALLS[name]), 2)
    assert exchange_of(config) == ((2, False, True) if name == "plain-64" else (1, False, False))


@pytest.mark.slow  # each is lowered and assembled in seconds
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_spilled_or_serialised(name: str, shares: int, tmp_path: Path) -> None:
    assert_registers_suffice(CALLS[name], shares, tmp_path)
