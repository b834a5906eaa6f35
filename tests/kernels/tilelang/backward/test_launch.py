"""What a backward pass launches: the short way of calls with numbers only, and the way of all others."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tileattn import ALiBi, Causal, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch
from tileattn.kernels.tilelang.backward.library import Kernels, kernel_names
from tileattn.variant.key import encode

PLAIN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "full": (None, ()),
    "causal": (Causal(), ()),
    "window": (SlidingWindow(33, 5), ()),
    "soft cap in a window": (SlidingWindow(33, None), (SoftCap(20.0),)),
}


def call_of(variant: str, **facts: Any) -> BackwardCall:
    dims = facts.pop("dims", (64, 64))
    return BackwardCall(
        AttentionCall(torch.bfloat16, *dims, variant, arch="sm_90a", needs_grad=True, **facts), (True,) * 3 + (False,)
    )


def launched(call: BackwardCall, operands: Operands, expanded: bool = False) -> tuple[list[Any], Any]:
    """The launches' names and arguments, and the gradients. Of a tensor: its memory's number, shape and strides."""
    dim, dim_v = call.forward.head_dim, call.forward.head_dim_v
    made = [
        torch.randn(1 if expanded else 3, n, h, d).bfloat16()
        for n, h, d in ((70, 4, dim), (90, 2, dim), (90, 2, dim_v))
    ]
    q, k, v = (x.expand(3, -1, -1, -1) for x in made)
    o, do = (torch.randn(3, 70, 4, dim_v).bfloat16() for _ in range(2))
    lse = torch.randn(3, 70, 4).transpose(1, 2)
    calls: list[Any] = []
    alive: list[Tensor] = []

    def seen(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        alive.append(x)
        pointers = list(dict.fromkeys(y.data_ptr() for y in alive))
        return pointers.index(x.data_ptr()), x.shape, x.stride(), x.dtype

    def kernel(name: str) -> Any:
        return lambda *arguments: calls.append((name, [seen(x) for x in arguments]))

    names = kernel_names(call)
    kernels = Kernels(*(kernel(name) if name in names else None for name in Kernels._fields))  # type: ignore[arg-type]
    with mock.patch.object(launch, "backward_kernels", return_value=kernels):
        run = launch.prepare_backward_with(None, call, q.shape, k.shape, 0.25)
        gradients = run(Inputs(q, k, v, operands=operands), o, lse, do, None)
    return calls, [seen(x) for x in gradients[:3]]


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 96)])
@pytest.mark.parametrize("name", PLAIN)
def test_the_short_way_launches_the_same(name: str, dims: tuple[int, int], expanded: bool) -> None:
    variant, operands = encode(*PLAIN[name])
    call = call_of(variant, dims=dims)
    with mock.patch.object(launch, "_plain", wraps=launch._plain) as short:
        got = launched(call, operands, expanded)
    assert short.called
    with mock.patch.object(launch, "_is_plain", return_value=False):
        assert got == launched(call, operands, expanded)
    assert [name for name, _ in got[0]] == ["prepare", "main", "finish"]


def test_calls_with_more_than_numbers_take_the_other_way() -> None:
    call = call_of("")
    kernels = Kernels(*[mock.Mock()] * 3, None)
    assert launch._is_plain(call, kernels)
    assert not launch._is_plain(call, kernels._replace(queries=mock.Mock()))
    assert not launch._is_plain(dataclasses.replace(call, dlse=True), kernels)
    variant, _ = encode(None, (ALiBi(torch.ones(4)),))
    for other in (call_of(variant), call_of("", sink=True), call_of("", dropout=True), call_of("", packed=True)):
        assert not launch._is_plain(other, kernels)
