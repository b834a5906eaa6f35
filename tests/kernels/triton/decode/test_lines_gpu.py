"""Triton's decode kernels by lines on a GPU: ``pytest -m gpu tests/kernels/triton/decode/test_lines_gpu.py``.

Tiles of the default sizes. Keys and values in tiles that are hidden from all rows of a kv head are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.kernels.triton.decode.line_cases import MASKS, poisoned
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import BlockSparse, Causal, FunctionMask, SoftCap
from tileattn.call import cache_status
from tileattn.call.decoding import FixedSplit, Splits
from tileattn.testing import assert_forward_accurate
from tileattn.tuner.state import forget_prepared

pytest.importorskip("triton")
from tileattn.kernels.triton.decode import lists
from tileattn.kernels.triton.decode.backend import prepare
from tileattn.kernels.triton.decode.launch import Decode
from tileattn.kernels.triton.decode.lists import Lines

pytestmark = pytest.mark.gpu

TILE = 64  # a multiple of all block_N
RAGGED = (0, 1, 63, 1025, 4000)
FIXED = FixedSplit(256)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _short_calls_have_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lists, "FEWEST_TILES", 1)
    forget_prepared()
    yield
    forget_prepared()
    cache_status.check_caches()


def third(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every third stretch of 128 keys."""
    return (k <= q) & (k // 128 % 3 == 1)


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Other stretches in each sequence, also behind a query."""
    return (k // 192 + b) % 3 != 1


def problem(mask: Any, q_lens: Any = (1,) * 5, k_lens: Any = RAGGED, **given: Any) -> Problem:
    of = {"heads": 8, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "dtype": BF16, "scale": 0.125}
    return Problem(q_lens, k_lens, mask=MASKS[mask] if isinstance(mask, str) else FunctionMask(mask), **of | given)


def decode_of(made: Problem, inputs: Any, page: int, splits: Splits) -> Decode:
    return prepare(*made.facts(inputs, page, splits), made.scale, splits)


def check(made: Problem, page: int, splits: Splits, packed: bool = False, tail: int = 0) -> None:
    expected = made.expected(tail, packed)
    without, hidden = poisoned(made, TILE)
    assert hidden
    inputs = without.inputs(page, packed=packed, tail=tail)
    decode = decode_of(made, inputs, page, splits)
    assert decode.call.listed
    assert_forward_accurate("a plan", decode(inputs, decode.plan(inputs)), *expected)
    inputs.out.fill_(math.nan)
    assert_forward_accurate("no plan", decode(inputs, None), *expected)


@pytest.mark.parametrize("splits", [None, 1, 7, FIXED], ids=str)
@pytest.mark.parametrize("page", [0, 1, 3, 16, 64, 128])
@pytest.mark.parametrize("name", ["by-head", "third-in-window", "or"])
def test_pages_and_splits(name: str, page: int, splits: Splits) -> None:
    check(problem(name), page, splits)


@pytest.mark.parametrize("splits", [None, FIXED], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
def test_dtypes_and_head_dims(head_dim: int, dtype: torch.dtype, splits: Splits) -> None:
    given = {"head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype, "scale": head_dim**-0.5}
    for page in (0, 16):
        check(problem(third, **given), page, splits)
        check(problem("by-head", (9,) * 3, (1025, 63, 2100), **given), page, splits)


@pytest.mark.parametrize("splits", [None, 5, FIXED], ids=str)
@pytest.mark.parametrize("mask", ["by-head", by_batch, third])
def test_packed_queries(mask: Any, splits: Splits) -> None:
    """Of single queries, a draft, a prefill chunk of several tiles, and rows of no sequence."""
    made = problem(mask, (1, 130, 0, 9, 1), (1025, 700, 63, 400, 4000))
    for page in (0, 16, 64):
        check(made, page, splits, packed=True, tail=70)


@pytest.mark.parametrize("name", ["nothing", "floats"])
def test_other_masks(name: str) -> None:
    check(problem(name, (2,) * 3, (70, 3000, 1025), sink=torch.arange(8.0, device=DEVICE)), 16, None)
    check(problem(name, (2,) * 3, (70, 3000, 1025), mods=(SoftCap(3.0),)), 16, None)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["by-head", "third-in-window", "or"])
def test_bits_of_a_fixed_split_do_not_depend_on_lines(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the other sequences of a call, whose sizes decide whether lines are made."""
    for head_dim in (64, 128):
        made = problem(name, (3, 3), (700, 4000), head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
        monkeypatch.setattr(lists, "FEWEST_TILES", 1)
        bits = made.run(16, FIXED)
        alone = dataclasses.replace(made, q_lens=(3,), k_lens=(4000,), q=[], k=[], v=[])
        alone.q[0], alone.k[0], alone.v[0] = made.q[1], made.k[1], made.v[1]
        monkeypatch.setattr(lists, "FEWEST_TILES", 2**62)
        without, of_one = made.run(16, FIXED), alone.run(0, FIXED)
        for got, other, one in zip(bits, without, of_one, strict=True):
            assert torch.equal(got, other)
            assert torch.equal(got[1], one[0])


def test_the_same_bits_in_each_run() -> None:
    made = problem("by-head", (2,) * 5)
    first = made.run(16, None)
    for _ in range(10):
        assert all(map(torch.equal, made.run(16, None), first))


def test_a_graph_sees_lengths_and_blocks_that_were_written_in_place() -> None:
    """Captured at length 1 with other blocks: lines are made in each replay."""
    lengths = torch.tensor([4000, 63, 1025], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    first, second = ((torch.rand(3, 2, 1, 64, generator=generator) < part).to(DEVICE) for part in (0.5, 0.1))
    made = problem("third", (1,) * 3, (4000, 63, 1025))
    inputs = made.inputs(16)
    given, blocks = torch.ones_like(lengths), first.clone()

    def step(seqlens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.decode(  # type: ignore[return-value]
            *inputs[:3], seqlens, page_table=inputs.page_table, mask=Causal() & BlockSparse(chosen, (1, TILE)),
            scale=made.scale, return_lse=True, backend="triton",
        )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(given, blocks)  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, blocks)
    for chosen in (first, second, torch.zeros_like(first)):
        given.copy_(lengths)
        blocks.copy_(chosen)
        captured[0].fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, captured, step(lengths, chosen.clone())))


def test_blocks_that_a_model_chose() -> None:
    """Beside the torch backend, which evaluates every pair; hidden keys are not read."""
    lengths, q_len = (4000, 63, 1025), 3
    chosen = (torch.rand(3, 2, q_len, 64, generator=torch.Generator().manual_seed(1)) < 0.1).to(DEVICE)
    made = problem("third", (q_len,) * 3, lengths, dtype=F16)
    made.mask = Causal()
    inputs = made.inputs(16)
    options = {"page_table": inputs.page_table, "mask": BlockSparse(chosen, (1, TILE)), "scale": made.scale}
    expected = tileattn.decode(*inputs[:4], backend="torch", **options)
    hidden = ~chosen.any(2).repeat_interleave(TILE, dim=2)  # (batch, kv_heads, keys)
    for b, length in enumerate(lengths):
        for cache in (made.k, made.v):
            cache[b].masked_fill_(hidden[b, :, :length].T[..., None], math.nan)
    poisoned_inputs = made.inputs(16)
    options["page_table"] = poisoned_inputs.page_table
    got = tileattn.decode(*poisoned_inputs[:4], backend="triton", **options)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def test_a_long_call_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^17 tiles and more have lines without a test's limit; half as many have none."""
    monkeypatch.undo()
    forget_prepared()
    made = Problem(
        (1,) * 8, (1000,) * 8, 16, 16, head_dim=64, head_dim_v=64, dtype=BF16, scale=0.125, mask=MASKS["third"]
    )
    long, short = made.inputs(more=2**16 - 1000), made.inputs(more=2**15 - 1000)
    assert decode_of(made, long, 0, None).call.listed
    assert not decode_of(made, short, 0, None).call.listed
    expected = made.expected()
    for inputs in (long, short):
        assert_forward_accurate("long", decode_of(made, inputs, 0, None)(inputs, None), *expected)


def test_layers_share_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem("by-head")
    inputs = made.inputs(16)
    options = {"page_table": inputs.page_table, "mask": made.mask, "scale": made.scale, "backend": "triton"}
    plan = tileattn.decode_plan(*inputs[:4], **options)
    expected = tileattn.decode(*inputs[:4], **options)
    monkeypatch.setattr(Lines, "make", lambda *_: pytest.fail("lines were made again"))
    assert torch.equal(tileattn.decode(*inputs[:4], plan=plan, **options), expected)
