"""Decode calls on a GPU: the schedules that the defaults choose, and the generic one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("tilelang")

from tests.kernels.tilelang.decode.cases import SCALE, Case, Tensors, check_calls
from tileattn import ALiBi, SlidingWindow, SoftCap
from tileattn.call import cache_status
from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit
from tileattn.kernels.tilelang.decode import launch
from tileattn.kernels.tilelang.decode.config import generic_default

pytestmark = pytest.mark.gpu

RAGGED = [0, 1, 63, 1025, 4000]
CASES = {
    **{f"page-{page}": Case(RAGGED, 1, 4, 2, page=page, dim=128) for page in (0, 1, 3, 16, 64)},
    "queries": Case(RAGGED, 5, 8, 1, page=16, dim=64, mods=(SoftCap(2.0),)),
    "window-alibi": Case(RAGGED, 3, 4, 2, page=3, dim=64, mask=SlidingWindow(300, 0), mods=(ALiBi(torch.rand(8)),)),
    "splits": Case(RAGGED, 1, 4, 2, page=16, dim=128, splits=7, sink=True),
    "one": Case(RAGGED, 1, 4, 2, page=16, dim=128, splits=1),
    "fixed": Case(RAGGED, 1, 4, 2, page=16, dim=128, splits=FixedSplit(128), sink=True),
    "packed": Case(RAGGED, [1, 70, 0, 9, 1], 3, 2, page=16, dim=128, rest=5, sink=True),
    "packed-keys": Case(RAGGED, [1, 16, 0, 9, 1], 4, 2, page=0, dim=128, rest=5, sink=True, packed_keys=True),
    "many": Case([(37 * i) % 901 for i in range(300)], 1, 2, 1, page=16, dim=64),
}


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)


def decoded(tensors: Tensors) -> tuple[launch.Decoding, DecodeInputs]:
    call, sizes, inputs = tensors.inputs()
    return launch.prepare(dataclasses.replace(call, arch=arch()), sizes, SCALE, tensors.case.splits), inputs


@pytest.mark.parametrize("schedule", ["default", "generic"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode(case: Case, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    tensors = Tensors(case, "cuda")
    decoding, inputs = decoded(tensors)
    check_calls(tensors, decoding, inputs, times=3, none=True)
    cache_status.check_caches()


@pytest.mark.parametrize("schedule", ["default", "generic"])
def test_an_infinite_score_outweighs_the_other_part(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without parts. The exponents of its part have the base 0, those of the other one 433."""
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    decoding, inputs = decoded(Tensors(Case([200], 1, 2, 1, page=0, dim=64, splits=2), "cuda"))
    inputs.q.fill_(1)
    inputs.k_cache[:, :200] = 300 / (SCALE * 64)
    inputs.k_cache[:, 3] = torch.tensor([math.inf] + [0.0] * 63, dtype=inputs.q.dtype)
    o, lse = decoding(inputs, None)
    assert torch.isposinf(lse).all()
    assert o.isnan().all()


@pytest.mark.parametrize("schedule", ["default", "generic"])
def test_one_graph_serves_all_lengths(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at length 1, with the plan."""
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    tensors = Tensors(Case([4000, 63, 1025], 1, 4, 2, page=16, dim=64), "cuda")
    decoding, inputs = decoded(tensors)
    lengths = inputs.seqlens_k.clone()
    inputs.seqlens_k.fill_(1)
    decoding(inputs, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = decoding(inputs, None)
    for _ in range(2):
        inputs.seqlens_k.copy_(lengths)
        o.fill_(math.nan)
        graph.replay()
        tensors.check(o, lse)


@pytest.mark.parametrize("schedule", ["default", "generic"])
@pytest.mark.parametrize("keys", [128, 1024])
def test_bits_with_fixed_split_depend_on_the_row_alone(
    schedule: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, with more queries, beside a prefill; in pages of 16 and 64."""
    if schedule == "generic":
        monkeypatch.setattr(launch, "default", generic_default)
    generator = torch.Generator("cuda").manual_seed(0)
    length, heads, kv_heads, dim, pages = 3000, 8, 2, 128, 400

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").half()

    q = drawn(16, heads, dim)
    k, v = drawn(pages * 16, kv_heads, dim), drawn(pages * 16, kv_heads, dim)

    def row(lengths: list[int], q_lens: list[int], page: int) -> torch.Tensor:
        """The last row of the last sequence, whose keys are the first of k and v."""
        batch, packed = len(lengths), len(set(q_lens)) > 1
        queries = torch.cat([*(drawn(n, heads, dim) for n in q_lens[:-1]), q[-q_lens[-1] :]])
        queries = queries[None] if packed else queries.view(batch, q_lens[0], heads, dim)
        width = -(-length // page)
        table = torch.arange(width, dtype=torch.int32, device="cuda").repeat(batch, 1)
        call = DecodeCall(
            torch.float16, dim, dim, "Causal()", arch=arch(), packed=packed, page_rows=min(page, 64), fixed=keys
        )
        sizes = DecodeSizes(batch, max(q_lens), sum(q_lens), heads, kv_heads, width * page, page)
        ends = torch.tensor([0, *q_lens], device="cuda").cumsum(0).int() if packed else None
        caches = (x.view(-1, page, kv_heads, dim) for x in (k, v))
        seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        inputs = DecodeInputs(queries, *caches, seqlens, table, ends)
        o, _ = launch.prepare(call, sizes, SCALE, FixedSplit(keys))(inputs, None)
        return o[-1, -1]

    alone = row([length], [1], 16)
    assert torch.equal(row([length], [1], 64), alone)
    assert torch.equal(row([length], [16], 16), alone)
    assert torch.equal(row([5, 1000, 0, length], [1] * 4, 16), alone)
    assert torch.equal(row([length] * 40, [1] * 40, 16), alone)
    for prefill in (9, 10, 300):
        assert torch.equal(row([700, length], [prefill, 1], 16), alone)
