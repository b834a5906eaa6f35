"""Bits on two GPUs: those of one GPU, and the same from run to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileattn
from tests.parallel.two_gpus.ranks_two_gpus import bits, repeated
from tests.tools.ranks.two_gpus import MARKS, on_both

pytestmark = MARKS
SEQLEN = 3001  # of runs that begin anywhere
DIMS = (64, 128)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"algorithm": "gather", "head_groups": 1},
    {"algorithm": "gather", "head_groups": 2},
    {"algorithm": "gather", "head_groups": 4},
    {"algorithm": "ulysses"},
    {"algorithm": "ring"},
)
MASKS = (tileattn.Causal(), tileattn.SlidingWindow(1000))
# A ring merges parts of rows: its bits are not those of one GPU.
BITS = [(options, dim, mask) for options in OPTIONS[:-1] for dim in DIMS for mask in MASKS]
REPEATED = [(options, mask, torch.bfloat16) for options in OPTIONS for mask in MASKS]
REPEATED += [(OPTIONS[0], MASKS[0], torch.float16), (OPTIONS[4], MASKS[0], torch.float32)]


def name_of(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("seqlen", [6144, 12288])  # four runs of multiples of 768: some kernels take 192 queries
@pytest.mark.parametrize(("options", "dim", "mask"), BITS, ids=name_of)
def test_o_and_lse_have_the_bits_of_one_gpu(options: dict[str, Any], dim: int, mask: Any, seqlen: int) -> None:
    """Runs begin at multiples of 256, and both use the same kernel."""
    for equal in on_both(bits, options, seqlen, dim, mask):
        assert equal == {"o": True, "lse": True}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("options", "mask", "dtype"), REPEATED, ids=name_of)
def test_bits_are_equal_from_run_to_run(options: dict[str, Any], mask: Any, dtype: torch.dtype, dim: int) -> None:
    for different in on_both(repeated, options, SEQLEN, dim, mask, dtype, 10):
        assert different == []
