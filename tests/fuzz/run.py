"""The parent process: starts processes that make calls, ends those that hang, and adds up their counts and failures."""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from .report import Failure
from .spec import Call
from .worker import BLOCK, Plan, draw_call, work

HANGS_AFTER = {"cpu": 240.0, "cuda": 100.0}  # seconds without a sign of life
WHILE_COMPILING = 3  # processes that make calls beside those that compile
SAYS_EVERY = 30.0
MOST_DEATHS = 12
MOST_OF_A_STRUCTURE = 2  # failures, after which it is left alone


class Process(NamedTuple):
    """A process that makes calls, its end of the pipe, and the memory in which it says what it is at."""

    plan: Plan
    process: Any
    connection: Connection
    progress: Any


class Run:
    """One leg: counts, failures, and on a GPU the structures of the whole run, which `state` keeps between legs."""

    def __init__(
        self,
        seed: int,
        device: str,
        backends: list[str | None],
        end: float,
        workers: int,
        structures: int,
        state: Path | None,
        most_failures: int,
        most_calls: int | None = None,
    ) -> None:
        self.state = state
        kept = json.loads(state.read_text()) if state is not None and state.exists() else {}
        self.seed, self.leg = kept.get("seed", seed), kept.get("legs", 0)
        self.count = kept.get("structures", structures)
        self.counts = collections.Counter(kept.get("counts", {}))
        self.failures = [Failure(*each) for each in kept.get("failures", [])]
        self.close: list[tuple[float, str]] = [(ratio, call) for ratio, call in kept.get("close", [])]
        self.compiled: dict[int, str] = {}
        self.not_compiled: dict[int, str] = {}
        self.device, self.backends, self.end, self.workers = device, backends, end, workers
        self.most_failures, self.deaths, self.new_failures = most_failures, 0, 0
        self.most_calls, self.calls_before = most_calls, self.counts["calls"]
        self.running: list[Process] = []
        self.started = 0
        self.shelved: set[int] = set()
        self.sent: dict[int, set[int]] = {}
        self.context = multiprocessing.get_context("spawn")
        self.finished_compiling = threading.Event()
        self.structures: dict[int, str] = {}

    def run(self) -> int:
        print(f"seed {self.seed}, leg {self.leg}, {self.device}, {self.workers} processes", flush=True)
        if self.count:
            self._compile()
        else:
            self.finished_compiling.set()
        said = time.time()
        try:
            while self._goes_on():
                self._start_some()
                self._hear()
                self._end_what_hangs()
                if time.time() - said > SAYS_EVERY:
                    said = time.time()
                    print(self._line(), flush=True)
                    self._keep()
        finally:
            for each in self.running:
                each.process.kill()
        self.leg += 1
        self._keep()
        self._summary()
        if self.device == "cuda":
            os._exit(int(bool(self.failures)))  # compilers need not be waited for
        return int(bool(self.failures))

    # --- Kernels ---

    def _compile(self) -> None:
        import torch

        from tileattn.call.facts import device_arch

        from . import ahead

        drawn = ahead.structures(self.seed, self.count, device_arch(torch.device(self.device)))
        self.structures = {each.number: each.call for each in drawn}
        for each in drawn:
            if not each.compiles:
                self.compiled[each.number] = each.call
        processes = max(1, (os.cpu_count() or 1) - WHILE_COMPILING)

        def compile_them() -> None:
            for structure, error in ahead.compile_all_of(drawn, processes):
                if error is None:
                    self.compiled[structure.number] = structure.call
                else:
                    self.not_compiled[structure.number] = error
                    self._failed(
                        Failure(
                            structure.call, structure.call, f"not compiled: {error}", "", str(self.seed), self.device
                        )
                    )
            self.finished_compiling.set()

        threading.Thread(target=compile_them, daemon=True).start()

    # --- Processes ---

    def _goes_on(self) -> bool:
        if self.new_failures >= self.most_failures or self.deaths >= MOST_DEATHS:
            return False
        if self.most_calls is not None and self.counts["calls"] - self.calls_before >= self.most_calls:
            return False
        return time.time() < self.end or bool(self.running)

    def _start_some(self) -> None:
        if time.time() > self.end - 5:
            return
        wanted = self.workers if self.finished_compiling.is_set() else min(WHILE_COMPILING, self.workers)
        while len(self.running) < wanted:
            number = self.started
            self.started += 1
            bucket = "long" if self.device == "cuda" and number % 4 == 3 else None
            name, structured = f"{self.seed} {self.leg} {number}", self.count > 0
            self._start(Plan(name, self.device, self.backends, self.end, structured, bucket))

    def _start(self, plan: Plan) -> None:
        ours, theirs = self.context.Pipe()
        progress = self.context.Array("d", 3 + BLOCK, lock=False)
        progress[0] = time.time()
        process = self.context.Process(target=work, args=(plan, theirs, progress), daemon=True)
        process.start()
        theirs.close()
        self.running.append(Process(plan, process, ours, progress))
        self.sent[process.pid] = set()

    def _tell(self, each: Process) -> None:
        """Which structures are ready; those of Triton, which compiles when it is called, go to one process each."""
        ready = self.compiled
        if each.plan.again:
            ready = {number: self.structures[number] for _, number in each.plan.again if number in self.structures}
        place = int(each.plan.seed.split()[2])
        new: list[tuple[int, str | None]] = [
            (number, text)
            for number, text in list(ready.items())
            if number not in self.sent[each.process.pid] | (set() if each.plan.again else self.shelved)
            and (each.plan.again or _is_for(text, each.plan.bucket, number % self.workers == place % self.workers))
        ]
        if not each.plan.again:
            new += [(number, None) for number in self.shelved & self.sent[each.process.pid]]
            self.sent[each.process.pid] -= self.shelved
        if new:
            self.sent[each.process.pid].update(number for number, text in new if text is not None)
            each.connection.send(new)

    def _hear(self) -> None:
        for each in list(self.running):
            if self.count:
                _quietly(lambda each=each: self._tell(each))
        for connection in wait([each.connection for each in self.running], timeout=0.5):
            each = next(each for each in self.running if each.connection is connection)
            try:
                kind, what = each.connection.recv()
            except (EOFError, OSError):
                self._died(each, f"the process died (exit status {_status(each.process)})")
                continue
            if kind == "counts":
                self.counts.update(what)
            elif kind == "close":
                self.close = sorted([*self.close, *what], reverse=True)[:20]
            elif kind == "failure":
                self._failed(what)
            elif kind == "died":
                self._died(each, what)
            elif kind == "done":
                self.running.remove(each)

    def _end_what_hangs(self) -> None:
        now = time.time()
        for each in list(self.running):
            limit = HANGS_AFTER[self.device]
            if now - each.progress[0] > limit:
                each.process.kill()
                self._died(each, f"the process gave no sign of life for {limit:.0f} s and was ended")
            elif now > self.end + 60:
                each.process.kill()
                self.running.remove(each)

    def _died(self, each: Process, why: str) -> None:
        """Makes the calls of the block again, one by one; where the process died doing that, the call is known."""
        each.process.kill()
        self.running.remove(each)
        self.deaths += 1
        first, count = int(each.progress[1]), int(each.progress[2])
        block = [(first + place, int(each.progress[3 + place])) for place in range(count)]
        if each.plan.again or not self.count:
            number, structure = block[-1] if block else (0, -1)
            self._failed(self._of_death(each.plan, number, structure, why))
        else:
            print(f"{why}: calls {first} to {first + count - 1} of {each.plan.seed} are made again", flush=True)
            self._start(each.plan._replace(again=block, first=first + count))

    def _of_death(self, plan: Plan, number: int, structure: int, why: str) -> Failure:
        text = self.structures.get(structure)
        call = draw_call(plan, number, None if text is None else Call.from_json(text)).to_json()
        return Failure(call, call, why, "", f"{plan.seed} {number}", self.device, structure)

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.new_failures += 1
        of_structure = sum(each.structure == failure.structure for each in self.failures)
        if failure.structure >= 0 and of_structure >= MOST_OF_A_STRUCTURE:
            self.shelved.add(failure.structure)
        print(failure.text(), flush=True)

    # --- Words ---

    def _line(self) -> str:
        line = f"{self.counts['calls']} calls, {self.counts['with gradients']} with gradients, "
        line += f"{len(self.failures)} failures"
        if self.count:
            line += f", {len(self.compiled)} of {self.count} structures ready, {len(self.not_compiled)} not compiled"
        return line

    def _summary(self) -> None:
        kinds: dict[str, list[str]] = collections.defaultdict(list)
        for name, count in sorted(self.counts.items()):
            first, _, rest = name.partition(" ")
            if rest and first in ("backend", "adapter", "dtype"):
                kinds[first].append(f"{rest} {count}")
        for kind, parts in kinds.items():
            print(f"by {kind}: {', '.join(parts)}")
        if self.close:
            print(f"largest error of a call that was right: {self.close[0][0]:.2f} of what is allowed")
        print(f"slow calls: {self.counts['slow calls']}, processes that died: {self.deaths}")
        print(f"seed {self.seed}, {self.leg} legs: {self._line()}", flush=True)

    def _keep(self) -> None:
        if self.state is None:
            return
        kept = {
            "seed": self.seed, "legs": self.leg, "structures": self.count, "counts": dict(self.counts),
            "failures": self.failures, "close": self.close, "not compiled": self.not_compiled,
        }  # fmt: skip
        scratch = self.state.with_suffix(".tmp")
        scratch.write_text(json.dumps(kept, indent=1))
        scratch.replace(self.state)


def _is_for(structure: str, bucket: str | None, is_own: bool) -> bool:
    """Whether a process takes a structure: of its bucket, and its own of those that compile when they are called."""
    call = Call.from_json(structure)
    return call.bucket == bucket and (is_own or call.backend not in ("triton", "mma"))


def _quietly(action: Callable[[], Any]) -> None:
    """A process that has just died reads nothing any more; that is noticed elsewhere."""
    with contextlib.suppress(OSError):
        action()


def _status(process: Any) -> int | None:
    process.join(2.0)
    return process.exitcode  # type: ignore[no-any-return]
