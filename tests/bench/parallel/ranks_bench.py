"""What ranks run for test_parallel_run.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tileattn.bench.parallel import implementations, ranks, timing
from tileattn.bench.parallel import run as suite_run
from tileattn.bench.parallel import torch_context_parallel as pytorch
from tileattn.bench.parallel.cases import Case, suite
from tileattn.bench.parallel.implementations import IDEAL, Prepared, TorchFlex, always
from tileattn.bench.parallel.problem import Source
from tileattn.bench.parallel.ranks import RankFailed, Ranks
from tileattn.bench.parallel.results import Results
from tileattn.bench.parallel.run import Run
from tileattn.cli.app import app

TINY = ["bench", "--suite", "parallel", "--device", "cpu", "--seqlen", "512", "--head-dim", "8", "--rounds", "2"]


def command(arguments: list[str]) -> tuple[int, str]:
    """The exit code and the output of the suite with some options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setattr(timing, "MEASURE_MS", 0.0)
        ran = CliRunner().invoke(app, [*TINY, *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def fresh() -> Results:
    return Results("cpu", "made up", 2, "bf16", 512, 8, {}, None, "today")


def measured(cases: list[Case], entrants: list[Any], directions: tuple[str, ...] = ("fwd",)) -> Results:
    """The results of a run of one round."""
    found, said = fresh(), []
    with ranks.ranks_of("cpu") as here:
        Run(cases, entrants, directions, 1, here, torch.bfloat16, found, lambda: None, said.append, said.append)()
    return found


class Fails:
    """Like the ideal, but on one rank it fails: when it is prepared, or in a call."""

    def __init__(self, name: str, rank: int, call: int) -> None:
        self.name, self.rank, self.call = name, rank, call

    def refusal(self, case: Case, here: Ranks) -> str | None:
        return None

    def prepare(self, source: Source, here: Ranks) -> Prepared:
        calls = 0
        prepared = implementations.Ideal().prepare(source, here)
        attend = prepared.attend

        def failing() -> Tensor:
            nonlocal calls
            calls += 1
            if here.rank == self.rank and calls == self.call:
                raise RuntimeError("out of luck\nmore")
            return attend()

        prepared.attend = failing
        if self.call == 0 and here.rank == self.rank:
            raise MemoryError("too large")
        return prepared


def failures() -> Results:
    """A run in which some fail on the second rank only, at different places, and others do not."""
    case = suite("cpu", 256, 8)[0]
    return measured([case], [*always(None), Fails("prepared", 1, 0), Fails("first", 1, 1), Fails("later", 1, 4)])


def wrong_values() -> Results:
    """A run in which tileattn returns another o."""
    case = suite("cpu", 512, 8)[0]
    own = always(None)[1]

    class Wrong(type(own)):  # type: ignore[misc]
        def prepare(self, source: Source, here: Ranks) -> Prepared:
            prepared = super().prepare(source, here)
            attend = prepared.attend
            prepared.attend = lambda: attend() * 1.1
            return prepared

    return measured([case], [always(None)[0], Wrong()])


def flex() -> Results:
    """Forward passes by FlexAttention, which is not compiled here."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    cases = [case for case in suite("cpu", 256, 8) if case.window is not None or case.name.endswith("sigma 1")]
    torch.compiler.set_stance("force_eager")
    try:
        return measured(cases, [*always(None), TorchFlex("flex"), TorchFlex("flex-ptrr")])
    finally:
        torch.compiler.set_stance("default")


def ring_context() -> tuple[list[int], list[int], list[str]]:
    """PyTorch's own shard of a buffer, ours, and what SDPA is inside a ring, after one, and after one that failed."""
    import torch.nn.functional as F

    original, found = F.scaled_dot_product_attention, []

    def patched() -> str:
        return "original" if F.scaled_dot_product_attention is original else "patched"

    with ranks.ranks_of("cpu") as here:
        mesh = pytorch.mesh("cpu", here.count)
        with pytorch.ring(mesh, 16, "cudnn", "alltoall"):
            found.append(patched())
        found.append(patched())
        try:
            with pytorch.ring(mesh, 16, "fa2", "allgather"):
                raise MemoryError("too large")
        except MemoryError:
            found.append(patched())
        context_parallel = pytorch._name(pytorch.CONTEXT_PARALLEL, "context_parallel")
        buffer = torch.arange(16)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
            pass
        return buffer.tolist(), pytorch.ring_tokens(16, here.rank, here.count).tolist(), found


def long_case() -> Results:
    return measured([case for case in suite("cpu", 256, 8) if case.is_long], always(None), ("fwd", "fwdbwd"))


def gives_up_together() -> list[str]:
    """Failures at different places of two attempts, with waiting in between."""
    said: list[str] = []
    with ranks.ranks_of("cpu") as here:
        for failing in (0, 1):

            def work(failing: int = failing) -> int:
                here.barrier()
                if here.rank == failing:
                    raise ValueError(f"of rank {failing}")
                here.barrier()
                here.barrier()
                return 1

            try:
                here.attempt(work, lambda text: None)
            except RankFailed as error:
                said.append(str(error))
        said.append(str(here.attempt(lambda: sum(here.gathered(here.rank)), said.append)))
    return said


def slow_ones_leave() -> list[str]:
    """Of PyTorch's, those far slower than the best have one round only."""
    entrants = [
        suite_run._Entrant(name, None, ms, 1, None, None, [ms])  # type: ignore[arg-type]
        for name, ms in ((IDEAL, 1.0), ("tileattn", 9.0), ("fa2-allgather", 4.0), ("fa2-alltoall", 5.0))
    ]
    left: list[Any] = []
    rest = suite_run._without_slow(entrants, left.append)
    return [*(each.name for each in rest), "left", *(each.name for each in left)]
