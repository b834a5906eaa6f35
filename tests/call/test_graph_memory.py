"""Tensors that are kept for later calls, while torch.compile runs a function in the memory of its CUDA graphs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn import Causal, attention
from tileattn.api import shared_plans
from tileattn.call import graph_memory
from tileattn.call.deferred_status import DeferredStatus
from tileattn.kernels.tilelang.backward import workspaces
from tileattn.kernels.tilelang.forward import queue

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GRAPHS, OTHER = 7, 8


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a stream the current one, where torch.compile's graphs have the stream GRAPHS."""
    current = [OTHER]
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=GRAPHS))
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, graph_memory.TREES, trees)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current[0], device_index=0)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def take(stream: int) -> None:
        current[0] = stream

    return take


def test_only_their_stream_is_one_of_graphs(on_stream: Callable[[int], None]) -> None:
    assert not graph_memory.warms_up(GPU)
    on_stream(GRAPHS)
    assert graph_memory.warms_up(GPU)


def test_without_their_module_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, graph_memory.TREES, raising=False)
    assert not graph_memory.warms_up(GPU)


def test_the_rows_of_a_backward_pass_are_not_kept(
    on_stream: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_place", lambda device: "here")
    monkeypatch.setattr(workspaces, "_kept", {})
    monkeypatch.setattr(workspaces, "warms_up", lambda device: graph_memory.warms_up(GPU))
    q = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16)
    on_stream(GRAPHS)
    rows = workspaces.rows_of(q, (1, 2, 64), 64, True)
    assert workspaces.rows_of(q, (1, 2, 64), 64, True) is not rows
    on_stream(OTHER)
    rows = workspaces.rows_of(q, (1, 2, 64), 64, True)
    assert workspaces.rows_of(q, (1, 2, 64), 64, True) is rows


def test_a_counter_is_not_kept(on_stream: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **named: zeros(*size, **named))
    monkeypatch.setattr(queue, "_tickets", {})
    on_stream(GRAPHS)
    assert queue.tickets(GPU) is not queue.tickets(GPU)
    assert not queue._tickets
    on_stream(OTHER)
    assert queue.tickets(GPU) is queue.tickets(GPU)


def test_a_status_is_made_by_another_thread(on_stream: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(CPU))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    makers: list[threading.Thread] = []
    make = DeferredStatus(["wrong"], "tests")
    zeros = torch.zeros

    def noted(*size: object, **named: object) -> Tensor:
        makers.append(threading.current_thread())
        return zeros(*size, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "zeros", noted)
    on_stream(GRAPHS)
    assert make.of(CPU) is make.of(CPU)
    assert waited == [CPU]
    assert makers != [threading.current_thread()]
    assert len(makers) == 1


def test_the_plan_of_a_step_is_not_kept(on_stream: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_plans, "decode_plan", lambda *tensors, **options: object())
    x: Any = SimpleNamespace(
        is_cuda=True, device=GPU, dtype=torch.bfloat16, shape=(2, 4), stride=lambda: (4, 1), data_ptr=lambda: 32
    )

    plans = shared_plans.SharedPlans()

    def plan() -> object:
        return plans.plan("kind", x, x, x, x, {})

    on_stream(GRAPHS)
    assert plan() is not plan()
    on_stream(OTHER)
    kept = plan()
    assert plan() is kept
    on_stream(GRAPHS)
    assert plan() is not kept


def _once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=Causal(), backend="tilelang")


def _twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _once(_once(q, k, v), k, v)


def _trained(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    o = function(q, k, v)
    return [o.detach().clone(), *(x.clone() for x in torch.autograd.grad(o, (q, k, v), do))]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seqlen", "heads", "kv_heads", "dim"), [(1, 700, 4, 4, 64), (2, 512, 8, 2, 128)])
def test_reduced_overhead_between_eager_calls(batch: int, seqlen: int, heads: int, kv_heads: int, dim: int) -> None:
    """Two compiled functions of one shape, the second compiled between the passes of the first; eager calls between."""
    pytest.importorskip("tilelang")

    def made(length: int, seed: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = [(batch, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
        drawn = [torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes]
        return [x.requires_grad_(index < 3) for index, x in enumerate(drawn)]

    def same(got: list[Tensor], expected: list[Tensor]) -> None:
        for one, other in zip(got, expected, strict=True):  # dq is added up in any order
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)

    torch._dynamo.reset()
    first, second = (torch.compile(each, mode="reduce-overhead", fullgraph=True) for each in (_once, _twice))
    expected = {each: [_trained(each, *made(seqlen, seed)) for seed in range(5)] for each in (_once, _twice)}
    for call in range(50):
        torch.compiler.cudagraph_mark_step_begin()
        q, k, v, do = made(seqlen, call % 5)
        o = first(q, k, v)
        before = o.detach().clone()
        same(_trained(_once, *made(seqlen, (call + 3) % 5)), expected[_once][(call + 3) % 5])
        _trained(_once, *made(64 * (1 + call % 7), call))
        if call % 5 == 4:
            same(_trained(second, *made(seqlen, (call + 1) % 5)), expected[_twice][(call + 1) % 5])
        assert torch.equal(o, before)
        same([before, *torch.autograd.grad(o, (q, k, v), do)], expected[_once][call % 5])
    torch._dynamo.reset()
