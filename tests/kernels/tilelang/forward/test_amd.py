"""The schedule for AMD's MI300X, without one: its space, HIP source, code objects, and results on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools import hip
from tests.tools.lowering import CALLS, SLOW_CALLS, lower, make_call, on
from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.dropout import Dropout
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.architecture import padded
from tileattn.kernels.tilelang.forward import defaults, space
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.amd.config import (
    AmdConfig,
    amd_preferences,
    is_valid_amd,
    shared_bytes,
)
from tileattn.kernels.tilelang.forward.amd.space import (
    amd_candidates,
    article_space,
    example_space,
    is_article_best,
    valid_article_space,
)
from tileattn.kernels.tilelang.forward.kernel import kernel_of
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.testing.dropout import dropout_mask
from tileattn.testing.emulator.kernel import COMPILER, Kernel
from tileattn.variant.key import encode

ARCH, SHARED_BYTES = "gfx942", 65536
NARROW, WIDE = make_call(Causal(), dim=64, arch=ARCH), make_call(Causal(), arch=ARCH)


# --- The space ---


@pytest.mark.parametrize(
    ("configs", "count", "kernels"), [(list(article_space()), 576, 96), (list(example_space()), 108, 18)]
)
def test_the_published_spaces(configs: list[AmdConfig], count: int, kernels: int) -> None:
    assert len(configs) == len(set(configs)) == count
    assert len({config.kernel_text for config in configs}) == kernels  # splits and stages share them


@pytest.mark.parametrize(("dim", "article", "example"), [(16, 360, 78), (64, 252, 48), (128, 108, 12), (256, 12, 0)])
def test_those_that_fit_into_shared_memory_and_registers_are_valid(dim: int, article: int, example: int) -> None:
    call = make_call(dim=dim, arch=ARCH)
    k_pack = 2 if dim % 32 == 0 else 1
    assert len(valid_article_space(call)) == article
    valid = [config for config in example_space() if is_valid_amd(call, replace(config, k_pack=k_pack))]
    assert len(valid) == example


def test_the_fastest_of_the_article_is_searched() -> None:
    # Table 1 of the article, head dim 128: 128 queries, 32 keys, 512 threads, renumbered blocks.
    candidates = space.candidates(make_call(dim=128, dtype=torch.float16, arch=ARCH), (8, 4096, 4096, 1))
    assert [config.panel_size for config in candidates if is_article_best(config)] == [7, 8]
    assert not any(map(is_article_best, example_space()))
    # 4096 queries are 32 tiles: 64, 128 and 256 blocks for them are the same launch.
    assert len({(config.kernel_text, config.splits(4096)) for config in candidates}) == len(candidates) < 60
    for config in article_space():
        named = (config.block_M, config.block_N, config.threads, config.enable_rasterization)
        assert is_article_best(config) == (named == (128, 32, 512, True))


@pytest.mark.parametrize("name", [*CALLS, *SLOW_CALLS])
def test_every_call_has_a_default_and_candidates(name: str) -> None:
    call = on(ARCH, (CALLS | SLOW_CALLS)[name])
    config = defaults.default(call)
    assert isinstance(config, AmdConfig)
    assert shared_bytes(call, config) <= SHARED_BYTES
    candidates = space.candidates(call, (64, 4096, 4096, 1))
    assert len(candidates) >= 10
    assert all(is_valid_amd(call, config) for config in candidates)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_M": 32},  # four waves of 16 rows
        {"block_N": 24},
        {"block_N": 256},  # 66 KiB
        {"k_pack": 3},
        {"num_split_q": 0},
        {"qk_coalesced_width": 16},
        {"v_coalesced_width": 2},
        {"num_stages": 3},
        {"threads": 96},
        {"panel_size": 0},
    ],
)
def test_what_does_not_fit_is_not_valid(wrong: dict[str, int]) -> None:
    right = AmdConfig(64, 64)
    assert is_valid_amd(WIDE, right)
    assert not is_valid_amd(WIDE, replace(right, **wrong))


def test_splits_and_copies_in_place_share_a_kernel_and_nothing_else_does() -> None:
    config = AmdConfig(64, 64)
    key = launch.cache_key(WIDE, config)
    for same in ({"num_split_q": 7}, {"num_stages": 1}):
        assert launch.cache_key(WIDE, replace(config, **same)) == key
    others = ({"num_stages": 2}, {"block_M": 128}, {"panel_size": 7}, {"k_pack": 1}, {"enable_rasterization": False})
    for other in others:
        assert launch.cache_key(WIDE, replace(config, **other)) != key


# --- HIP source and code objects ---


def check(call: AttentionCall, config: AmdConfig, folder: Path) -> None:
    """What is asked of the source; and of the code object, where a compiler is there."""
    source = lower(call, config)
    instruction = {torch.bfloat16: "bf16", torch.float16: "f16"}[call.dtype]
    assert f"__builtin_amdgcn_mfma_f32_16x16x16{instruction}" in source
    steps = padded(call.head_dim) // (16 * config.k_pack)
    assert steps == 1 or f"ki < {steps};" in source
    assert ("tl::rasterization2DRow<" in source) == config.enable_rasterization
    assert int(re.search(r"__launch_bounds__\((\d+)\)", source)[1]) == config.threads  # type: ignore[index]
    # Rows are read as wide as the configuration says, not element by element.
    if call.aligned:
        assert "longlong4" not in source
        loads = re.findall(r"= \*\((uint[24])\*\)\((?:q|k|v) \+", source)
        widths = {4: "uint2", 8: "uint4"}
        expected = {widths[config.qk_coalesced_width], widths[config.v_coalesced_width]}
        assert set(loads) == expected, loads
    places = re.findall(r"\(char\*\)buf_dyn_shmem \+ (\d+)", source)
    least = 2 * config.block_N * min(padded(call.head_dim), padded(call.head_dim_v))  # bytes of the last of them
    assert max(map(int, places)) + min(least, 4 * config.threads) <= shared_bytes(call, config) <= SHARED_BYTES
    if not hip.MISSING:
        usage = hip.compile_hip(source, folder)
        # Vector registers are spilled to accumulators, scalar ones to vector registers, for which scratch is set apart.
        assert usage.scratch == 0 or (usage.scalars_spilled > 0 and usage.spilled == 0), (usage, str(config))


@pytest.mark.slow(reason="lowers a kernel, 10 s")
def test_the_fastest_of_the_article_becomes_hip_source(tmp_path: Path) -> None:
    check(make_call(dim=128, dtype=torch.float16, arch=ARCH), AmdConfig(128, 32, threads=512), tmp_path)


# Head dims of which every candidate is lowered.
WALKED = {"64": NARROW, "128": WIDE, "192/128": make_call(Causal(), dim=192, dim_v=128, arch=ARCH)} | {
    str(dim): make_call(Causal(), dim=dim, arch=ARCH) for dim in (16, 40, 96, 192, 256)
}


def _valid() -> Iterator[Any]:
    """One configuration for each kernel of the space: the published ones, and what the tuner adds.

    Of two that differ in panel_size alone, one is enough: it is one number in the source.
    """
    for name, call in WALKED.items():
        kernels = {replace(config, panel_size=0).kernel_text: config for config in amd_candidates(call)}
        for config in kernels.values():
            swizzled = f"p{config.panel_size}" if config.enable_rasterization else "p0"
            sizes = f"{config.block_M}x{config.block_N}-t{config.threads}-s{config.num_stages}"
            yield pytest.param(call, config, id=f"{name}-{sizes}-{swizzled}-v{config.v_coalesced_width}")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "config"), list(_valid()))
def test_every_valid_configuration(call: AttentionCall, config: AmdConfig, tmp_path: Path) -> None:
    check(call, config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, *SLOW_CALLS])
def test_every_feature(name: str, tmp_path: Path) -> None:
    call = on(ARCH, (CALLS | SLOW_CALLS)[name])
    config = defaults.default(call)
    assert isinstance(config, AmdConfig)
    check(call, config, tmp_path)


# --- The same schedule, lowered for NVIDIA's sm_80 and run on the CPU by emulate() ---

IDS = Documents(torch.arange(150) // 40)
RUNS: dict[str, tuple[AmdConfig, dict[str, Any]]] = {
    "causal": (AmdConfig(64, 32, 2, 128, panel_size=2), {"mask": Causal()}),
    "full": (AmdConfig(64, 64, 1, 128, num_stages=1), {}),
    "window": (AmdConfig(32, 32, 3, 64, panel_size=3), {"mask": SlidingWindow(20, 3), "lengths": (150, 131)}),
    "more splits than tiles": (AmdConfig(64, 32, 99, 128), {"mask": Causal(), "lengths": (40, 150)}),
    "unordered": (AmdConfig(64, 32, 2, 128, enable_rasterization=False), {"mask": IDS & Causal()}),
    "documents, sink": (AmdConfig(64, 32, 2, 128), {"mask": IDS, "sink": True}),
    "rows without keys": (AmdConfig(64, 32, 2, 128), {"mask": Causal(), "lengths": (150, 60)}),
    "softcap": (AmdConfig(64, 32, 2, 128), {"mask": PrefixLM(9), "mods": [SoftCap(5.0)]}),
    "bias, alibi": (AmdConfig(64, 32, 2, 128), {"mods": [ALiBi(torch.ones(4)), Bias(torch.randn(1, 4, 150, 150))]}),
    "head dims differ": (AmdConfig(64, 32, 2, 128, k_pack=1), {"mask": Causal(), "dims": (40, 72)}),
    "two stages": (AmdConfig(64, 32, 2, 128, num_stages=2), {"mask": Causal(), "dtype": torch.bfloat16}),
    "dropout": (AmdConfig(64, 32, 2, 128), {"mask": Causal(), "p": 0.3}),
    "wide": (AmdConfig(64, 16, 2, 128), {"mask": Causal(), "dims": (256, 256)}),
    "unaligned": (AmdConfig(64, 32, 2, 128), {"mask": Causal(), "aligned": False}),
    "four warps, one row of 16 each": (AmdConfig(64, 32, 2, 128, v_coalesced_width=8), {"lengths": (150, 33)}),
}
QUICK = ("causal",)


def run(
    config: AmdConfig,
    prepare: Any,
    *,
    mask: Mask | None = None,
    mods: Any = (),
    lengths: tuple[int, int] = (150, 150),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    sink: bool = False,
    p: float = 0.0,
    aligned: bool = True,
    arch: str = "sm_80",
    device: str = "cpu",
) -> None:
    """One call, against the oracle; two query heads share a key head."""
    generator = torch.Generator(device).manual_seed(0)

    def random(length: int, heads: int, dim: int) -> torch.Tensor:
        x = torch.randn(2, length, heads, dim + (0 if aligned else 3), device=device, generator=generator)
        return x.to(dtype)[..., :dim]

    q, k, v = random(lengths[0], 4, dims[0]), random(lengths[1], 2, dims[0]), random(lengths[1], 2, dims[1])
    sinks = torch.randn(4, device=device, generator=generator) if sink else None
    variant, operands = encode(mask, mods)
    call = AttentionCall(dtype, *dims, variant, sink=sink, aligned=aligned, arch=arch, dropout=p > 0)
    assert is_valid_amd(call, config)
    forward = prepare(config, call, q.shape, k.shape, dims[0] ** -0.5)
    seed = torch.tensor([7], dtype=torch.int64, device=device)
    moved = Operands([x.to(device) for x in operands.tensors], operands.ints, operands.floats)
    got = forward(Inputs(q, k, v, sinks, moved, Dropout(p, seed) if p else None))
    dropped = dropout_mask(seed, p, 2, 4, *lengths) / (1 - p) if p else None
    arguments = (q, k, v, mask, mods, sinks)
    expected = oracle_attention(*arguments, dropout=dropped), eager_attention(*arguments, dropout=dropped)
    assert_forward_accurate("amd", got, *expected)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in RUNS]
)
def test_the_schedule_computes_attention(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        forward_launch, "forward_function", lambda call, config: Kernel(kernel_of(call, config), tmp_path)
    )
    config, options = RUNS[name]
    run(config, forward_launch.prepare_with, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_the_schedule_computes_attention_on_a_gpu(name: str) -> None:
    config, options = RUNS[name]
    options = dict(options)
    if name == "documents, sink":
        options["mask"] = Documents((torch.arange(150) // 40).cuda())
    if name == "unordered":
        options["mask"] = Documents((torch.arange(150) // 40).cuda()) & Causal()
    if "mods" in options and name.startswith("bias"):
        options["mods"] = [ALiBi(torch.ones(4).cuda()), Bias(torch.randn(1, 4, 150, 150).cuda())]
    arch = "sm_90a" if torch.cuda.get_device_capability()[0] == 9 else "sm_80"
    run(config, forward_launch.prepare_with, **options, arch=arch, device="cuda")


def test_defaults_fall_back_to_smaller_tiles() -> None:
    sizes = {dim: defaults.default(make_call(dim=dim, arch=ARCH)) for dim in (64, 128, 192, 256)}
    areas = [config.block_M * config.block_N for config in sizes.values()]
    assert areas == sorted(areas, reverse=True)
    for dim in sizes:
        call = make_call(dim=dim, arch=ARCH)
        assert any(is_valid_amd(call, config) for config in amd_preferences(call))
