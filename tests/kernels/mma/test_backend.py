"""The ladder without a GPU: its names and refusals, its kernels compiled, and run by an emulator."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import special_values
from tests.tools.mma import emulator as mma_emulator
from tests.tools.mma.cases import SHAPES, Shape, check, default_kernels, kernels, keys_of_a_warp
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.installation import pip_install
from tileattn.kernels.mma import backend, compile, rungs
from tileattn.kernels.mma.backend import Choice, parse
from tileattn.kernels.mma.rungs import HEAD_DIMS, LARGE_HEAD_DIMS, RUNGS, Kernel, RungOptions, Tiles
from tileattn.kernels.mma.tiles import candidates
from tileattn.runtime import dispatch
from tileattn.runtime import operators as ops
from tileattn.testing import (
    ConformanceCase,
    assert_forward_accurate,
    build,
    conformance_cases,
    eager_attention,
    fp16_accumulation,
    oracle_attention,
)
from tileattn.variant.key import encode

ARCH = "sm_90a"
CALL = AttentionCall(torch.float16, 64, 64, arch=ARCH)


# --- Names ---

NAMES = {
    "": Choice(),
    "split_q": Choice("split_q"),
    "acc=fp16": Choice(acc="fp16"),
    "shared_kv,stages=1,acc=fp16,smem=padded": Choice("shared_kv", 1, "fp16", "padded"),
    "split_q,smem=padded,stages=2": Choice("split_q", smem="padded"),
    "shared_qkv,tiles=64x64x4x2": Choice("shared_qkv", tiles=Tiles(64, 64, 4, 2)),
    # As flash-attention-mma writes them.
    "split-kv": Choice("split_kv"),
    "split-q+stage1": Choice("split_q", 1),
    "share-kv,acc=fp16": Choice("shared_kv", acc="fp16"),
    "split-q+share-qkv+stage2,smem=padded": Choice("shared_qkv", 2, smem="padded"),
    "split-q+tiling-qk": Choice("tiled_d"),
    "tiling-qkv+stage1": Choice("tiled_d", 1),
    "split-q+share-kv+acc-f32+stage1": Choice("shared_kv", 1),
    "split-q+share-qkv+swizzle-qk+stage2": Choice("shared_qkv"),
    "split-q+tiling-qkv+acc-f32+swizzle-qkv+stage1": Choice("tiled_d", 1),
    "tiled_d,tiles=64x64x8x1x128": Choice("tiled_d", tiles=Tiles(64, 64, 8, 1, 128)),
}
WRONG = (
    *("splitq", "stages=3", "stages=", "acc=bf16", "smem", "tiles=64x64", "tiles=axbxcxd", "Split_q", "split_q,"),
    *("split-q+split-kv", "share-kv+split-q", "split-q+stage3", "share-kv+stage1,stages=2", "share_kv", "split-q+"),
    *("share-kv+stage1+stage2", "share-kv+acc-f16", "stage1", "share-kv+swizzle-q,smem=padded", "split-q+o-s2g"),
    *("split_q,split_kv", "stages=1,stages=1", "rung=split_q2", " split_q", "split_q, stages=1"),
)


@pytest.mark.parametrize("options", NAMES)
def test_names_say_what_is_wanted(options: str) -> None:
    assert parse(options) == NAMES[options]


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_name_is_one_error_that_says_what_is_accepted(options: str) -> None:
    with pytest.raises(ValueError, match=re.escape(backend.ACCEPTED)) as caught:
        dispatch.named(f"mma:{options}")
    assert repr(f"mma:{options}") in str(caught.value)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_name_of_options_parses_to_them(rung: str) -> None:
    head_dim = 512 if rung == "tiled_d" else 64
    for stages, acc, smem in ((1, "fp16", "padded"), (2, "fp32", "swizzle")):
        options = RungOptions(rung, stages, acc, smem)
        assert parse(str(options).removeprefix("mma:")).options(head_dim) == options
        for tiles in candidates(options, head_dim):
            assert parse(f"{options},tiles={tiles}".removeprefix("mma:")).tiles == tiles


# --- Refusals ---


def refusal(options: str = "", **changes: Any) -> str | None:
    facts = {"dtype": torch.float16, "head_dim": 64, "head_dim_v": 64, "arch": ARCH} | changes
    return backend.refusal(parse(options), AttentionCall(**facts))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if cuda-core were."""
    monkeypatch.setattr(backend, "has_compiler", lambda: True)


