"""How a plan cuts the sum of all jobs' costs into equal shares, one for each worker; see plan_kernel.py.

Of A workers, worker p begins at place ``floor(p * total / A)``. If all jobs are equally long, and A is a multiple of
their number or a divisor, cuts lie at the borders of jobs and at equal parts of them: then no worker has two parts.

Quotients are estimated in float32 and corrected in integers: an integer division takes twice as many instructions, and
the planning kernel is as long as its longest chain of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

OVERHEAD = 1  # of a job, in runs of tiles


@T.macro
def shares(arg, total):
    """How many workers have work, and their shares of the total.

    `few` of them if the total is small. No more than it takes for the same number of tiles in the longest share: fewer
    parts are to be merged. Each has `least` tiles, and their number stays a multiple of the jobs', up to all workers.
    So a share is at least 1.
    """
    runs = T.alloc_var("int32", init=T.max(total - arg.jobs * OVERHEAD, 1))
    workers = T.alloc_var("int32", init=T.if_then_else(runs <= arg.few_tiles >> arg.coarse, arg.few, arg.workers))
    least = T.alloc_var("int32", init=T.max(arg.least >> arg.coarse, 1))
    longest = T.alloc_var("int32", init=T.max(_about(runs, workers), least))
    active = T.alloc_var("int32", init=_about(_about(runs, longest), arg.jobs) * arg.jobs)
    active = T.max(T.min(T.min(active, workers), total), 1)
    share = T.alloc_var("int32", init=T.truncdiv(total, active))
    rest = T.alloc_var("int32", init=total - share * active)
    # How many workers begin in one place, all in all less than one.
    begun = T.alloc_var("float32", init=_float(active) / _float(T.max(total, 1)))
    return SimpleNamespace(total=total, active=active, share=share, rest=rest, begun=begun)


@T.macro
def place_of(deal, worker):
    """Where a worker begins: floor(worker * total / active)."""
    more = quotient(worker * deal.rest, deal.active)
    return worker * deal.share + more


@T.macro
def worker_of(deal, place):
    """The last worker that begins at a place or before it: the last with worker * total < (place + 1) * active."""
    end = T.alloc_var("int64", init=_long(place + 1) * _long(deal.active))
    worker = T.alloc_var("int32", init=T.cast(_float(place + 1) * deal.begun, "int32"))
    if _long(worker) * _long(deal.total) >= end:
        worker -= 1
    else:
        if _long(worker + 1) * _long(deal.total) < end:
            worker += 1
    return worker


@T.macro
def quotient(number, divisor):
    """floor(number / divisor), where that is at most 2**20: the estimate's error is then below 1."""
    found = T.alloc_var("int32", init=T.cast(_float(number) / _float(divisor), "int32"))
    rest = T.alloc_var("int32", init=number - found * divisor)
    if rest < 0:
        found -= 1
    else:
        if rest >= divisor:
            found += 1
    return found


def _about(number: Any, divisor: Any) -> Any:
    """number / divisor, rounded up; of very large ones to about as much."""
    return T.cast((_float(number) + (_float(divisor) - 0.5)) / _float(divisor), "int32")


def _float(value: Any) -> Any:
    return T.cast(value, "float32")


def _long(value: Any) -> Any:
    return T.cast(value, "int64")
