"""Kernels that take their tiles from lists, on a machine without a GPU: what is read, and that ptxas spills no more."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import MAX_SPILLED, assemble, find_nvcc, lower, make_call, numbers
from tileattn import Causal, Dilated, FunctionMask, SlidingWindow
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward import kernels
from tileattn.kernels.tilelang.backward import launch as backward_launch
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default as backward_default
from tileattn.kernels.tilelang.backward.defaults import listed_as, queries_default
from tileattn.kernels.tilelang.backward.library import cache_key as backward_key
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.launch import launched
from tileattn.kernels.tilelang.forward.library import cache_key
from tileattn.math import load

SERIALIZED = re.compile(r"C75(?:08|10|12|14)|serializ|setmaxnreg ignored", re.IGNORECASE)
IDS = torch.ones(9, dtype=torch.int32)
MASKS = {
    "dilated": Dilated(511, dilation=4),
    "function": FunctionMask(lambda b, h, q, k: (k <= q) & ((q - k) % 3 != 1)),
    "loaded": FunctionMask(lambda b, h, q, k: load(IDS, q) == load(IDS, k)),
}


def forward_source(call: AttentionCall, listed: bool = True) -> str:
    return lower(call, dataclasses.replace(defaults.default(call), listed=listed))  # type: ignore[call-arg]


def backward_of(call: AttentionCall, deterministic: bool = False) -> BackwardCall:
    return BackwardCall(dataclasses.replace(call, needs_grad=True), (True, True, True, False), False, deterministic)


def backward_source(call: BackwardCall, which: str = "main", listed: bool = True) -> str:
    config = backward_default(call)
    assert not isinstance(config, BackwardConfig)
    return device_source(kernels.kernel_of(call, which, dataclasses.replace(config, listed=listed)), "sm_90a")


def test_forward_reads_tiles_from_its_line() -> None:
    source = forward_source(make_call(MASKS["dilated"], dim=64))
    # The producer, and the consumers' first tile, masked tiles and whole tiles.
    assert source.count("= list_tiles[") == 4
    assert "list_lines" not in source.split("{", 1)[1]  # no index is compared with a size
    assert "tile_of_line" not in source


def test_forward_reads_the_row_of_a_line() -> None:
    source = forward_source(make_call(MASKS["dilated"], dim=64))
    assert source.count("list_rows[") == 2  # of the first task and of the next ones
    assert "list_sorted" not in source.split("{", 1)[1]


@pytest.mark.slow(reason="lowers a kernel, 15 s")
def test_without_lists_no_row_is_read() -> None:
    assert "list_rows" not in forward_source(make_call(MASKS["dilated"], dim=64), listed=False)


def test_backward_reads_tiles_from_its_line() -> None:
    source = backward_source(backward_of(make_call(MASKS["dilated"], dim=64)))
    assert source.count("list_tiles[") == 4  # of Q, of dO, of dQ's sums, of the consumers
    assert "list_lines" not in source.split("{", 1)[1]


@pytest.mark.slow(reason="11 s")
def test_packed_kernels_read_tiles_from_lines_of_their_runs() -> None:
    """The same places, and in the forward pass which tile of its run a task has, of the first task and of the next."""
    call = make_call(MASKS["dilated"], dim=64, packed=True)
    source = forward_source(call)
    assert source.count("= list_tiles[") == 4
    assert source.count("list_rows[") == 2
    assert "list_ahead" not in source
    backward = backward_source(backward_of(call))
    assert backward.count("list_tiles[") == 4
    for body in (source, backward):
        assert "list_lines" not in body.split("{", 1)[1]


def test_a_block_without_a_tile_looks_for_no_line() -> None:
    """The launch has blocks for the longest work list that there can be. A record behind its end was never written."""
    source = backward_source(backward_of(make_call(MASKS["function"], dim=64, packed=True), True), "queries")
    (line,) = re.findall(r"\n *(.*)\n *\S+ = .*list_head", source)
    assert re.fullmatch(r"if \(\(.+ < \S+\[8\]\)\) \{", line), line


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_for_dq_alone_and_that_of_wide_heads(packed: bool) -> None:
    for which in ("main", "queries"):
        source = backward_source(backward_of(make_call(MASKS["dilated"], dim=256, packed=packed)), which)
        assert "list_tiles[" in source
        assert "list_lines" not in source.split("{", 1)[1]


# Bytes that are spilled beyond those without lists, most of them for dq alone (deterministic=True): what is left to do
# in docs/design/intervals.md.
KNOWN = {
    ("dilated", 128, "main"): 48,
    ("images-text", 64, "queries"): 64,
    ("images-text", 128, "queries"): 64,
    ("blocks", 64, "queries"): 200,
    ("blocks", 128, "queries"): 128,
    ("neighborhood", 64, "queries"): 476,
    ("neighborhood", 128, "queries"): 236,
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "main", "queries"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", dict.fromkeys([*MASKS, *NAMES]))
def test_ptxas_spills_no_more_than_without_lists(name: str, dim: int, which: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    call = make_call(MASKS[name] if name in MASKS else pattern(name, 512, 4, "cpu").mask, dim=dim)
    spilled = []
    for listed in (False, True):
        if which == "forward":
            source = forward_source(call, listed)
        else:
            source = backward_source(backward_of(call, which == "queries"), which, listed)
        said = assemble(nvcc, source, "sm_90a", tmp_path)
        assert not SERIALIZED.search(said), said
        spilled.append(max(numbers(r"(\d+) bytes spill stores", said)))
    assert spilled[1] <= KNOWN.get((name, dim, which), max(spilled[0], MAX_SPILLED))


# The same of packed calls (docs/design/packed.md).
KNOWN_PACKED = {
    ("dilated", 64, "main"): 84,
    ("dilated", 128, "main"): 60,
    ("dilated", 64, "queries"): 232,
    ("dilated", 128, "queries"): 76,
}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "main", "queries"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_ptxas_spills_no_more_in_packed_calls(name: str, dim: int, which: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    call = make_call(MASKS[name], dim=dim, packed=True)
    if which == "forward":
        source = forward_source(call)
    else:
        source = backward_source(backward_of(call, which == "queries"), which)
    said = assemble(nvcc, source, "sm_90a", tmp_path)
    assert not SERIALIZED.search(said), said
    assert max(numbers(r"(\d+) bytes spill stores", said)) <= KNOWN_PACKED.get((name, dim, which), MAX_SPILLED)


# --- Which configuration a call is launched with ---


def shape(seqlen: int, dim: int = 64, heads: int = 3) -> torch.Size:
    """Of q. By default fewer heads than share bits of mixed tiles (lists/bits.py)."""
    return torch.Size((1, seqlen, heads, dim))


def test_long_calls_of_functions_are_launched_with_lists() -> None:
    call = make_call(MASKS["function"], dim=64)
    usual = defaults.default(call)
    assert isinstance(usual, HopperConfig)
    listed = dataclasses.replace(usual, listed=True)
    assert launched(usual, call, shape(4096), shape(4096)) == listed
    assert launched(usual, call, shape(4096, heads=4), shape(4096)) == dataclasses.replace(listed, bits=True)
    assert launched(usual, call, shape(100), shape(4000)) is usual
    generic = defaults.default(make_call(MASKS["function"], dim=64, aligned=False))
    assert launched(generic, call, shape(4096), shape(4096)) is generic
    for mask in (None, Causal(), SlidingWindow(5, 5)):
        plain = make_call(mask, dim=64)
        assert launched(usual, plain, shape(4096), shape(4096)) is usual


def test_rows_of_a_function_have_no_ranges_to_look_for() -> None:
    call = make_call(Causal() & MASKS["loaded"], dim=64)
    usual = defaults.default(call)
    assert isinstance(usual, HopperConfig)
    assert usual.mask_words
    assert launched(usual, call, shape(4096), shape(4096)) == dataclasses.replace(usual, listed=True, mask_words=False)
    images = make_call(pattern("images-text", 512, 4, "cpu").mask, dim=64)
    assert launched(usual, images, shape(4096), shape(4096)).mask_words  # type: ignore[union-attr]


def test_both_kernels_of_a_backward_pass_have_lists_or_none() -> None:
    call = backward_of(make_call(MASKS["function"], dim=256))
    config, of_groups = backward_launch.configured(call, shape(4096, 256), shape(4096, 256))
    assert of_groups == (1, 0)
    assert config is not None
    assert config.listed  # type: ignore[union-attr]
    assert listed_as(config, queries_default(call)).listed  # type: ignore[union-attr]
    assert not listed_as(backward_default(call), queries_default(call)).listed  # type: ignore[union-attr]
    assert backward_launch.configured(call, shape(300, 256), shape(300, 256))[0] is None


def test_a_kernel_with_lists_has_a_key_of_its_own() -> None:
    call = make_call(MASKS["function"], dim=64)
    usual = defaults.default(call)
    assert cache_key(call, usual) != cache_key(call, dataclasses.replace(usual, listed=True))  # type: ignore[call-arg]
    backward = backward_of(make_call(MASKS["function"], dim=256))
    config = backward_default(backward)
    listed = dataclasses.replace(config, listed=True)  # type: ignore[call-arg]
    for name in ("main", "queries"):
        assert backward_key(backward, name, config) != backward_key(backward, name, listed)
    assert backward_key(backward, "prepare", config) == backward_key(backward, "prepare", listed)


def test_defaults_have_what_long_calls_take() -> None:
    """So that `tileattn warmup` and the tests of generated code see them."""
    found = defaults.defaults(make_call(MASKS["function"], dim=64))
    assert {config.listed for config in found if isinstance(config, HopperConfig)} == {False, True}
    assert all(
        not config.listed for config in defaults.defaults(make_call(Causal())) if isinstance(config, HopperConfig)
    )
