"""Pools of processes that are the ranks of a group: one for each number of ranks, started once, for all tests.

On CPUs the group's backend is gloo. With ``device="cuda"`` it is NCCL, and each rank has a GPU of its own.

A test sends a function, by its module and name, and its arguments. Every rank runs it, and the test gets what each
returned or raised. Nothing waits for ever: a pool that does not answer in time is ended, and the test fails.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0  # seconds that a function may take


class Raised:
    """What a rank raised: the name of its type, its text, and `rank` if it has one."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.text, self.rank = type(error).__name__, str(error), getattr(error, "rank", None)

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


class Ended:
    """What is returned for a rank whose process has ended."""


class Pool:
    """Processes of a group: on CPUs, or each on the GPU of its rank's number."""

    def __init__(self, ranks: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed", "tileattn", "tileattn.parallel", "tileattn.testing"]
        )
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks, self.store.port, device), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank, or :class:`Raised` or :class:`Ended`."""
        sent = _packed((function.__module__, function.__qualname__, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(sent)
        results: dict[int, Any] = {}
        end = time.monotonic() + limit
        while len(results) < len(self.pipes):
            missing = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(missing, max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(set(range(len(self.pipes))) - set(results))} did not answer")
            for pipe in ready:
                results[self.pipes.index(pipe)] = _received(pipe)  # type: ignore[arg-type]
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)


def returned(results: list[Any]) -> list[Any]:
    """The results, after a check that no rank raised."""
    wrong = {rank: result for rank, result in enumerate(results) if isinstance(result, (Raised, Ended))}
    assert not wrong, wrong
    return results


_pools: dict[tuple[int, str], Pool] = {}


def pool(ranks: int, device: str = "cpu") -> Pool:
    """The pool of this number of ranks on these devices, which all tests share."""
    found = _pools.get((ranks, device))
    if found is None or not all(process.is_alive() for process in found.processes):
        found = _pools[ranks, device] = Pool(ranks, device)
        atexit.register(found.close)
    return found


def _serve(pipe: Connection, rank: int, ranks: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend, gpus, timeout = "gloo", None, LIMIT
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend, gpus, timeout = "nccl", [rank], 3 * LIMIT  # a rank may compile a kernel while another waits for it
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    dist.barrier(device_ids=gpus)  # so that no rank ends while another still connects to it
    while True:
        try:
            module, name, arguments = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except (EOFError, OSError):
            return
        try:
            result = getattr(import_module(module), name)(*arguments)
        except Exception as error:
            result = Raised(error)
        pipe.send_bytes(_packed(result))


def _received(pipe: Connection) -> Any:
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except (EOFError, OSError):
        return Ended()


def _packed(value: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()
