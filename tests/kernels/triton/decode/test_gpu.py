"""What only a GPU shows of Triton's decode kernels; tests/api/ has what all backends must show there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import ALiBi, Causal, SlidingWindow, SoftCap
from tileattn.call.decoding import FixedSplit, Splits

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

KEYS, FIXED = 5003, FixedSplit(1024)


def slopes(heads: int) -> ALiBi:
    return ALiBi(torch.linspace(0.5, 0.01, heads).to(DEVICE))


def problem(q_lens: Any, k_lens: Any, head_dim: int, dtype: torch.dtype, variant: str) -> Problem:
    mask = SlidingWindow(2500, 0) if variant == "window" else Causal()
    mods = (SoftCap(20.0), slopes(32)) if variant == "modified" else ()
    of = {"heads": 32, "kv_heads": 8, "scale": head_dim**-0.5, "mask": mask, "mods": mods}
    made = Problem(q_lens, k_lens, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, seed=len(q_lens), **of)
    alone = Problem([16], [KEYS], head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, seed=99, **of)
    made.q[-1], made.k[-1], made.v[-1] = alone.q[0][16 - q_lens[-1] :], alone.k[0], alone.v[0]
    return made


@pytest.mark.parametrize("variant", ["causal", "window", "modified"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_bits_of_a_fixed_split(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    """The last row of the last sequence: alone, batched, packed, with 16 queries; pages; both ways of merging."""
    bits: dict[str, tuple[Tensor, Tensor]] = {}

    def run(name: str, q_lens: Any, k_lens: Any, page: int, packed: bool = False, more: int = 7) -> None:
        made = problem(q_lens, k_lens, head_dim, dtype, variant)
        o, lse = made.run(page, FIXED, packed=packed, more=more)
        bits[name] = o[-1, -1], lse[-1, :, -1]

    run("alone", [1], [KEYS], 0)
    for page in (1, 16, 64, 96):
        run(f"pages of {page}", [1], [KEYS], page)
    run("a larger cache", [1], [KEYS], 0, more=9000)
    run("16 queries", [16], [KEYS], 16)
    run("batched", [1] * 9, [77, 1, 3000, 0, 511, 1025, 64, 5100, KEYS], 16)
    run("in a large batch", [1] * 80, [*range(40, 119), KEYS], 64)  # one program for all parts of a sequence
    for chunk in (9, 10, 400):
        run(f"beside a prefill of {chunk}", [chunk, 1, 1], [chunk + 5, 300, KEYS], 16, packed=True)
    run("packed, 16 queries", [100, 16], [100, KEYS], 64, packed=True)
    for name, got in bits.items():
        for which, x, expected in zip(("o", "lse"), got, bits["alone"], strict=True):
            assert torch.equal(x, expected), f"{which}, {name}: {(x != expected).sum()} of {x.numel()} differ"


@pytest.mark.parametrize("splits", [None, 5, FIXED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 192, 256])
def test_tiles_of_the_default_sizes(head_dim: int, dtype: torch.dtype, splits: Splits) -> None:
    """Few rows, more, and packed chunks of several tiles, on each page size's loads."""
    of = {"head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype, "scale": head_dim**-0.5, "mask": Causal()}
    for page, q_len in ((0, 1), (16, 1), (64, 9), (3, 9)):
        Problem([q_len] * 3, (1025, 63, 2100), **of).check("dense", page, splits)
    Problem((1, 130, 1, 0, 17), (1025, 130, 700, 5, 400), **of).check("packed", 16, splits, packed=True, tail=70)


def test_groups_on_each_number_of_rows() -> None:
    for heads, kv_heads in ((128, 1), (71, 1), (40, 8), (8, 8)):
        made = Problem([2] * 2, (1025, 63), heads, kv_heads, 64, 64, torch.bfloat16, 0.125, mask=Causal())
        made.check("groups", 16)


def test_a_user_s_function_in_tiles_that_differ_by_head() -> None:
    def own(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * (1.0 + 0.1 * (h % 3)) - 0.001 * (q - k)

    made = Problem([3] * 2, (1025, 63), head_dim=64, head_dim_v=64, mask=Causal(), mods=(own,))
    for splits in (None, FIXED):
        dataclasses.replace(made, q=[], k=[], v=[]).check("user", 16, splits)
