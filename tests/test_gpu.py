"""What only a GPU can show of the TileLang backend, beside conformance: ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import tileattn
from tileattn.kernels.tilelang import launch

pytestmark = pytest.mark.gpu


def _tensors(batch: int, seqlen: int, heads: int, head_dim: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def test_memory_is_o_and_lse_only_at_128k_tokens() -> None:
    q, k, v = _tensors(1, 131072, 8, 128)
    tileattn.attention(*_tensors(1, 128, 8, 128), causal=True, return_lse=True)  # compiles and loads
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    o, lse = tileattn.attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == o.nbytes + lse.nbytes
    assert o.isfinite().all()
    assert lse.isfinite().all()


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """q spans 2**31 elements: row 2**20 of a head begins beyond what 32 bits can say."""
    wide = torch.zeros((1, 2**20 + 64, 33, 64), device="cuda", dtype=torch.bfloat16)
    q, k, v = wide[:, -64:, 32:], *_tensors(1, 256, 1, 64)[1:]
    q.copy_(_tensors(1, 64, 1, 64)[0])
    full = tileattn.attention(wide[:, :, 32:], k, v)[:, -64:]
    assert torch.equal(full, tileattn.attention(q.contiguous(), k, v))


def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tileattn.attention(*_tensors(2, 100, 4, 64), causal=True)
    compiled = []
    monkeypatch.setattr(launch, "ensure_compiled", lambda *arguments: compiled.append(arguments))
    for batch, seqlen, heads in ((1, 1, 1), (3, 777, 2), (2, 4096, 16)):
        tileattn.attention(*_tensors(batch, seqlen, heads, 64), causal=True)
    assert compiled == []


def test_cuda_graph_replays_on_new_inputs() -> None:
    q, k, v = _tensors(2, 500, 4, 128)
    tileattn.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tileattn.attention(q, k, v, causal=True)
    for tensor, fresh in zip((q, k, v), _tensors(2, 500, 4, 128, seed=1)):
        tensor.copy_(fresh)
    graph.replay()
    assert torch.equal(o, tileattn.attention(q, k, v, causal=True))


def test_runs_on_the_current_stream() -> None:
    q, k, v = _tensors(4, 2048, 8, 128)
    expected = tileattn.attention(q, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows on this stream waits; on another it would run at once
        late = q.roll(1, 1).roll(-1, 1)
        o = tileattn.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_two_hundred_launches_give_the_same_bits(head_dim: int, causal: bool) -> None:
    q, k, v = _tensors(2, 1000, 8, head_dim)
    first, first_lse = tileattn.attention(q, k, v, causal=causal, return_lse=True)
    for _ in range(200):
        o, lse = tileattn.attention(q, k, v, causal=causal, return_lse=True)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


def test_compiled_model_equals_eager() -> None:
    q, k, v = _tensors(2, 300, 4, 64)
    window = tileattn.SlidingWindow(64, 0)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileattn.attention(q * 2, k, v, mask=window, score_mod=tileattn.SoftCap(30.0)) + 1

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    expected = tileattn.attention(q * 2, k, v, mask=window, score_mod=tileattn.SoftCap(30.0)) + 1
    assert torch.equal(compiled(q, k, v), expected)


def test_another_process_takes_the_kernel_from_disk() -> None:
    """... and does so without importing TileLang, whose import alone would take longer than the load."""
    tileattn.attention(*_tensors(1, 64, 2, 64), causal=True)
    code = (
        "import sys, torch, tileattn\n"
        "q = torch.randn(1, 64, 2, 64, device='cuda', dtype=torch.bfloat16)\n"
        "tileattn.attention(q, q, q, causal=True)\n"
        "assert 'tilelang' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
