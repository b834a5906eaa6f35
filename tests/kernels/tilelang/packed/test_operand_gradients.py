"""PyTorch's part of the packed backward pass: delta for each row, and the gradients of the variant's tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn import ALiBi, Bias
from tileattn.call.facts import AttentionCall, BackwardCall, Packed
from tileattn.kernels.tilelang.backward.operand_gradients import BY_KEY, SPREAD, paths, values_of
from tileattn.kernels.tilelang.backward.workspaces import PackedWorkspaces
from tileattn.kernels.tilelang.packed import work_list as records
from tileattn.variant.key import encode
from tileattn.variant.reading import evaluate
from tileattn.variant.scores import for_packed

LENGTHS_Q, LENGTHS_K, BEHIND, HEADS = (3, 0, 5, 1), (4, 2, 3, 0), 2, 2
ENDS_Q, ENDS_K = ([0, *itertools.accumulate(lengths)] for lengths in (LENGTHS_Q, LENGTHS_K))
PACKED = Packed(torch.tensor(ENDS_Q).int(), torch.tensor(ENDS_K).int(), 6, 5)
SEQUENCES, TOTAL_Q, TOTAL_K = len(LENGTHS_Q), ENDS_Q[-1] + BEHIND, ENDS_K[-1] + BEHIND
BIAS, KEY_BIAS, TABLE = torch.rand(SEQUENCES, HEADS, 6, 5), torch.rand(9), torch.rand(3)
DISTANCES, IDS = torch.rand(20), torch.arange(8) % 3

MODS: dict[str, Any] = {
    "slopes": ALiBi(torch.rand(HEADS)),
    "slopes by sequence": ALiBi(torch.rand(SEQUENCES, HEADS)),
    "shared bias": Bias(BIAS[:1]),
    "bias of keys": Bias(BIAS[:, :1, :1]),
    "keys, shifted": lambda score, b, h, q, k: score + KEY_BIAS[k + 2],
    "keys, partly beyond": lambda score, b, h, q, k: score + KEY_BIAS[k + 6],
    "looked up": lambda score, b, h, q, k: score * TABLE[IDS[k]],
    "distances": lambda score, b, h, q, k: score + DISTANCES[q - k + 10],
}


def _workspaces() -> PackedWorkspaces:
    call = BackwardCall(AttentionCall(torch.bfloat16, 64, 64, packed=True), (True,) * 4)
    q, k = torch.empty(1, TOTAL_Q, HEADS, 64), torch.empty(1, TOTAL_K, HEADS, 64)
    return PackedWorkspaces(call, q, k, PACKED)


@pytest.mark.parametrize("name", MODS)
def test_every_part_comes_to_the_element_that_was_read(name: str) -> None:
    mods = for_packed([MODS[name]], *PACKED[:2])
    key, operands = encode(None, mods)
    forward = AttentionCall(torch.bfloat16, 64, 64, key, packed=True)
    needs = (True, True, True, False, *(x.is_floating_point() for x in operands.tensors))
    (path,) = paths(BackwardCall(forward, needs, deterministic=True))
    workspaces, tensor = _workspaces(), operands.tensors[path.tensor]
    parts = torch.rand(workspaces.shapes[path.way])
    expected, kept = torch.zeros(tensor.shape), torch.zeros(parts.shape)
    for b, h in itertools.product(range(SEQUENCES), range(HEADS)):
        first = LENGTHS_K[b] - LENGTHS_Q[b]
        rows = range(LENGTHS_Q[b]) if path.way == SPREAD else [0]
        for row, k in itertools.product(rows, range(LENGTHS_K[b])):
            place = (0, h, ENDS_K[b] + k) if path.way == BY_KEY else (0, h, ENDS_Q[b] + row, k)
            kept[place] = parts[place]  # where no score is, nothing is written out
            values = values_of(operands) | {"b": b, "h": h, "q": row + first, "k": k}
            index = tuple(int(evaluate(each, values)) for each in path.load.args[1:])
            if all(0 <= each < size for each, size in zip(index, tensor.shape)):
                expected[index] += parts[place]
    got = torch.zeros(tensor.shape)
    workspaces.add_up(got, path, kept, operands)
    torch.testing.assert_close(got, expected)


def test_delta_by_row() -> None:
    """delta is taken from each sequence's place in the workspace; unused tail rows may hold anything."""
    workspaces = _workspaces()
    delta: Tensor = torch.full(workspaces.q_rows, torch.nan)
    expected = torch.rand(1, HEADS, ENDS_Q[-1])
    for run, (start, length) in enumerate(zip(ENDS_Q, LENGTHS_Q)):
        first = start // records.ALIGNMENT * records.ALIGNMENT + run * records.PADDING
        delta[..., first : first + length] = expected[..., start : start + length]
    assert torch.equal(workspaces.by_row(delta)[..., : ENDS_Q[-1]], expected)
