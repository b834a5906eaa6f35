"""What only a GPU can show of the TileLang backend, beside conformance: ``pytest -m gpu``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tileattn
from tileattn import Causal, Documents, SlidingWindow, SoftCap
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.defaults import SHORT, defaults
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

pytestmark = pytest.mark.gpu


def _tensors(batch: int, seqlen: int, heads: int, head_dim: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def test_memory_is_o_and_lse_only_at_128k_tokens() -> None:
    q, k, v = _tensors(1, 131072, 8, 128)
    tileattn.attention(*_tensors(1, 128, 8, 128), causal=True, return_lse=True)  # compiles and loads
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left must not be freed in between
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


def test_new_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """A call has at most one kernel for each bucket of lengths; any sizes within a bucket share it."""
    if pytestconfig.getoption("--kernels") is not None:
        pytest.skip("--kernels leaves one bucket only")
    compiled: list[tuple[Any, Any]] = []
    really_compile = launch.ensure_compiled

    def counted(call: Any, config: Any) -> Path:
        compiled.append((call, config))
        return really_compile(call, config)

    launch.forward_function.cache_clear()
    monkeypatch.setattr(launch, "ensure_compiled", counted)
    for seqlen in (SHORT - 901, 2 * SHORT + 901):  # no other test has these
        tileattn.attention(*_tensors(3, seqlen, 5, 64), causal=True)
    call = compiled[0][0]
    assert compiled == [(call, config) for config in defaults(call)]
    compiled.clear()
    for batch, seqlen, heads in ((1, 1, 1), (2, SHORT, 3), (1, SHORT + 1, 1), (3, 777, 2), (2, 4096, 16)):
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


class Shape(NamedTuple):
    """Lengths of queries and keys, heads, head dims; a dozen of them for what races would show in."""

    batch: int = 2
    lengths: tuple[int, int] = (1000, 1000)
    heads: tuple[int, int] = (8, 8)
    head_dims: tuple[int, int] = (128, 128)
    mask: Any = None
    score_mod: Any = None
    sink: bool = False

    def tensors(self, seed: int = 0, device: str = "cuda") -> dict[str, Any]:
        """The arguments of `attention`; on "meta" without values, for benchmarks/precompile.py."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

        def random(length: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, length, heads, head_dim)
            return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

        (seqlen_q, seqlen_k), (heads, kv_heads), (head_dim, head_dim_v) = self.lengths, self.heads, self.head_dims
        q, k = random(seqlen_q, heads, head_dim), random(seqlen_k, kv_heads, head_dim)
        v = random(seqlen_k, kv_heads, head_dim_v)
        sink = torch.linspace(-1, 2, heads, device=device) if self.sink else None
        mask = self.mask(seqlen_k, device) if callable(self.mask) else self.mask
        return {"q": q, "k": k, "v": v, "mask": mask, "score_mod": self.score_mod, "sink": sink}


