"""Triton's decode kernels by lines, in the interpreter: what lines say, what kernels compute, which tiles they visit.

The oracle is every pair of the mask. Keys and values in tiles that are hidden from all rows of a kv head are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tileattn
from tests.kernels.triton.decode.line_cases import MASKS, kinds_of, poisoned, row_tiles, seen_by
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tests.tools.triton_kernels.visits import count_visits
from tileattn import BlockSparse, Causal, FunctionMask, SlidingWindow
from tileattn.call import cache_status
from tileattn.call.decoding import DecodeCall, DecodeSizes, FixedSplit, Splits
from tileattn.math import load
from tileattn.testing import assert_forward_accurate
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

pytest.importorskip("triton")
from tileattn.kernels.triton.decode import defaults, kernel, lists
from tileattn.kernels.triton.decode.backend import prepare
from tileattn.kernels.triton.decode.launch import Decode
from tileattn.kernels.triton.decode.lists import Lines
from tileattn.kernels.triton.tile_sizes import Config

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="test_lines_gpu.py has tiles of a GPU")

TILE = 16
SMALL = Config(16, TILE, 4, 1)
FIXED = FixedSplit(128)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _short_calls_have_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In small tiles; no call records an error in the device's status."""
    monkeypatch.setattr(lists, "FEWEST_TILES", 1)
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    forget_prepared()
    with defaults.overridden(SMALL):
        yield
    forget_prepared()
    cache_status.check_caches()


def problem(name: str, q_lens: Any = (1, 1, 1), k_lens: Any = (200, 65, 0), **given: Any) -> Problem:
    return Problem(q_lens, k_lens, **{"heads": 4, "head_dim": 16, "head_dim_v": 16, "mask": MASKS[name]} | given)


def decode_of(made: Problem, inputs: Any, page: int = 0, splits: Splits = None) -> Decode:
    return prepare(*made.facts(inputs, page, splits), made.scale, splits)


# --- What lines say ---

OF_LINES: dict[str, Problem] = {
    **{name: problem(name, (2, 2, 2), (200, 65, 7)) for name in MASKS},
    "prefill": problem("by-head", (30, 30), (150, 33), kv_heads=1),
    "packed": problem("by-head", (30, 1, 0, 9), (150, 200, 5, 9)),
    "packed-third": problem("third", (30, 1, 0, 9), (150, 200, 5, 9), kv_heads=1),
}


@pytest.mark.parametrize("splits", [None, FIXED], ids=["None", "fixed"])
@pytest.mark.parametrize("name", OF_LINES)
def test_lines_are_of_what_rows_see(name: str, splits: Splits) -> None:
    """No tile of these masks is listed needlessly, nor mixed needlessly."""
    made, packed = OF_LINES[name], name.startswith("packed")
    inputs = made.inputs(packed=packed, tail=3 * packed)
    decode = decode_of(made, inputs, splits=splits)
    assert decode.lines is not None
    table = decode.plan(inputs)
    assert table is not None
    size, counts, planes = decode.lines.arguments
    assert table.shape == (decode.lines.boxes.items, planes, size)
    number = 0
    for number, b, rows in row_tiles(made, TILE, packed):
        for plane in range(planes):
            kv_heads = range(plane, plane + 1) if planes > 1 else range(made.kv_heads)
            mixed, whole = kinds_of(seen_by(made, b, kv_heads, rows), TILE)
            line = table[number, plane].tolist()
            if splits is None:
                assert line[:2] == [len(mixed), len(mixed) + len(whole)]
                assert line[2 : 2 + line[1]] == mixed + whole
            else:
                visited = sorted(mixed + whole)
                assert line[:counts] == [sum(tile < 8 * part for tile in visited) for part in range(counts)]
                assert line[counts : counts + len(visited)] == visited
    assert number < len(table)


def test_blocks_of_lines_are_made_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileattn.kernels import decode_boxes

    made = OF_LINES["packed"]
    inputs = made.inputs(packed=True)
    together = decode_of(made, inputs).plan(inputs)
    monkeypatch.setattr(decode_boxes, "MOST_AT_ONCE", 1)
    one_by_one = decode_of(made, inputs).plan(inputs)
    for number, _, _ in row_tiles(made, TILE, packed=True):
        for line, other in zip(together[number].tolist(), one_by_one[number].tolist(), strict=True):
            assert line[: 2 + line[1]] == other[: 2 + other[1]]


