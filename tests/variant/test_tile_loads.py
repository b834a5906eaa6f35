"""The loads that a kernel may copy tile by tile, and the part of a key that says whether a tensor allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tileattn import ALiBi, Bias, Causal, Documents, SoftCap
from tileattn import math as tm
from tileattn.call.inputs import Operands
from tileattn.variant.key import encode
from tileattn.variant.program import Program, program, restore, with_alignment
from tileattn.variant.tile_loads import is_aligned

TABLE = torch.zeros(2, 4, 16, 16)
COLUMN = torch.zeros(16)


def traced(*mods: Callable[..., Any]) -> Program:
    key, operands = encode(None, mods)
    return program(with_alignment(key, operands.tensors))


# --- Loads ---

TILE_LOADS = {
    "position": lambda s, b, h, q, k: s + TABLE[b, h, q, k],
    "shifted": lambda s, b, h, q, k: s + TABLE[b, h, 3 + q - b, k],
    "group": lambda s, b, h, q, k: s * tm.tanh(TABLE[0, h // 2, q, k]),
    "twice": lambda s, b, h, q, k: tm.where(TABLE[b, h, q, k] > 0, s, TABLE[b, h, q, k]),
}
OTHER_LOADS = {
    "transposed": lambda s, b, h, q, k: s + TABLE[b, h, k, q],
    "shifted keys": lambda s, b, h, q, k: s + TABLE[b, h, q, k + 1],
    "every second row": lambda s, b, h, q, k: s + TABLE[b, h, q // 2, k],
    "minus q": lambda s, b, h, q, k: s + TABLE[b, h, 9 - q, k],
    "q twice": lambda s, b, h, q, k: s + TABLE[b, h, q + q, k],
    "diagonal": lambda s, b, h, q, k: s + TABLE[b, h, q - k, k],
    "row of all queries": lambda s, b, h, q, k: s + TABLE[b, h, 0, k],
    "depends on q": lambda s, b, h, q, k: s + TABLE[b, q // 8, q, k],
    "one dimension": lambda s, b, h, q, k: s + COLUMN[k],
}


@pytest.mark.parametrize("name", TILE_LOADS)
def test_a_load_that_follows_the_scores_is_one_of_tiles(name: str) -> None:
    compiled = traced(TILE_LOADS[name])
    assert len(compiled.tile_loads) == 1
    assert compiled.copied_tile == (compiled.tile_loads[0], torch.float32)


@pytest.mark.parametrize("name", OTHER_LOADS)
def test_any_other_load_is_not(name: str) -> None:
    compiled = traced(OTHER_LOADS[name])
    assert compiled.tile_loads == ()
    assert compiled.copied_tile is None
    assert not any(tensor.aligned for tensor in compiled.tensors)


def test_a_bias_is_read_by_tiles_unless_one_row_serves_all() -> None:
    assert traced(Bias(TABLE)).copied_tile is not None
    assert traced(Bias(TABLE[:, :, :1])).copied_tile is None
    assert traced(ALiBi(TABLE[0, :, 0, 0])).copied_tile is None


def test_of_several_the_first_that_is_aligned_is_copied() -> None:
    copied = traced(Bias(TABLE[..., 1:]), SoftCap(3.0), Bias(TABLE.half()), Bias(TABLE)).copied_tile
    assert copied is not None
    assert (copied[0].name, copied[1]) == ("t1", torch.float16)


@pytest.mark.parametrize(("batch", "heads"), [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_who_shares_tiles(batch: int, heads: int) -> None:
    (load,) = traced(Bias(TABLE[:batch, :heads])).tile_loads
    assert (load.differs_by("b"), load.differs_by("h")) == (batch > 1, heads > 1)


# --- Alignment ---


def test_rows_must_begin_at_multiples_of_16_bytes() -> None:
    for dtype, step in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 4)):
        rows = torch.zeros(2, 4, 16, 2 * step + 1, dtype=dtype)
        assert not is_aligned(rows)  # an odd number of keys
        assert not is_aligned(torch.zeros(2, 4, 16, 3 * step // 2, dtype=dtype))
        padded = torch.zeros(2, 4, 16, 3 * step, dtype=dtype)
        assert is_aligned(padded)
        assert is_aligned(padded[..., : 2 * step + 1])  # an odd number of keys in padded rows
        assert is_aligned(padded[:, 1:3, 3:, step:])
        assert not is_aligned(padded[..., 1 : 1 + step])  # the first element
        assert not is_aligned(padded[..., ::2])
        assert not is_aligned(padded.transpose(2, 3))
        assert is_aligned(padded.transpose(1, 2))
        assert not is_aligned(padded[:1].expand(3, -1, -1, -1))  # a tensor map cannot step by 0
        assert not is_aligned(padded[:, :, :1].expand(-1, -1, 5, -1))


def test_dtypes_that_are_not_copied() -> None:
    assert not is_aligned(torch.zeros(2, 4, 16, 16, dtype=torch.float64))
    assert not is_aligned(torch.zeros(2, 4, 16, 16, dtype=torch.int32))
    assert not is_aligned(torch.zeros(2, 4, 16, 16, dtype=torch.bool))


# --- Keys ---


def test_the_mark_stands_at_its_tensor() -> None:
    mods = (ALiBi(TABLE[0, :, 0, 0]), Bias(TABLE), TILE_LOADS["position"], Bias(TABLE[..., 1:]))
    mask = Causal() & Documents(torch.zeros(16, dtype=torch.int32))
    key, operands = encode(mask, mods)
    marked = with_alignment(key, operands.tensors)
    assert ":aligned" not in key
    assert marked.replace(":aligned", "") == key
    assert "Bias(t:float32:nnnn:aligned)+{t:float32:nnnn:aligned;" in marked
    assert marked.endswith("+Bias(t:float32:nnnn)")
    assert [t.aligned for t in program(marked).tensors][-4:] == [False, True, True, False]
    assert with_alignment(marked, operands.tensors) == marked
    assert with_alignment(marked, [tensor[..., 1:] for tensor in operands.tensors]) == key


def test_a_key_without_such_loads_stays() -> None:
    for mask, mods in ((None, ()), (Causal(), (ALiBi(COLUMN),)), (None, (OTHER_LOADS["transposed"],))):
        key, operands = encode(mask, mods)
        assert with_alignment(key, operands.tensors) == key


def test_alignment_is_part_of_the_kernel_and_not_of_the_value() -> None:
    key, operands = encode(None, (Bias(TABLE),))
    marked = with_alignment(key, operands.tensors)
    assert str(program(key)) != str(program(marked))
    _, (bias,) = restore(marked, Operands([TABLE]))
    assert bias.tensor is TABLE