@pytest.mark.usefixtures("installed")
def test_what_it_runs() -> None:
    for head_dim in HEAD_DIMS + LARGE_HEAD_DIMS:
        for dtype in (torch.float16, torch.bfloat16):
            for variant in ("", "Causal()"):
                assert refusal(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, variant=variant) is None
    assert refusal("acc=fp16") is None
    assert refusal("tiled_d", head_dim=512, head_dim_v=512) is None
    assert refusal(arch="sm_80") is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ("", {"arch": "gfx942"}, "no NVIDIA GPU"),
        ("", {"arch": "sm_75"}, "no NVIDIA GPU"),
        ("", {"needs_grad": True}, "no backward pass"),
        ("", {"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ("acc=fp16", {"dtype": torch.bfloat16}, "acc=fp16 takes float16 only"),
        ("", {"variant": "SlidingWindow(i,i)"}, "no mask but Causal"),
        ("", {"sink": True}, "no sink"),
        ("", {"dropout": True}, "no dropout"),
        ("", {"aligned": False}, "multiples of 16 bytes"),
        ("", {"head_dim": 80, "head_dim_v": 80}, "head_dim must be one of 32, 64, 96, 128, 256"),
        ("", {"head_dim": 128}, "must be equal, not 128 and 64"),
        ("split_q", {"head_dim": 256, "head_dim_v": 256}, "head_dim must be one of 32, 64, 96, 128, not 256"),
        ("tiled_d", {}, "head_dim must be one of 256, 384"),
        ("split_q,tiles=1x1x1x1", {}, "must be one of 128x64x4x2"),
        (
            "tiled_d",
            {"head_dim": 1024, "head_dim_v": 1024, "arch": "sm_86"},
            "and has 101376 on sm_86",
        ),
    ],
)
def test_what_it_refuses(options: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in str(refusal(options, **changes))


def test_without_cuda_core_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_compiler", lambda: False)
    assert refusal() == f"cuda-core is not installed ({pip_install('mma')})"


@pytest.mark.usefixtures("installed")
def test_it_never_runs_unasked() -> None:
    dispatch._select.cache_clear()
    for head_dim in (64, 512):
        call = AttentionCall(torch.float16, head_dim, head_dim, arch=ARCH)
        assert not dispatch.select(call).name.startswith("mma")
        assert dispatch.select(call, "mma:acc=fp16").name == "mma:acc=fp16"
    dispatch._select.cache_clear()


def test_every_head_dim_has_tiles_that_fit() -> None:
    for kernel in kernels(all_dims=True):
        for tiles in candidates(kernel.options, kernel.head_dim):
            fitting = Kernel(kernel.options, kernel.dtype, kernel.head_dim, tiles)
            assert fitting.shared_memory() * tiles.blocks <= 227 * 1024 - 1024 * (tiles.blocks - 1), fitting


# --- Compiled ---


def assembled(kernel: Kernel, folder: Path) -> str:
    """What ptxas says of a kernel: through NVRTC where cuda-core is, else through nvcc."""
    if compile.has_compiler():
        return compile.build_cubin(kernel, ARCH, folder / "kernel.cubin")
    if mma_emulator.NVCC is None:
        pytest.skip("needs cuda-core or nvcc")
    macros = [f"-D{name}={value}" for name, value in kernel.macros().items()]
    source = str(compile.SOURCES / f"{kernel.options.rung}.cu")
    command = [
        mma_emulator.NVCC,
        f"-arch={ARCH}",
        "-std=c++17",
        "-cubin",
        "-Xptxas",
        "-v",
        *macros,
        source,
        "-o",
        "/dev/null",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


FEW_BYTES = 24  # what a tile's loop reads back once: next to nothing beside its hundreds of instructions


def spilled_bytes(kernel: Kernel, folder: Path) -> int:
    """Bytes of a thread's stack."""
    log = assembled(kernel, folder)
    match = re.search(r"(\d+) bytes stack frame", log)
    assert match is not None, log
    return int(match[1])


QUICK = ("shared_qkv,acc=fp32", "shared_kv,acc=fp16")


@pytest.mark.slow_except("shared_kv,acc=fp16", reason="NVRTC takes 1.5 s")
@pytest.mark.parametrize("options", QUICK)
def test_nothing_spills(options: str, tmp_path: Path) -> None:
    assert spilled_bytes(parse(options).kernel(CALL), tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", list(kernels(all_dims=True)), ids=str)
def test_no_default_spills(kernel: Kernel, tmp_path: Path) -> None:
    options = kernel.options
    best = options.stages == 2 and options.smem == "swizzle"
    assert spilled_bytes(kernel, tmp_path) <= (0 if best else FEW_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(RungOptions(rung, acc=acc), torch.float16, head_dim, tiles)
        for rung in RUNGS
        for head_dim in (LARGE_HEAD_DIMS if rung == "tiled_d" else HEAD_DIMS)
        for acc in rungs.ACCUMULATIONS
        for tiles in candidates(RungOptions(rung, acc=acc), head_dim)[1:]
    ],
    ids=str,
)
def test_no_candidate_spills_much(kernel: Kernel, tmp_path: Path) -> None:
    assert spilled_bytes(kernel, tmp_path) <= FEW_BYTES


# --- Emulated ---

needs_gpp = pytest.mark.skipif(mma_emulator.COMPILER is None, reason="needs g++")
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The backend's forward pass, with kernels that run on the CPU."""
    folder = tmp_path_factory.mktemp("mma")
    built: dict[Kernel, mma_emulator.Kernel] = {}

    def launcher(kernel: Kernel, arch: str, index: int | None) -> mma_emulator.Kernel:
        if kernel not in built:
            built[kernel] = mma_emulator.Kernel(kernel, folder)
        return built[kernel]

    def run(
        choice: Choice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = AttentionCall(q.dtype, q.shape[3], v.shape[3], "Causal()" if causal else "", arch=ARCH)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "launcher", launcher)
            patch.setattr(backend, "has_compiler", lambda: True)
            assert backend.refusal(choice, call) is None
            return backend.prepare(choice, call, q.shape, k.shape, scale)(Inputs(q, k, v))

    return run


def choice_of(kernel: Kernel) -> Choice:
    options = kernel.options
    return Choice(options.rung, options.stages, options.acc, options.smem, kernel.tiles)


def emulate(run: Run, kernel: Kernel, shape: Shape, name: str) -> None:
    tensors = shape.tensors(kernel.head_dim, kernel.dtype, "cpu")
    scale = kernel.head_dim**-0.5 if shape.scale is None else shape.scale
    check(name, kernel, shape, tensors, run(choice_of(kernel), *tensors, shape.causal, scale))


EMULATED = (
    ("split_kv,stages=1,smem=padded", torch.float16, 64, "causal"),
    ("split_q,stages=1", torch.bfloat16, 32, "causal, rows without keys"),
    ("shared_kv,acc=fp16", torch.float16, 96, "full"),
    ("shared_kv", torch.bfloat16, 128, "causal, few queries"),
    ("shared_qkv", torch.float16, 64, "full"),
    ("shared_qkv,acc=fp16,stages=1,smem=padded", torch.float16, 64, "negative scale"),
    ("pipelined", torch.bfloat16, 32, "causal, rows without keys"),
    ("pipelined,acc=fp16,stages=1,smem=padded", torch.float16, 64, "causal"),
    ("pipelined,acc=fp16,tiles=128x96x4x2", torch.float16, 64, "full"),
    ("tiled_d", torch.bfloat16, 256, "causal"),
)


@pytest.mark.slow_cases(
    "shared_kv,acc=fp16-dtype2-96-full",
    "shared_qkv-dtype4-64-full",
    "pipelined,acc=fp16,stages=1,smem=padded-dtype7-64-causal",
    "pipelined,acc=fp16,tiles=128x96x4x2-dtype8-64-full",
    reason="2 to 4 s each; a cheaper case of each rung is in the others",
)
@needs_gpp
@pytest.mark.parametrize(("options", "dtype", "head_dim", "shape"), EMULATED)
def test_emulated(emulated: Run, options: str, dtype: torch.dtype, head_dim: int, shape: str) -> None:
    kernel = parse(options).kernel(AttentionCall(dtype, head_dim, head_dim, arch=ARCH))
    emulate(emulated, kernel, SHAPES[shape], shape)


SPECIAL = (  # those of EMULATED, so that no other kernel is compiled
    ("split_kv,stages=1,smem=padded", torch.float16, 64, "causal"),
    ("shared_qkv", torch.float16, 64, "full"),
    ("pipelined", torch.bfloat16, 32, "causal"),
)


@pytest.mark.slow_except("pipelined-dtype2-32-causal", reason="1 s each")
@needs_gpp
@pytest.mark.parametrize(("options", "dtype", "head_dim", "mask"), SPECIAL)
def test_nan_and_infinities(emulated: Run, options: str, dtype: torch.dtype, head_dim: int, mask: str) -> None:
    kernel = parse(options).kernel(AttentionCall(dtype, head_dim, head_dim, arch=ARCH))
    call = special_values.call_of(mask, dtype, "cpu", head_dim=head_dim)
    got = emulated(choice_of(kernel), call.q, call.k, call.v, mask == "causal", head_dim**-0.5)
    special_values.assert_as_the_formula(call, got)


@pytest.mark.slow_except("split_kv", reason="1.5 s")
@needs_gpp
@pytest.mark.parametrize("rung", ["split_kv", "shared_qkv"])
def test_the_rules_float16_run_rounds_where_kernels_do(emulated: Run, rung: str) -> None:
    """In one tile no maximum rises. Both round alike, except where float32 sums of 16 terms are nearly ties."""
    kernel, shape = parse(f"{rung},acc=fp16").kernel(CALL), SHAPES["negative scale"]
    assert shape.scale is not None
    assert shape.lengths[1] <= kernel.tiles.block_N
    q, k, v = shape.tensors(kernel.head_dim, kernel.dtype, "cpu")
    _, got = emulated(choice_of(kernel), q, k, v, shape.causal, shape.scale)
    _, lse = fp16_accumulation.eager_fp16_accumulation(-q, k, v, None, -shape.scale, keys_of_a_warp(kernel))
    assert ((got - lse).abs() < 1e-5).float().mean() > 0.95


@needs_gpp
@pytest.mark.slow
@pytest.mark.parametrize("kernel", list(dict.fromkeys([*kernels(all_dims=False), *default_kernels()])), ids=str)
def test_every_option_emulated(emulated: Run, kernel: Kernel) -> None:
    for name, shape in SHAPES.items():
        emulate(emulated, kernel, shape, name)


def _runs(case: ConformanceCase) -> bool:
    structure = case.structure
    plain = structure.mask in ("none", "causal") and not structure.scores and not structure.sink and structure.aligned
    equal = structure.head_dim == structure.head_dim_v and structure.head_dim in HEAD_DIMS + LARGE_HEAD_DIMS
    return plain and equal and structure.dtype in ("fp16", "bf16")


@needs_gpp
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in conformance_cases("full") if _runs(case)], ids=lambda case: case.id)
def test_conformance_emulated(emulated: Run, case: ConformanceCase) -> None:
    arguments = build(case, "cpu")
    q, k, v, mask, score_mods, sink, scale, *_ = arguments.positional
    assert ops.make_call(Inputs(q, k, v, sink), encode(mask, score_mods)[0]).variant in ("", backend.CAUSAL)
    got = emulated(Choice(), q, k, v, mask is not None, case.structure.head_dim**-0.5 if scale is None else scale)
    assert_forward_accurate(
        case.id, got, oracle_attention(*arguments.positional), eager_attention(*arguments.positional)
    )


@pytest.mark.slow(reason="compiles many kernels, 6 s")
def test_many_kernels_compile_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in a new process, where threads that start at the same time import the compiler's package."""
    if not compile.has_compiler():
        pytest.skip("needs cuda-core")
    code = (
        "import torch; from tileattn.kernels.mma import batch, rungs, tiles\n"
        "batch.os.cpu_count = lambda: 4\n"
        "options = [rungs.RungOptions(rung, 1) for rung in rungs.RUNGS[:4]]\n"
        "made = [rungs.Kernel(x, torch.float16, 32, tiles.candidates(x, 32)[0]) for x in options]\n"
        f"assert batch.compile_all(made, {ARCH!r}) == [None] * 4\n"
    )
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.cubin"))) == 4
