"""Functions of tests on several ranks: new processes for each, with a limit of time. pools.py has some that stay."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def on_ranks(function: Callable[[int, int], Any], ranks: int, seconds: float, backend: str = "gloo") -> list[Any]:
    """What ``function(rank, ranks)`` returns on each rank. Fails where it raises, or after the limit of time.

    The function must be at the top of a module, and its results must be picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", __name__, function.__module__, function.__name__]
        # The parts of this process's path first, so that the same tileattn is imported.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), folder, str(seconds), backend], cwd=ROOT, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            end = time.monotonic() + seconds
            printed = [each.communicate(timeout=max(end - time.monotonic(), 0.1))[0] for each in processes]
        finally:
            for each in processes:
                each.kill()
                each.wait()
        for rank, (each, text) in enumerate(zip(processes, printed)):
            assert each.returncode == 0, f"rank {rank}: {text}"
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What ``make()`` returns, made once for all of xdist's workers, to which the tests of a file are dealt."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    path = (folders.getbasetemp().parent if is_worker else folders.getbasetemp()) / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        return pickle.loads(path.read_bytes())


def _main(module: str, name: str, rank: str, ranks: str, folder: str, seconds: str, backend: str) -> None:
    import torch.distributed as dist

    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks),
        timeout=timedelta(seconds=float(seconds)),
    )  # fmt: skip
    Path(folder, rank).write_bytes(pickle.dumps(function(int(rank), int(ranks))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
