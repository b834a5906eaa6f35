"""Structures for a GPU, and their kernels compiled ahead of the calls, several structures at once.

The kernels of a structure are determined as in benchmarks/precompile.py: calls of the structure are made on tensors
without memory, and stopped where they ask for a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tileattn.kernels.tilelang.build.batch import Done, compile_all, compile_job

from .draw import Draw
from .spec import Call

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SAMPLES = 5  # calls of a structure, which may take another of a few kernels by their sizes
# Of a hundred structures, how many each backend runs; the others are TileLang's.
SHARES = {"triton": 6, "torch": 5, "mma": 2}


class Structure(NamedTuple):
    """A structure by its number, and what compiles it."""

    number: int
    call: str
    arch: str

    @property
    def compiles(self) -> bool:
        return self.arch != "cpu" and Call.from_json(self.call).backend not in SHARES


def structures(seed: int, count: int, arch: str) -> list[Structure]:
    """The structures of a run; the same for the same seed, in every process."""
    drawn = []
    for number in range(count):
        device = "cpu" if arch == "cpu" else "cuda"
        backend = None if arch == "cpu" else _backend(number)
        call = Draw(f"structure {seed} {number}", device, backend).structure()
        if number % 4 == 3 and call.backend not in SHARES and device == "cuda":
            call = call.replace(bucket="long")
        drawn.append(Structure(number, call.to_json(), arch))
    return drawn


def _backend(number: int) -> str | None:
    place = number * 37 % 100  # spread over the list
    for backend, share in SHARES.items():
        if place < share:
            return backend
        place -= share
    return None


def compile_all_of(drawn: Sequence[Structure], processes: int) -> Iterator[tuple[Structure, str | None]]:
    """Each structure as its kernels are compiled, and the error if there was one."""
    jobs = [structure for structure in drawn if structure.compiles]
    for done in compile_all(jobs, processes, compile_structure):  # type: ignore[arg-type]
        yield done.job, done.error  # type: ignore[misc]


def compile_structure(structure: Structure) -> Done:
    """In a process of its own."""
    try:
        for job in jobs_of(structure):
            done = compile_job(job)
            if done.error is not None:
                return Done(structure, error=f"{job}: {done.error}")  # type: ignore[arg-type]
    except Exception as error:
        return Done(structure, error=f"{type(error).__name__}: {error}")  # type: ignore[arg-type]
    return Done(structure)  # type: ignore[arg-type]


def jobs_of(structure: Structure) -> list:  # type: ignore[type-arg]
    """The kernels that calls of a structure ask for."""
    sys.path.insert(0, str(BENCHMARKS))
    import precompile

    call = Call.from_json(structure.call)
    draw = Draw(f"samples {structure.number}", "cuda", call.backend)
    samples = (draw.sizes(call, 200_000) for _ in range(SAMPLES * 3))
    samples_with_work = [each for each in samples if each.elements and each.rows and each.keys][:SAMPLES]
    return precompile.jobs_of([_attempt(each) for each in samples_with_work], structure.arch)  # type: ignore[no-any-return]


def _attempt(call: Call):  # type: ignore[no-untyped-def]
    """The call on tensors without memory; by another adapter where its own reads them."""
    from . import adapters, values

    call = call.replace(poisoned=False)
    if call.adapter == "padded":
        call = call.replace(adapter="varlen")
    if call.adapter == "torch_sdpa":
        call = call.replace(adapter="attention", lse=True)

    def attempt() -> None:
        t = values.make(call, "meta")
        adapters.run(call, adapters.quantized(call, t)[0] if call.dtype == "fp8" else t)

    return attempt
