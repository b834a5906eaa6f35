"""Kernels whose mixed tiles have bits, on a machine without a GPU: the words that a thread loads, and spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from tests.kernels.tilelang.test_tile_lists_lowering import MASKS, SERIALIZED, backward_of
from tests.tools.lowering import MAX_SPILLED, assemble, find_nvcc, lower, make_call, numbers
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.backward import kernels
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default as backward_default
from tileattn.kernels.tilelang.backward.library import cache_key as backward_key
from tileattn.kernels.tilelang.backward.listed import as_listed
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.library import cache_key
from tileattn.kernels.tilelang.lists.bits import bits_jobs
from tileattn.kernels.tilelang.lists.bits_kernel import bits_kernel
from tileattn.kernels.tilelang.lists.library import read_by_mask
from tileattn.variant.program import program


def forward_source(call: AttentionCall) -> str:
    config = defaults.default(call)
    assert isinstance(config, HopperConfig)
    return lower(call, defaults.with_lists(config, call, bits=True))


def backward_source(call: AttentionCall) -> str:
    backward = backward_of(call)
    config = backward_default(backward)
    assert not isinstance(config, BackwardConfig)
    return device_source(kernels.kernel_of(backward, "main", as_listed(config, bits=True)), "sm_90a")


def in_python(expression: str) -> str:
    """An index as Python computes it; the place of the line's bits is `place`."""
    for cast in ("(int64_t)", "(int)", "(uint)"):
        expression = expression.replace(cast, "")
    return re.sub(r"\bv_\d+\[\d\]", "place", re.sub(r"threadIdx\.x", "thread", expression))


def check_words(source: str, loads: int, rows: int, columns: int) -> None:
    """Each thread loads the words of its rows and columns, and hides each score by the bit of its column."""
    found = re.findall(r"word\w*\[(i_\d+)\] = mixed_bits\[(.*)\];", source)
    assert len(found) == loads
    for variable, index in found:
        (step,) = set(re.findall(r"\b(?:j|step)_?\d*\b", in_python(index))) or {"none"}
        code = compile(in_python(index), "index", "eval")
        for thread in (0, 1, 5, 31, 32, 127, 128, 255):
            row, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
            for i in range(2):
                at = {"thread": thread, variable: i, "place": 7, step: 3}
                first, after = eval(code, {}, at), eval(code, {}, at | {step: 4})
                assert first % (rows * 4) == (row + 8 * i) * 4 + t
                assert first // (rows * 4) in (7, 10, 11)  # the line's first, or j or j + 1 behind it
                assert after - first == (0 if step == "none" else rows * 4)
    pattern_of_bits = r"word\w*\[(i_\d+)\] >> \(\(uint\)(j\w*)\)\) & .*\n\s+\S+ = \w+\[(.*)\];"
    hidden = re.findall(pattern_of_bits, source)
    assert len(hidden) == loads
    for variable, bit, index in hidden:
        code = compile(in_python(index), "register", "eval")
        got = {(i, j): eval(code, {}, {variable: i, bit: j}) for i in range(2) for j in range(columns // 4)}
        # The layout of products: four registers for each eight columns, two of each row.
        assert got == {(i, j): j // 2 * 4 + i * 2 + j % 2 for i, j in got}


@pytest.mark.slow(reason="13 s")
def test_words_of_the_forward_pass() -> None:
    """Of the first tile and of the others; before the wait for Q and for K."""
    source = forward_source(make_call(MASKS["function"], dim=128))
    check_words(source, 2, 128, 128)
    assert "bit_lines" not in source.split("{", 1)[1]  # no index is compared with a size
    for part in source.split("= mixed_bits[")[1:]:
        assert ".wait(" in part.split("wgmma", 1)[0]
    assert source.count("distance = ") == 2  # tiles without bits evaluate the mask


def test_words_of_the_backward_pass() -> None:
    """A tile of 64 queries has 16 bits in each word."""
    source = backward_source(make_call(MASKS["function"], dim=128))
    check_words(source, 1, 128, 64)
    assert "bit_lines" not in source.split("{", 1)[1]
    assert ".wait(" in source.split("= mixed_bits[")[1].split("wgmma", 1)[0]


def test_a_kernel_with_bits_has_a_key_of_its_own() -> None:
    call = make_call(MASKS["function"], dim=64)
    config = defaults.default(call)
    assert isinstance(config, HopperConfig)
    without, having = (defaults.with_lists(config, call, bits) for bits in (False, True))
    assert cache_key(call, without) != cache_key(call, having)
    backward = backward_of(call)
    main = backward_default(backward)
    assert not isinstance(main, BackwardConfig)
    assert backward_key(backward, "main", as_listed(main)) != backward_key(backward, "main", as_listed(main, True))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "main"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", dict.fromkeys([*MASKS, *NAMES]))
def test_ptxas_spills_no_more(name: str, dim: int, which: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    call = make_call(MASKS[name] if name in MASKS else pattern(name, 512, 4, "cpu").mask, dim=dim)
    said = assemble(nvcc, forward_source(call) if which == "forward" else backward_source(call), "sm_90a", tmp_path)
    assert not SERIALIZED.search(said), said
    assert max(numbers(r"(\d+) bytes spill stores", said)) <= MAX_SPILLED


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_of_bits_spills_nothing(name: str, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    call = make_call(pattern(name, 512, 4, "cpu").mask, dim=64)
    if not bits_jobs(call.variant, "sm_90a"):
        pytest.skip("has no bits")
    traced = program(call.variant)
    said = assemble(nvcc, device_source(bits_kernel(traced, read_by_mask(traced)), "sm_90a"), "sm_90a", tmp_path)
    assert numbers(r"(\d+) bytes spill stores", said) == [0]
