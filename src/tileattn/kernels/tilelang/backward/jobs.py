"""All kernels of a call, with those for blocks that share groups of heads (shares/). Imports no compiler."""

from __future__ import annotations

from ....call.facts import CAUSAL, BackwardCall
from .defaults import MainConfig, default
from .library import AnyBackwardJob, BackwardJob, kernel_jobs
from .shares.choice import configurations, may_split, split
from .shares.last_wave import Dealt, is_cut, whole_part


def jobs_of(call: BackwardCall, config: MainConfig, of_groups: Dealt) -> tuple[AnyBackwardJob, ...]:
    """The kernels of a call whose groups are dealt so.

    config: of the main kernel without shares.
    """
    shares, whole_keys = of_groups
    own = kernel_jobs(call, split(call, config, shares))
    return (*own, _of_first_keys(call, config, shares)) if whole_keys else own


def all_jobs(call: BackwardCall) -> tuple[AnyBackwardJob, ...]:
    """The kernels that a call may get for some sizes, without the tuner."""
    own = tuple(job for config in configurations(call) for job in kernel_jobs(call, config))
    if call.forward.variant != CAUSAL or not may_split(call, default(call)) or not is_cut(default(call)):
        return own  # the first keys have no other kernel
    return (*own, _of_first_keys(call, default(call), 2))


def _of_first_keys(call: BackwardCall, config: MainConfig, shares: int) -> BackwardJob:
    first, of_first = whole_part(call, config, shares)
    return BackwardJob(first, "main", of_first)
