"""What macOS and Windows lack, hidden on Linux: TileLang, Triton, and what of Python's library Unix or Linux alone has.

As a plugin, `pytest -p tests.tools.other_systems`, it hides TileLang and Triton only: pytest uses the others itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = {"tilelang", "triton", "tvm", "tvm_ffi"}
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
OF_OS = (
    *("RTLD_GLOBAL", "RTLD_LAZY", "fchmod", "fork", "getegid", "geteuid", "getloadavg", "getpgid", "getuid", "killpg"),
    *("mkfifo", "sched_getaffinity", "setsid", "sysconf", "uname", "wait4"),
)
OF_SIGNAL = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "setitimer")
# They ask which system this is, and take what it has: imported before that is hidden.
KNOW_SYSTEMS = (
    "torch",
    "filelock",
    "platformdirs",
    "rich.console",
    "typer",
    "asyncio",
    "subprocess",
    "multiprocessing",
)


class WithoutPackages(PathFinder):
    """Finds what `sys.path` has, but for `PACKAGES`."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in PACKAGES else super().find_spec(fullname, path, target)


def hide_packages() -> None:
    sys.meta_path[:] = [WithoutPackages if finder is PathFinder else finder for finder in sys.meta_path]


def hide_unix() -> None:
    for name in KNOW_SYSTEMS:
        importlib.import_module(name)
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type] # None: the import of such a module fails
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def pytest_configure() -> None:
    hide_packages()
