"""The code that TileLang generates for calls with dropout, on a machine without a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward import test_lowering as of_backward
from tests.kernels.tilelang.backward.test_lowering import backward_of
from tests.kernels.tilelang.forward.test_lowering import ASSEMBLED, _check_assembly
from tests.tools import lowering
from tests.tools.lowering import (
    BIAS,
    IDS,
    SLOPES,
    TILES,
    assemble,
    disassemble,
    find_disassembler,
    find_nvcc,
    lower,
    make_call,
    on,
)
from tileattn import ALiBi, Bias, Causal, SlidingWindow, SoftCap
from tileattn.call.dropout import ROUNDS
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.backward import library as backward_launch
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.config import HopperConfig

FP8 = torch.float8_e4m3fn
CALLS = {
    "plain": make_call(dropout=True),
    "plain-16": make_call(dim=16, dtype=torch.float16, dropout=True),
    "plain-64": make_call(dim=64, dropout=True),
    "plain-256": make_call(dim=256, dropout=True),
    "causal": make_call(Causal(), dropout=True),
    "causal-64": make_call(Causal(), dim=64, dropout=True),
    "causal-256": make_call(Causal(), dim=256, dropout=True),
    "causal-192/128": make_call(Causal(), dim=192, dim_v=128, dropout=True),
    "window-96": make_call(SlidingWindow(5, 0), dim=96, dtype=torch.float16, dropout=True),
    "documents": make_call(IDS & Causal(), sink=True, dropout=True),
    "softcap": make_call(Causal(), SoftCap(30.0), dropout=True),
    "softcap-256": make_call(Causal(), SoftCap(30.0), dim=256, dropout=True),
    "alibi": make_call(Causal(), ALiBi(SLOPES), dropout=True),
    "bias-tiles": make_call(Causal(), Bias(TILES), dropout=True),
    "shared-bias": make_call(None, Bias(BIAS[:1]), dropout=True),
    "composed-64": make_call(IDS & Causal(), ALiBi(SLOPES), SoftCap(9.0), dim=64, dropout=True),
    "unaligned": make_call(Causal(), aligned=False, dropout=True),
    "fp8": make_call(dtype=FP8, dropout=True),
    "fp8-causal-64": make_call(Causal(), dim=64, dtype=FP8, dropout=True),
}


def source_of(call: AttentionCall, which: str) -> str:
    """The source of the forward kernel, or of a kernel of the backward pass, in the schedule of the call."""
    if which == "forward":
        return lower(call)
    return device_source(kernel(replace(backward_of(call), deterministic=which == "queries"), which), call.arch)


def _kernels() -> list[object]:
    parameters = []
    for (name, call), arch in itertools.product(CALLS.items(), ("sm_90a", "sm_80", "gfx942")):
        if call.dtype == FP8 and arch != "sm_90a":
            continue
        for which in ("forward",) if call.dtype == FP8 else ("forward", "main", "queries"):
            parameters.append(pytest.param(on(arch, call), which, id=f"{arch}-{name}-{which}"))
    return parameters


@pytest.mark.slow(reason="lowers a kernel, 10 s and more each; test_dropout_emulated.py runs one")
@pytest.mark.parametrize(("call", "which"), _kernels())
def test_kernel(call: AttentionCall, which: str, tmp_path: Path) -> None:
    """The seed is in memory, numbers are parameters; no wgmma is serialised, and no score is spilled."""
    source = source_of(call, which)
    signature = re.search(r"__global__ void __launch_bounds__\(\d+(?:, \d+)?\) \w+\(([^)]*)\)", source)
    assert signature is not None
    parameters = dict(reversed(part.replace("__restrict__ ", "").rsplit(None, 1)) for part in signature[1].split(", "))
    assert parameters["seed"].endswith("int64_t*")
    assert parameters["threshold"] == "int"
    # TileLang calls a parameter as the macro that takes it does.
    assert "float" in (parameters.get("weight"), parameters.get("factor"))
    if call.arch in ASSEMBLED:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
        report = assemble(nvcc, source, call.arch, tmp_path)
        (_check_assembly if which == "forward" else of_backward._check_assembly)(report)


@pytest.mark.slow(reason="lowers, assembles and disassembles a kernel, 15 s")
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_four_elements_share_their_words(arch: str, tmp_path: Path) -> None:
    """One product a round for each group, in one instruction; some more for the head's words, few for addresses."""
    nvcc, disassembler = find_nvcc(), find_disassembler()
    if nvcc is None or disassembler is None:
        pytest.skip("needs nvcc and nvdisasm or cuobjdump")
    call = on(arch, CALLS["plain-64"])
    tile = defaults.default(call)
    assemble(nvcc, lower(call, tile), arch, tmp_path)
    multiplications = disassemble(disassembler, tmp_path / "kernel.cubin").count("IMAD.WIDE.U32")
    threads = tile.consumer_threads() if isinstance(tile, HopperConfig) else tile.threads
    groups = tile.block_M * tile.block_N // threads // 4
    copies = {"sm_90a": 2, "sm_80": 3}[arch]  # a first tile and the loop; a pipeline's loop and its end
    products = multiplications - 2 * ROUNDS
    # In the forward pass a thread's queries are few: their first product is the same for all keys.
    assert (ROUNDS - 1) * groups * copies <= products + ROUNDS <= (ROUNDS + 1) * groups * copies + 2 * ROUNDS


@pytest.mark.slow(reason="5 s")
def test_it_is_part_of_the_key() -> None:
    for call in (CALLS["plain"], CALLS["softcap"]):
        without = replace(call, dropout=False)
        assert launch.cache_key(call, defaults.default(without)) != launch.cache_key(without, defaults.default(without))
        for name in ("main", "queries"):
            keys = {backward_launch.cache_key(backward_of(each), name) for each in (call, without)}
            assert len(keys) == 2
        # What comes before does not know of it.
        assert backward_launch.cache_key(backward_of(call), "prepare") == backward_launch.cache_key(
            backward_of(without), "prepare"
        )
    assert "seed" not in lower(lowering.CALLS["plain"])
