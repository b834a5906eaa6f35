"""One run of benchmarks/first_call.py, in a process of its own: prints the seconds of its parts as JSON.

Imports nothing before the clock starts that a user's program would not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

HEAD_DIM, SEQLEN = 128, 4096
Seconds = dict[str, float]


class _Clock:
    """Seconds of the parts of a run."""

    def __init__(self) -> None:
        self.parts: Seconds = {}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Ends a part, which began where the one before ended."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now

    def around(self, module: Any, name: str, before: str, part: str) -> None:
        """Makes a function of a module end one part at its beginning, and its own at its end."""
        function: Callable[..., Any] = getattr(module, name)

        def timed(*arguments: Any) -> Any:
            self.lap(before)
            try:
                return function(*arguments)
            finally:
                self.lap(part)

        setattr(module, name, timed)


def _both_passes(arch: str) -> Seconds:
    """A call and its backward pass; without a GPU, their kernels."""
    clock = _Clock()
    import torch

    clock.lap("import torch")
    import tileattn
    from tileattn.call.facts import AttentionCall, BackwardCall

    clock.lap("import tileattn")
    if not arch:
        q = torch.randn(1, SEQLEN, 8, HEAD_DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        do = torch.randn_like(q)
        torch.cuda.synchronize()
        clock.lap("start CUDA")
        o = tileattn.attention(q, q, q, causal=True, backend="tilelang")
        torch.cuda.synchronize()
        clock.lap("forward pass")
        o.backward(do)
        torch.cuda.synchronize()
        clock.lap("backward pass")
        return clock.parts
    from tileattn.kernels.tilelang.backward.library import kernel_jobs
    from tileattn.kernels.tilelang.forward.defaults import default
    from tileattn.kernels.tilelang.forward.library import Job

    call = AttentionCall(torch.bfloat16, HEAD_DIM, HEAD_DIM, "Causal()", arch=arch)
    jobs = kernel_jobs(BackwardCall(replace(call, needs_grad=True), (True, True, True, False)))
    try:
        from tileattn.kernels.tilelang.backward.library import longest_first
        from tileattn.kernels.tilelang.build.background import behind, taken
    except ImportError:  # a version without
        Job(call, default(call)).compile()
        clock.lap("forward pass")
    else:
        jobs = longest_first(jobs)
        with behind(lambda: jobs):
            Job(call, default(call)).compile()
            clock.lap("forward pass")
            jobs = taken(jobs)
    for job in jobs:
        job.compile()
    clock.lap("backward pass")
    return clock.parts


def _one_run(arch: str, ahead: bool) -> Seconds:
    """A forward pass; without a GPU, its kernel.

    ahead: its source is in the package, and nothing of TileLang is imported.
    """
    clock = _Clock()
    import torch

    clock.lap("import torch")
    import tileattn
    from tileattn.call.facts import AttentionCall
    from tileattn.kernels.tilelang.forward.defaults import default
    from tileattn.kernels.tilelang.forward.library import Job

    clock.lap("import tileattn")
    q = None
    if not arch:
        q = torch.randn(1, SEQLEN, 8, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        clock.lap("start CUDA")
    (_time_compilers if ahead else _time_all)(clock)
    if q is None:
        call = AttentionCall(torch.bfloat16, HEAD_DIM, HEAD_DIM, "Causal()", return_lse=False, arch=arch)
        Job(call, default(call)).compile()
        clock.lap("write into the cache")
    else:
        tileattn.attention(q, q, q, causal=True, backend="tilelang")
        torch.cuda.synchronize()
        clock.lap("load and run")
    if ahead and "tilelang" in sys.modules:
        raise RuntimeError("TileLang was imported: the source is not in the package, or not of these files")
    return clock.parts


def _time_compilers(clock: _Clock) -> None:
    from tileattn.kernels.tilelang.build import ahead, link, nvcc

    clock.around(ahead, "find", "look for the kernel", "read its source")
    clock.around(nvcc, "cubin", "start the host's compiler", "nvcc")
    clock.around(link, "build_library", "look for the kernel", "link")


def _time_all(clock: _Clock) -> None:
    """Ends a part behind each step from the import of TileLang on."""
    with _as_while_compiling():
        from tileattn.kernels.tilelang.build import compile as building
        from tileattn.kernels.tilelang.build import nvcc

        importlib.import_module("tileattn.kernels.tilelang.forward.kernel")
    clock.lap("import TileLang and the kernel's module")
    clock.around(building, "_lower", "trace the kernel", "TileLang's passes")
    clock.around(nvcc, "cubin", "generate source", "nvcc")
    clock.around(building, "build_library", "trace the kernel", "export, with the host's compiler")


def _as_while_compiling() -> Any:
    """The garbage collector as `find_or_compile` sets it; as it is in versions that leave it alone."""
    try:
        from tileattn.kernels.tilelang.build.collection import collection_paused
    except ImportError:
        return nullcontext()
    return collection_paused()


if __name__ == "__main__":
    arch, direction = sys.argv[1:]
    ahead = os.environ.get("TILEATTN_SOURCES") != "0"
    print(json.dumps(_both_passes(arch) if direction == "fwdbwd" else _one_run(arch, ahead)))
    sys.stdout.flush()
    os._exit(0)  # not the end of TileLang's process, which takes its time
