"""Decode calls that visit the tiles of lines only, on a GPU: the schedules of the defaults, and the generic one.

Keys and values in tiles that a mask hides are NaN, so that a tile is seen that should not have been visited.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("tilelang")

import tileattn
from tests.kernels.tilelang.decode.cases import SCALE, Case, Tensors, check_calls
from tests.kernels.tilelang.decode.line_cases import SINKS, blocks, by_head, every_third, nothing, poison_hidden
from tests.kernels.tilelang.decode.test_gpu import arch
from tileattn import BlockSparse, Causal, FunctionMask, SlidingWindow, SoftCap
from tileattn.call import cache_status
from tileattn.call.decoding import DecodeInputs, FixedSplit
from tileattn.kernels.tilelang.decode import launch
from tileattn.kernels.tilelang.decode.config import generic_default
from tileattn.kernels.tilelang.decode.lines import launch as write_lines
from tileattn.kernels.tilelang.decode.lines import visits
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.tuner.state import forget_prepared

pytestmark = pytest.mark.gpu

TILE = 64  # a multiple of all block_N
RAGGED = [0, 1, 63, 1025, 4000]


def third(b, h, q, k):  # type: ignore[no-untyped-def]
    """Every third stretch of 128 keys."""
    return (k <= q) & (k // 128 % 3 == 1)


def floats(b, h, q, k):  # type: ignore[no-untyped-def]
    """Which PyTorch's operations make the lines of."""
    return ((q - k) * 0.5 < 100.0) | (k < 20)


CASES = {
    **{
        f"by-head-{page}": Case(RAGGED, 1, 4, 2, page=page, dim=128, mask=FunctionMask(by_head))
        for page in (0, 1, 3, 16, 64)
    },
    "queries": Case(RAGGED, 5, 8, 1, page=16, dim=64, mods=(SoftCap(2.0),), mask=FunctionMask(third)),
    "or": Case(RAGGED, 1, 4, 2, page=16, dim=128, mask=SINKS, sink=True),
    "third-in-window": Case(RAGGED, 2, 4, 2, page=16, dim=128, mask=SlidingWindow(2000, 0) & FunctionMask(third)),
    "splits": Case(RAGGED, 1, 4, 2, page=16, dim=128, splits=7, mask=FunctionMask(third)),
    "fixed": Case(RAGGED, 1, 4, 2, page=16, dim=128, splits=FixedSplit(128), sink=True, mask=FunctionMask(by_head)),
    "packed": Case(RAGGED, [1, 70, 0, 9, 1], 3, 2, page=16, dim=128, rest=5, mask=FunctionMask(by_head)),
    "packed-keys": Case(
        RAGGED, [1, 16, 0, 9, 1], 4, 2, page=0, dim=128, rest=5, packed_keys=True, mask=FunctionMask(third)
    ),
    "blocks": Case(RAGGED, 1, 4, 2, page=64, dim=128, **blocks(RAGGED, 2, 4, 1, 0.1, 64)),
    "blocks-of-queries": Case(RAGGED, 3, 4, 2, page=16, dim=64, **blocks(RAGGED, 2, 4, 3, 0.05, 64)),
    "nothing": Case([70, 3000], 1, 2, 1, page=16, dim=64, mask=FunctionMask(nothing), sink=True),
    "floats": Case(RAGGED, 1, 4, 2, page=16, dim=64, mask=FunctionMask(floats)),
    "many": Case([(37 * i) % 901 for i in range(300)], 1, 2, 1, page=16, dim=64, mask=FunctionMask(every_third)),
}


@pytest.fixture(autouse=True)
def every_call_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEWEST_TILES", "FEWEST_BY_OPERATIONS"):
        monkeypatch.setattr(visits, name, 1)
    forget_prepared()


def decoded(tensors: Tensors) -> tuple[launch.Decoding, DecodeInputs]:
    call, sizes, inputs = tensors.inputs()
    return launch.prepare(dataclasses.replace(call, arch=arch()), sizes, SCALE, tensors.case.splits), inputs


@pytest.mark.parametrize("schedule", ["default", "generic"])
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    tensors = Tensors(CASES[name], "cuda")
    assert poison_hidden(tensors, TILE) > 0 or name == "many"
    decoding, inputs = decoded(tensors)
    assert decoding.call.listed
    check_calls(tensors, decoding, inputs, times=3, none=True)
    cache_status.check_caches()


@pytest.mark.parametrize("name", CASES)
def test_whatever_writes_the_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for its queries, that for as many as a tile has, and PyTorch's operations."""
    tensors = Tensors(CASES[name], "cuda")
    poison_hidden(tensors, TILE)
    decoding, inputs = decoded(tensors)
    tensors.check(*decoding(inputs, None))
    monkeypatch.setattr(visits.Lines, "queries", 64)  # where there is a kernel for so many
    tensors.check(*decoding(inputs, None))
    monkeypatch.setattr(write_lines, "fits", lambda *_: False)
    tensors.check(*decoding(inputs, None))


@pytest.mark.parametrize("schedule", ["default", "generic"])
@pytest.mark.parametrize("name", ["fixed", "queries", "blocks-of-queries", "packed"])
def test_bits_with_fixed_split_do_not_depend_on_lines(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile that all rows hide changes no bit of a row's sums."""
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    case = dataclasses.replace(CASES[name], splits=FixedSplit(256))
    decoding, inputs = decoded(Tensors(case, "cuda"))
    o, lse = decoding(inputs, None)
    monkeypatch.setattr(visits, "MOST_TILES", 0)
    without, inputs = decoded(Tensors(case, "cuda"))
    assert decoding.call.listed
    assert not without.call.listed
    expected = without(inputs, None)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_graph_sees_blocks_and_lengths_that_were_written_in_place() -> None:
    """Captured with other blocks, at length 1."""
    lengths = [4000, 63, 1025]
    first, second = (blocks(lengths, 2, 4, 1, part, 64) for part in (0.5, 0.1))
    tensors = Tensors(Case(lengths, 1, 4, 2, page=16, dim=64, **second), "cuda")
    assert poison_hidden(tensors, TILE) > 0
    q, k, v, seqlens, table = (
        each.cuda() for each in (tensors.q, tensors.k, tensors.v, tensors.lengths, tensors.table)
    )
    of_first, of_second = (each["mask"].y.blocks.cuda() for each in (first, second))
    mask = Causal() & BlockSparse(of_first, (1, 64))
    given = seqlens.clone().fill_(1)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return tileattn.decode(  # type: ignore[return-value]
            q, k, v, given, page_table=table, mask=mask, scale=SCALE, return_lse=True, backend="tilelang"
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step()
    given.copy_(seqlens)
    of_first.copy_(of_second)
    o.fill_(math.nan)
    graph.replay()
    tensors.check(o, lse)


def test_attention_of_few_queries_skips_tiles() -> None:
    """One query over 8192 keys: the decode phase runs it, and hidden keys are not read."""
    q, k, v = (torch.randn(1, n, 8, 64, device="cuda", dtype=torch.half) for n in (1, 8192, 8192))
    arguments = (q, k, v, FunctionMask(third), (), None, SCALE)
    expected = oracle_attention(*arguments), eager_attention(*arguments)
    hidden = (torch.arange(8192, device="cuda") // 128 % 3 != 1)[None, :, None, None]
    k, v = (each.masked_fill(hidden, math.nan) for each in (k, v))
    got = tileattn.attention(q, k, v, mask=third, scale=SCALE, return_lse=True, backend="tilelang")
    assert_forward_accurate("one query", got, *expected)  # type: ignore[arg-type]
