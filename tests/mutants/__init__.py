"""Named mutants: edits of the package that are wrong, each with the tests that see it. See CONTRIBUTING.md."""

from __future__ import annotations

import itertools

from . import appending, backends, caches, calls, decode, gradients, masks, packed, rules
from .mutant import Mutant


def all_mutants() -> list[Mutant]:
    """Every mutant, by area."""
    areas = (gradients, decode, caches, backends, calls, rules, packed, appending, masks)  # those that take longest first
    return list(itertools.chain.from_iterable(area.MUTANTS for area in areas))
