"""One process that makes calls, one after another, and reads their verdicts in blocks.

On a GPU nothing waits within a block: each call leaves the largest of its outputs' errors (over their bounds) in a
tensor, which is read when the block is full. Calls that failed are then made again, shrunk and sent to the parent. The
process writes the number of its present call to memory that it shares with the parent. The parent ends a process that
hangs, and reports the calls of a process that died.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .draw import Draw
from .report import Failure
from .shrink import shrink
from .spec import Call
from .trial import detail, failure, trial

BLOCK = 200
SHRINK_SECONDS = {"cpu": 40.0, "cuda": 15.0}
LATE_SECONDS = 3.0  # a call that took longer compiled something
CLOSE = 0.5  # of what is allowed, from which on the largest errors are told, to judge the rule by
DEAD = 3  # exit status after an error from which a CUDA context does not recover


class Plan(NamedTuple):
    """What a process is to do.

    Attributes:
        seed: of the whole run, with the leg and the process in it.
        device: "cpu" or "cuda".
        backends: of which each call takes one, where structures are drawn with their calls.
        structured: structures were drawn before; the parent says which are ready.
        end: when to stop, as `time.time` has it.
        bucket: kernels of this bucket of lengths, on a GPU.
        first: the number of the first call.
        again: (number, structure) of calls to make with a wait behind each, in place of drawing.
    """

    seed: str
    device: str
    backends: Sequence[str | None]
    end: float
    structured: bool = False
    bucket: str | None = None
    first: int = 0
    again: Sequence[tuple[int, int]] = ()


def draw_call(plan: Plan, number: int, structure: Call | None) -> Call:
    """The call of this number."""
    draw = Draw(f"{plan.seed} {number}", plan.device, None)
    if not plan.structured:
        draw.backend = draw.weighted(dict(_SHARES(plan.backends)))
        structure = draw.structure()
        return draw.sizes(structure, 20_000 if draw.backend == "triton" else 150_000)
    assert structure is not None
    draw.backend = structure.backend
    usual = 600_000 if draw.gpu else 150_000
    call = draw.sizes(structure, 5 * usual if draw.chance(0.03) else usual)
    return call


def _SHARES(backends: Sequence[str | None]) -> Iterator[tuple[str | None, int]]:
    for backend in backends:
        yield backend, 1 if backend == "triton" else 12


def work(plan: Plan, connection: Any, progress: Any) -> None:
    """The process's main function; `progress` is [time, first of the block, how many, structures of the block ...]."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if plan.bucket:
            from .adapters import bucket

            stack.enter_context(bucket(plan.bucket))
        worker = _Worker(plan, connection, progress)
        try:
            worker.again() if plan.again else worker.run()
        except torch.AcceleratorError as error:
            connection.send(("died", str(error).splitlines()[0]))
            os._exit(DEAD)
    connection.send(("done", None))


class _Worker:
    def __init__(self, plan: Plan, connection: Any, progress: Any) -> None:
        self.plan, self.connection, self.progress = plan, connection, progress
        self.structures: dict[int, Call] = {}
        self.number = plan.first
        self.block = BLOCK if plan.structured else 1
        self.worst = torch.zeros(self.block, dtype=torch.float64, device=plan.device)

    def run(self) -> None:
        while time.time() < self.plan.end:
            self._listen()
            if self.plan.structured and not self.structures:
                self.progress[0] = time.time()
                time.sleep(0.1)
                continue
            self._run_block()

    def again(self) -> None:
        """Calls of a block in which a process died, with a wait behind each."""
        while len(self.structures) < len({structure for _, structure in self.plan.again}):
            self.connection.poll(1.0)
            self._listen()
        for number, structure in self.plan.again:
            self._at(number, structure, 0)
            call = draw_call(self.plan, number, self.structures[structure])
            wrong = failure(call, self.plan.device)
            if self.plan.device == "cuda":
                torch.cuda.synchronize()
            if wrong is not None:
                self._send(call, wrong, number, structure)

    def _listen(self) -> None:
        while self.connection.poll():
            for number, text in self.connection.recv():
                if text is None:  # it has failed often enough
                    self.structures.pop(number, None)
                else:
                    self.structures[number] = Call.from_json(text)

    def _at(self, number: int, structure: int, place: int) -> None:
        self.progress[0] = time.time()
        if place == 0:
            self.progress[1] = number
        self.progress[3 + place] = structure
        self.progress[2] = place + 1

    def _run_block(self) -> None:
        counts: collections.Counter[str] = collections.Counter()
        self.worst.zero_()
        calls: dict[int, tuple[int, int, Call]] = {}
        for place in range(self.block):
            if time.time() > self.plan.end:
                break
            structure = self._structure()
            self._at(self.number, structure, place)
            call = draw_call(self.plan, self.number, self.structures.get(structure))
            calls[place] = self.number, structure, call
            began = time.time()
            self._make(call, place)
            if time.time() - began > LATE_SECONDS:
                counts["slow calls"] += 1
            self.number += 1
            counts.update(_kinds(call))
        worst = self.worst.tolist()  # the one wait
        wrong = [place for place in calls if not worst[place] <= 1]
        self.connection.send(("counts", dict(counts)))
        right = [(worst[place], calls[place][2].to_json()) for place in calls if CLOSE < worst[place] <= 1]
        if right:
            self.connection.send(("close", sorted(right, reverse=True)[:3]))
        told: set[int] = set()
        for place in wrong:
            number, structure, call = calls[place]
            if structure < 0 or structure not in told:  # one of a structure, for shrinking takes long
                self._report(call, number, structure)
            told.add(structure)

    def _structure(self) -> int:
        if not self.structures:
            return -1
        draw = Draw(f"{self.plan.seed} {self.number} structure", self.plan.device, None)
        return draw.one(sorted(self.structures))

    def _make(self, call: Call, place: int) -> None:
        try:
            ratios = trial(call, self.plan.device)
        except torch.AcceleratorError:
            raise
        except Exception:
            self.worst[place] = torch.inf  # told when it is made again
            return
        self.worst[place] = torch.stack(list(ratios.values())).amax()

    def _report(self, call: Call, number: int, structure: int) -> None:
        self.progress[0] = time.time() + SHRINK_SECONDS[self.plan.device]  # it may take so long
        wrong = failure(call, self.plan.device)
        if wrong is not None:
            self._send(call, wrong, number, structure)
            return
        wrong = "failed once, and not when it was made again: the result depends on what ran before, or on a race"
        self._tell(call, call, wrong, "", number, structure)

    def _send(self, call: Call, wrong: str, number: int, structure: int) -> None:
        device = self.plan.device

        def fails(smaller: Call) -> bool:
            return failure(smaller, device) is not None

        minimal = shrink(call, fails, SHRINK_SECONDS[device], same_kernels=device != "cpu")
        wrong = failure(minimal, device) or wrong
        self._tell(call, minimal, wrong, detail(minimal, device), number, structure)

    def _tell(self, call: Call, minimal: Call, wrong: str, more: str, number: int, structure: int) -> None:
        seed = f"{self.plan.seed} {number}"
        told = Failure(call.to_json(), minimal.to_json(), wrong, more, seed, self.plan.device, structure)
        self.connection.send(("failure", told))


def _kinds(call: Call) -> Iterator[str]:
    yield "calls"
    if call.grads:
        yield "with gradients"
    yield f"backend {call.backend or 'chosen'}"
    yield f"adapter {call.adapter}"
    yield f"dtype {call.dtype}"
