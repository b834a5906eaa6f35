"""FixedSplit: the bits of a row depend on its own query, keys, values and length; and the merging of parts.

The same row is computed alone, in a batch, beside prefill chunks, with more queries, from pages of several sizes, from
caches of several capacities, and with one program for all parts or one for each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import ALiBi, Causal, SlidingWindow, SoftCap
from tileattn.call.decoding import FixedSplit, Splits

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

KEYS, QUERIES, OTHERS = 389, 16, (70, 1, 130)
FIXED = FixedSplit(128)
SINK = torch.tensor([0.5, -1.0, 0.0, 2.0, 1.0, -3.0], device=DEVICE)


def slopes() -> Tensor:
    return torch.linspace(0.5, 0.01, 6).to(DEVICE)


VARIANTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "causal": (Causal(), ()),
    "window": (SlidingWindow(200, 0), ()),
    "softcap-alibi": (Causal(), (SoftCap(3.0), ALiBi(slopes()))),
}


def row_of(problem: Problem, sequence: int, q_len: int) -> Problem:
    """The problem with a sequence whose last query is the last one of `alone`."""
    alone = Problem([QUERIES], [KEYS], seed=99, dtype=problem.dtype)
    problem.q[sequence] = alone.q[0][QUERIES - q_len :]
    problem.k[sequence], problem.v[sequence] = alone.k[0], alone.v[0]
    return problem


def made(name: str, q_lens: Any, k_lens: Any, sequence: int, dtype: torch.dtype = torch.float16) -> Problem:
    mask, mods = VARIANTS[name]
    problem = Problem(q_lens, k_lens, mask=mask, mods=mods, sink=SINK, dtype=dtype)
    return row_of(problem, sequence, q_lens[sequence])


# Each gives the last row of the sequence: o (heads, head_dim_v) and lse (heads,).
Situation = Callable[[str, torch.dtype], tuple[Tensor, Tensor]]


def dense(page: int = 0, q_len: int = 1, others: Any = (), **given: Any) -> Situation:
    def run(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        lengths = (*others, KEYS)
        problem = made(name, [q_len] * len(lengths), lengths, len(others), dtype)
        o, lse = problem.run(page, FIXED, **given)
        return o[-1, -1], lse[-1, :, -1]

    return run


def packed(chunk: int, page: int, q_len: int = 1) -> Situation:
    """Behind a prefill of so many tokens."""

    def run(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        problem = made(name, [chunk, q_len, 1], [chunk + 3, KEYS, 5], 1, dtype)
        o, lse = problem.run(page, FIXED, packed=True, tail=2)
        return o[0, chunk + q_len - 1], lse[0, :, chunk + q_len - 1]

    return run


SITUATIONS: dict[str, Situation] = {
    "batched": dense(others=OTHERS),
    "pages of 1": dense(1, more=3),
    "pages of 16": dense(16, others=OTHERS),
    "pages of 64": dense(64, others=OTHERS),
    "a larger cache": dense(more=1000),
    "2 queries": dense(q_len=2),
    "16 queries": dense(16, q_len=QUERIES),
    "beside a prefill of 9": packed(9, 16),
    "beside a prefill of 10": packed(10, 16),
    "beside a prefill of 40": packed(40, 0),
    "packed, 16 queries": packed(40, 64, QUERIES),
}


@functools.cache
def alone(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return dense()(name, dtype)


@pytest.mark.slow_except(
    "*-batched", "*-16 queries", "*-beside a prefill of 10", reason="0.8 s each in Triton's interpreter"
)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_the_rest_of_a_call(name: str, dtype: torch.dtype, situation: str) -> None:
    if DEVICE == "cpu" and (name, dtype) not in COVERED:
        pytest.skip("takes the interpreter too long")
    for which, got, expected in zip(("o", "lse"), SITUATIONS[situation](name, dtype), alone(name, dtype), strict=True):
        assert torch.equal(got, expected), f"{which}, {situation}: {(got != expected).sum()} of {got.numel()} differ"


COVERED = {("window", torch.bfloat16)}


def test_bits_are_those_of_one_program_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that is too large, or enough sequences: one program walks over all parts, and merges as the other."""
    from tileattn.kernels.triton.decode import splits

    problem = made("causal", [2, 2], [KEYS, 130], 0)
    each = problem.run(16, FIXED)
    monkeypatch.setattr(splits, "WORKSPACE_BYTES", 0)
    together = problem.run(16, FIXED)
    for got, expected in zip(together, each, strict=True):
        assert torch.equal(got, expected)


