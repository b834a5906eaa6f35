"""`tileattn.tuning()`: the first call of each kind made inside is measured in all of its configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import results, state
from .space import Space

Prepare = Callable[[], Callable[..., Any]]


@contextlib.contextmanager
def tuning(*, quiet: bool = False, again: bool = False) -> Iterator[None]:
    """Tunes the calls that are made inside, forward and backward, on their own tensors.

    Calls with the same static facts, and the same sizes rounded up to powers of two, share a result. The first of them
    compiles and times the configurations of its backend, which takes some tens of seconds. The fastest configuration
    whose outputs agree with the default's is stored on disk, per GPU. This call, later calls and later processes use
    it. Calls that have a result are not measured again.

    It is process-wide: calls from all threads are tuned while it is open.

    Args:
        quiet: Show neither progress nor results on stderr.
        again: Also measure calls that have a result already.

    Raises:
        RuntimeError: It is open already, or a call inside is traced (torch.compile) or captured (a CUDA graph).
        OSError: The results cannot be written. This is checked before any measurement; the message names the file and
            how to choose another.
    """
    if state.session is not None:
        raise RuntimeError("tileattn.tuning() is open already, and cannot be opened inside itself")
    results.check_writable()
    state.session = Session(quiet, again)
    state.forget_prepared()
    try:
        yield
    finally:
        state.session = None
        state.forget_prepared()


class Session:
    """The state of an open `tuning()`: the calls that it has tuned."""

    def __init__(self, quiet: bool, again: bool) -> None:
        self.quiet, self.again = quiet, again
        self._lock = threading.Lock()
        self._tuned: set[tuple[str, str]] = set()
        self._said: set[str] = set()

    @property
    def tuned(self) -> bool:
        """Whether any call had candidates to tune."""
        return bool(self._tuned)

    def without_candidates(self, backend: str, arch: str) -> None:
        """Reports once that a backend has nothing to tune."""
        with self._lock:
            if backend in self._said:
                return
            self._said.add(backend)
        if not self.quiet:
            self._bar().say(f"tuning: the {backend} backend has nothing to tune on {arch}; its calls run as they are")

    def tunes(self, space: Space, arch: str, prepare: Prepare) -> Callable[..., Any]:
        """A function that tunes the call at its first run, and then only runs it.

        Args:
            space: The call's configurations.
            arch: Architecture of the device.
            prepare: Returns the backend's function for the call, with the stored result if there is one.
        """
        ready: list[Callable[..., Any]] = []

        def run(*arguments: Any, **options: Any) -> Any:
            if not ready:
                if state.session is self:
                    self._tune(space, arch, arguments, options)
                ready.append(prepare())
            return ready[0](*arguments, **options)

        return run

    def _tune(self, space: Space, arch: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Tunes each call and bucket once: the first thread does it, the others wait."""
        with self._lock:
            name = space.call, results.bucket(space.sizes)
            if name in self._tuned:
                return
            if self.again or not space.known:
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "tileattn.tuning() is open while a CUDA graph is captured: nothing can be timed there"
                    )
                self._search(space, arch, arguments, options)
            self._tuned.add(name)

    def _search(self, space: Space, arch: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        from tileattn.measure import timing

        from .search import search

        q = arguments[0].q  # of the inputs, which come first in both passes
        bar, began = self._bar(), time.monotonic()
        try:
            result = search(
                space,
                lambda prepared: flat(prepared(*arguments, **options)),
                lambda run, calls: timing.time_calls(run, q.device, calls),
                bar,
                dtype=q.dtype,
                gradients=space.gradients,
            )
        finally:
            bar.end()
            timing.release()
        entry = results.Result(
            written(result.best), result.ms, result.default_ms, result.measured, str(datetime.date.today()), versions()
        )
        bar.finished(result, time.monotonic() - began)  # first: where it cannot be kept, it is at least seen
        results.keep(arch, space.call, space.sizes, entry)

    def _bar(self) -> Any:
        from .progress import Bar

        return Bar(self.quiet)


def flat(outputs: Any) -> list[Tensor | None]:
    """The outputs as a flat sequence: o and lse, or the gradients of q, k, v, the sink and the variant's tensors."""
    return [y for x in outputs for y in (x if isinstance(x, tuple) else (x,))]


def written(config: Any) -> dict[str, Any]:
    """A configuration as a JSON object: the name of its class, and its fields."""
    return {"schedule": type(config).__name__, **dataclasses.asdict(config)}


def versions() -> str:
    """Of the packages that a result was measured with."""
    parts = [f"torch {torch.__version__}"]
    for package in ("tileattn", "tilelang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(parts)
