"""What ranks run for test_contents_ranks.py: calls under masks whose tensors change between them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import tileattn
from tests.parallel.ranks_conformance import poisoned_shard
from tests.parallel.ranks_plan import drawn
from tileattn.parallel import Plan
from tileattn.parallel.operators import trace
from tileattn.parallel.prepare import Given
from tileattn.parallel.sharding.visible import seen
from tileattn.testing import poisoned_memory

SEQLEN, HEADS = 512, (2, 1, 1)
WIDTHS = (40, 400, 0)  # 0: nobody sees anything


def inputs() -> list[Tensor]:
    """q, k, v and do, whole."""
    return [drawn(SEQLEN, heads, 16, seed=heads + place) for place, heads in enumerate((*HEADS, HEADS[0]))]


def window(table: Tensor) -> Any:
    """A causal window for each query: a function that captures a tensor."""
    return lambda b, h, q, k: (k <= q) & (q - k < table[q])


def received(plan: Plan, mask: Any, **options: Any) -> int:
    """Bytes that this rank receives in a forward pass."""
    before = plan.traffic.received
    plan.attention(*(torch.ones(1, plan.rows, 2, 8) for _ in range(3)), mask=mask, **options)
    return plan.traffic.received - before


def written_in_place(options: dict[str, Any]) -> list[dict[str, Any]]:
    """For each content of one tensor: outputs, gradients, bytes, and how often the mask's expression was asked."""
    plan, table, found = Plan(None, SEQLEN, layout="contiguous"), torch.zeros(SEQLEN, dtype=torch.int64), []
    *whole, do = inputs()
    for width in WIDTHS:
        table.fill_(width)
        rows = [poisoned_shard(plan, x).requires_grad_() for x in whole]
        before = plan.traffic.received
        with patch("tileattn.parallel.sharding.ranges.seen", wraps=seen) as asked, poisoned_memory():
            o, lse = plan.attention(*rows, mask=window(table), return_lse=True, **options)
            forward, first = plan.traffic.received - before, asked.call_count
            o.backward(poisoned_shard(plan, do))
            plan.attention(*rows, mask=window(table), return_lse=True, **options)
        assert first > 0
        assert asked.call_count == first  # of another function that reads the same tensor at the same version
        gradients = dict(zip(("dq", "dk", "dv"), (x.grad for x in rows)))
        found.append({"o": o.detach(), "lse": lse.detach(), "bytes": forward, **gradients})
    return found


def several_masks() -> dict[str, int]:
    """Bytes for masks of several kinds, where a rank reaches 128 keys of the other."""
    plan, place = Plan(None, SEQLEN, layout="contiguous"), torch.arange(SEQLEN)
    blocks = ((place[:4, None] - place[:4]).abs() < 1)[None, None]
    blocks[..., 2, 1] = True
    tokens = torch.zeros(1, SEQLEN, dtype=torch.bool)
    masks = {
        "blocks": tileattn.BlockSparse(blocks, 128),
        "joined": tileattn.SlidingWindow(30, 0) | tileattn.GlobalTokens(tokens),
        "causal": tileattn.FunctionMask(lambda b, h, q, k: (q - k < tokens.shape[1]) & (place[q] - place[k] < 30)),
    }
    found = {name: received(plan, mask, causal=name == "causal") for name, mask in masks.items()}
    blocks[..., 2, 0] = True
    found["written"] = received(plan, masks["blocks"])
    return found


def in_a_capture(algorithm: str) -> tuple[int, int]:
    """Bytes of a call outside of a CUDA graph, and in one, which asks for no tensor and is agreed on before."""
    plan, table = Plan(None, SEQLEN, layout="contiguous"), torch.full((SEQLEN,), 40)
    before = received(plan, window(table), algorithm=algorithm)
    with (
        patch("tileattn.parallel.plan.is_capturing", lambda x: True),
        patch("tileattn.parallel.sharding.visible.tile_kinds", side_effect=AssertionError("a tensor is read")),
    ):
        captured = received(plan, window(table), algorithm=algorithm)
        table.fill_(3)
        assert received(plan, window(table), algorithm=algorithm) == captured
    return before, captured


def inference() -> int:
    """Bytes under a function whose tensors have no versions."""
    plan = Plan(None, SEQLEN, layout="contiguous")
    with torch.inference_mode():
        return received(plan, window(torch.full((SEQLEN,), 40)))


def other_contents(rank: int, check: str, good: int) -> str:
    """What a rank raises where the tensor of one holds something else, after good calls."""
    plan, table = Plan(None, SEQLEN, layout="contiguous", check=check), torch.full((SEQLEN,), 40)
    for _ in range(good):
        received(plan, window(table))
    if plan.rank == rank:
        table.fill_(200)
    try:
        received(plan, window(table))
    except tileattn.parallel.RankError as error:
        return str(error)
    return "nothing"


def written_before_backward(rank: int, by_operator: bool) -> str:
    """What a rank raises where one writes to a mask's tensor between the passes, and so has no backward pass."""
    plan, table = Plan(None, SEQLEN, layout="contiguous"), torch.full((SEQLEN,), 40)
    x = torch.ones(1, plan.rows, 2, 8, requires_grad=True)
    if by_operator:
        given = Given(window(table), None, False, None, None, 0.0, False, False, None, "gather", None)
        o = trace(plan._number, (x, x, x), given)[0]
    else:
        o = plan.attention(x, x, x, mask=window(table))
    if plan.rank == rank:
        table.fill_(200)
    try:
        o.sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def compiled() -> None:
    """Functions that read tensors, of a mask and of scores, in compiled code: the eager bits, also after a write."""
    plan, table = Plan(None, SEQLEN, layout="contiguous"), torch.full((SEQLEN,), 40)
    slopes = torch.rand(HEADS[0], generator=torch.Generator().manual_seed(0))
    q, k, v, do = map(plan.shard, inputs())
    mask = tileattn.Documents(torch.arange(SEQLEN) // 300) & tileattn.FunctionMask(window(table))

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * (q - k)

    def attend(q: Tensor) -> Any:
        return plan.attention(q, k, v, mask=mask, score_mod=biased, algorithm="gather")

    in_graph, results = torch.compile(attend, backend="aot_eager", fullgraph=True), []
    for width in (40, 300):
        table.fill_(width)
        for run in (attend, in_graph):
            leaf = q.clone().requires_grad_()
            before, o = plan.traffic.received, run(leaf)
            results.append((o.detach(), *torch.autograd.grad(o, leaf, do), plan.traffic.received - before))
    for eager, traced in (results[:2], results[2:]):
        assert torch.equal(eager[0], traced[0])
        assert torch.equal(eager[1], traced[1])
        assert eager[2] == traced[2]
    assert plan.rank == 0 or results[0][2] < results[2][2]
