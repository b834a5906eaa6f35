"""What a call of a plan costs the host, in both modes of its check, beside a call on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

import tileattn
from tileattn.bench.parallel.cases import HEADS, Case
from tileattn.bench.parallel.implementations import plan_of
from tileattn.bench.parallel.problem import Part, Source
from tileattn.bench.parallel.ranks import Ranks
from tileattn.bench.parallel.results import HostCost

TOKENS = {"cuda": 2048, "cpu": 64}
CALLS = {"cuda": 50, "cpu": 10}


def case_of(device_type: str, head_dim: int) -> Case:
    """The small shape."""
    return Case("host", TOKENS[device_type], *HEADS[device_type], head_dim)


def host_costs(case: Case, dtype: torch.dtype, ranks: Ranks, backend: str | None) -> list[HostCost]:
    """Microseconds until a forward call returns, after the first; on a CPU the work is in them."""
    source = Source(case, ranks.device, dtype)
    q, k, v, _ = source.inputs(Part(torch.arange(case.seqlen // ranks.count)))
    costs = [_cost("tileattn.attention", lambda: tileattn.attention(q, k, v, causal=True, backend=backend), ranks)]
    for check in ("first", "always"):
        plan = plan_of(case, check)
        mine = source.inputs(Part(plan.tokens))

        call = partial(plan.attention, *mine[:3], causal=True, backend=backend)
        costs.append(_cost(f"plan.attention, check={check!r}", call, ranks))
    return costs


def _cost(what: str, call: Callable[[], object], ranks: Ranks) -> HostCost:
    with torch.no_grad():
        for _ in range(3):
            call()
        times = []
        for _ in range(CALLS[ranks.device.type]):
            ranks.barrier()  # a full queue of the GPU would make the host wait
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    ranks.barrier()
    return HostCost(what, max(ranks.gathered(median(times))))