def _documents(seqlen: int, device: str) -> tileattn.Mask:
    return Documents(torch.arange(seqlen, device=device, dtype=torch.int32) // 173) & Causal()


SHAPES = {
    "full": Shape(),
    "causal": Shape(mask=Causal()),
    "causal-64": Shape(head_dims=(64, 64), mask=Causal()),
    "full-64-long": Shape(lengths=(1111, 2100), head_dims=(64, 64)),
    "causal-256": Shape(head_dims=(256, 256), mask=Causal()),
    "causal-192/128": Shape(head_dims=(192, 128), mask=Causal()),
    "window": Shape(lengths=(900, 1301), mask=SlidingWindow(100, 0)),
    "documents": Shape(mask=_documents),
    "softcap": Shape(mask=Causal(), score_mod=SoftCap(20.0)),
    "groups": Shape(heads=(16, 2), mask=Causal()),
    "sink": Shape(lengths=(63, 2049), sink=True),
    "sink-long": Shape(lengths=(1063, 2049), sink=True),
    "two blocks share keys": Shape(3, (1100, 1311), (24, 24)),
    "two blocks share keys, 256": Shape(3, (1100, 1311), (24, 12), (256, 256)),
    "more tiles than blocks": Shape(4, (2177, 2177), (16, 4), mask=Causal()),
    "more tiles than blocks, full": Shape(3, (1025, 1311), (24, 24), (64, 64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_two_hundred_launches_give_the_same_bits(name: str) -> None:
    arguments = SHAPES[name].tensors()
    first, first_lse = tileattn.attention(**arguments, return_lse=True)
    assert first.isfinite().all()
    for _ in range(200):
        o, lse = tileattn.attention(**arguments, return_lse=True)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


# Where O lies in shared memory depends on both head dims: beside Q, K and V, or where Q was.
DIFFERING = {
    f"{name}-{dim}/{dim_v}": Shape(lengths=(300, 411), heads=(4, 2), head_dims=(dim, dim_v), mask=mask)
    for dim, dim_v in ((128, 192), (192, 160), (64, 256), (256, 224), (160, 80), (32, 96))
    for name, mask in (("full", None), ("causal", Causal()))
}


@pytest.mark.parametrize("name", DIFFERING)
def test_head_dims_that_differ(name: str) -> None:
    arguments = DIFFERING[name].tensors()
    got = tileattn.attention(**arguments, return_lse=True, backend="tilelang")
    positional = [arguments[each] for each in ("q", "k", "v", "mask")]
    assert_forward_accurate(name, got, oracle_attention(*positional), eager_attention(*positional))


# --- The queue of tiles: a counter in device memory, which launches that run at the same time must not share ---

QUEUED = SHAPES["more tiles than blocks"]


def test_two_streams_at_the_same_time() -> None:
    both = [QUEUED.tensors(seed) for seed in (0, 1)]
    expected = [tileattn.attention(**arguments) for arguments in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[index].append(tileattn.attention(**both[index]))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(o, expected[index]) for o in outputs[index])


def test_a_graph_replays_on_another_stream_beside_eager_calls() -> None:
    captured, eager = QUEUED.tensors(0), QUEUED.tensors(1)
    expected, expected_eager = tileattn.attention(**captured), tileattn.attention(**eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tileattn.attention(**captured)
        o_again = tileattn.attention(**captured)
    other = torch.cuda.Stream()
    beside = []
    for _ in range(30):
        with torch.cuda.stream(other):
            graph.replay()
            beside.append(tileattn.attention(**eager))
        beside.append(tileattn.attention(**eager))
    torch.cuda.synchronize()
    assert torch.equal(o, expected)
    assert torch.equal(o_again, expected)
    assert all(torch.equal(x, expected_eager) for x in beside)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_in_the_rows_that_see_it(head_dim: int, causal: bool) -> None:
    """NaN makes no kernel hang, though barriers are released at addresses that depend on the sums."""
    q, k, v = _tensors(2, 700, 4, head_dim)
    q[0, 300] = torch.nan
    k[1, 500] = torch.nan
    o, lse = tileattn.attention(q, k, v, causal=causal, return_lse=True)
    hit = torch.zeros(2, 700, dtype=torch.bool, device="cuda")
    hit[0, 300] = True
    hit[1, 500 if causal else 0 :] = True
    assert torch.equal(o.isnan().all(-1).all(-1), hit)
    assert torch.equal(o.isnan().any(-1).any(-1), hit)
    assert torch.equal(lse.isnan().all(1), hit)
    assert torch.equal(lse.isnan().any(1), hit)
    q[0, 300] = k[1, 500] = 0  # what comes after is not harmed
    assert tileattn.attention(q, k, v, causal=causal).isfinite().all()


def test_compiled_model_equals_eager() -> None:
    q, k, v = _tensors(2, 300, 4, 64)
    window = tileattn.SlidingWindow(64, 0)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tileattn.attention(q * 2, k, v, mask=window, score_mod=tileattn.SoftCap(30.0)) + 1

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    expected = tileattn.attention(q * 2, k, v, mask=window, score_mod=tileattn.SoftCap(30.0)) + 1
    assert torch.equal(compiled(q, k, v), expected)


def test_another_process_takes_the_kernel_from_disk() -> None:
    """It does not import TileLang, which would take longer than loading the kernel."""
    tileattn.attention(*_tensors(1, 64, 2, 64), causal=True)
    code = (
        "import sys, torch, tileattn\n"
        "q = torch.randn(1, 64, 2, 64, device='cuda', dtype=torch.bfloat16)\n"
        "tileattn.attention(q, q, q, causal=True)\n"
        "assert 'tilelang' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cap", [0.5, 4.0, 30.0, 50.0, 60.0])
@pytest.mark.parametrize("mask", [SlidingWindow(0, 0), Causal()], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_that_sees_one_key_is_its_value(head_dim: int, mask: tileattn.Mask, cap: float) -> None:
    """Under a soft cap the softmax may have a base of its own, with which the largest weight is not 1."""
    q, k, v = _tensors(2, 300, 2, head_dim)
    o = tileattn.attention(8 * q, k, v, mask=mask, score_mod=SoftCap(cap), backend="tilelang")
    rows = slice(None) if isinstance(mask, SlidingWindow) else slice(0, 1)
    assert torch.equal(o[:, rows], v[:, rows])
