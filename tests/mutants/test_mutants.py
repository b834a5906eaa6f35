"""The list of mutants is sound: each edits one place, and names tests that are there. `make mutants` runs them."""

from __future__ import annotations

import ast
import collections

import pytest

from tests.mutants import all_mutants
from tests.mutants.mutant import ROOT, Mutant, missing_tests


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_edits_one_place_and_names_tests_that_are_there(mutant: Mutant) -> None:
    edited = mutant.applied(mutant.path(ROOT).read_text())
    ast.parse(edited)  # what is no Python is seen by any test, and shows nothing
    assert mutant.tests
    assert missing_tests(mutant) == []


def test_names_are_unique_and_there_are_many() -> None:
    mutants = all_mutants()
    assert [name for name, count in collections.Counter(mutant.name for mutant in mutants).items() if count > 1] == []
    assert len(mutants) >= 60


def test_a_mutant_that_does_not_fit_says_so() -> None:
    mutant = Mutant(
        "wrong",
        "variant/masks.py",
        "k <= q",
        "k < q",
        ("variant/test_mask_ranges.py::test_ranges_are_sound", "test_none.py"),
    )
    with pytest.raises(ValueError, match=r"mutant wrong: its old text occurs 2 times in variant/masks.py, not once"):
        mutant.applied("k <= q or k <= q")
    with pytest.raises(ValueError, match="it changes nothing"):
        Mutant("same", "variant/masks.py", "k", "k", ()).applied("k")
    assert missing_tests(mutant) == ["test_none.py"]
    assert missing_tests(Mutant("wrong", "a", "b", "c", ("variant/test_mask_ranges.py::test_none[1]",))) == [
        "variant/test_mask_ranges.py::test_none[1]"
    ]
