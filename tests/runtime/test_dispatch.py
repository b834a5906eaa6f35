"""Every backend's `refusal`, and dispatch's choice, beside the table that says what must run (support_table.py)."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.support_table import (
    ANY,
    BF16,
    FP8,
    FP16,
    FP32,
    FP64,
    NVIDIA,
    TABLE,
    check_refusal,
    default_backend,
    must_run,
    possible,
)
from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, KeyPadding, PrefixLM, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall, BackwardCall, is_aligned
from tileattn.kernels.mma import backend as mma_backend
from tileattn.kernels.tilelang.backward import defaults as backward_defaults
from tileattn.kernels.tilelang.forward import defaults
from tileattn.runtime.dispatch import BACKENDS, select
from tileattn.variant.key import encode
from tileattn.variant.program import program

IDS, KEEP = torch.zeros(8, dtype=torch.int32), torch.ones(1, 8, dtype=torch.bool)
SLOPES, BIAS = torch.ones(8), torch.zeros(1, 8, 8, 8, dtype=torch.bfloat16)

# By kind; each mask meets each modification below.
MASKS: dict[str, Any] = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(5, 0),
    "prefix": PrefixLM(3),
    "documents": Documents(IDS),
    "padding": KeyPadding(KEEP),
    "composed": (Causal() & Documents(IDS)) | PrefixLM(2),
    "function": FunctionMask(lambda b, h, q, k: (k <= q) | (k % 3 == 0)),
}
MODIFICATIONS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "softcap": (SoftCap(30.0),),
    "alibi": (ALiBi(SLOPES),),
    "bias": (Bias(BIAS),),
    "function": (lambda score, b, h, q, k: score - 0.1 * (q - k),),
    "two": (SoftCap(30.0), Bias(BIAS)),
    "float64": (Bias(BIAS.double()),),
}
# (head_dim, head_dim_v): the ends of what kernels take, just outside of them, and the classes between.
HEAD_DIMS = [(d, d) for d in (1, 8, 12, 15, 16, 24, 32, 40, 64, 100, 128, 256, 257, 264)]
HEAD_DIMS += [(192, 128), (64, 100), (100, 64), (8, 64), (64, 8), (128, 256), (256, 264), (264, 64), (256, 512)]
HEAD_DIMS += [(d, d) for d in (384, 512, 640, 768, 896, 1024, 1152)]
DTYPES = (FP16, BF16, FP32, FP64, FP8)
# Of each flag in turn, and of flags that rows of the table tell apart together.
FLAGS: list[dict[str, bool]] = [
    {},
    {"needs_grad": True},
    {"packed": True},
    {"packed": True, "needs_grad": True},
    {"aligned": False},
    {"aligned": False, "needs_grad": True},
    {"dropout": True},
    {"dropout": True, "needs_grad": True, "packed": True},
    {"sink": True},
    {"return_lse": False},
]


# The flags that meet every mask and modification.
SOME_FLAGS = [*FLAGS[:3], {"aligned": False, "dropout": True, "sink": True}]


@functools.cache
def calls(arch: str) -> tuple[AttentionCall, ...]:
    """Every dtype, head dim and flag, without a variant; every mask with every modification, and every dtype."""
    plain = itertools.product(DTYPES, FLAGS, HEAD_DIMS, [""])
    keys = [encode(mask, mods)[0] for mask, mods in itertools.product(MASKS.values(), MODIFICATIONS.values())]
    varied = itertools.product(DTYPES, SOME_FLAGS, [(64, 64), (100, 100)], keys)
    return tuple(
        AttentionCall(dtype, dim, dim_v, key, arch=arch, **flags)
        for dtype, flags, (dim, dim_v), key in itertools.chain(plain, varied)
    )


@pytest.fixture(autouse=True)
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes cuda-core look installed; apart from that, the ladder's refusals do not depend on it."""
    monkeypatch.setattr(mma_backend, "has_compiler", lambda: True)


@pytest.mark.parametrize("arch", ANY)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_runs_what_it_must_and_nothing_else(backend: Any, arch: str) -> None:
    if backend.name != "mma" and not possible(backend.name, arch):
        pytest.skip(f"this process has not what {backend.name} needs on {arch}")
    for call in calls(arch):
        check_refusal(backend.name, call, backend.refusal(call))


def test_every_backend_has_rows() -> None:
    assert [backend.name for backend in BACKENDS] == list(TABLE)


@pytest.mark.parametrize("arch", ANY)
def test_dispatch_chooses_the_first_that_must_run(arch: str) -> None:
    if not all(possible(name, arch) for name in ("tilelang", "triton")):
        pytest.skip("tilelang or triton is not installed")
    for call in calls(arch):
        if call.variant in ("", "Causal()"):
            expected = default_backend(call)
            if expected is None:
                with pytest.raises(NotImplementedError, match="no backend runs this call"):
                    select(call)
            else:
                assert select(call).name == expected, call


