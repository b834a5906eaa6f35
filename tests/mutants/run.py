"""Runs named mutants: edits a copy of the tree, runs the tests that must see it, and says which mutants survived.

    python tests/mutants/run.py                   # all, two at a time; what `make mutants` does
    python tests/mutants/run.py --jobs 1 softcap  # those whose names contain a word
    python tests/mutants/run.py --list

First the tests that will be run pass without any edit; otherwise a failure would say nothing. A mutant is killed if
tests fail (pytest's exit status 1). It is an error, as a survivor is, if they do not end in time, or end otherwise:
when a test is not found, say.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import all_mutants
from mutants.mutant import ROOT, Mutant

LIMIT = 300  # seconds for the tests of one mutant
COPIED = ("src", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", "*.png", "*.ipynb")
TESTS_FAILED = 1


def main() -> int:
    """The number of mutants that were not killed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="only list them")
    options = parser.parse_args()
    wanted = [x for x in all_mutants() if not options.words or any(word in x.name for word in options.words)]
    if options.list:
        print("\n".join(f"{x.name:45} {x.file}" for x in wanted))
        return 0
    if not wanted:
        print("no such mutant; --list names them", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="tileattn-mutants-") as folder:
        return _run(wanted, max(1, options.jobs), Path(folder))


def _run(wanted: Sequence[Mutant], jobs: int, folder: Path) -> int:
    begin = time.monotonic()
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(jobs):
        trees.put(_copy(folder / str(number)))
    if not _passes_unchanged(wanted, trees, jobs):
        return 1
    wrong = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_verdict, mutant, trees): mutant for mutant in wanted}
        for number, future in enumerate(as_completed(running), 1):
            mutant, (verdict, seconds) = running[future], future.result()
            print(f"{number:3}/{len(wanted)}  {verdict:9} {seconds:4.0f} s  {mutant.name}", flush=True)
            if verdict != "killed":
                wrong.append(f"{verdict}: {mutant.name} ({mutant.file}; {' '.join(mutant.tests)})")
    print(
        f"{len(wanted) - len(wrong)} of {len(wanted)} mutants killed in {(time.monotonic() - begin) / 60:.0f} minutes"
    )
    print("\n".join(wrong))
    return 1 if wrong else 0


def _copy(tree: Path) -> Path:
    """A copy of what the tests need."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, tree / name)
    return tree


def _passes_unchanged(wanted: Sequence[Mutant], trees: queue.Queue[Path], jobs: int) -> bool:
    """Whether all tests that will be run pass without any edit, shared out over the copies."""
    tests = sorted({test for mutant in wanted for test in mutant.tests})
    files = {test for test in tests if "::" not in test}
    tests = [test for test in tests if test in files or test.partition("::")[0] not in files]
    parts = [part for part in (tests[start::jobs] for start in range(jobs)) if part]
    print(f"{len(tests)} selections of tests without any edit ...", flush=True)

    def passes(part: list[str]) -> bool:
        tree = trees.get()
        try:
            done = _pytest(tree, part, limit=LIMIT * len(part))
        finally:
            trees.put(tree)
        if done is not None and done.returncode == 0:
            return True
        print("they must pass first:\n" + ("out of time" if done is None else done.stdout[-4000:]), file=sys.stderr)
        return False

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(passes, parts)))


def _verdict(mutant: Mutant, trees: queue.Queue[Path]) -> tuple[str, float]:
    """ "killed", "survived", "timed out" or "error", and how long it took."""
    tree, begin = trees.get(), time.monotonic()
    path = mutant.path(tree)
    text = path.read_text()
    try:
        path.write_text(mutant.applied(text))
        done = _pytest(tree, mutant.tests, limit=LIMIT)
    except ValueError as error:
        print(error, file=sys.stderr)
        return "error", time.monotonic() - begin
    finally:
        path.write_text(text)
        trees.put(tree)
    seconds = time.monotonic() - begin
    if done is None:
        return "timed out", seconds
    if done.returncode not in (0, TESTS_FAILED):
        print(done.stdout[-2000:], file=sys.stderr)
        return "error", seconds
    return "killed" if done.returncode == TESTS_FAILED else "survived", seconds


def _pytest(tree: Path, tests: Sequence[str], limit: float) -> subprocess.CompletedProcess[str] | None:
    """pytest on a copy of the tree; None where it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=tree, env=environment, timeout=limit, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
