"""Compiles append_kv's Triton kernel for GPUs that this machine does not have.

    python tests/tools/triton_kernels/append_compiler.py

prints one line of JSON for each kernel, then by how many kernels calls of several sizes are run. It runs in its own
process: Triton decides at import whether it compiles or interprets, and the tests interpret.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.tools import append_cases
from tests.tools.triton_kernels import compiler

NAMES = ("halves-pages", "packed-positions")
CONFIG = SimpleNamespace(num_warps=1, num_stages=2)


class Recorder:
    """In place of the kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self.record

    def record(self, *arguments: Any, num_warps: int) -> None:
        self.arguments = arguments


def arguments_of(case: append_cases.AppendCase, arch: str) -> tuple[Any, ...]:
    """What the kernel is launched with."""
    from tileattn.call.appending import make_append_call
    from tileattn.kernels.triton.append import launch

    real, recorder = launch.append_kernel, Recorder()
    launch.append_kernel = recorder
    try:
        inputs, interleaved = append_cases.inputs_of(append_cases.Built(case))
        launch.Append(replace(make_append_call(inputs, interleaved, on_gpu=True), arch=arch))(inputs)
    finally:
        launch.append_kernel = real
    return recorder.arguments


def specialization(arguments: tuple[Any, ...]) -> Any:
    """By what Triton tells compiled kernels apart, beside options."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from tileattn.kernels.triton.append.kernel import append_kernel

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(append_kernel.signature, append_kernel.params, backend)
    return repr(bind(*arguments, num_warps=CONFIG.num_warps)[1])


def main() -> None:
    """See the module's header."""
    from tileattn.kernels.triton.append.kernel import append_kernel

    by_id = {case.id: case for case in append_cases.CASES}
    for arch in compiler.TARGETS:
        for name in NAMES:
            report = compiler._compile(arch, append_kernel, CONFIG, arguments_of(by_id[name], arch))
            print(json.dumps({"arch": arch, "name": name} | report), flush=True)
    case = by_id["halves-pages"]
    others = (replace(case, heads=16, kv_heads=1), replace(case, seqlens=(1,), new=1), replace(case, page=1))
    keys = {specialization(arguments_of(other, "sm_90a")) for other in (case, *others)}
    print(json.dumps({"kernels": len(keys), "keys": sorted(keys)}))


if __name__ == "__main__":
    main()
