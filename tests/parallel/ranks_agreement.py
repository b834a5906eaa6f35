"""What ranks run for test_agreement.py and test_two_gpus_agreement.py: calls of which one is wrong."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

import tileattn
from tileattn.parallel import Plan
from tileattn.parallel.torch_names import default_store

SEQLEN = 37


def call(plan: Plan, device: str, mask: Any, heads: int = 4, **options: Any) -> None:
    """Forward and backward on any values."""
    q, k, v = (torch.ones(1, plan.rows, each, 8, device=device, requires_grad=True) for each in (heads, 2, 2))
    plan.attention(q, k, v, mask=mask, **options).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()


def wrong(plan: Plan, device: str, what: str, at: bool) -> None:
    """A call that is wrong on one rank."""
    if what == "argument":
        call(plan, device, tileattn.Causal(), heads=3 if at else 4)  # 3 is no multiple of 2
    elif what == "mask":
        call(plan, device, tileattn.SlidingWindow(5) if at else tileattn.Causal())
    elif what == "window":
        call(plan, device, tileattn.SlidingWindow(6 if at else 5))
    elif what == "dtype":
        q = torch.ones(1, plan.rows, 2, 8, device=device, dtype=torch.float64 if at else torch.float32)
        plan.attention(q, q, q)
    elif what == "death":
        if at:
            os._exit(1)
        call(plan, device, tileattn.Causal())
    elif what == "backend":
        # It refuses the call when it runs: behind the agreement, in which all took part.
        call(plan, device, tileattn.Causal(), backend="mma" if at else "torch")
    else:
        raise AssertionError(what)


def wrong_at(what: str, rank: int, good: int, check: str, device: str = "cpu") -> dict[str, Any]:
    """Makes good calls, then one that is wrong on one rank; says what it raised, after how long, and what then runs."""
    plan = Plan(None, SEQLEN, check=check)
    for _ in range(good):
        call(plan, device, tileattn.Causal())
    begin = time.monotonic()
    found: dict[str, Any] = {"error": None}
    try:
        wrong(plan, device, what, plan.rank == rank)
    except Exception as error:
        found = {"error": str(error), "kind": type(error).__name__, "rank": getattr(error, "rank", None)}
    return {**found, "seconds": time.monotonic() - begin}


def stays_usable(what: str, rank: int, check: str, device: str = "cpu") -> str:
    """A wrong call, and then a good one of the same plan."""
    plan = Plan(None, SEQLEN, check=check)
    text = "nothing"
    try:
        wrong(plan, device, what, plan.rank == rank)
    except Exception as error:
        text = str(error)
    for _ in range(3):
        call(plan, device, tileattn.Causal())
    return text


def backward_after_a_refusal(rank: int) -> None:
    """A call is refused between the passes of a good one, which then begins late on one rank."""
    plan = Plan(None, SEQLEN)
    q = torch.ones(1, plan.rows, 2, 8, requires_grad=True)
    o = plan.attention(q, q, q, causal=True)
    with suppress(ValueError, tileattn.parallel.RankError):
        call(plan, "cpu", tileattn.Causal(), heads=3 if plan.rank == rank else 4)
    if plan.rank == rank:
        time.sleep(1.0)
    o.sum().backward()


def refused_often(rank: int) -> str:
    """What a rank raises at a call that another refused some time ago, as it did the next ones."""
    plan = Plan(None, SEQLEN)
    if plan.rank == rank:
        for _ in range(3):
            with suppress(ValueError):
                call(plan, "cpu", tileattn.Causal(), heads=3)
        return "nothing"
    time.sleep(0.5)
    try:
        call(plan, "cpu", tileattn.Causal())
    except tileattn.parallel.RankError as error:
        return str(error)
    return "nothing"


def slow_rank(waits: bool) -> float:
    """A rank that comes later than a dead one would be found: it sleeps, or waits for a key of the store."""
    plan = Plan(None, SEQLEN)
    if plan.rank == 1 and waits:
        with suppress(RuntimeError):
            default_store().wait(["a key that nobody writes"], timedelta(seconds=7.5))
    elif plan.rank == 1:
        time.sleep(6.5)
    call(plan, "cpu", tileattn.Causal())
    return 0.0
