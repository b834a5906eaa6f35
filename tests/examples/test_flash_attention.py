"""The one-file FlashAttention: lowered as plain TileLang does it, run on the emulator, and on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tests.tools import ROOT
from tileattn.testing import assert_accurate


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import flash_attention  # type: ignore[import-not-found]

    return flash_attention


def lowered(function: Any, arch: str, passes: dict[str, bool]) -> str:
    """The source by TileLang alone: a copy of the file gets none of the package's repairs (build/compile.py)."""
    import tilelang
    from tilelang.backend.module import create_backend_context
    from tilelang.engine.lower import device_codegen_without_compile, lower_to_host_device_ir

    from tileattn.kernels.tilelang.build.compile import target_of

    target = target_of(arch)
    with target, tilelang.transform.PassContext(opt_level=3, config=passes):
        context = create_backend_context(target, None, "auto")
        _, device, *_ = lower_to_host_device_ir(function, context)
        return str(device_codegen_without_compile(device, context).inspect_source())


@pytest.mark.slow  # two seconds each
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_lowering(example: Any, name: str, arch: str) -> None:
    source = lowered(getattr(example, name)(64, True, "bfloat16"), arch, example.PASSES)
    assert ("wgmma" in source) == (arch == "sm_90a")
    assert ("mma_sync" in source) == (arch == "sm_80")
    # All warps compute: TileLang's own loading warp can hang.
    assert "setmaxnreg" not in source
    assert "warpgroup_reg" not in source


@pytest.mark.slow  # half a minute: g++ compiles two kernels, and each GPU thread runs in turn
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("causal", [False, True])
def test_on_the_emulator(example: Any, causal: bool) -> None:
    agrees(example, causal, (1, 150, 2, 64), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_on_a_gpu(example: Any, causal: bool, head_dim: int) -> None:
    agrees(example, causal, (2, 1111, 3, head_dim), "cuda")


def agrees(example: Any, causal: bool, shape: tuple[int, ...], device: str) -> None:
    """By the package's rule, and by the file's own check."""
    torch.manual_seed(0)
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    definition = partial(example.reference, causal=causal)
    exact = example.outputs(definition, *(x.double() for x in given))
    eager = example.outputs(definition, *given)
    ours = example.outputs(partial(example.attention, causal=causal), *given)
    for name, got, right, other in zip(("o", "dq", "dk", "dv"), ours, exact, eager, strict=True):
        assert_accurate(name, got, right, [other], gradient=name != "o")
    example.check(*given, causal=causal)


def test_wrong_results_are_seen(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key too many for each query."""
    given = [torch.randn(1, 21, 2, 32, dtype=torch.bfloat16) for _ in range(4)]
    monkeypatch.setattr(example, "attention", lambda q, k, v, causal: example.reference(q, k, v))
    example.check(*given, causal=False)
    with pytest.raises(AssertionError, match="o is wrong: its error is"):
        example.check(*given, causal=True)


def test_errors(example: Any) -> None:
    x = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"one dtype, float16 or bfloat16, got q \(1, 5, 2, 64\) torch.float32"):
        example.attention(x.float(), x, x)
    with pytest.raises(ValueError, match=r"head_dim 32, 64 or 128, got \(1, 5, 2, 40\)"):
        example.attention(*[x[..., :40]] * 3)
    with pytest.raises(ValueError, match=r"got \(1, 0, 2, 64\)"):
        example.attention(*[x[:, :0]] * 3)