@pytest.mark.parametrize(
    ("options", "call"),
    [
        # Sums in float16 and other tiles than the default's, which then fit.
        ("acc=fp16", AttentionCall(FP16, 64, 64, arch="sm_90a")),
        ("tiled_d,tiles=64x64x4x2x64", AttentionCall(BF16, 256, 256, arch="sm_89")),
        ("split_kv,stages=1,smem=padded", AttentionCall(BF16, 128, 128, "Causal()", arch="sm_80")),
    ],
)
def test_named_rungs_run(options: str, call: AttentionCall) -> None:
    assert mma_backend.refusal(mma_backend.parse(options), call) is None


@pytest.mark.parametrize("name", ["torch:fast", "torch:", "tilelang:split_q", "triton:stages=2"])
def test_options_behind_a_name_that_takes_none(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"or None, got {name!r}")):
        select(AttentionCall(FP16, 64, 64), name)


# --- What a call's layout is to a kernel ---


def cut(shape: tuple[int, ...], *index: Any, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)[index]


EVERYTHING = slice(None)
# Whether kernels may copy 16 bytes at a time; bshd views of (2, 5, 3, 64), or as the name says.
LAYOUTS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "bshd": (lambda: cut((2, 5, 3, 64)), True),
    "bhsd": (lambda: cut((2, 3, 5, 64)).transpose(1, 2), True),
    "one of three in a projection": (lambda: cut((2, 5, 3, 3, 64), EVERYTHING, EVERYTHING, 1), True),
    "every second row": (lambda: cut((2, 10, 3, 64), EVERYTHING, slice(0, None, 2)), True),
    "expanded batch": (lambda: cut((1, 5, 3, 64)).expand(2, 5, 3, 64), True),
    "expanded heads": (lambda: cut((2, 5, 1, 64)).expand(2, 5, 3, 64), False),
    "expanded sequence": (lambda: cut((2, 1, 3, 64)).expand(2, 5, 3, 64), False),
    "begins at 2 bytes": (lambda: cut((2, 5, 3, 72), ..., slice(1, 65)), False),
    "begins at 16 bytes": (lambda: cut((2, 5, 3, 72), ..., slice(8, 72)), True),
    "begins at 16 bytes, float32": (lambda: cut((2, 5, 3, 68), ..., slice(4, 68), dtype=FP32), True),
    "begins at 8 bytes, fp8": (lambda: cut((2, 5, 3, 80), ..., slice(8, 72), dtype=FP8), False),
    "heads step by 65": (lambda: torch.as_strided(cut((2, 6, 3, 64)), (2, 5, 3, 64), (1024, 200, 65, 1)), False),
    "rows step by 196": (lambda: torch.as_strided(cut((2, 5, 4, 64)), (2, 5, 3, 64), (1024, 196, 64, 1)), False),
    "batch steps by 964": (lambda: torch.as_strided(cut((2, 6, 3, 64)), (2, 5, 3, 64), (964, 192, 64, 1)), False),
    "head dim 20, float16": (lambda: cut((2, 5, 3, 20), dtype=FP16), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alignment(layout: str) -> None:
    make, aligned = LAYOUTS[layout]
    assert is_aligned(make()) is aligned


# --- What the TileLang kernels must run has a configuration that fits ---


def promised(arch: str, gradients: bool) -> list[AttentionCall]:
    """The calls that TileLang must run, with the masks and modifications that read most."""
    few = {encode(mask, mods)[0] for mask in (None, MASKS["composed"]) for mods in ((), MODIFICATIONS["two"])}
    runnable = [call for call in calls(arch) if call.variant in few and must_run("tilelang", call)]
    return [call for call in runnable if call.needs_grad is gradients]


@pytest.mark.parametrize("arch", [*NVIDIA, "gfx942"])
def test_what_tilelang_must_run_has_a_configuration(arch: str) -> None:
    """`default` raises where nothing fits."""
    required = promised(arch, gradients=False)
    assert len(required) > 50
    for call, seqlen in itertools.product(required, (1, 4096)):
        assert defaults.fits(call, defaults.default(call, seqlen)), call


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", [*NVIDIA, "gfx942"])
def test_what_tilelang_must_run_has_a_backward_configuration(arch: str, deterministic: bool) -> None:
    """`default` raises where nothing fits. Deterministic gradients are for every call that has gradients."""
    required = promised(arch, gradients=True)
    assert len(required) > 20
    for call in required:
        needs = (True,) * (4 + len(program(call.variant).tensors))
        backward = BackwardCall(call, needs, deterministic=deterministic)
        assert backward_defaults.default(backward) is not None, backward
        assert not deterministic or not backward_defaults.adds_dq(backward), backward
        assert backward_defaults.adds_dq(backward) or backward_defaults.queries_default(backward) is not None
