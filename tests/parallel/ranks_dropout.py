"""What ranks run for test_dropout.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tileattn
from tests.parallel.ranks_conformance import poisoned_shard
from tests.parallel.ranks_plan import drawn
from tileattn.call.dropout import draw_seed
from tileattn.parallel import Plan
from tileattn.testing import dropout_mask, poisoned_memory

SEED, P = 5, 0.3


def seeded(plan: Plan) -> None:
    """Another generator on each rank: that of rank 0 counts."""
    torch.manual_seed(SEED + 100 * plan.rank)


def patterns(seqlen: int, layout: str, ways: list[dict[str, Any]], documents: list[int] | None = None) -> list[str]:
    """The algorithms whose pattern is not that of one device, read from o: values are unit vectors."""
    bounds = [0, seqlen] if documents is None else documents
    plan = Plan(None, seqlen, layout=layout, documents=documents, node=2 if documents is None else None)
    batch, longest = (2 if documents is None else 1), max(stop - start for start, stop in pairwise(bounds))
    torch.manual_seed(SEED)
    count = batch if documents is None else len(documents) - 1
    expected = dropout_mask(draw_seed("cpu"), P, count, 4, longest, longest)
    units = torch.cat([torch.eye(longest)[: stop - start] for start, stop in pairwise(bounds)])
    v = plan.shard(units[None, :, None].expand(batch, seqlen, 2, longest))
    q, k = (plan.shard(drawn(seqlen, heads, 8).expand(batch, -1, -1, -1)) for heads in (4, 2))
    sequences = torch.bucketize(plan.tokens, torch.tensor(bounds), right=True) - 1
    wrong = []
    for options in ways:
        seeded(plan)
        with poisoned_memory(), torch.no_grad():
            o = plan.attention(q, k, v, dropout_p=P, **options)
        for row, (sequence, position) in enumerate(zip(sequences.tolist(), plan.positions.tolist())):
            keys = bounds[sequence + 1] - bounds[sequence]
            of_row = expected[:, :, position] if documents is None else expected[sequence : sequence + 1, :, position]
            if not torch.equal(o[:, row, :, :keys] != 0, of_row[..., :keys]):
                wrong.append(f"{options}: row {row} of rank {plan.rank}")
    return wrong


def beside_one_device(
    seqlen: int, layout: str, options: dict[str, Any], mask: Any, biased: bool
) -> dict[str, list[Tensor]]:
    """For each output and gradient: this rank's, and one device's rows of it in float64 and in float32."""
    plan = Plan(None, seqlen, layout=layout, node=2)
    found: list[list[Tensor]] = []
    names = ["o", "lse", "dq", "dk", "dv", "dsink", *["dbias"] * biased]
    for dtype, on_one in ((torch.float32, False), (torch.float64, True), (torch.float32, True)):
        whole = [drawn(seqlen, heads, 16, seed=heads + 1).expand(2, -1, -1, -1).to(dtype) for heads in (4, 2, 2)]
        do = drawn(seqlen, 4, 16, seed=7).expand(2, -1, -1, -1).to(dtype)
        rows = [x if on_one else poisoned_shard(plan, x) for x in whole]
        sink = drawn(1, 4, seed=9)[0, 0].to(dtype)
        bias = drawn(4, seqlen, seqlen, seed=3).to(dtype)
        leaves = [x.detach().clone().requires_grad_() for x in (*rows, sink, *[bias] * biased)]
        given = {"mask": mask, "sink": leaves[3], "dropout_p": P, "return_lse": True}
        if biased:
            given["score_mod"] = (tileattn.Bias(leaves[4]), tileattn.SoftCap(9.0))
        if on_one:
            torch.manual_seed(SEED)
            o, lse = tileattn.attention(*leaves[:3], **given)
            torch.autograd.backward([o, lse], [do, 0.1 * do.sum(3).transpose(1, 2)])
            shards = [plan.shard(x) for x in (o, lse.transpose(1, 2))]
            shards += [plan.shard(x.grad) for x in leaves[:3] if x.grad is not None]
        else:
            seeded(plan)
            with poisoned_memory():
                o, lse = plan.attention(*leaves[:3], **given, **options)
                mine = plan.shard(do)
                torch.autograd.backward([o, lse], [mine, 0.1 * mine.sum(3).transpose(1, 2)])
            shards = [o, lse.transpose(1, 2), *(x.grad for x in leaves[:3] if x.grad is not None)]
        found.append([*(x.detach() for x in shards), *(x.grad for x in leaves[3:] if x.grad is not None)])
    return dict(zip(names, ([*each] for each in zip(*found))))


def checkpointed(seqlen: int, options: dict[str, Any]) -> None:
    """Outputs and gradients have the same bits with and without recomputation, and so has the generator's state."""
    plan = Plan(None, seqlen)
    x = plan.shard(drawn(seqlen, 4, 16)).requires_grad_()

    def block(x: Tensor) -> Tensor:
        y = plan.attention(x, x, x, causal=True, dropout_p=P, **options)
        return plan.attention(y.sin(), y, y, causal=True, dropout_p=P, **options)

    results = []
    for recompute in (False, True):
        seeded(plan)
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, gradient, torch.rand(3)))
    for first, second in zip(*results):
        assert torch.equal(first, second)
    assert not torch.equal(block(x), results[0][0])  # another seed


def given(options: list[dict[str, Any]], local: bool = False) -> None:
    """A call with other options on each rank."""
    plan = Plan(None, 37)
    x = torch.ones(1, plan.rows, 2, 8)
    score_mod = tileattn.Bias(torch.ones(1, 1, plan.rows, 37)) if local else None
    plan.attention(x, x, x, score_mod=score_mod, **options[plan.rank % len(options)])


def local_bias() -> None:
    """Runs that begin at multiples of 16: a bias of local rows gives what the whole one gives."""
    seqlen = 32 * 4
    plan = Plan(None, seqlen)
    x, bias = plan.shard(drawn(seqlen, 2, 8)), drawn(2, seqlen, seqlen, seed=3)
    outputs = []
    for tensor in (bias, bias[:, :, plan.tokens]):
        seeded(plan)
        outputs.append(plan.attention(x, x, x, score_mod=tileattn.Bias(tensor), dropout_p=P, algorithm="gather"))
    assert torch.equal(*outputs)
