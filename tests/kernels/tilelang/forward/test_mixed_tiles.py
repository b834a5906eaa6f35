"""The mask on a mixed tile of a listed call: the generated conditions of every score of a tile, evaluated in Python."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools.lowering import lower, make_call
from tileattn import Dilated, FunctionMask, GlobalTokens, Mask, SlidingWindow, Strided
from tileattn.kernels.tilelang.forward import defaults
from tileattn.variant.key import encode

MASKS: dict[str, Mask] = {
    "dilated": Dilated(95, dilation=3),
    "strided": Strided(16, 5),
    "local-global": SlidingWindow(20, 7) | GlobalTokens(33),
    "constant": FunctionMask(lambda b, h, q, k: (q - k < 40 + h) & ((q + k) * (q - k) > b - 2000)),
    "other-way": FunctionMask(lambda b, h, q, k: (k - q < 9) & ((k - q) % 4 != 1)),
}
SEQLEN_Q, SEQLEN_K, ROW, FIRST_KEY, B, H = 500, 411, 128, 256, 1, 2


def listed_source(mask: Mask) -> str:
    call = make_call(mask, dim=64)
    return lower(call, dataclasses.replace(defaults.default(call), listed=True))  # type: ignore[call-arg]


def conditions(source: str) -> list[tuple[str, str]]:
    """Of both loops over the scores of a mixed tile the loop's variable and the condition, in Python."""
    found = re.findall(
        r"distance(?:_\d+)? = .*?for \(int (i_\d+) = 0; i_\d+ < 64; \+\+i_\d+\) \{\n.*?if \((.*?)\) \{\n", source, re.S
    )
    assert len(found) == 2
    return found


def in_python(condition: str) -> str:
    condition = condition.replace("&&", " and ").replace("||", " or ").replace("(int)", "").replace("(int64_t)", "")
    return re.sub(r"\b(b|h|q|k|distance)_\d+\b", r"\1", condition)


@pytest.mark.slow_cases("constant", reason="lowers a kernel, 15 s")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dilated", "constant"))) for name in MASKS]
)
def test_each_score_of_a_tile(name: str) -> None:
    mask = MASKS[name]
    operands = encode(mask, ())[1]
    source = listed_source(mask)
    q0, k = ROW + SEQLEN_K - SEQLEN_Q, torch.arange(FIRST_KEY, FIRST_KEY + 128)
    q = torch.arange(q0, q0 + 128)[:, None]
    expected = mask.allows(torch.tensor(B), torch.tensor(H), q, k[None]) & (k < SEQLEN_K)
    for variable, condition in conditions(source):
        code = compile(in_python(condition), name, "eval")
        for thread in range(256):
            row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
            known = {"q": q0 + row, "k": FIRST_KEY + column, "distance": q0 + row - FIRST_KEY - column}
            known |= {"seqlen_k": SEQLEN_K, "b": B, "h": H, "abs": abs}
            known |= {f"i{index}": number for index, number in enumerate(operands.ints)}
            for register in range(64):
                got = bool(eval(code, {}, known | {variable: register}))
                i, j = row + register % 4 // 2 * 8, column + register // 4 * 8 + register % 2
                assert got == bool(expected[i, j]), (thread, register)


def test_a_register_and_a_constant() -> None:
    """No thread's or tile's number is left in a score's condition, of which nvcc could not tell equal ones."""
    for _, condition in conditions(listed_source(MASKS["dilated"])):
        assert "threadIdx" not in condition
        assert "seqlen_q" not in condition
        assert "k_lo" not in condition


@pytest.mark.slow(reason="lowers a kernel, 15 s")
def test_ranges_are_masked_without_distances() -> None:
    call = make_call(MASKS["dilated"], dim=64)
    assert "distance" not in lower(call, defaults.default(call))