class _NoReads(TorchDispatchMode):
    """Refuses operations that read elements on the host, or whose results have sizes that depend on elements."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.__name__.split(".")[0] not in ("_local_scalar_dense", "item", "nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("splits", [None, FIXED], ids=str)
def test_nothing_is_read_on_the_host(splits: Splits) -> None:
    """On the meta device tensors have no elements."""
    made = OF_LINES["packed"]
    inputs = made.inputs(packed=True)
    decode = decode_of(made, inputs, splits=splits)
    on_meta = [tensor if tensor is None else tensor.to("meta") for tensor in inputs[:7]]
    with _NoReads():
        decode.plan(inputs._replace(**dict(zip(inputs._fields, on_meta))))


def test_lines_of_wrong_lengths_name_tiles_that_there_are() -> None:
    made = OF_LINES["packed"]
    inputs = made.inputs(packed=True)
    lines = decode_of(made, inputs).lines
    assert lines is not None
    lengths = torch.tensor([-5, 2**31 - 1, -(2**31), 3], dtype=torch.int32)
    for ends in ([0, 2**31 - 1, -(2**31), 5, 7], [7, 3, 12, 2**31 - 1, 0], [0, 0, 0, 0, 0]):
        wrong = inputs._replace(seqlens_k=lengths, cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))
        for line in lines.make(wrong).view(-1, lines.arguments[0]).tolist():
            assert 0 <= line[0] <= line[1] <= lines.boxes.tiles
            assert all(0 <= tile < lines.boxes.tiles for tile in line[2 : 2 + line[1]])


# --- What kernels compute ---


def check(made: Problem, page: int = 0, splits: Splits = None, tail: int = 0, **given: Any) -> None:
    """By lines, and without the keys that all rows of a kv head hide."""
    inputs = made.inputs(page, tail=tail, **given)
    assert decode_of(made, inputs, page, splits).call.listed
    expected = made.expected(tail, given.get("packed", False))
    without, hidden = poisoned(made, TILE)
    assert hidden
    assert_forward_accurate("lines", without.run(page, splits, tail=tail, **given), *expected)


SHORT = {
    "by-head-pages": (problem("by-head"), 3, 3, {}),
    "third-window-fixed": (problem("third-in-window", dtype=F32, kv_heads=1), 16, FIXED, {}),
    "packed": (problem("by-batch", (9, 1, 0), (90, 60, 5), dtype=BF16), 16, None, {"packed": True, "tail": 3}),
}
LONG = {
    **{f"{name}-{page}": (problem(name), page, None, {}) for name in MASKS for page in (0, 1, 16, 64)},
    **{f"{name}-fixed-{page}": (problem(name), page, FIXED, {}) for name in MASKS for page in (0, 3, 16)},
    **{f"{name}-one": (problem(name, (3,) * 3, dtype=F32), 16, 1, {}) for name in ("by-head", "or")},
    "more-parts-than-tiles": (problem("third"), 16, 40, {}),
    "prefill": (problem("by-head", (30, 30), (150, 33), dtype=BF16), 16, 3, {}),
    **{
        f"packed-{splits}": (problem("by-head", (30, 1, 0, 9), (150, 200, 5, 9)), 3, splits, {"packed": True})
        for splits in (None, 1, 5, FIXED)
    },
}


@pytest.mark.parametrize(
    ("made", "page", "splits", "given"),
    [*SHORT.values(), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG.values())],
    ids=[*SHORT, *LONG],
)
def test_outputs(made: Problem, page: int, splits: Splits, given: dict[str, Any]) -> None:
    check(made, page, splits, **given)


@pytest.mark.parametrize("q_len", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_blocks_that_a_model_chose(q_len: int) -> None:
    """By the public call; the oracle looks blocks up by itself."""
    chosen = torch.rand(2, 2, q_len, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    lengths = (150, 70)

    def allows(b: Any, h: Any, q: Any, k: Any) -> Any:
        first = torch.tensor(lengths)[b] - q_len
        return (k <= q) & chosen[b, h // 2, q - first, k // TILE]

    made = Problem([q_len] * 2, lengths, heads=4, head_dim=16, head_dim_v=16, scale=0.25)
    made.mask = SimpleNamespace(allows=allows)
    expected = made.expected()
    without, hidden = poisoned(made, TILE)
    assert hidden
    without.mask = None
    inputs = without.inputs(16)
    got = tileattn.decode(
        *inputs[:4], page_table=inputs.page_table, mask=BlockSparse(chosen, (1, TILE)), scale=0.25, return_lse=True,
        backend="triton",
    )  # fmt: skip
    assert_forward_accurate("blocks", got, *expected)


def test_rows_that_see_nothing_and_no_pages() -> None:
    """Rows of no sequence have the line of another one, and a cache without pages none of what lines say."""
    made = problem("nothing", (1, 1), (40, 3), sink=torch.arange(4.0))
    for splits in (None, FIXED):
        o, lse = made.run(16, splits, packed=True, tail=2)
        assert (o == 0).all()
        assert torch.equal(lse[0, :, :2], torch.arange(4.0)[:, None].expand(4, 2))
        assert (lse[0, :, 2:] == -torch.inf).all()
    made = problem("by-batch", (1, 1), (40, 33))
    inputs = made.inputs(16)
    inputs = inputs._replace(k_cache=inputs.k_cache[:0], v_cache=inputs.v_cache[:0])
    o, lse = decode_of(made, inputs, 16)(inputs, None)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    cache_status.STATUS.devices.clear()  # lengths that there is no room for


# --- Which tiles they visit ---


@pytest.mark.parametrize(
    ("name", "splits"), [("by-head", 3), pytest.param("or", 1, marks=pytest.mark.slow), ("third", FIXED)], ids=str
)
def test_what_is_not_hidden_is_visited(name: str, splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products a tile of a program, and a mask in mixed ones; with a FixedSplit in all."""
    made = problem(name, (2, 2), (200, 65), kv_heads=2 if name == "by-head" else 1)
    count = count_visits(monkeypatch, kernel)
    made.run(16, splits)
    mixed = whole = 0
    for _, b, rows in row_tiles(made, TILE, packed=False):
        for kv_head in range(made.kv_heads):
            found = kinds_of(seen_by(made, b, range(kv_head, kv_head + 1), rows), TILE)
            mixed, whole = mixed + len(found[0]), whole + len(found[1])
    assert whole > 0 or name == "or"
    assert count == {"products": 2 * (mixed + whole), "masked": mixed + whole * (splits == FIXED)}


