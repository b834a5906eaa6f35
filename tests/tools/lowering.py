"""Lowers and assembles kernels for GPUs that this machine does not have; shared by the tests of generated code."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilelang
import torch

from tileattn import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    FunctionMask,
    KeyPadding,
    Mask,
    PrefixLM,
    SlidingWindow,
    SoftCap,
)
from tileattn.call.facts import AttentionCall
from tileattn.compat.transformers.patterns import DenseMask, ShiftedWindow
from tileattn.kernels.tilelang.build import nvcc as nvcc_module
from tileattn.kernels.tilelang.build.compile import (
    _lower,
    _pass_context,
    create_backend_context,
    device_codegen_without_compile,
    device_source,
    target_of,
)
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward.kernel import kernel_of
from tileattn.variant.key import encode
from tileattn.variant.program import with_alignment

# Bytes that a thread may keep in local memory: what belongs to a task, not to its scores (a coefficient, an address of
# lse). It is read once per tile of keys, and the tile sizes that bring it were measured faster than those without.
MAX_SPILLED = 32
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942")
IDS = Documents(torch.arange(9) // 4)
SLOPES, BIAS, SEEN = torch.ones(4), torch.ones(2, 4, 9, 9), torch.ones(9, dtype=torch.bool)
# Rows of multiples of 16 bytes: copied tile by tile.
TILES, WIDE_TILES = torch.ones(2, 4, 16, 16, dtype=torch.bfloat16), torch.ones(1, 1, 16, 16)


def make_call(
    mask: Mask | None = None,
    *mods: object,
    dim: int = 128,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    arch: str = "sm_90a",
    **flags: bool,
) -> AttentionCall:
    """The static facts of a call; its kernel depends on nothing else."""
    variant, operands = encode(mask, mods)  # type: ignore[arg-type]
    variant = with_alignment(variant, operands.tensors)
    return AttentionCall(dtype, dim, dim_v or dim, variant, arch=arch, **flags)


def user_score(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score * 0.5 + h


# Every mask, score modification, flag, and head dim at least once, each in the company that asks most of registers.
CALLS = {
    "plain": make_call(),
    "plain-16": make_call(dim=16, dtype=torch.float16, return_lse=False),
    "plain-256": make_call(dim=256),
    "causal-64": make_call(Causal(), dim=64),
    "plain-128/192": make_call(dim=128, dim_v=192),
    "causal-192/128": make_call(Causal(), dim=192, dim_v=128),
    "window-96": make_call(SlidingWindow(5, 0), dim=96, dtype=torch.float16),
    "documents-causal": make_call(IDS & Causal()),
    "window-or-prefix-192": make_call(SlidingWindow(5, 3) | PrefixLM(3), dim=192, sink=True),
    "captured-64/128": make_call(FunctionMask(lambda b, h, q, k: SEEN[k] | (q == k)), dim=64, dim_v=128),
    "softcap-256": make_call(Causal(), SoftCap(30.0), dim=256),
    "bias-tiles": make_call(Causal(), Bias(TILES)),
    "bias-wide-tiles-64": make_call(None, Bias(WIDE_TILES), dim=64),
    "composed": make_call(PrefixLM(torch.ones(2).int()), ALiBi(SLOPES), Bias(BIAS), SoftCap(9.0), user_score, dim=40),
    "unaligned": make_call(Causal(), aligned=False),
}
# Looked at by `make test-all` only, for the time they take.
SLOW_CALLS = {
    "plain-40": make_call(dim=40, aligned=False, sink=True, dtype=torch.float16),
    "plain-64": make_call(dim=64),
    "plain-96": make_call(dim=96),
    "plain-192": make_call(dim=192),
    "plain-64/128": make_call(dim=64, dim_v=128),
    "plain-192/160": make_call(dim=192, dim_v=160),
    "plain-64/256": make_call(dim=64, dim_v=256),
    "plain-256/224": make_call(dim=256, dim_v=224),
    "causal-160": make_call(Causal(), dim=160),
    "causal-80": make_call(Causal(), dim=80),
    "plain-192/128": make_call(dim=192, dim_v=128),
    "causal": make_call(Causal()),
    "causal-256": make_call(Causal(), dim=256),
    "prefix": make_call(PrefixLM(3)),
    "documents-96": make_call(IDS, dim=96),
    "documents-causal-256": make_call(IDS & Causal(), dim=256, sink=True, dtype=torch.float16),
    "function": make_call(FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 0)),
    "padding-causal": make_call(Causal() & KeyPadding(torch.ones(2, 2, dtype=torch.bool))),
    "alibi": make_call(Causal(), ALiBi(SLOPES)),
    "bias": make_call(None, Bias(BIAS), dtype=torch.float16),
    "bias-tiles-64": make_call(Causal(), Bias(TILES), dim=64, sink=True),
    "bias-tiles-96": make_call(SlidingWindow(5, 0), Bias(TILES[:1]), SoftCap(9.0), dim=96, dtype=torch.float16),
    "bias-wide-tiles": make_call(Causal(), Bias(WIDE_TILES), user_score, dtype=torch.float16),
    "bias-tiles-256": make_call(Causal(), Bias(TILES), dim=256),
    "bias-tiles-composed": make_call(IDS & Causal(), Bias(WIDE_TILES), ALiBi(SLOPES), Bias(TILES), SoftCap(3.0)),
    "bias-256": make_call(Causal(), Bias(BIAS), dim=256),
    "shifted-window-64": make_call(ShiftedWindow(3, 0, torch.ones(1).int()) & Causal(), dim=64, sink=True),
    "dense-64": make_call(DenseMask(SEEN.expand(2, 1, 9, 9)), dim=64),
    "composed-192": make_call(IDS & Causal(), ALiBi(SLOPES), Bias(BIAS), SoftCap(3.0), dim=192, sink=True),
}


def lower(call: AttentionCall, tile: defaults.Config | None = None) -> str:
    """The CUDA or HIP source of a call's kernel."""
    return _lowered(call, tile or defaults.default(call))


