"""The kernel that makes lines, run on the CPU by emulate(): it writes what PyTorch's operations write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.cases import Case, Tensors
from tests.kernels.tilelang.decode.line_cases import CASES, blocks, by_head
from tileattn import FunctionMask
from tileattn.call.decoding import DecodeCall
from tileattn.kernels.tilelang.decode.lines import launch as write_lines
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.kernels.tilelang.decode.lines.kernel import lines_kernel
from tileattn.kernels.tilelang.decode.lines.visits import Lines, lines_of
from tileattn.kernels.tilelang.lists.library import dtypes_of
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.key import encode

# More tiles than a block has threads.
LONG = Case([30, 4900, 0, 90], [3, 1, 0, 9], 3, 2, page=16, mask=FunctionMask(by_head))
ALL = CASES | {"long": LONG}
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def both(case: Case, folder: Path) -> tuple[Lines, Tensor, Tensor]:
    """The lines of a case by operations and by the kernel, (lines, numbers)."""
    call, sizes, inputs = Tensors(case).inputs()
    if case.packed_keys:  # as launch.Decoding locates them
        inputs = inputs._replace(seqlens_k=inputs.seqlens_k.diff())
    lines = lines_of(call, sizes, 16, 16)
    found = visits.analysis_of(call.variant, lines.queries)
    assert found is not None
    assert write_lines.fits(found, lines, inputs.operands)
    kernel = Kernel(lines_kernel(found, dtypes_of(call.variant), call.packed), folder)
    plans = [torch.full((3 + lines.rows, 16), -7, dtype=torch.int32) for _ in range(2)]
    lines.write(inputs, plans[0][3:])
    write_lines.by_kernel(kernel, found, lines, inputs, plans[1], 3)
    assert (plans[1][:3] == -7).all()
    by_operations, by_kernel = (plan[3:].view(lines.items * lines.planes, -1) for plan in plans)
    return lines, by_operations, by_kernel


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "long" else pytest.mark.slow) for name in ALL])
def test_the_kernel_writes_the_same(name: str, tmp_path: Path) -> None:
    case = ALL[name]
    lines, by_operations, by_kernel = both(case, tmp_path)
    for number, (expected, got) in enumerate(zip(by_operations.tolist(), by_kernel.tolist(), strict=True)):
        tiles = _tiles_of(case, number // lines.planes)
        assert got[: tiles + 1] == expected[: tiles + 1]
        entries = slice(lines.tiles + 1, lines.tiles + 1 + expected[tiles])
        assert got[entries] == expected[entries]


def _tiles_of(case: Case, item: int) -> int:
    """The tiles that an item's sequence has; 0 for an item that is none."""
    first = 0
    for b, (length, q_len) in enumerate(zip(case.lengths, case.each, strict=True)):
        if not isinstance(case.q_lens, int):
            first = sum(case.each[:b]) * case.group // 16 + b
        count = -(-q_len * case.group // 16)
        if first <= item < first + count:
            return -(-length // 16)
        first += count
    return 0


def test_masks_without_a_kernel() -> None:
    """Floats; and a tensor of which a tile reads more than a thread does."""
    wide = torch.zeros(1000, dtype=torch.int32)
    masks = {
        "floats": FunctionMask(lambda b, h, q, k: (q - k) * 0.5 < 3.0),
        "wide": FunctionMask(lambda b, h, q, k: wide[2 * k] == 0),
        "ids": FunctionMask(lambda b, h, q, k: wide[q] == wide[k]),
    }
    found = {name: visits.analysis_of(encode(mask, ())[0], 1) is not None for name, mask in masks.items()}
    assert found == {"floats": False, "wide": False, "ids": True}


def test_blocks_of_one_query_have_a_kernel() -> None:
    """Of several, operations find which rows of blocks they are: a kernel knows no bounds of a sequence's first."""
    for q_len in (1, 3):
        call, sizes, _ = Tensors(Case([900], q_len, 4, 2, page=0, **blocks([900], 2, 4, q_len, 0.1, 64))).inputs()
        lines = lines_of(call, sizes, 64, 64)
        assert lines.queries == (1 if q_len == 1 else 64)
        assert (visits.analysis_of(call.variant, lines.queries) is not None) == (q_len == 1)


def test_calls_beyond_the_limits_of_the_kernel() -> None:
    key, operands = encode(FunctionMask(lambda b, h, q, k: k % 32 < 16), ())
    _, sizes, _ = Tensors(CASES["nothing"]).inputs()
    call = DecodeCall(torch.float16, 16, 16, key, arch="sm_80")
    found = visits.analysis_of(key, 1)
    assert found is not None
    for capacity, block_N, expected in ((2**20, 64, True), (2**24, 64, False), (2**20, 128, False)):
        lines = lines_of(call, sizes._replace(capacity=capacity), 16, block_N)
        assert write_lines.fits(found, lines, operands) == expected
