"""The kernels that are compiled behind a forward kernel are those that the call's backward pass asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tileattn import ALiBi, Bias, Causal, Dilated, Documents, Mask, SoftCap
from tileattn.call.expected import expecting
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang.backward import launch as backward
from tileattn.kernels.tilelang.backward import library as backward_library
from tileattn.kernels.tilelang.backward.listed import as_listed
from tileattn.kernels.tilelang.build import background
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.forward import launch as forward
from tileattn.kernels.tilelang.forward import library as forward_library
from tileattn.kernels.tilelang.lists.library import BitsJob, ListsJob
from tileattn.kernels.tilelang.packed.library import PlanJob
from tileattn.tuner import state
from tileattn.variant.key import encode
from tileattn.variant.program import program, with_alignment

CACHES = (
    forward_library.forward_function,
    forward_library.transpose_function,
    backward_library.backward_kernels,
    backward_library.main_kernel,
    backward_library.add_shares,
)


class Asked(NamedTuple):
    """The kernels that passes look up, and those that the background gets."""

    own: list[KernelJob]
    behind: list[KernelJob]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """No kernel is in the cache, and none is compiled."""
    found = Asked([], [])

    def compile(job: KernelJob) -> Path:
        background.compiling(job)
        found.own.append(job)
        return Path("kernel.so")

    for module in (forward_library, backward_library):
        monkeypatch.setattr(module, "find_or_compile", compile)
        monkeypatch.setattr(module, "load", lambda path: dict.fromkeys(NAMES, lambda *arguments: None))
    monkeypatch.setattr(background, "is_on", lambda: True)
    monkeypatch.setattr(background, "start", found.behind.extend)
    forget()
    yield found
    forget()


NAMES = ("forward", "transpose", "prepare", "main", "finish", "queries", "add")


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


def keys(jobs: list[KernelJob]) -> set[str]:
    return {job.key for job in jobs}


def variant_of(mask: Mask | None, *mods: Any) -> str:
    text, operands = encode(mask, mods)
    return with_alignment(text, operands.tensors)


CALL = AttentionCall(torch.bfloat16, 128, 128, arch="sm_90a", needs_grad=True)
LONG = 2, 8192, 16, 128
BIAS = variant_of(Causal(), Bias(torch.ones(1, 16, 64, 64, dtype=torch.bfloat16)))
# By name: the call, the shapes of queries and keys, whether gradients are deterministic, and the variant's gradients.
CASES: dict[str, tuple[AttentionCall, tuple[int, ...], int, bool, bool]] = {
    "full": (CALL, LONG, 16, False, False),
    "causal": (dataclasses.replace(CALL, variant="Causal()"), LONG, 16, False, False),
    "short causal": (dataclasses.replace(CALL, variant="Causal()"), (1, 700, 4, 128), 4, False, False),
    "shared groups": (dataclasses.replace(CALL, variant="Causal()"), (1, 8192, 16, 128), 2, False, False),
    "first keys alone": (
        dataclasses.replace(CALL, head_dim=96, head_dim_v=96),
        (8, 2688, 32, 96),
        8,
        False,
        False,
    ),
    "deterministic": (dataclasses.replace(CALL, variant="Causal()"), LONG, 16, True, False),
    "wide heads": (dataclasses.replace(CALL, head_dim=256, head_dim_v=256), (1, 2048, 8, 256), 8, False, False),
    "sink": (dataclasses.replace(CALL, sink=True, variant=variant_of(Causal(), SoftCap(30.0))), LONG, 16, False, False),
    "slopes": (dataclasses.replace(CALL, variant=variant_of(None, ALiBi(torch.ones(16)))), LONG, 16, False, False),
    "bias with a gradient": (dataclasses.replace(CALL, variant=BIAS), LONG, 16, False, True),
    "bias without": (dataclasses.replace(CALL, variant=BIAS), LONG, 16, False, False),
    "lists": (dataclasses.replace(CALL, variant=variant_of(Dilated(511, dilation=4))), LONG, 16, False, False),
    "dropout": (dataclasses.replace(CALL, dropout=True), LONG, 16, False, False),
    "generic": (dataclasses.replace(CALL, arch="sm_80", variant="Causal()"), LONG, 16, False, False),
    "generic, deterministic": (dataclasses.replace(CALL, arch="sm_80"), LONG, 16, True, False),
    "unaligned": (dataclasses.replace(CALL, aligned=False), LONG, 16, False, False),
    "AMD": (dataclasses.replace(CALL, arch="gfx942"), LONG, 16, False, False),
}


class _Operands(NamedTuple):
    tensors: list[torch.Tensor]


def operands_of(call: AttentionCall, gradients: bool) -> Any:
    tensors = program(call.variant).tensors
    return _Operands([torch.ones(1, requires_grad=gradients and each.dtype.is_floating_point) for each in tensors])


def shapes(q_shape: tuple[int, ...], kv_heads: int) -> tuple[torch.Size, torch.Size]:
    batch, seqlen, _, head_dim = q_shape
    return torch.Size(q_shape), torch.Size((batch, seqlen, kv_heads, head_dim))


@pytest.mark.parametrize("scale", [0.1, -0.1], ids=["", "negative scale"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_the_backward_pass_are_compiled_behind_the_forward_kernel(
    case: str, scale: float, asked: Asked
) -> None:
    call, q_shape, kv_heads, deterministic, gradients = CASES[case]
    sizes = shapes(q_shape, kv_heads)
    with expecting(deterministic, operands_of(call, gradients)):
        forward.prepare(call, *sizes, scale)
    behind = [job for job in asked.behind if not isinstance(job, (ListsJob, BitsJob))]
    asked.own.clear()
    tensors = tuple(gradients and each.dtype.is_floating_point for each in program(call.variant).tensors)
    needs = (True, True, True, call.sink, *tensors)
    backward.prepare_backward(BackwardCall(call, needs, deterministic=deterministic), *sizes, scale)
    assert keys(behind) == keys(asked.own)
    assert len(asked.own) >= 3
    assert behind[0].key in {job.key for job in asked.own if getattr(job, "kernel", "") == "main"}


def test_the_cases_have_kernels_of_all_kinds(asked: Asked) -> None:
    """Otherwise the test above would check too little."""
    for call, q_shape, kv_heads, deterministic, gradients in CASES.values():
        forget()
        with expecting(deterministic, operands_of(call, gradients)):
            forward.prepare(call, *shapes(q_shape, kv_heads), 0.1)
    kinds = {getattr(job, "kernel", type(job).__name__) for job in asked.behind}
    mains = [job for job in asked.behind if getattr(job, "kernel", "") == "main"]
    assert len(mains) == len(CASES) + 1  # one case has another for the first keys
    assert kinds == {"prepare", "main", "finish", "queries", "SharesJob", "ListsJob", "BitsJob"}


def test_without_gradients_nothing_follows(asked: Asked) -> None:
    forward.prepare(dataclasses.replace(CALL, needs_grad=False), *shapes(LONG, 16), 0.1)
    assert (len(asked.own), asked.behind) == (1, [])


def test_the_lists_of_a_call_without_gradients_follow(asked: Asked) -> None:
    variant = variant_of(Dilated(511, dilation=4))
    forward.prepare(dataclasses.replace(CALL, needs_grad=False, variant=variant), *shapes(LONG, 16), 0.1)
    assert asked.behind
    assert {type(job) for job in asked.behind} <= {ListsJob, BitsJob}


def test_nothing_follows_while_the_tuner_measures(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "session", object())
    forward.prepare(CALL, *shapes(LONG, 16), 0.1)
    assert asked.behind == []


def test_a_kernel_that_is_loaded_asks_for_nothing(asked: Asked) -> None:
    forward.prepare(CALL, *shapes(LONG, 16), 0.1)
    asked.own.clear()
    asked.behind.clear()
    forward.prepare(CALL, *shapes(LONG, 16), 0.2)
    assert asked == Asked([], [])


def test_small_kernels_before_the_forward_kernel_are_compiled_behind_it(asked: Asked) -> None:
    packed = dataclasses.replace(CALL, packed=True, needs_grad=False)
    forward_library.forward_function(packed, forward.default(packed))
    assert [type(job) for job in asked.own] == [forward_library.Job, PlanJob]
    assert asked.behind[0] == PlanJob("sm_90a")
    asked.own.clear()
    fp8 = dataclasses.replace(CALL, dtype=FP8, needs_grad=False)
    forward_library.forward_function(fp8, forward.default(fp8))
    assert [job.config is None for job in asked.own] == [False, True]


def loaded_packed(call: AttentionCall, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads a packed call's forward kernel as its first run does, which needs a GPU."""

    def packed_forward(load: Callable[..., Any], config: Any, *_: Any) -> Any:
        return load(forward.with_lists(config, call) if listed else config)

    monkeypatch.setattr(forward, "packed_forward", packed_forward)
    forward.prepare(call, *shapes(LONG, 16), 0.1)


@pytest.mark.parametrize("listed", [False, True])
def test_the_backward_kernels_of_packed_calls(listed: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = variant_of(Dilated(511, dilation=4))
    call = dataclasses.replace(CALL, packed=True, variant=variant)
    loaded_packed(call, listed, monkeypatch)
    behind = [job for job in asked.behind if not isinstance(job, (ListsJob, PlanJob))]
    assert any(isinstance(job, ListsJob) and job.packed for job in asked.behind) == listed
    asked.own.clear()
    needs = (True, True, True, False, *(False for _ in program(variant).tensors))
    of = BackwardCall(call, needs)
    config = backward.default(of)
    backward.prepare_backward_with(as_listed(config) if listed else None, of, *shapes(LONG, 16), 0.1)
    assert keys(behind) == keys(asked.own)


def test_documents_in_a_packed_call_without_lists(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    call = dataclasses.replace(CALL, packed=True, variant=variant_of(Documents(torch.arange(9) // 4)))
    loaded_packed(call, False, monkeypatch)
    assert isinstance(asked.behind[0], PlanJob)
    assert {"main", "prepare"} <= {getattr(job, "kernel", "") for job in asked.behind}
