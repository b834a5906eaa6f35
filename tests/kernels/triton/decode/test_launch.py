"""The host's part of Triton's decode phase: what it refuses, how it splits, and errors that the device records."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import tileattn
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import Causal
from tileattn.call import cache_status
from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit, Splits
from tileattn.kernels.triton.decode import backend, defaults, splits
from tileattn.kernels.triton.tile_sizes import Config
from tileattn.runtime.dispatch import BACKENDS

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

CALL = DecodeCall(torch.float16, 64, 64, arch="sm_90a")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"arch": "gfx942", "page_rows": 1}, None),
        ({"arch": "sm_80", "head_dim": 7, "head_dim_v": 256, "aligned": False, "packed": True}, None),
        ({"dtype": torch.float32, "fixed": 1024}, None),
        ({"arch": "sm_75"}, "neither an NVIDIA GPU from sm_80 on nor an AMD GPU"),
        ({"dtype": torch.float64}, "dtype must be float16, bfloat16 or float32, not torch.float64"),
        ({"head_dim": 257}, "head_dim must lie in 1 .. 256, not 257"),
        ({"head_dim_v": 512}, "head_dim_v must lie in 1 .. 256, not 512"),
        ({"variant": "+ALiBi(t:float64:n)"}, "must not be float64"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str | None) -> None:
    said = backend.refusal(dataclasses.replace(CALL, **changes))
    assert (said is None) if reason is None else (said is not None and reason in said)


def test_on_a_cpu_only_where_it_is_named_and_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    call = dataclasses.replace(CALL, arch="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.refusal(call) is None
    assert "name it" in str(backend.reservation(call))
    assert backend.reservation(CALL) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in str(backend.refusal(call))


def test_dispatch_has_the_phase() -> None:
    phase = next(each.decode for each in BACKENDS if each.name == "triton")
    assert phase is not None
    assert (phase.refusal, phase.prepare) == (backend.refusal, backend.prepare)


# --- Tiles and parts, by sizes alone ---


@pytest.mark.parametrize(
    ("changes", "rows", "expected"),
    [
        ({}, 4, (16, 64, 4)),
        ({}, 17, (64, 64, 3)),
        ({"page_rows": 16}, 4, (16, 64, 7)),  # entries of the table are a stage as well, for K and for V
        ({"fixed": 1024}, 4, (64, 64, 3)),  # q_len must not decide
        ({"fixed": 1024}, 400, (64, 64, 3)),
        ({"arch": "gfx942", "page_rows": 16}, 4, (16, 64, 1)),
        ({"dtype": torch.float32, "head_dim": 256}, 400, (16, 16, 1)),
        ({"arch": "sm_80", "head_dim_v": 256}, 400, (64, 32, 2)),
    ],
)
def test_tiles(changes: dict[str, Any], rows: int, expected: tuple[int, ...]) -> None:
    config = defaults.default(dataclasses.replace(CALL, **changes), rows)
    assert (config.block_M, config.block_N, config.num_stages) == expected


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a", "gfx942", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [1, 64, 128, 256])
def test_tiles_divide_fixed_parts(arch: str, dtype: torch.dtype, head_dim: int) -> None:
    """Also where a bias is read, whose tiles take shared memory."""
    for variant in ("", "+Bias(t:float32:nnnn)"):
        for page_rows in (0, 16):
            call = DecodeCall(dtype, head_dim, head_dim, variant, arch=arch, fixed=128, page_rows=page_rows)
            tiles = [defaults.default(call, rows) for rows in (1, 1000)]
            assert tiles[0] == tiles[1]
            assert 128 % tiles[0].block_N == 0


SIZES = DecodeSizes(batch=1, max_seqlen_q=1, total_q=1, heads=32, kv_heads=8, capacity=8192, page_size=0)


@pytest.mark.parametrize(
    ("asked", "changes", "processors", "expected"),
    [
        (None, {}, 132, 33),  # two programs for each multiprocessor
        (None, {"batch": 16}, 132, 3),
        (None, {"batch": 64}, 132, 1),
        (None, {"capacity": 256}, 132, 2),  # two tiles each
        (None, {"capacity": 0}, 132, 1),
        (None, {"capacity": 2**20}, 10**6, 128),
        (None, {"batch": 0}, 132, 64),
        (1, {}, 132, 1),
        (200, {"capacity": 5}, 132, 200),
        (FixedSplit(1024), {}, 132, 8),
        (FixedSplit(1024), {"capacity": 1000}, 132, 1),
        (FixedSplit(1024), {"capacity": 0}, 132, 1),
        (FixedSplit(1024), {"batch": 33}, 132, 1),  # enough programs without
    ],
)
def test_number_of_parts(asked: Splits, changes: dict[str, Any], processors: int, expected: int) -> None:
    sizes = SIZES._replace(**changes)
    rows = splits.split_rows(sizes, False, Config(16, 64, 4, 3))
    assert splits.number_of(asked, sizes, rows, 128, Config(16, 64, 4, 3), processors) == expected


def test_only_packed_sequences_of_one_tile_are_split() -> None:
    """The workspace has so many rows for each of them; without packing, for all."""
    sizes = SIZES._replace(max_seqlen_q=1000)
    config = Config(64, 64, 4, 3)
    assert splits.split_rows(sizes, True, config) == 64
    assert splits.split_rows(sizes, False, config) == 4000
    assert splits.split_rows(SIZES, True, config) == 4


def test_the_workspace_is_bounded() -> None:
    sizes = SIZES._replace(max_seqlen_q=4000, batch=1, kv_heads=1, heads=32, capacity=2**20)
    rows = splits.split_rows(sizes, False, Config(64, 64, 4, 3))
    number = splits.number_of(None, sizes, rows, 128, Config(64, 64, 4, 3), 10**6)
    assert 1 < number < 128
    assert number * rows * 130 * 4 <= splits.WORKSPACE_BYTES


def test_nothing_is_prepared_again_for_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length, or number of pages in use, launches what is there."""
    from tileattn.kernels.triton.decode.launch import Decode

    problem = Problem([1, 1], (200, 65), heads=2, kv_heads=1, mask=Causal())
    inputs = problem.inputs(16)
    decode = Decode(*problem.facts(inputs, 16, 2), problem.scale, 2)
    worked_out: list[int] = []
    real = decode._work_out
    monkeypatch.setattr(decode, "_work_out", _named("_work_out", lambda *given: worked_out.append(1) or real(*given)))
    for lengths in ((200, 65), (1, 0), (17, 3)):
        decode(inputs._replace(seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=DEVICE)), None)
    assert len(worked_out) == 1


