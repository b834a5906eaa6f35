"""Runs named mutants: edits a copy of the tree, runs the tests that must see it, and says which mutants survived.

    python tests/mutants/run.py                   # all, two at a time; what `make mutants` does
    python tests/mutants/run.py --jobs 1 softcap  # those whose names contain a word
    python tests/mutants/run.py --list

The tests must first pass without any edit; otherwise a failure would say nothing. A mutant is killed if tests fail
(pytest's exit status 1). It is an error, as a survivor is, if they do not end in time, or end otherwise: a test may be
missing.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants import all_mutants
from tests.mutants.mutant import ROOT, Mutant

LIMIT = 300  # seconds for the tests of one mutant
COPIED = ("src", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", "*.png", "*.ipynb")
VERDICTS = {0: "survived", 1: "killed", None: "timed out"}  # by pytest's exit status


def main() -> int:
    """The exit status: 1 if some mutant was not killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only mutants whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--unchecked", action="store_true", help="do not first run the tests without any edit")
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
        return _run(wanted, max(1, options.jobs), not options.unchecked, Path(folder))


class Worker:
    """A copy of the tree, and the process that runs tests on it; see worker.py."""

    def __init__(self, tree: Path) -> None:
        self.tree = _copy(tree)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def status(self, tests: Sequence[str], limit: float = LIMIT) -> int | None:
        """pytest's exit status; None where the tests did not end in time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"tree": str(self.tree), "tests": list(tests), "limit": limit}) + "\n")
        self.process.stdin.flush()
        return cast("int | None", json.loads(self.process.stdout.readline()))

    def output(self) -> str:
        """The end of what the last tests printed."""
        return (self.tree / "output.txt").read_text()[-3000:]


def _run(wanted: Sequence[Mutant], jobs: int, check: bool, folder: Path) -> int:
    begin = time.monotonic()
    workers: queue.Queue[Worker] = queue.Queue()
    for number in range(jobs):
        workers.put(Worker(folder / str(number)))
    try:
        if check and not _passes_unchanged(wanted, workers, jobs):
            return 1
        wrong = _survivors(wanted, workers, jobs)
    finally:
        while not workers.empty():
            workers.get().process.kill()
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(wanted) - len(wrong)} of {len(wanted)} mutants killed in {minutes:.0f} minutes")
    print("\n".join(wrong))
    return 1 if wrong else 0


def _survivors(wanted: Sequence[Mutant], workers: queue.Queue[Worker], jobs: int) -> list[str]:
    """The mutants that were not killed, and how their tests ended."""
    wrong = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_verdict, mutant, workers): mutant for mutant in wanted}
        for number, future in enumerate(as_completed(running), 1):
            mutant, (verdict, seconds) = running[future], future.result()
            print(f"{number:3}/{len(wanted)}  {verdict:9} {seconds:4.0f} s  {mutant.name}", flush=True)
            if verdict != "killed":
                wrong.append(f"{verdict}: {mutant.name} ({mutant.file}; {' '.join(mutant.tests)})")
    return wrong


def _copy(tree: Path) -> Path:
    """A copy of what the tests need."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, tree / name)
    # Bytecode that is compared with the source by its hash: an edit within a second, of equal length, must be seen.
    compileall.compile_dir(tree / "src", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


def _passes_unchanged(wanted: Sequence[Mutant], workers: queue.Queue[Worker], jobs: int) -> bool:
    """Whether all tests that will be run pass without any edit, shared out over the copies."""
    tests = sorted({test for mutant in wanted for test in mutant.tests})
    files = {test for test in tests if "::" not in test}
    tests = [test for test in tests if test in files or test.partition("::")[0] not in files]
    print(f"{len(tests)} selections of tests without any edit ...", flush=True)

    def passes(part: list[str]) -> bool:
        worker = workers.get()
        try:
            status = worker.status(part, limit=LIMIT * len(part))
            if status != 0:
                print(f"they must pass first (pytest: {status}):\n{worker.output()}", file=sys.stderr)
            return status == 0
        finally:
            workers.put(worker)

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(passes, [part for part in (tests[start::jobs] for start in range(jobs)) if part])))


def _verdict(mutant: Mutant, workers: queue.Queue[Worker]) -> tuple[str, float]:
    """ "killed", "survived", "timed out" or "error", and how long it took."""
    worker, begin = workers.get(), time.monotonic()
    path = mutant.path(worker.tree)
    text = path.read_text()
    try:
        path.write_text(mutant.applied(text))
        status = worker.status(mutant.tests)
        if status not in VERDICTS:
            print(f"{mutant.name}: pytest's status is {status}\n{worker.output()}", file=sys.stderr)
        return VERDICTS.get(status, "error"), time.monotonic() - begin
    except ValueError as error:
        print(error, file=sys.stderr)
        return "error", time.monotonic() - begin
    finally:
        path.write_text(text)
        workers.put(worker)


if __name__ == "__main__":
    sys.exit(main())