def test_which_way_fixed_parts_are_computed() -> None:
    """Only by sizes: what the test above compares are two ways."""
    from tileattn.kernels.triton.decode import splits
    from tileattn.kernels.triton.tile_sizes import Config

    problem = made("causal", [2, 2], [KEYS, 130], 0)
    _, sizes = problem.facts(problem.inputs(16), 16, FIXED)
    config, parts = Config(64, 64, 4, 1), -(-sizes.capacity // 128)
    assert splits.number_of(FIXED, sizes, 6, 12, config, 132) == parts
    assert splits.number_of(FIXED, sizes, 6, 12, config, 1) == 1  # as many programs as the device runs at a time
    many = sizes._replace(batch=10**6)
    assert splits.number_of(FIXED, many, 6, 12, config, 10**9) == 1  # no workspace of that size


# --- Parts ---


@pytest.mark.slow_cases("FixedSplit(keys=128)-1", "FixedSplit(keys=128)-30", reason="1 s each in Triton's interpreter")
@pytest.mark.parametrize(
    ("splits", "q_len"),
    # 20 parts take the interpreter 4 s, and are empty as some of 7 are.
    [(7, 30), pytest.param(20, 1, marks=pytest.mark.slow), (FIXED, 1), (FIXED, 30)],
    ids=str,
)
def test_what_nobody_has_written_is_not_read(splits: Splits, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty parts and rows that do not exist: the workspace is NaN before."""
    from tileattn.kernels.triton.decode import launch
    from tileattn.kernels.triton.decode.launch import Decode

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    real = Decode._workspace
    made_of: list[int] = []

    def poisoned(self: Any, number: int, q: Tensor) -> tuple[Tensor, Tensor]:
        found = real(self, number, q)
        made_of.append(found[0].numel())
        return tuple(each.fill_(math.nan) for each in found)

    monkeypatch.setattr(Decode, "_workspace", poisoned)
    problem = Problem([q_len] * 4, (200, 65, 1, 0), heads=3, kv_heads=1, mask=Causal())
    problem.check("parts", 3, splits)
    problem.check("parts", 3, splits, packed=True, tail=3)
    assert all(made_of)


@pytest.mark.slow(reason="1.2 s in Triton's interpreter")
def test_more_parts_than_tiles_change_nothing_that_is_exact() -> None:
    """Values of one key are what they are, however many empty parts are merged."""
    problem = Problem([1], [1], mask=Causal())
    for splits in (1, 2, 9, FIXED):
        o, _ = problem.run(16, splits)
        assert torch.equal(o[0, 0], problem.v[0][0].repeat_interleave(3, 0))


def test_each_sequence_is_split_by_its_own_length() -> None:
    """Short sequences in a large cache: parts are of what there is, so that all programs have work."""
    from tileattn.kernels.triton.decode.launch import Decode

    problem = Problem([1], [256], heads=2, kv_heads=1, mask=Causal())
    inputs = problem.inputs(more=10000)
    decode = Decode(*problem.facts(inputs, 0, 4), problem.scale, 4)
    kept: list[Tensor] = []
    real = decode._workspace
    decode._workspace = lambda *given: kept.extend(each.fill_(math.nan) for each in real(*given)) or tuple(kept)
    decode(inputs, None)
    m, l = kept[1].view(2, 2, 4)
    assert (l > 0).all()
    assert m.isfinite().all()


def test_the_order_of_parts_is_that_of_keys() -> None:
    """Each fixed part is attention over its own keys, and they are merged from the first to the last one."""
    problem = Problem([1], [300], heads=2, kv_heads=1, mask=Causal(), dtype=torch.float32, head_dim_v=16)
    o, lse = problem.run(0, FIXED)
    total_o, total_lse = torch.zeros(2, 16, device=DEVICE), torch.full((2,), -math.inf, device=DEVICE)
    for begin in range(0, 300, 128):
        k, v = (x[0][begin : begin + 128][None] for x in (problem.k, problem.v))
        part_o, part_lse = tileattn.attention(
            problem.q[0][None], k, v, scale=problem.scale, return_lse=True, backend="torch"
        )
        new = torch.logaddexp(total_lse, part_lse[0, :, 0])
        total_o = total_o * (total_lse - new).exp()[:, None] + part_o[0, 0] * (part_lse[0, :, 0] - new).exp()[:, None]
        total_lse = new
    torch.testing.assert_close(o[0, 0], total_o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[0, :, 0], total_lse, rtol=1e-5, atol=1e-5)


def test_the_variant_of_a_fixed_split_has_one_loop() -> None:
    """Tiles that all rows see are computed by the same instructions as others."""
    from tileattn.kernels.triton.decode.plan import make_decode_plan
    from tileattn.kernels.triton.tile_sizes import Config

    problem = made("window", [1], [KEYS], 0)
    call, _ = problem.facts(problem.inputs(), 0, FIXED)
    fixed = make_decode_plan(call, Config(64, 64, 4, 1))
    free = make_decode_plan(dataclasses.replace(call, fixed=0), Config(64, 64, 4, 1))
    assert (fixed.before, fixed.within, fixed.behind) == (False, False, True)
    assert (free.before, free.within, free.behind) == (True, True, True)
