"""The tuner on a GPU, with few candidates: ``pytest -m gpu``. It compiles about a dozen kernels, some seconds each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tileattn
from tileattn.kernels.tilelang.backward import space as backward_space
from tileattn.kernels.tilelang.forward import space
from tileattn.runtime import dispatch
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.tuner import results, state

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("TILEATTN_TUNING_FILE", str(path))
    results._devices.cache_clear()
    monkeypatch.setattr(space, "MOST", 4)
    every = backward_space.candidates
    monkeypatch.setattr(backward_space, "candidates", lambda call: every(call)[:4])
    yield path
    results._devices.cache_clear()
    state.forget_prepared()


def qkv(grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 500, 4, 64)
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_(grad) for _ in range(3)]


def test_a_forward_pass_is_tuned_and_stays_right(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    q, k, v = qkv()
    with tileattn.tuning():
        got = tileattn.attention(q, k, v, causal=True, return_lse=True)
    ((device, call, bucket, result),) = results.entries(results.read(file))
    assert torch.cuda.get_device_name() in device
    assert call.startswith("bfloat16 d64 Causal() lse")
    assert bucket == "p8 q512 k512 g1"
    assert 0 < result.ms <= 1.02 * result.default_ms
    assert result.candidates >= 2, capfd.readouterr().err
    arguments = (q, k, v, tileattn.Causal())
    expected = oracle_attention(*arguments), eager_attention(*arguments)
    assert_forward_accurate("inside", got, *expected)
    assert_forward_accurate("after", tileattn.attention(q, k, v, causal=True, return_lse=True), *expected)
    code = (
        "import torch\n"
        "from tileattn.kernels.tilelang.forward import launch\n"
        "from tileattn.runtime import operators as ops\n"
        "from tileattn.call.inputs import Inputs\n"
        "q = torch.zeros(2, 500, 4, 64, device='cuda', dtype=torch.bfloat16)\n"
        "call = ops.make_call(Inputs(q, q, q), 'Causal()')\n"
        "config = launch._chosen(call, q.shape, q.shape)\n"
        f"assert type(config).__name__ == {result.config['schedule']!r}\n"
        f"assert config.block_N == {result.config['block_N']}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_backward_pass_is_tuned_and_stays_right(file: Path) -> None:
    plain, tuned = qkv(grad=True), qkv(grad=True)
    weights = torch.linspace(-1, 1, 64, device="cuda")
    (tileattn.attention(*plain, causal=True, backend="tilelang") * weights).sum().backward()
    with tileattn.tuning(quiet=True):
        (tileattn.attention(*tuned, causal=True, backend="tilelang") * weights).sum().backward()
    calls = [call for _, call, _, _ in results.entries(results.read(file))]
    assert len(calls) == 2
    assert calls[1].startswith("backward (bfloat16 d64 Causal() lse needs_grad")
    for one, other in zip(plain, tuned):
        assert one.grad is not None
        assert other.grad is not None
        difference = (one.grad.float() - other.grad.float()).norm() / one.grad.float().norm()
        assert difference < 2 * torch.finfo(torch.bfloat16).eps


def test_a_lookup_costs_nothing(file: Path) -> None:
    """A call's configuration is chosen once: neither results nor a session is asked for afterwards."""
    q, k, v = qkv()
    tileattn.attention(q, k, v, causal=True)
    before = dispatch._prepare.cache_info()
    for _ in range(3):
        tileattn.attention(q, k, v, causal=True)
    assert dispatch._prepare.cache_info() == before


def test_a_graph_is_not_captured_inside(file: Path) -> None:
    q, k, v = qkv()
    tileattn.attention(q, k, v)
    torch.cuda.synchronize()
    with tileattn.tuning(quiet=True):
        tileattn.attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # tuned already
            tileattn.attention(q, k, v)
        graph.replay()
    assert file.exists()
