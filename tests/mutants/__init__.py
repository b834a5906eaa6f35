"""Named mutants: edits of the package that are wrong, each with the tests that see it. See CONTRIBUTING.md."""

from __future__ import annotations

import itertools

from . import backends, calls, decode, gradients, masks, packed, rules, triton_decode
from .mutant import Mutant


def all_mutants() -> list[Mutant]:
    """Every mutant, by area."""
    areas = (gradients, decode, backends, calls, rules, packed, masks, triton_decode)  # those that take longest first
    return list(itertools.chain.from_iterable(area.MUTANTS for area in areas))
