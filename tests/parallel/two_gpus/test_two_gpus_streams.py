"""Streams, memory that is used again while transfers are under way, CUDA graphs, and the most memory that is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.two_gpus.ranks_two_gpus import in_a_graph, on_another_stream, peak, under_pressure
from tests.parallel.two_gpus.test_two_gpus_bits import OPTIONS, name_of
from tests.tools.ranks.two_gpus import MARKS, on_both

pytestmark = MARKS


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_another_stream(options: dict[str, Any]) -> None:
    for different in on_both(on_another_stream, options, 4096):
        assert different == []


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_memory_that_is_used_again_at_once(options: dict[str, Any]) -> None:
    names = ("o", "lse", "dq", "dk", "dv")
    if options["algorithm"] == "ring":  # whose o and lse are not, bit by bit, those of one GPU
        names = names[2:]
    for wrong in on_both(under_pressure, options, 4096, 60):
        assert {name: wrong[name] for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_a_cuda_graph(options: dict[str, Any]) -> None:
    for equal in on_both(in_a_graph, options, 2048):
        assert equal


MOST = 28e9 / 2**20  # bytes a token of the whole sequence, on each of two GPUs: 28 GB for a million tokens


def test_the_most_memory() -> None:
    """Of q, k, v, o, do, dq, dk, dv and lse there are 21.5 GB for a million tokens, of 32 and 8 heads of 128.

    At this length "auto" takes fewer groups of heads, which are faster and need more memory.
    """
    seqlen = 1 << 16
    for found in on_both(peak, {"algorithm": "gather", "head_groups": 8}, seqlen, (32, 8), 128):
        assert found["peak"] <= MOST * seqlen
