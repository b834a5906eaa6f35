"""Compiles the Triton kernels that a call would launch, for GPUs that this machine does not have.

    python tests/tools/triton_kernels/compiler.py '<a list of calls as JSON>'

prints one line of JSON for each kernel. It runs in its own process, because Triton decides at import whether it
compiles or interprets, and the tests interpret.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90a": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
# What a program may have; of sm_80 to sm_89 the least.
SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90a": 227 * 1024, "gfx942": 64 * 1024}


def compiled(arch: str, calls: list[dict[str, Any]], configs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What :func:`compile_call` says about all kernels of these calls, from a process of its own."""
    request = json.dumps({"arch": arch, "calls": calls, "configs": configs or {}})
    return printed(__file__, request)


def printed(script: str, *arguments: str) -> list[dict[str, Any]]:
    """What a script prints as JSON, line by line; as a command in a process that has not imported Triton."""
    from tests import fresh_process

    run = f"import runpy, sys; sys.argv = {[script, *arguments]!r}; runpy.run_path({script!r}, run_name='__main__')"
    return [json.loads(line) for line in fresh_process.run(run).splitlines() if line.startswith("{")]


def main(request: str) -> None:
    facts = json.loads(request)
    for call in facts["calls"]:
        if call.pop("decode", False):
            reports = compile_decode(facts["arch"], **call)
        else:
            reports = compile_call(facts["arch"], facts["configs"], **call)
        for report in reports:
            print(json.dumps(report), flush=True)


