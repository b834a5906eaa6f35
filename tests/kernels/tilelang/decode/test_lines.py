"""Lines of tiles that decode calls visit: what PyTorch's operations write, beside each pair of the mask itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.tilelang.decode.cases import Case, Tensors
from tests.kernels.tilelang.decode.line_cases import CASES
from tileattn import BlockSparse, Causal, FunctionMask, SlidingWindow
from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from tileattn.kernels import decode_boxes
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.kernels.tilelang.decode.lines.visits import Lines, lines_of
from tileattn.variant.key import encode

BLOCK_M, BLOCK_N = 16, 16
# Items of four queries, whose last ones see as far as a tile's end.
PREFILL = Case([64], 64, 4, 1, page=0, mask=FunctionMask(lambda b, h, q, k: k <= q))
# In the last tile, keys 160 to 175, the mask hides all but those behind the sequence.
HIDDEN_END = Case([166], 1, 4, 2, page=0, mask=FunctionMask(lambda b, h, q, k: k // 24 % 3 == 1))


def made(case: Case, block_M: int = BLOCK_M) -> tuple[Lines, Tensor]:
    """The lines of a case, (items, planes, numbers)."""
    call, sizes, inputs = Tensors(case).inputs()
    if case.packed_keys:  # as launch.Decoding locates them
        inputs = inputs._replace(seqlens_k=inputs.seqlens_k.diff())
    lines = lines_of(call, sizes, block_M, BLOCK_N)
    out = torch.full((lines.rows, 16), -7, dtype=torch.int32)
    lines.write(inputs, out)
    return lines, out.view(lines.items, lines.planes, -1)


def entries(line: list[int], tiles: int) -> list[tuple[int, bool]]:
    """The tiles of a line, and whether each is whole. Checks the counts before each tile."""
    upto, listed = line[: tiles + 1], line[tiles + 1 :]
    found = [(entry // 2, entry % 2 == 1) for entry in listed[: upto[tiles]]]
    numbers = [tile for tile, _ in found]
    assert numbers == sorted(set(numbers))
    assert upto == [sum(tile < end for tile in numbers) for end in range(tiles + 1)]
    return found


def seen_by_rows(case: Case, b: int, kv_heads: range, rows: range) -> Tensor:
    """Which keys of a sequence its packed rows see, in the heads of these kv heads: bool (rows, keys)."""
    length, q_len = case.lengths[b], case.each[b]
    mask = case.mask if case.alone is None else case.alone(b)
    assert mask is not None
    keys, found = torch.arange(length), []
    for kv_head in kv_heads:
        for row in rows:
            q, h = length - q_len + row // case.group, kv_head * case.group + row % case.group
            allowed = mask.allows(0 if case.alone else b, h, torch.tensor(q), keys)
            found.append(torch.as_tensor(allowed).expand(length))
    return torch.stack(found)


@pytest.mark.parametrize("case", [*CASES.values(), PREFILL, HIDDEN_END], ids=[*CASES, "prefill", "hidden-end"])
def test_lines_are_of_what_rows_see(case: Case) -> None:
    lines, table = made(case)
    visited = possible = 0
    number = 0  # of the item
    for b, q_len in enumerate(case.each):
        if not isinstance(case.q_lens, int):
            number = sum(case.each[:b]) * case.group // BLOCK_M + b
        for q_tile in range(-(-q_len * case.group // BLOCK_M)):
            rows = range(q_tile * BLOCK_M, min((q_tile + 1) * BLOCK_M, q_len * case.group))
            for plane in range(lines.planes):
                kv_heads = range(plane, plane + 1) if lines.planes > 1 else range(case.kv_heads)
                seen = seen_by_rows(case, b, kv_heads, rows)
                kinds = dict(entries(table[number + q_tile, plane].tolist(), lines.tiles))
                for tile in range(lines.tiles):
                    part = seen[:, tile * BLOCK_N : (tile + 1) * BLOCK_N]
                    assert tile in kinds or not part.any()
                    assert not kinds.get(tile) or (part.all() and part.shape[1] == BLOCK_N)
                    visited += tile in kinds
                    possible += bool(part.any())
        number += -(-q_len * case.group // BLOCK_M)
    # No tile of these masks is visited needlessly.
    assert visited == possible


def test_tiles_that_all_rows_see_are_whole() -> None:
    """But the last one, of fewer keys; none beyond them is visited."""
    case = Case([90, 64], 1, 4, 2, page=0, mask=FunctionMask(lambda b, h, q, k: k % 64 < 32))
    _, table = made(case)
    tiles = -(-Tensors(case).capacity // BLOCK_N)
    assert entries(table[0, 0].tolist(), tiles) == [(0, True), (1, True), (4, True), (5, False)]
    assert entries(table[1, 0].tolist(), tiles) == [(0, True), (1, True)]


def test_blocks_beyond_a_sequence_are_not_visited() -> None:
    """Their mask has another range for each head, so that jobs have all keys."""
    blocks = torch.ones(2, 2, 1, 6, dtype=torch.bool)
    blocks[:, 1, :, 2] = False
    _, table = made(Case([90, 64], 1, 4, 2, page=0, mask=BlockSparse(blocks, (1, 16))))
    for b, numbers in enumerate(([0, 1, 2, 3, 4, 5], [0, 1, 2, 3])):
        for kv_head in range(2):
            expected = [(tile, tile < 5) for tile in numbers if kv_head == 0 or tile != 2]
            assert entries(table[b, kv_head].tolist(), 6) == expected


def test_parts_are_made_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: the same lines."""
    for name in ("by-head", "packed"):
        lines, together = made(CASES[name])
        monkeypatch.setattr(decode_boxes, "MOST_AT_ONCE", 2 * lines.tiles * lines.planes)
        _, one_by_one = made(CASES[name])
        monkeypatch.undo()
        assert torch.equal(together, one_by_one)


