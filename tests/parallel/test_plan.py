"""Plans: shards, bits, errors, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileattn
from tests.parallel import ranks_plan
from tests.tools.ranks.pools import pool, returned
from tileattn.parallel.transport.link import Link
from tileattn.parallel.transport.transfer import Transfer
from tileattn.testing import assert_accurate, poisoned_memory


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("ranks", "seqlen"), [(1, 7), (2, 63), (4, 111), (8, 5), (8, 0), (4, 3)])
def test_shards_make_the_whole_again(ranks: int, seqlen: int, layout: str) -> None:
    results = returned(pool(ranks).run(ranks_plan.there_and_back, seqlen, layout))
    positions = torch.cat([result["positions"] for result in results])
    assert sorted(positions.tolist()) == list(range(seqlen))
    sizes = [result["rows"] for result in results]
    assert max(sizes) - min(sizes) <= 2  # two blocks, each off by one token at most


OPTIONS: list[dict[str, Any]] = [
    {"algorithm": "gather", "head_groups": 2},
    {"algorithm": "ulysses"},
    {"algorithm": "2d"},
    {"algorithm": "ring"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["algorithm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_equal_from_run_to_run(options: dict[str, Any], dtype: torch.dtype) -> None:
    runs = [returned(pool(4).run(ranks_plan.bits, options, 111, dtype, tileattn.Causal())) for _ in range(2)]
    for first, second in zip(*runs):
        for name in first:
            assert torch.equal(first[name], second[name]), name
    sinks = [result["dsink"] for result in runs[0]]
    assert all(torch.equal(sinks[0], other) for other in sinks)


def runs_have_the_bits_of_the_whole(seqlen: int, dtype: torch.dtype, mask: Any) -> bool:
    """Of calls in this process, without a plan, on the runs of queries of two ranks and the keys up to their ends.

    Whether it is so is up to the library of the CPU's matrix products: on an AMD EPYC, float32 is not.
    """
    q, k, v = (ranks_plan.drawn(seqlen, heads, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    o, quarter = tileattn.attention(q, k, v, mask=mask), seqlen // 4
    runs = [(0, quarter), (quarter, 3 * quarter), (3 * quarter, seqlen)]
    return all(
        torch.equal(tileattn.attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask=mask), o[:, start:stop])
        for start, stop in runs
    )


CAUSAL, WINDOW = tileattn.Causal(), tileattn.SlidingWindow(300)


@pytest.mark.parametrize(
    ("algorithm", "seqlen", "mask"),
    [
        ("ulysses", 63, CAUSAL),
        ("ulysses", 63, WINDOW),
        # PyTorch's kernel for CPUs has other tiles below 192 queries and from 768 on. For a window, they depend on all
        # lengths.
        ("gather", 1024, CAUSAL),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_o_and_lse_have_the_bits_of_one_device(algorithm: str, seqlen: int, mask: Any, dtype: torch.dtype) -> None:
    """With gather: runs that begin at multiples of 256, so that the tiles are those of one device."""
    if algorithm == "gather" and not runs_have_the_bits_of_the_whole(seqlen, dtype, mask):
        pytest.skip("this CPU's matrix products give a row other bits beside other rows or columns")
    for result in returned(pool(2).run(ranks_plan.bits, {"algorithm": algorithm}, seqlen, dtype, mask)):
        assert torch.equal(result["o"], result["one_o"])
        assert torch.equal(result["lse"], result["one_lse"])


FAR_APART = {
    "window": tileattn.SlidingWindow(20),
    "two sides": tileattn.SlidingWindow(3, 40),
    "documents": tileattn.Causal() & tileattn.Documents(torch.arange(700) // 30),
}


@pytest.mark.parametrize("mask", FAR_APART.values(), ids=FAR_APART.keys())
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["algorithm"])
def test_windows_of_several_runs(options: dict[str, Any], mask: Any) -> None:
    """The two runs of a rank reach keys far apart, whose rows in memory begin at multiples of 256."""
    for result in returned(pool(4).run(ranks_plan.beside_one_device, options, 700, mask)):
        for name, (got, oracle, eager) in result.items():
            assert_accurate(name, got, oracle, [eager], gradient=name != "o")


def test_gaps_before_keys_are_zeros() -> None:
    """A kernel may read them, and multiply what it read by a probability of 0."""
    transfer = Transfer([[(0, 5), (8, 12)]], [[(2, 4), (9, 12)]], [(1, 3)], 0, (2, 1))
    link = Link(None, 0, lambda waited: None, lambda error: None)
    x = torch.randn(1, 9, 4, 8)
    with poisoned_memory():
        (found,) = transfer.fetch(link, [x])
    gap = torch.zeros(1, 1, 2, 8)
    assert torch.equal(found, torch.cat([gap, gap, x[:, 2:4, 1:3], gap, x[:, 6:9, 1:3]], 1))
    assert (link.sent, link.received) == (0, 0)


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bias_may_have_local_rows(ranks: int, algorithm: str) -> None:
    returned(pool(ranks).run(ranks_plan.local_bias, 45, algorithm))


def test_a_dimension_of_a_mesh_is_a_group() -> None:
    for rank, (text, (o, whole_o, gradient, whole_gradient)) in enumerate(returned(pool(4).run(ranks_plan.meshes, 37))):
        assert text.startswith("ValueError: group must be a process group or a DeviceMesh of one dimension"), rank
        assert "(names: 'data', 'context')" in text
        assert_accurate("o", o, whole_o, [whole_o])
        assert_accurate("dq + dk + dv", gradient, whole_gradient, [whole_gradient], gradient=True)


# --- Errors ---


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((None, "8"), {}, "TypeError: seqlen must be an int, the tokens of the whole sequence, got '8'"),
        ((None, -1), {}, "ValueError: seqlen must be at least 0, got -1"),
        ((4, 8), {}, "TypeError: group must be a process group, a DeviceMesh of one dimension or None, got 4"),
        (("ring", 8), {}, "TypeError: group must be a process group, a DeviceMesh of one dimension or None, got str"),
        (
            (None, 8),
            {"layout": "zig"},
            "ValueError: layout must be one of 'zigzag', 'contiguous', 'documents', got",
        ),
        ((None, 8), {"layout": "documents"}, "ValueError: layout='documents' goes with documents=cu_seqlens"),
        ((None, 8), {"layout": "zigzag", "documents": [0, 8]}, "got layout='zigzag' and documents="),
        ((None, 8), {"documents": [0, 7]}, "ValueError: documents must be cu_seqlens from 0 to seqlen = 8, got [0, 7]"),
        ((None, 8), {"documents": [0, 5, 3, 8]}, "ValueError: documents must not decrease, got 3 after 5 (document 1)"),
        ((None, 8), {"documents": torch.ones(2)}, "ValueError: documents must be cu_seqlens, int32 or int64"),
        ((None, 8), {"documents": [0, 8.0]}, "TypeError: documents must be cu_seqlens, a list of ints"),
        ((None, 8), {"mask": tileattn.Causal()}, "ValueError: mask of a plan says whose areas documents are dealt by"),
        ((None, 8), {"check": "never"}, "ValueError: check must be 'first' or 'always', got 'never'"),
        ((None, 8), {"node": 3}, "ValueError: node must divide the 2 ranks of the group, got 3"),
        ((None, 8), {"node": 1.5}, "TypeError: node must be an int or None, got 1.5"),
    ],
)
def test_a_bad_plan(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    for message in returned(pool(2).run(ranks_plan.raised, "bad_plan", arguments, options)):
        assert text in message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ({"algorithm": "star"},),
            "ValueError: algorithm must be one of 'auto', 'gather', 'ulysses', '2d', 'ring'",
        ),
        (({"head_groups": 3},), "ValueError: head_groups must lie in 1 .. kv_heads = 2, got 3"),
        (({"head_groups": "2"},), "TypeError: head_groups must be an int or None, got '2'"),
        (
            ({"head_groups": 2, "algorithm": "ring"},),
            "head_groups is for algorithm='gather' and '2d', got 2",
        ),
        (({}, 37), "got 37 rows (the whole sequence: use plan.shard)"),
        (({}, 5), "ValueError: q must be a shard with the "),
        (({}, None, 3), "the heads of q must be a multiple of the heads of k and v, got 3 and 2"),
        (({}, None, 4, torch.float8_e4m3fn), "NotImplementedError: q, k and v of a parallel plan must be float16"),
        (({"mask": torch.ones(37, 37)},), "TypeError: mask must be a tileattn mask or a function"),
        (({"backend": "best"},), "ValueError: backend must be one of"),
        (({"sink": torch.ones(3)},), "ValueError: sink must have shape (heads,) = (4,), got (3,)"),
        (
            ({"score_mod": tileattn.Bias(torch.ones(1, 1, 9, 37))},),
            "ValueError: Bias: tensor must have shape (batch or 1, heads or 1, seqlen_q or 1, seqlen_k)",
        ),
    ],
)
def test_a_bad_call(arguments: tuple[Any, ...], text: str) -> None:
    for message in returned(pool(2).run(ranks_plan.raised, "bad_call", *arguments)):
        assert text in message


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("none", "TypeError: shard() needs at least one tensor, got none"),
        ("list", "TypeError: tensor 0 must be a tensor (batch, rows, ...) or (rows,), got list"),
        ("length", "ValueError: tensor 0 must have 37 rows in dimension 1, got shape (2, 36)"),
        ("scalar", "ValueError: tensor 0 must be (batch, rows, ...) or (rows,), got a tensor without dimensions"),
        ("unshard", "in dimension 1, got shape (2, 37)"),
    ],
)
def test_a_bad_shard(what: str, text: str) -> None:
    for message in returned(pool(2).run(ranks_plan.raised, "bad_shard", what)):
        assert text in message


def test_a_plan_without_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"got None without a default group; call torch\.distributed"):
        tileattn.parallel.Plan(None, 8)
