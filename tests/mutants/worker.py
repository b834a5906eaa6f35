"""Runs pytest in forks of a process that has imported torch and more, because importing takes longer than most tests.

For each line of JSON that it reads, ``{"tree": folder, "tests": [...], "limit": seconds}``, it writes one: pytest's
exit status, or null where the tests did not end in time. What they printed is in ``output.txt`` in the folder.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

IMPORTED_ONCE = ("torch", "torch.testing", "pytest")
# The first is what is edited. The second looks at the environment, which tests/conftest.py sets, when it is imported.
IMPORTED_BY_TESTS = ("tileattn", "triton")
OPTIONS = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.mutants.first_failure", "-m", "not slow")


def main() -> None:
    """Until the input ends."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    assert not sys.modules.keys() & set(IMPORTED_BY_TESTS)
    for line in sys.stdin:
        print(json.dumps(_status(json.loads(line))), flush=True)


def _status(task: dict[str, Any]) -> int | None:
    child = os.fork()
    if child == 0:
        os.setsid()  # so that what the tests start ends with them
        os._exit(_run(Path(task["tree"]), task["tests"]))
    end = time.monotonic() + task["limit"]
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(tree: Path, tests: list[str]) -> int:
    """In the fork: pytest on a copy of the tree."""
    import pytest

    output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    paths = [str(tree / name) for name in ("src", ".")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of processes that tests start
    try:
        return int(pytest.main([*OPTIONS, *(f"tests/{test}" for test in tests)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