def test_wrong_lengths_are_clamped() -> None:
    """Whatever they are: their sequences have no more tiles than there are."""
    mask = FunctionMask(lambda b, h, q, k: k % 32 < 16)
    key, operands = encode(mask, ())
    call = DecodeCall(torch.float16, 16, 16, key, arch="sm_80", packed=True)
    sizes = DecodeSizes(3, 4, 12, 2, 1, 100, 0)
    lines = lines_of(call, sizes, BLOCK_M, BLOCK_N)
    none = torch.zeros(0)
    for bounds in ([0, 2**31 - 1, -(2**31), 5], [7, 3, 12, 2**31 - 1], [0, 0, 0, 0]):
        lengths = torch.tensor([-5, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ends = torch.tensor(bounds, dtype=torch.int32)
        inputs = DecodeInputs(none, none, none, lengths, cu_seqlens_q=ends, operands=operands)
        out = torch.zeros(lines.rows, 16, dtype=torch.int32)
        lines.write(inputs, out)
        for line in out.view(lines.items, -1).tolist():
            assert [tile for tile, _ in entries(line, lines.tiles)] in ([], [0, 2, 4, 6])


class _NoReads(TorchDispatchMode):
    """Refuses operations that read elements on the host, or whose results have sizes that depend on elements."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.__name__.split(".")[0] not in ("_local_scalar_dense", "item", "nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["by-head", "blocks", "packed"])
def test_nothing_is_read_on_the_host(name: str) -> None:
    """On the meta device tensors have no elements."""
    call, sizes, inputs = Tensors(CASES[name]).inputs()
    on_meta = [tensor if tensor is None else tensor.to("meta") for tensor in inputs[:7]]
    operands = inputs.operands
    operands.tensors = [tensor.to("meta") for tensor in operands.tensors]
    lines = lines_of(call, sizes, BLOCK_M, BLOCK_N)
    with _NoReads():
        lines.write(DecodeInputs(*on_meta, operands), torch.empty(lines.rows, 16, dtype=torch.int32, device="meta"))


def test_which_calls_have_lines() -> None:
    masks = {
        "function": FunctionMask(lambda b, h, q, k: (k <= q) & (k % 64 < 32)),
        "or": SlidingWindow(5, 0) | SlidingWindow(0, 5),
        "causal": Causal(),
        "window": SlidingWindow(5, 0) & Causal(),
        "none": None,
    }
    long, short = DecodeSizes(16, 1, 16, 32, 8, 2**17, 0), DecodeSizes(1, 1, 1, 32, 8, 4096, 0)
    for name, mask in masks.items():
        call = DecodeCall(torch.bfloat16, 128, 128, encode(mask, ())[0], arch="sm_90a")
        has_gaps = name in ("function", "or")
        assert visits.is_listed(call, long, 64, 64) == has_gaps, name
        assert not visits.is_listed(call, short, 64, 64), name
        # The bits of a FixedSplit come from one kernel, whatever the sizes.
        fixed = DecodeCall(**{**vars(call), "fixed": 128})
        assert visits.is_listed(fixed, short, 64, 64) == has_gaps, name
        huge = long._replace(batch=2**10, total_q=2**10, capacity=2**24)
        assert not visits.is_listed(call, huge, 64, 64), name
        assert not visits.is_listed(call, long._replace(capacity=0), 64, 64), name
