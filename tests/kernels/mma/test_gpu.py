"""The ladder on a GPU: every option of every rung against the oracle, and what a launch needs: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

import tileattn
import tileattn.testing
from tests.tools.mma.cases import SHAPES, check, default_kernels, kernels
from tileattn.call.facts import device_arch
from tileattn.kernels.mma.batch import compile_all
from tileattn.kernels.mma.rungs import RUNGS, Kernel

pytestmark = pytest.mark.gpu
KERNELS = list(dict.fromkeys([*kernels(all_dims=False), *default_kernels()]))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All at once, in threads: one after another they would take minutes."""
    pytest.importorskip("cuda.core")
    errors = compile_all(KERNELS, device_arch(torch.device("cuda", torch.cuda.current_device())))
    assert not any(errors), next(filter(None, errors))


def _tensors(seqlen: int, head_dim: int = 64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, seqlen, 4, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_option(kernel: Kernel) -> None:
    for name, shape in SHAPES.items():
        tensors = shape.tensors(kernel.head_dim, kernel.dtype, "cuda")
        with tileattn.testing.poisoned_memory():
            got = tileattn.attention(
                *tensors, causal=shape.causal, scale=shape.scale, return_lse=True, backend=str(kernel.options)
            )
        check(name, kernel, shape, tensors, got)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_hundred_launches_give_the_same_bits(rung: str) -> None:
    """A barrier that is missing would show sooner or later."""
    q, k, v = _tensors(1000, 256 if rung == "tiled_d" else 64)
    first = tileattn.attention(q, k, v, causal=True, backend=f"mma:{rung}")
    assert first.isfinite().all()
    for _ in range(100):
        assert torch.equal(tileattn.attention(q, k, v, causal=True, backend=f"mma:{rung}"), first)


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    q, k, v = _tensors(2048)
    expected = tileattn.attention(q, k, v, backend="mma")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows on this stream waits; on another it would run at once
        o = tileattn.attention(q.roll(1, 1).roll(-1, 1), k, v, backend="mma")
    stream.synchronize()
    assert torch.equal(o, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tileattn.attention(q, k, v, backend="mma")
    q.copy_(_tensors(2048, seed=1)[0])
    graph.replay()
    assert torch.equal(o, tileattn.attention(q, k, v, backend="mma"))


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """q spans 2**31 elements: row 2**20 of a head begins beyond what 32 bits can say."""
    wide = torch.zeros((1, 2**20 + 64, 33, 64), device="cuda", dtype=torch.float16)
    q, (_, k, v) = wide[:, -64:, 32:], (x[:1, :, :1] for x in _tensors(256))
    q.copy_(_tensors(64)[0][:1, :, :1])
    full = tileattn.attention(wide[:, :, 32:], k, v, backend="mma")[:, -64:]
    assert torch.equal(full, tileattn.attention(q.contiguous(), k, v, backend="mma"))


def test_gradients_are_refused() -> None:
    q, k, v = _tensors(64)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        tileattn.attention(q.requires_grad_(), k, v, backend="mma")


def test_compiled_model_equals_eager() -> None:
    q, k, v = _tensors(300)
    compiled = torch.compile(lambda q, k, v: tileattn.attention(q * 2, k, v, causal=True, backend="mma") + 1)
    assert torch.equal(compiled(q, k, v), tileattn.attention(q * 2, k, v, causal=True, backend="mma") + 1)
