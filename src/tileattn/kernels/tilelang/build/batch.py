"""Compiles many kernels at once, in separate processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ...cache.store import kernel_cache
from . import text

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class AnyJob(Protocol):
    """One kernel to compile: a value, which is sent to another process."""

    @property
    def key(self) -> str:
        """The key of the library in the kernel cache."""
        ...

    def compile(self) -> None:
        """Compiles the kernel into the cache."""
        ...


@dataclass(frozen=True)
class Done:
    """The result of a job: it was in the cache, took some seconds to compile, or failed."""

    job: AnyJob
    seconds: float = 0.0
    was_there: bool = False
    error: str | None = None


def compile_job(job: AnyJob) -> Done:
    """Compiles a job in a process of its own. Of an exception only the text is returned: not all can be pickled."""
    start = time.perf_counter()
    try:
        if kernel_cache().find(job.key) is not None:
            return Done(job, was_there=True)
        job.compile()
    except Exception as failure:
        return Done(job, error=f"{type(failure).__name__}: {failure}")
    return Done(job, seconds=time.perf_counter() - start)


def _in_process(work: Callable[[AnyJob], Done], job: AnyJob, modules: Sequence[str]) -> Done:
    text.import_modules(modules)
    return work(job)


_main_lock = threading.Lock()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Inside, processes that start do not import the caller's main module: kernels need nothing of it.

    A script that calls `tileattn.tuning()` at its top level, without a guard, would otherwise run again in each.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        spec, file = main.__spec__, main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


def compile_all(jobs: Sequence[AnyJob], processes: int, work: Callable[[AnyJob], Done] = compile_job) -> Iterator[Done]:
    """Compile in parallel, in the given order, and yield each as it is ready.

    Each process is a pool of its own: if a compiler kills its process, one job fails and a new process replaces it.
    Spawned, not forked: TileLang may initialise CUDA when it is imported, which does not survive a fork.
    """
    pools: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()

    def new_pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def one(job: AnyJob) -> Done:
        pool = pools.get()
        try:
            with _main_hidden():
                waiting = pool.submit(_in_process, work, job, text.modules_of(str(job)))
            return waiting.result()
        except Exception as failure:
            pool.shutdown(wait=False)
            pool = new_pool()
            return Done(job, error=f"its process ended: {type(failure).__name__}: {failure}")
        finally:
            pools.put(pool)

    processes = max(1, min(processes, len(jobs)))
    for _ in range(processes):
        pools.put(new_pool())
    try:
        with ThreadPoolExecutor(processes) as threads:
            for done in as_completed([threads.submit(one, job) for job in jobs]):
                yield done.result()
    finally:
        # Do not join: 16 workers took 13 s to exit one by one.
        while not pools.empty():
            pools.get().shutdown(wait=False)