def _named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


# --- What the device finds to be wrong ---


@pytest.fixture(autouse=True)
def fresh_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_status.STATUS, "devices", {})


def run(problem: Problem, inputs: DecodeInputs, page: int, number: Splits = 2) -> torch.Tensor:
    o, _ = backend.prepare(*problem.facts(inputs, page, number), problem.scale, number)(inputs, None)
    return o


@pytest.mark.slow_except("-5-0-3", "2147483647-206-3", reason="0.6 s each in Triton's interpreter")
@pytest.mark.parametrize(
    ("length", "keys", "page"), [(10**6, 206, 0), (-5, 0, 3), (-(2**31), 0, 0), (2**31 - 1, 206, 3)]
)
def test_lengths_beyond_the_cache_are_clamped_and_reported(length: int, keys: int, page: int) -> None:
    problem = Problem([1, 1, 1], (100, 200, 70), heads=2, kv_heads=1, mask=Causal())
    expected = run(problem, problem.inputs(page), page)
    inputs = problem.inputs(page, more=6)
    for cache in (inputs.k_cache, inputs.v_cache):
        cache.nan_to_num_(nan=0.0)
    if page:
        inputs.page_table.fill_(0)
    inputs.seqlens_k[1] = length
    o = run(problem, inputs, page)
    assert o[1].isfinite().all()
    assert bool(o[1].any()) == (keys > 0)
    if not page:
        assert torch.equal(o[0], expected[0])
        assert torch.equal(o[2], expected[2])
    with pytest.raises(ValueError, match=r"seqlens_k must be from 0 to the cache's capacity: .* at sequence 1"):
        tileattn.check_caches()