@functools.lru_cache(maxsize=256)  # several tests look at one kernel
def _lowered(call: AttentionCall, tile: defaults.Config) -> str:
    return device_source(kernel_of(call, tile), call.arch)


def source_and_shared(function: Any, arch: str) -> tuple[str, int]:
    """What `device_source` gives, and the bytes of dynamic shared memory that the kernel is launched with."""
    target = target_of(arch)
    with target, _pass_context(function):
        context = create_backend_context(target, None, "auto")
        _, device = _lower(function, context)
        (kernel,) = device.functions.values()
        source = device_codegen_without_compile(device, context).inspect_source()
        return str(source), int(kernel.attrs.get("dyn_shared_memory_buf", 0))


def on(arch: str, call: AttentionCall) -> AttentionCall:
    """The same call on another architecture."""
    return replace(call, arch=arch)


def find_nvcc() -> str | None:
    """The CUDA compiler on the path, in the toolkit's folder, or from pip."""
    from tilelang.env import CUDA_HOME

    places = [shutil.which("nvcc"), *(os.path.join(home, "bin", "nvcc") for home in (CUDA_HOME,) if home)]
    return next((place for place in places if place and Path(place).is_file()), None)


def assemble(nvcc: str, source: str, arch: str, folder: Path) -> str:
    """What ptxas says about a kernel: registers, spills, warnings."""
    root = Path(tilelang.__file__).parent
    number = arch.removeprefix("sm_")
    # As the package has it compiled (tests/kernels/tilelang/build/test_nvcc.py): the same machine code, with less for
    # nvcc to read.
    (folder / "kernel.cu").write_text(nvcc_module.with_own_draw(nvcc_module.with_own_products(source)))
    command = [
        *(nvcc, "-std=c++17", "--use_fast_math", f"-gencode=arch=compute_{number},code=sm_{number}"),
        *("-Xptxas", "-v", "-cubin", f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include", "-DENABLE_BF16"),
        *("kernel.cu", "-o", "kernel.cubin"),
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stderr


def find_disassembler() -> str | None:
    """nvdisasm or cuobjdump on the path or beside nvcc; nvcc from pip has neither."""
    beside = Path(find_nvcc() or "").resolve().parent
    places = (shutil.which(name) or str(beside / name) for name in ("nvdisasm", "cuobjdump"))
    return next((place for place in places if Path(place).is_file()), None)


def disassemble(tool: str, cubin: Path) -> str:
    """The machine instructions (SASS) of a kernel."""
    flags = ["-sass"] if Path(tool).name.startswith("cuobjdump") else []
    return subprocess.run([tool, *flags, str(cubin)], capture_output=True, text=True, check=True).stdout


def numbers(pattern: str, text: str) -> list[int]:
    """All numbers that a pattern's group finds."""
    return [int(number) for number in re.findall(pattern, text)]
