"""What a named mutant is: one wrong edit of the package, and the tests that must see it."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "src/tileattn"


@dataclass(frozen=True)
class Mutant:
    """A wrong edit.

    Attributes:
        name: short and unique; says what is wrong.
        file: below src/tileattn.
        old: text of that file, which occurs there once.
        new: what takes its place.
        tests: of which some must fail then, as pytest's arguments below tests/: a file, or a file's test.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def path(self, root: Path) -> Path:
        """The file in a copy of the tree."""
        return root / PACKAGE / self.file

    def applied(self, text: str) -> str:
        """The file's text with the edit.

        Raises:
            ValueError: the old text does not occur exactly once, or the new one is the same.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"mutant {self.name}: its old text occurs {count} times in {self.file}, not once")
        if self.old == self.new:
            raise ValueError(f"mutant {self.name}: it changes nothing")
        return text.replace(self.old, self.new)


def missing_tests(mutant: Mutant) -> list[str]:
    """The mutant's tests whose file or function does not exist."""
    return [test for test in mutant.tests if not _exists(test)]


def _exists(test: str) -> bool:
    file, _, function = test.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and (not function or function.partition("[")[0] in _functions(path))


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def mutants(file: str, tests: tuple[str, ...], edits: dict[str, tuple[str, str]]) -> list[Mutant]:
    """Mutants of one file that the same tests see: by name, the old and the new text."""
    return [Mutant(name, file, old, new, tests) for name, (old, new) in edits.items()]
