"""The processes of a run: who this one is, and what they tell each other outside of what is timed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)  # of a collective: a rank that fails alone must not hold a machine for long


class RankFailed(RuntimeError):
    """Something failed on one or more ranks; raised on all of them."""


@dataclass(frozen=True)
class _Failure:
    reason: str


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run.

    Attributes:
        rank, count: this one, and how many.
        device: of this rank.
        host: a gloo group, for words and numbers.
    """

    rank: int
    count: int
    device: torch.device
    host: Any

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank, on all.

        Raises:
            RankFailed: a rank failed instead (`attempt`).
        """
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.host)
        failures = [f"rank {rank}: {each.reason}" for rank, each in enumerate(values) if isinstance(each, _Failure)]
        if failures:
            raise RankFailed("; ".join(failures))
        return values

    def barrier(self) -> None:
        """Waits until all ranks are here, and their GPUs idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.gathered(None)

    def attempt(self, what: Callable[[], T], say: Callable[[str], None]) -> T:
        """What a function returns, which all ranks call. If it fails on one of them, all give it up at the same place.

        Raises:
            RankFailed: on all ranks, with the reasons.
        """
        try:
            value = what()
        except RankFailed:
            raise
        except Exception as error:
            say(traceback.format_exc())
            self.gathered(_Failure(_reason(error)))  # raises; others learn it where they wait for this rank
            raise AssertionError("a failure was told to the others") from error
        self.gathered(None)
        return value


def started() -> bool:
    """Whether this process is one of several ranks: torchrun's, or of a process group that is there already."""
    return dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ))


def first_process() -> bool:
    """Whether this is the first of the processes."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])) == 0


@contextmanager
def ranks_of(device_type: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, in the default process group, which is made if there is none."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    made = not dist.is_initialized()
    if made and device_type == "cuda":
        dist.init_process_group("nccl", timeout=TIMEOUT)
    elif made:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        host = dist.new_group(backend="gloo", timeout=TIMEOUT * 5)  # compiling takes longer than a transfer
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, host)
    finally:
        if made:
            dist.destroy_process_group()
