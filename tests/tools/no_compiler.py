"""A pytest plugin for environments without a compiler, in which a bundle of kernels is installed.

    python -m pytest -p tests.tools.no_compiler -m gpu tests/test_conformance.py tests/test_conformance_backward.py

From the first test on, a process that starts, or an import of TileLang, TVM or Triton, fails the test that does it. A
test that asks for a kernel which no installed bundle has is skipped, with the name of the kernel. So what passes has
compiled nothing. The run ends with an error if TileLang is installed, if no bundle is, or if no test passes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

FORBIDDEN = ("tilelang", "tvm", "triton")
STARTS = frozenset(
    ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn")
)
MISSING = "no kernel for "  # begins the error of a kernel that no bundle has

_active = False
_outcomes: Counter[str] = Counter()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event in STARTS:
        raise RuntimeError(f"a process was started where nothing may compile: {event} {str(arguments[:2])[:200]}")
    if event == "import" and str(arguments[0]).partition(".")[0] in FORBIDDEN:
        raise ImportError(f"{arguments[0]} was imported where there is no compiler")


def pytest_configure(config: pytest.Config) -> None:
    from tileattn.kernels.bundles.installed import bundles

    if importlib.util.find_spec("tilelang") is not None:
        raise pytest.UsageError("TileLang is installed here; this plugin is for environments without it")
    if not bundles():
        raise pytest.UsageError("no bundle of kernels is installed here (docs/bundles.md)")
    sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _active
    _active = True
    try:
        return (yield)
    finally:
        _active = False


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except RuntimeError as error:
        if not str(error).startswith(MISSING):
            raise
        pytest.skip(str(error).partition(": no bundle")[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _outcomes[report.outcome] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and session.exitstatus == 0 and not _outcomes["passed"]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
