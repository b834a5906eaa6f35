"""What score modifications cost in the generated code of the Hopper schedule."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import (
    MAX_SPILLED,
    SLOPES,
    assemble,
    disassemble,
    find_disassembler,
    find_nvcc,
    lower,
    make_call,
    numbers,
)
from tileattn import ALiBi, Bias, Causal, SoftCap
from tileattn.call.facts import AttentionCall
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward.config import HopperConfig


def slanted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A modification of positions as users write it."""
    return score + 0.01 * (k - q)


def scored(mod: Any, **facts: Any) -> AttentionCall:
    return make_call(Causal(), mod, **facts)


# Lowered once, for what is asked of each modification.
SLANTED_AND_CAPPED = make_call(Causal(), ALiBi(SLOPES), SoftCap(50.0), dim=64)


def last_loop(source: str) -> str:
    """The consumers' loop over tiles without a mask, in the generated source."""
    _, _, consumers = source.partition("warpgroup_reg_alloc<")
    loop = re.split(r"\bfor \(int j_\d+ = 0; j_\d+ < (?=\()", consumers)[-1]
    return loop.partition("tl::warpgroup_reg_dealloc")[0]


@pytest.mark.slow  # 20 s
def test_a_heads_slope_is_read_once_per_tile_of_queries() -> None:
    source = lower(SLANTED_AND_CAPPED)
    assert len(re.findall(r"\bt0\[", source)) == 1
    assert not re.search(r"\bt0\[", last_loop(source))


@pytest.mark.slow  # 20 s for both
@pytest.mark.parametrize("call", [SLANTED_AND_CAPPED, scored(SoftCap(50.0), dim=16, dtype=torch.float16)], ids=str)
def test_which_tanh(call: AttentionCall) -> None:
    """The hardware's errs by 2^-11, less than bfloat16 does and not less than float16. AMD's: test_lowering.py."""
    loop = last_loop(lower(call))
    assert ("tanhf(" in loop) == (call.dtype == torch.bfloat16)
    assert "/ f0" not in loop


# Instructions per score of the main loop that are allowed beyond those of the kernel without a modification: what grows
# with the position, and one for the scale. A soft cap costs none, since it saves the search for the maximum.
COSTS = {
    "alibi": (ALiBi(SLOPES), 2),
    "user": (slanted, 2),
    "softcap": (SoftCap(50.0), 0),
}


@pytest.mark.slow_except("softcap-64", reason="lowers, assembles and disassembles a kernel, 20 s each")
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("name", COSTS)
def test_main_loop(name: str, dim: int, tmp_path: Path) -> None:
    nvcc, disassembler = find_nvcc(), find_disassembler()
    if nvcc is None or disassembler is None:
        pytest.skip("needs nvcc and nvdisasm or cuobjdump")
    mod, cost = COSTS[name]
    call = scored(mod, dim=dim)
    tile = defaults.default(call)
    assert isinstance(tile, HopperConfig)
    log = assemble(nvcc, lower(call, tile), call.arch, tmp_path)
    assert max(numbers(r"(\d+) bytes spill stores", log)) <= MAX_SPILLED, log
    sass = disassemble(disassembler, tmp_path / "kernel.cubin")
    opcodes = main_loop(sass)
    scores = tile.block_M * tile.block_N // tile.consumer_threads()
    # The search for the maximum runs under P V, or as much of what MUFU does.
    under = [part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0] for part in sass.split("DEPBAR.LE gsb0, 0x1")[1:]]
    assert all(part.count("FMNMX") >= scores or part.count("MUFU") >= scores // 2 for part in under)
    # Positions are converted for each row that a thread holds, not for each score.
    assert sum(count for opcode, count in opcodes.items() if opcode.startswith("I2F")) <= 4
    assert not [opcode for opcode in opcodes if opcode.startswith("LDG")]
    assert opcodes["MUFU.TANH"] == (scores if name == "softcap" else 0)
    assert opcodes["MUFU.RCP"] == 0
    assert (opcodes["FMNMX.FTZ"] + opcodes["FMNMX"] == 0) == (name == "softcap")
    assert "C751" not in log, log  # products that run one after the other
    assert opcodes.total() <= (8 + cost) * scores + 80


@pytest.mark.slow(reason="lowers, assembles and disassembles a kernel, 20 s")
def test_a_bias_takes_three_instructions(tmp_path: Path) -> None:
    """Per score: the scale, one to make a float of 16 bits, and less than one for reading eight by one ldmatrix."""
    nvcc, disassembler = find_nvcc(), find_disassembler()
    if nvcc is None or disassembler is None:
        pytest.skip("needs nvcc and nvdisasm or cuobjdump")
    call = scored(Bias(torch.zeros(1, 2, 256, 256, dtype=torch.bfloat16)))
    tile = defaults.default(call)
    assert isinstance(tile, HopperConfig)
    log = assemble(nvcc, lower(call, tile), call.arch, tmp_path)
    assert max(numbers(r"(\d+) bytes spill stores", log)) <= MAX_SPILLED, log
    opcodes = main_loop(disassemble(disassembler, tmp_path / "kernel.cubin"))
    scores = tile.block_M * tile.block_N // tile.consumer_threads()
    assert opcodes["LDSM.16.M88.4"] == scores // 8
    assert opcodes["PRMT"] == 0
    assert opcodes.total() <= (8 + 3) * scores + 80


def main_loop(sass: str) -> Counter[str]:
    """Opcodes of the loop over tiles without a mask: the shortest that waits for the first of two products."""
    labels: dict[str, int] = {}
    opcodes: list[str] = []
    loops = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(\S+)(.*);", line):
            opcodes.append(instruction[1] + (" gsb0, 0x1" if "gsb0, 0x1" in instruction[2] else ""))
            target = re.search(r"`\((\.L_x_\d+)\)", instruction[2])
            if instruction[1].startswith("BRA") and target and target[1] in labels:
                loops.append(opcodes[labels[target[1]] :])
    return Counter(min((loop for loop in loops if any("gsb0, 0x1" in opcode for opcode in loop)), key=len))
