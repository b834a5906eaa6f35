"""What each rank runs for test_conformance.py and test_two_gpus.py: a conformance case on its shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileattn.parallel import Plan
from tileattn.testing import Arguments, ConformanceCase, build, output_gradients, poisoned_memory

AROUND = 8  # rows, so that a GPU's kernels find them at multiples of 16 bytes


@functools.cache
def plan_of(seqlen: int, layout: str, node: int) -> Plan:
    return Plan(None, seqlen, layout=layout, node=node)


def poisoned_shard(plan: Plan, x: Tensor, dim: int = 1) -> Tensor:
    """The shard of a tensor, inside memory that is NaN before and behind it."""
    shard = x.index_select(dim, plan.tokens.to(x.device))
    shape = list(shard.shape)
    shape[dim] += 2 * AROUND
    memory = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    inside = memory.narrow(dim, AROUND, shard.shape[dim])
    return inside.copy_(shard)


def on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """The same with all tensors on the CPU, also those of dictionaries inside."""
    return {
        name: on_cpu(x) if isinstance(x, dict) else x.detach().cpu() if isinstance(x, Tensor) else x
        for name, x in values.items()
    }


def attend(
    case: ConformanceCase, layout: str, node: int, options: dict[str, Any], device: str = "cpu"
) -> dict[str, Any]:
    """Outputs and gradients of this rank, and its tokens."""
    arguments = build(case, device)
    do, dlse = output_gradients(case, arguments)
    plan = plan_of(arguments.q.shape[1], layout, node)
    rows = [poisoned_shard(plan, x.detach()).requires_grad_() for x in (arguments.q, arguments.k, arguments.v)]
    others = {name: x for name, x in arguments.leaves().items() if name not in ("dq", "dk", "dv")}
    with poisoned_memory():
        o, lse = _call(plan, rows, arguments, options)
        outputs, gradients = [o], [poisoned_shard(plan, do)]
        if dlse is not None:
            outputs, gradients = [o, lse], [*gradients, poisoned_shard(plan, dlse, 2)]
        torch.autograd.backward(outputs, gradients)
    found = dict(zip(("dq", "dk", "dv"), (x.grad for x in rows)))
    found |= {name: x.grad for name, x in others.items()}
    return on_cpu({"tokens": plan.tokens, "o": o, "lse": lse, "gradients": found})


def _call(plan: Plan, rows: Sequence[Tensor], arguments: Arguments, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return plan.attention(  # type: ignore[no-any-return]
        *rows, mask=arguments.mask, score_mod=arguments.score_mods or None, sink=arguments.sink, scale=arguments.scale,
        return_lse=True, **options,
    )  # fmt: skip


def everything(calls: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Several cases: processes answer once for all of them."""
    return [attend(*call) for call in calls]
