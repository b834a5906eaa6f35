"""Backward passes on two streams, on a GPU: ``pytest -m gpu tests/kernels/tilelang/backward/test_two_streams_gpu.py``.

All bits are those of the same kernels one after another: dk and dv have a fixed order of summation, and so has dq where
it comes from a kernel of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn.kernels.tilelang.backward import launch
from tileattn.kernels.tilelang.backward.two_streams import launch_beside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the Hopper schedules"
    ),
]

# Head dims of q and k and of v, heads and kv heads, lengths, causal, deterministic: each worth two streams.
CASES = {
    "full-192": ((192, 192), (16, 16), (1001, 1300), False, False),
    "causal-192/128": ((192, 128), (16, 16), (796, 2768), True, False),
    "causal-160": ((160, 160), (24, 8), (1301, 1301), True, False),
    "full-256": ((256, 256), (16, 8), (1024, 999), False, False),
    "deterministic-128": ((128, 128), (32, 8), (1500, 1001), False, True),
    "deterministic-causal-64-shares": ((64, 64), (28, 4), (3001, 3001), True, True),
}


class Pass:
    """A call's inputs, and the gradient of its output. On "meta" they have no values."""

    def __init__(self, name: str, device: str = "cuda") -> None:
        dims, self.heads, self.lengths, self.causal, self.deterministic = CASES[name]
        of_q, of_k = ((2, length, heads) for length, heads in zip(self.lengths, self.heads))
        shapes = ((*of_q, dims[0]), (*of_k, dims[0]), (*of_k, dims[1]), (*of_q, dims[1]))
        *leaves, self.do = (torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in leaves]
        if device != "meta":
            self.fill(0)

    def fill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for x in (*self.leaves, self.do):
                x.copy_(torch.randn(x.shape, device="cuda", generator=generator))

    def run(self) -> list[Tensor]:
        options: dict[str, Any] = {"causal": self.causal, "deterministic": self.deterministic, "backend": "tilelang"}
        o = tileattn.attention(*self.leaves, **options)
        return [o.detach(), *torch.autograd.grad(o, self.leaves, self.do)]

    def in_turn(self, seed: int) -> list[Tensor]:
        """What the same kernels give one after another."""
        self.fill(seed)
        with mock.patch.object(launch, "launch_beside", lambda here, there, device: (there(), here())):
            found = [x.clone() for x in self.run()]
        torch.cuda.synchronize()
        return found


@pytest.fixture
def beside() -> Iterator[mock.Mock]:
    """Counts the passes on two streams."""
    with mock.patch.object(launch, "launch_beside", wraps=launch_beside) as spy:
        yield spy


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for name, x, y in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("name", CASES)
def test_the_same_gradients(name: str, beside: mock.Mock) -> None:
    """And memory that is freed at once is used again at once, by values that would show in the gradients."""
    call = Pass(name)
    expected = call.in_turn(1)
    for _ in range(30):
        assert_equal(call.run(), expected)
    assert beside.call_count == 30


@pytest.mark.parametrize("name", CASES)
def test_on_streams_that_are_not_the_default(name: str, beside: mock.Mock) -> None:
    calls = [Pass(name), Pass(name)]
    expected = [call.in_turn(seed) for seed, call in enumerate(calls)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    runs: list[list[list[Tensor]]] = [[], []]
    for _ in range(10):
        for call, stream, found in zip(calls, streams, runs):
            with torch.cuda.stream(stream):
                found.append(call.run())
                assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    for found, right in zip(runs, expected):
        for got in found:
            assert_equal(got, right)
    assert beside.call_count == 20


@pytest.mark.parametrize("name", CASES)
def test_in_a_cuda_graph(name: str, beside: mock.Mock) -> None:
    """Each replay computes with what is in the inputs then, on any stream."""
    call = Pass(name)
    expected = [call.in_turn(seed) for seed in (1, 2)]
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        call.run()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = call.run()
    assert beside.call_count == 2
    for seed, right in zip((1, 2), expected):
        call.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal([x.clone() for x in static], right)


def test_two_threads(beside: mock.Mock) -> None:
    """Both on the default stream, whose passes follow each other in any order."""
    calls = [Pass("full-192"), Pass("causal-192/128")]
    expected = [call.in_turn(seed) for seed, call in enumerate(calls)]
    runs: list[list[list[Tensor]]] = [[], []]

    def work(index: int) -> None:
        runs[index].extend(calls[index].run() for _ in range(20))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for found, right in zip(runs, expected):
        assert len(found) == 20
        for got in found:
            assert_equal(got, right)


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for name in CASES:
        yield Pass(name, "meta").run
