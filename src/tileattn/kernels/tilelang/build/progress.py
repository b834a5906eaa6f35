"""A line on the terminal while a kernel is compiled: what, the seconds so far, and how many kernels there were."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator

AFTER_S = 2.0  # a kernel that is compiled sooner has no line
EVERY_S = 0.5

_count = 0  # kernels that this process has begun to compile
_one_line = threading.Lock()


@contextlib.contextmanager
def progress_line(what: str) -> Iterator[None]:
    """Inside, where it takes more than `AFTER_S` seconds, stderr has a line that says so. It is removed at the end.

    There is none where stderr is no terminal, in child processes, and beside another line: of two threads that compile,
    the first has one. Only the line itself imports rich.

    Args:
        what: the kernel.
    """
    global _count
    _count += 1
    if not _is_shown() or not _one_line.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    line = threading.Thread(target=_show, args=(what, ended), daemon=True)
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: the kernel is compiled all the same
            line.start()
        try:
            yield
        finally:
            ended.set()
            if line.ident is not None:
                line.join()
    finally:
        _one_line.release()


def _is_shown() -> bool:
    if multiprocessing.parent_process() is not None:
        return False
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


def _show(what: str, ended: threading.Event) -> None:
    begin = time.perf_counter()
    if ended.wait(AFTER_S):
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def text() -> Text:
        seconds = time.perf_counter() - begin
        line = f"tileattn: compiling kernel {_count} of this process, {seconds:.0f} s: {what}"
        return Text(line, no_wrap=True, overflow="ellipsis")

    # What the program itself prints meanwhile stays where it was sent to.
    options = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with Live(text(), console=Console(stderr=True, force_terminal=True), **options) as line:
        while not ended.wait(EVERY_S):
            line.update(text(), refresh=True)