def compile_call(
    arch: str,
    configs: dict[str, Any],
    *,
    dtype: str = "float16",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    variant: str = "none",
    aligned: bool = True,
    backward: bool = True,
    group: int = 1,
    dq: bool = True,
    listed: bool = False,
) -> list[dict[str, Any]]:
    """Facts of each kernel that this call launches: name, bytes of shared memory, registers, spills, instructions.

    listed: whether its tiles are taken from lists, as those of long calls are.
    """
    import torch

    from tileattn.call.facts import AttentionCall, BackwardCall
    from tileattn.call.inputs import Inputs
    from tileattn.kernels.triton import defaults as config
    from tileattn.kernels.triton.backward.launch import Backward
    from tileattn.kernels.triton.forward.launch import Forward
    from tileattn.kernels.triton.tile_sizes import Config
    from tileattn.variant.key import encode

    key, operands = encode(*_variant(variant))
    call = AttentionCall(
        getattr(torch, dtype), head_dim, head_dim_v or head_dim, key, arch=arch, aligned=aligned, needs_grad=backward
    )
    seqlen, heads = SEQLEN, HEADS
    q = torch.empty(2, seqlen, heads, head_dim, dtype=call.dtype)
    k = torch.empty(2, seqlen, heads // group, head_dim, dtype=call.dtype)
    v, o = (torch.empty(2, seqlen, n, call.head_dim_v, dtype=call.dtype) for n in (heads // group, heads))
    lse = torch.empty(2, heads, seqlen)
    with (
        _launches() as launches,
        _lists(listed),
        config.overridden(**{name: Config(**fields) for name, fields in configs.items()}),
    ):
        inputs = Inputs(q, k, v, operands=operands)
        Forward(call, q.shape, k.shape, 0.125)(inputs)
        if backward:
            wanted = (dq, True, True, False, *(t.requires_grad for t in operands.tensors))
            run = Backward(BackwardCall(call, wanted), q.shape, k.shape, 0.125)
            run(inputs, o, lse, o, None)
    return [_compile(arch, *each) for each in launches]


def compile_decode(
    arch: str,
    *,
    dtype: str = "float16",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    variant: str = "causal",
    page: int = 0,
    packed: bool = False,
    fixed: int = 0,
    q_len: int = 1,
    aligned: bool = True,
    listed: bool = False,
) -> list[dict[str, Any]]:
    """The same of a decode call over caches of 4096 tokens."""
    import torch

    from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit
    from tileattn.kernels.triton.decode.launch import Decode
    from tileattn.variant.key import encode

    key, operands = encode(*_variant(variant))
    call = DecodeCall(
        getattr(torch, dtype), head_dim, head_dim_v or head_dim, key, aligned=aligned, arch=arch, packed=packed,
        page_rows=min(page & -page, 64), fixed=fixed,
    )  # fmt: skip
    capacity = -(-4096 // page) * page if page else 4096
    rows = (capacity // page + 7, page) if page else (2, capacity)
    q = torch.empty(*((1, 2 * q_len) if packed else (2, q_len)), HEADS, head_dim, dtype=call.dtype)
    k, v = (torch.empty(*rows, 2, dim, dtype=call.dtype) for dim in (head_dim, call.head_dim_v))
    table = torch.zeros(2, capacity // page, dtype=torch.int32) if page else None
    ends = torch.zeros(3, dtype=torch.int32) if packed else None
    sizes = DecodeSizes(2, q_len, 2 * q_len, HEADS, 2, capacity, page)
    with _launches() as launches, _lists(listed):
        inputs = DecodeInputs(q, k, v, torch.zeros(2, dtype=torch.int32), table, ends, operands=operands)
        Decode(call, sizes, 0.125, FixedSplit(fixed) if fixed else 4)(inputs, None)
    return [_compile(arch, *each) for each in launches]


@contextlib.contextmanager
def _launches() -> Iterator[list[Any]]:
    """The kernel, configuration and arguments of each launch within it; nothing runs."""
    from tileattn.kernels.triton import launch_cache

    launches: list[Any] = []

    def record(_: Any, work_out: Any, *arguments: Any, numbers: Any = None) -> None:
        launch = work_out(*arguments)
        given = [*arguments, *([] if numbers is None else [numbers])]
        for place, facts in launch.described.items():
            given[place] = facts.of(given[place])
        launches.append((launch.kernel, launch.config, (*given, *launch.constants)))

    real = launch_cache.LaunchCache.__call__
    launch_cache.LaunchCache.__call__ = record
    try:
        yield launches
    finally:
        launch_cache.LaunchCache.__call__ = real


@contextlib.contextmanager
def _lists(listed: bool) -> Iterator[None]:
    """Within it, short calls take their tiles from lists."""
    from unittest import mock

    from tileattn.kernels.triton import lists
    from tileattn.kernels.triton.decode import lists as decode_lists

    with contextlib.ExitStack() as stack:
        for module, name in ((lists, "FEWEST_PAIRS"), (decode_lists, "FEWEST_TILES")) if listed else ():
            stack.enter_context(mock.patch.object(module, name, 1))
        yield


SEQLEN, HEADS = 512, 8


def _variant(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A mask and modifications as the conformance cases call them, "causal+bias_bh+user"; all gradients are wanted.

    Or a sparse pattern, as the benchmark calls it.
    """
    from tileattn.bench.sparse_masks import NAMES, pattern
    from tileattn.testing import ConformanceCase, build
    from tileattn.testing.call_arguments import Structure
    from tileattn.testing.shapes import Shape

    if name in NAMES:
        return pattern(name, SEQLEN, HEADS, "cpu").mask, ()
    mask, *scores = name.split("+")
    structure = Structure("fp32", 16, 16, mask, tuple(scores), sink=False, aligned=True)
    arguments = build(ConformanceCase(structure, Shape(2, HEADS, HEADS, SEQLEN, SEQLEN)))
    arguments.leaves()
    return arguments.mask, arguments.score_mods


def _compile(arch: str, kernel: Any, config: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget(*TARGETS[arch]))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    bound, specialization, launch_options = bind(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, launch_options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=parsed.__dict__)
    facts = {"kernel": kernel.__name__, "shared": binary.metadata.shared, "config": str(config)}
    return facts | (_assembled(arch, binary.asm["ptx"]) if arch.startswith("sm") else _amd(binary.asm["amdgcn"]))


def _assembled(arch: str, ptx: str) -> dict[str, Any]:
    """ptxas's report."""
    import triton

    ptxas = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(path), "-o", str(path.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"mma\.sync", ptx)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "cp_async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
    }


def _amd(assembly: str) -> dict[str, Any]:
    number = {name: int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    return {"registers": number["vgpr_count"], "spills": number["vgpr_spill_count"],
            "mma": len(re.findall(r"v_mfma", assembly))}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
