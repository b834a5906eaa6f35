"""The kernels that `tileattn warmup` compiles into the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from tileattn.bench import problem
from tileattn.bench.baselines.own import needs, variant_key
from tileattn.bench.cases import DTYPES, Case
from tileattn.bench.problem import Problem
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang.backward.defaults import short_default
from tileattn.kernels.tilelang.backward.library import BackwardJob, kernel_names
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.forward.defaults import defaults
from tileattn.kernels.tilelang.forward.library import Job


def calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[AttentionCall]:
    """All combinations of (head_dim, head_dim_v), variant names and dtype names (`cases.DTYPES`).

    Each occurs twice: with and without lse, which are different kernels.
    """
    return [
        AttentionCall(
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            variant=variant_key(_small(variant)),
            sink="sink" in variant.split("+"),
            return_lse=return_lse,
            arch=arch,
        )
        for dtype, (head_dim, head_dim_v), variant, return_lse in product(dtypes, head_dims, variants, (False, True))
    ]


def backward_calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[BackwardCall]:
    """The backward passes of the same: the gradients of q, k and v, of a sink, and of a bias with "dbias"."""
    wanted = []
    for variant in variants:
        q, k, v, _, *tensors = needs(_small(variant))
        for call in calls(head_dims, [variant], dtypes, arch):
            if call.return_lse:
                wanted.append(BackwardCall(replace(call, needs_grad=True), (q, k, v, call.sink, *tensors)))
    return wanted


def _small(variant: str) -> Problem:
    """A problem with the variant that is small enough to build on any machine, and asks for gradients."""
    return problem.build(Case(2, 8, 8, 2, 2, 8, 8, variant, "bf16"), "cpu", direction="bwd")


def jobs(wanted: Sequence[AttentionCall], backward: Sequence[BackwardCall] = ()) -> list[AnyJob]:
    """The kernels of these calls, for short sequences and for long ones; for fp8 also those that transpose v."""
    transposing = _distinct(Job(call, None) for call in wanted if call.dtype == FP8)
    # Calls share what comes before and after the main kernel.
    going_back = _distinct(
        BackwardJob(call, name, config)
        for call in backward
        for config in dict.fromkeys((None, short_default(call)))
        for name in kernel_names(call)
    )
    return [*transposing, *(Job(call, config) for call in wanted for config in defaults(call)), *going_back]


def _distinct(given: Iterable[AnyJob]) -> list[AnyJob]:
    return list({job.key: job for job in given}.values())
