"""Named mutants: edits of the package that are wrong, each with the tests that see it. See CONTRIBUTING.md."""

from __future__ import annotations

import itertools

from .areas import (
    appending,
    backends,
    bundles,
    caches,
    calls,
    decode,
    decode_lines,
    engines,
    few_queries,
    flex,
    gradients,
    intervals,
    lists,
    masks,
    mixed_bits,
    packed,
    parallel,
    rules,
    shards,
    shares,
    triton_decode,
)
from .mutant import Mutant


def all_mutants() -> list[Mutant]:
    """Every mutant, by area."""
    # Those that take longest come first.
    areas = (
        gradients,
        decode,
        caches,
        bundles,
        backends,
        calls,
        rules,
        shards,
        shares,
        flex,
        packed,
        appending,
        masks,
        intervals,
        lists,
        mixed_bits,
        triton_decode,
        engines,
        decode_lines,
        few_queries,
        parallel,
    )
    return list(itertools.chain.from_iterable(area.MUTANTS for area in areas))