@pytest.mark.slow_except("-1-1", "2147483647-64", reason="0.4 s each in Triton's interpreter")
@pytest.mark.parametrize(
    ("entry", "page"), [(-1, 1), (10**6, 16), (2**31 - 1, 64), (-(2**31), 1), (-1, 64), (10**6, 1)]
)
def test_entries_that_are_no_pages_are_clamped_and_reported(entry: int, page: int) -> None:
    """They reach no memory outside of the cache: it lies in the middle of a tensor, which would be an infinity."""
    problem = Problem([1, 1], (100, 200), heads=2, kv_heads=1, head_dim=16, head_dim_v=16, mask=Causal())
    inputs = problem.inputs(page)
    inputs.page_table[0, 40 // page] = entry
    around = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(inputs, name)
        outer = torch.full((cache.shape[0] + 2, *cache.shape[1:]), math.inf, dtype=cache.dtype, device=DEVICE)
        outer[1:-1] = cache.nan_to_num(nan=0.0)
        around[name] = outer[1:-1]
    o = run(problem, inputs._replace(**around), page)
    assert o.isfinite().all()
    with pytest.raises(ValueError, match=r"page_table's entries .* at sequence 0"):
        tileattn.check_caches()  # before the next call, which on a GPU may raise the error as well
    problem.q_lens, problem.k_lens = (1,), (200,)
    problem.q, problem.k, problem.v = problem.q[1:], problem.k[1:], problem.v[1:]
    alone = run(problem, problem.inputs(page, more=50), page)
    torch.testing.assert_close(o[1], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("ends", "most", "message"),
    [
        ((0, 2, 1, 4), 4, "cu_seqlens_q must start at 0, must not decrease"),
        ((1, 2, 3, 4), 4, "cu_seqlens_q must start at 0"),
        ((0, 2, 3, 10**6), 4, "cu_seqlens_q must .* not go beyond total_q"),
        ((0, -(2**31), 2**31 - 1, 4), 4, "cu_seqlens_q must"),
        ((0, 1, 4, 5), 2, "max_seqlen_q must be at least the longest length: .* at sequence 1"),
    ],
)
def test_wrong_cumulative_lengths_are_reported(ends: tuple[int, ...], most: int, message: str) -> None:
    problem = Problem([1, 3, 1], (100, 50, 30), heads=2, kv_heads=1, mask=Causal())
    inputs = problem.inputs(16, packed=True)
    inputs = inputs._replace(cu_seqlens_q=torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    call, sizes = problem.facts(inputs, 16, 2)
    outer = torch.full((3, *inputs.q.shape[1:3], 12), 7.0, dtype=torch.float16, device=DEVICE)
    backend.prepare(call, sizes._replace(max_seqlen_q=most), 0.2, 2)(inputs._replace(out=outer[1:2]), None)
    assert (outer[0] == 7).all()
    assert (outer[2] == 7).all()
    with pytest.raises(ValueError, match=message):
        tileattn.check_caches()


def test_a_longer_sequence_than_max_seqlen_q_is_right_nevertheless() -> None:
    problem = Problem([1, 3, 1], (100, 50, 30), heads=2, kv_heads=1, mask=Causal())
    expected = problem.run(16, 2, packed=True)[0].clone()
    inputs = problem.inputs(16, packed=True)
    call, sizes = problem.facts(inputs, 16, 2)
    o, _ = backend.prepare(call, sizes._replace(max_seqlen_q=1), 0.2, 2)(inputs, None)
    torch.testing.assert_close(o, expected, rtol=1e-3, atol=1e-3)


def test_a_cache_without_pages_has_no_keys() -> None:
    problem = Problem([1], (0,), heads=2, kv_heads=1)
    inputs = problem.inputs(16, more=0)
    inputs.seqlens_k[0] = 5
    assert not run(problem, inputs, 16).any()
    with pytest.raises(ValueError, match="seqlens_k"):
        tileattn.check_caches()


# --- Addresses ---


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """x (rows, ...) with the last row beyond 2^31 elements; memory that is not written to is not there on a CPU."""
    rows, size = x.shape[0], x[0].numel()
    step = -(-(2**31) // (rows - 1) // 16) * 16
    storage = torch.empty(step * (rows - 1) + size, dtype=x.dtype, device=DEVICE)
    return storage.as_strided(x.shape, (step, *x[0].stride())).copy_(x)


@pytest.mark.parametrize("page", [0, 32, 64])
def test_caches_beyond_two_to_the_31_elements(page: int) -> None:
    problem = Problem([1, 1], (64, 64), heads=2, kv_heads=1, head_dim=16, head_dim_v=16, mask=Causal())
    expected, _ = problem.run(page, 2)
    inputs = problem.inputs(page)
    rows = (2, 64) if not page else (128 // page, page)
    caches = (far_apart(torch.stack(x).view(*rows, 1, 16)) for x in (problem.k, problem.v))
    table = None if not page else torch.arange(128 // page, dtype=torch.int32, device=DEVICE).view(2, -1)
    names = ("k_cache", "v_cache", "page_table")
    inputs = inputs._replace(**dict(zip(names, (*caches, table))))
    assert torch.equal(run(problem, inputs, page), expected)


def test_tokens_and_heads_that_are_far_apart() -> None:
    """Strides of any dimension: a cache (heads, tokens, batch, head_dim), as a view."""
    problem = Problem([1, 1], (100, 7), mask=Causal())
    expected, _ = problem.run(0, 2)
    inputs = problem.inputs(0)
    turned = {
        name: getattr(inputs, name).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        for name in ("k_cache", "v_cache")
    }
    assert torch.equal(run(problem, inputs._replace(**turned), 0), expected)
