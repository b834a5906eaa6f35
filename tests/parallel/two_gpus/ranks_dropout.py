"""What ranks run for test_two_gpus_dropout.py: dropout on shards, beside the torch backend on one GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tileattn
from tests.parallel.two_gpus.ranks_two_gpus import DEVICE, drawn_qkv, rows_of_lse
from tileattn.parallel import Plan
from tileattn.testing import poisoned_memory

SEED, P, SEQLEN, DIM = 5, 0.3, 1291, 64


def mask_of(name: str) -> tileattn.Mask:
    if name == "causal":
        return tileattn.Causal()
    return tileattn.Causal() & tileattn.Documents(torch.arange(SEQLEN, device=DEVICE) // 300)


def dropped(options: dict[str, Any], layout: str, mask: str) -> dict[str, list[Tensor]]:
    """Of each output and gradient this rank's rows: ours, and those of one GPU in float64 and in bfloat16.

    Ranks have other generators: that of rank 0 counts, and draws what one GPU's draws.
    """
    plan, visible = Plan(None, SEQLEN, layout=layout, node=2), mask_of(mask)
    *qkv, do = drawn_qkv(SEQLEN, DIM)
    found: list[list[Tensor]] = []
    for dtype, on_one in ((torch.bfloat16, False), (torch.float64, True), (torch.bfloat16, True)):
        leaves = [(x if on_one else plan.shard(x)).to(dtype).clone().requires_grad_() for x in qkv]
        q, k, v = leaves
        torch.manual_seed(SEED if on_one else SEED + 100 * plan.rank)
        with poisoned_memory():
            if on_one:
                o, lse = tileattn.attention(q, k, v, mask=visible, dropout_p=P, return_lse=True, backend="torch")
            else:
                o, lse = plan.attention(q, k, v, mask=visible, dropout_p=P, return_lse=True, **options)
            upstream = (do if on_one else plan.shard(do)).to(dtype)
            torch.autograd.backward([o, lse], [upstream, 0.1 * upstream.sum(3).transpose(1, 2).to(lse.dtype)])
        gradients = [x.grad for x in leaves if x.grad is not None]
        if on_one:
            o, *gradients = (plan.shard(x) for x in (o, *gradients))
            lse = rows_of_lse(plan, lse)
        found.append([x.detach().cpu() for x in (o, lse, *gradients)])
    return dict(zip(("o", "lse", "dq", "dk", "dv"), ([*each] for each in zip(*found, strict=True)), strict=True))