# --- Bits ---


@pytest.mark.parametrize("name", ["third-in-window", pytest.param("by-head", marks=pytest.mark.slow)])
def test_bits_of_a_fixed_split_do_not_depend_on_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls too short for lines, whose kernel finds all tiles in one list; and of one program for all parts."""
    from tileattn.kernels.triton.decode import splits

    made = problem(name, (1, 1), (200, 3), dtype=BF16)
    first = made.run(16, FIXED)
    monkeypatch.setattr(splits, "WORKSPACE_BYTES", 0)
    together = made.run(16, FIXED)
    monkeypatch.setattr(lists, "FEWEST_TILES", 2**62)
    inputs = made.inputs(16)
    short = decode_of(made, inputs, 16, FIXED)
    assert short.call.listed
    assert short.lines is not None
    assert short.lines.arguments == (0, 0, 1)
    for got in (together, made.run(16, FIXED)):
        assert torch.equal(got[0], first[0])
        assert torch.equal(got[1], first[1])


def test_all_tiles_of_a_list_are_those_of_the_range() -> None:
    """Entries of pages before a window are garbage, which would be recorded."""
    made = problem("third-in-window", (1,), (180,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "FEWEST_TILES", 2**62)
        made.check("window", 16, FIXED, seen_from=[max(keys - 131, 0) for keys in made.k_lens])


# --- Plans, and writes in place ---


def test_layers_share_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem("by-head", (1, 1), (100, 20))
    inputs = made.inputs(16)
    options = {"page_table": inputs.page_table, "mask": made.mask, "backend": "triton", "scale": made.scale}
    plan = tileattn.decode_plan(*inputs[:4], **options)
    assert plan.tensor is not None
    expected = tileattn.decode(*inputs[:4], **options)
    monkeypatch.setattr(Lines, "make", lambda *_: pytest.fail("lines were made again"))
    assert torch.equal(tileattn.decode(*inputs[:4], plan=plan, **options), expected)
    other = made.inputs(16, more=50)
    assert (
        tileattn.decode_plan(*other[:4], page_table=other.page_table, scale=made.scale, backend="triton").tensor is None
    )


def test_lengths_and_tensors_that_were_written_in_place() -> None:
    windows = torch.tensor([3, 60, 5, 9], dtype=torch.int32)
    mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(windows, h))
    made = problem("third", (1, 1), (100, 20), mask=mask)
    inputs = made.inputs(16)
    decode = decode_of(made, inputs, 16)
    inputs.seqlens_k.fill_(1)
    decode(inputs, None)
    inputs.seqlens_k.copy_(torch.tensor(made.k_lens))
    windows.copy_(torch.tensor([90, 0, 1, 2]))
    assert_forward_accurate("written", decode(inputs, None), *made.expected())


# --- Which calls have lines ---


def test_long_calls_of_masks_with_gaps_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = Config(16, 64, 4, 3)
    # 8 kv heads of 8 sequences of 2048 tiles; half of that
    long, short = DecodeSizes(8, 1, 8, 32, 8, 2**17, 0), DecodeSizes(8, 1, 8, 32, 8, 2**16, 0)
    masks = dict(MASKS) | {"none": None, "causal": Causal(), "window": SlidingWindow(5, 0) & Causal()}
    for name, mask in masks.items():
        has_gaps = name in MASKS
        for dtype in (F16, BF16, F32):
            call = DecodeCall(dtype, 128, 128, encode(mask, ())[0], arch="sm_90a")
            assert (lists.lines_of(call, long, config) is not None) == has_gaps, name
            assert lists.lines_of(call, short, config) is None, name
            huge = long._replace(batch=2**10, total_q=2**10, capacity=2**24)
            assert lists.lines_of(call, huge, config) is None, name
            assert lists.lines_of(call, long._replace(capacity=0), config) is None, name
            fixed = dataclasses.replace(call, fixed=128)
            for sizes in (long, short, huge):
                lines = lists.lines_of(fixed, sizes, config)
                assert (lines is not None) == has_gaps, name
                assert lines is None or lines.made == (sizes is long)


def test_a_call_by_ranges_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = problem("by-head")
    inputs = made.inputs()
    decode = decode_of(made, inputs)
    assert decode.lines is None
    assert decode.plan(inputs) is None
    assert not decode.call.listed
