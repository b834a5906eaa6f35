"""`tileattn warmup`: which kernels to compile into the cache ahead of the first call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tileattn.bench import problem
from tileattn.bench.cases import DTYPES, Case
from tileattn.bench.peers.own import variant_key
from tileattn.call import AttentionCall
from tileattn.fp8 import FP8
from tileattn.kernels.tilelang.batch import Job
from tileattn.kernels.tilelang.defaults import defaults


def calls(
    head_dims: Sequence[tuple[int, int]], variants: Sequence[str], dtypes: Sequence[str], arch: str
) -> list[AttentionCall]:
    """All combinations of (head_dim, head_dim_v), variant names and dtype names (`cases.DTYPES`).

    Each twice: kernels that return lse are others than those that do not.
    """
    return [
        AttentionCall(
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            variant=_key(variant),
            sink="sink" in variant.split("+"),
            return_lse=return_lse,
            arch=arch,
        )
        for dtype, (head_dim, head_dim_v), variant, return_lse in product(dtypes, head_dims, variants, (False, True))
    ]


def _key(variant: str) -> str:
    """The variant as kernels know it, by way of a problem small enough to build on any machine."""
    return variant_key(problem.build(Case(2, 8, 8, 2, 2, 8, 8, variant, "bf16"), "cpu"))


def jobs(wanted: Sequence[AttentionCall]) -> list[Job]:
    """The kernels of these calls, for short sequences and for long ones; for fp8 also those that transpose v."""
    forward = [Job(call, config) for call in wanted for config in defaults(call)]
    transposing = {job.key: job for job in (Job(call, None) for call in wanted if call.dtype == FP8)}
    return [*transposing.values(), *forward]
