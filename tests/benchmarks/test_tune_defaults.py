"""The tuned table of the Hopper schedule, and the script that writes it, without a GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.tools import ROOT
from tileattn import Causal, Documents, KeyPadding, Mask, PrefixLM, SlidingWindow
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.forward import defaults, sm90_table
from tileattn.kernels.tilelang.forward.candidates import fits_registers, hopper_candidates
from tileattn.kernels.tilelang.forward.config import HopperConfig, is_valid
from tileattn.variant.key import encode

# The script's child processes find it by its name.
sys.path.insert(0, str(ROOT / "benchmarks"))

import tune_defaults
from tune_defaults import Name, Row

NAMES = tune_defaults.names()


def test_the_table_has_all_rows_in_order() -> None:
    assert list(sm90_table.TABLE) == NAMES


def test_the_file_is_what_the_script_writes() -> None:
    committed = Path(sm90_table.__file__).read_text(encoding="utf-8")
    assert committed == tune_defaults.render(sm90_table.TABLE, sm90_table.ORIGIN)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_row_is_valid_and_is_its_calls_default(name: Name) -> None:
    call, config = tune_defaults.call_of(name), sm90_table.TABLE[name]
    assert is_valid(call, config)  # whether it fits the registers is for the lowering tests, which ask ptxas
    for seqlen in tune_defaults.LENGTHS[name[3]]:
        assert defaults.default(call, seqlen) == config


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_candidates_are_valid_and_few(name: Name) -> None:
    call = tune_defaults.call_of(name)
    candidates = hopper_candidates(call, short=name[3] == "short")
    assert len(set(candidates)) == len(candidates)
    assert 3 <= len(candidates) <= 11
    assert all(is_valid(call, config) and fits_registers(call, config) for config in candidates)
    assert set(candidates) < {*tune_defaults.row_of(name, {}).candidates, None}
    assert tune_defaults.row_of(name, sm90_table.TABLE).candidates[0] == sm90_table.TABLE[name]


def test_head_dims_between_take_the_next_larger_row() -> None:
    def row(*dims: int) -> HopperConfig | None:
        return defaults.tuned_row(*dims, "full", short=False)

    table = {name[:2]: config for name, config in sm90_table.TABLE.items() if name[2:] == ("full", "long")}
    assert row(16, 16) == row(56, 64) == table[64, 64]
    assert row(72, 72) == row(64, 96) == table[96, 96]
    assert row(104, 128) == table[128, 128]
    assert row(136, 128) == table[192, 128]
    assert row(128, 136) == row(160, 160) == table[192, 192]
    assert row(200, 16) == table[256, 256]
    assert row(264, 264) is None


IDS = Documents(torch.arange(9) // 4)


def masked(mask: Mask, head_dim: int, head_dim_v: int | None = None) -> AttentionCall:
    return AttentionCall(torch.bfloat16, head_dim, head_dim_v or head_dim, encode(mask, ())[0], arch="sm_90a")


def test_calls_without_a_row_take_the_generic_schedule() -> None:
    """Wide heads with a modification, or a mask of many tensors, or documents packed; and rows that are not aligned."""
    for call in (
        replace(masked(IDS, 192), packed=True),
        masked(IDS & KeyPadding(torch.ones(2, 9, dtype=torch.bool)), 192),
        AttentionCall(torch.bfloat16, 256, 256, "Causal()+SoftCap(f)", arch="sm_90a"),
        AttentionCall(torch.bfloat16, 128, 128, aligned=False, arch="sm_90a"),
        AttentionCall(torch.bfloat16, 128, 128, arch="sm_80"),
    ):
        assert not any(isinstance(config, HopperConfig) for config in defaults.defaults(call))


@pytest.mark.parametrize(
    ("dims", "keys", "of_documents"),
    [((136, 136), 112, 96), ((160, 160), 112, 96), ((192, 128), 128, 80), ((192, 192), 112, 80)],
)
def test_wide_heads_under_masks_other_than_the_causal_one(dims: tuple[int, int], keys: int, of_documents: int) -> None:
    """Masks that read tensors leave fewer registers for keys."""
    for mask in (SlidingWindow(5, 0), SlidingWindow(5, 3) & Causal(), PrefixLM(3)):
        call = masked(mask, *dims)
        tile = HopperConfig(128, keys, ping_pong=True)  # some windows hide scores by words of bits: test_choice.py
        assert {replace(each, mask_words=False) for each in defaults.defaults(call)} == {tile}
        assert defaults.defaults(replace(call, packed=True)) == [tile]
    for mask in (IDS, IDS & Causal(), IDS & SlidingWindow(5, 0)):
        call = masked(mask, *dims)
        assert defaults.defaults(call) == [HopperConfig(128, of_documents, ping_pong=True)]


def test_the_present_configuration_stays_within_the_noise() -> None:
    present, faster = HopperConfig(128, 128), HopperConfig(128, 112)
    assert tune_defaults.choose({present: [1.0, 1.0], faster: [0.99, 0.99]}, present) == present
    assert tune_defaults.choose({present: [1.0, 1.0], faster: [0.9, 1.0]}, present) == faster
    assert tune_defaults.choose({present: [1.0, 1.0], faster: [0.5, 2.1]}, present) == present
    assert tune_defaults.choose({present: [1.0], faster: [0.99]}, None) == faster
    assert tune_defaults.choose({faster: [1.0]}, present) == faster  # the present one did not run


HANGS, CRASHES, WRONG = HopperConfig(128, 64), HopperConfig(128, 80), HopperConfig(128, 96)


def pretend_to_measure(rows: Sequence[Row], connection: Connection) -> None:
    """A stand-in for the process that measures on the GPU."""
    for row in rows:
        times = {}
        for config in row.candidates:
            connection.send(("checking", row.name, config))
            if config == HANGS and row.name[0] == 64:
                time.sleep(600)
            if config == CRASHES and row.name[0] == 96:
                sys.exit(1)
            if config == WRONG:
                connection.send(("wrong", row.name, config, "an error of 1"))
            else:
                times[config] = [float(config.block_N)]
        connection.send(("row", row.name, times))
    connection.send(("end",))


@pytest.mark.slow(reason="6 s, most of it a time limit")
def test_candidates_that_hang_or_crash_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_defaults, "HANGS_AFTER_S", 1.0)
    rows = [Row((dim, dim, "full", "long"), (HANGS, CRASHES, WRONG)) for dim in (64, 96, 128)]
    measured = tune_defaults.measure(rows, pretend_to_measure)
    times = {HANGS: [64.0], CRASHES: [80.0]}
    assert measured == {
        rows[0].name: {CRASHES: [80.0]},
        rows[1].name: {HANGS: [64.0]},
        rows[2].name: times,
    }
    said = capsys.readouterr().out
    assert "hangs or crashes: (64, 64, 'full', 'long') HopperConfig(128, 64)" in said
    assert "hangs or crashes: (96, 96, 'full', 'long') HopperConfig(128, 80)" in said
    assert said.count("wrong:") == 3
