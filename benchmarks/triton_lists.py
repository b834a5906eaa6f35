"""What lists of tiles bring Triton's kernels: sparse masks by ranges, with lists that are kept, and that are made anew.

    python benchmarks/triton_lists.py --seqlen 2048 4096 16384 --dtype bfloat16 float32

Nine patterns (tileattn.bench.sparse_masks), batch 1, both passes, with the host's time. The lengths at which lists that
are made anew begin to pay are what kernels/triton/lists.py asks for. A GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import tileattn
from tileattn.bench.sparse_masks import NAMES, pattern
from tileattn.kernels import kept_lists
from tileattn.kernels.triton import lists
from tileattn.tuner.state import forget_prepared

ROUNDS = 7
WAYS = {"ranges": 2**62, "kept": 1, "anew": 1}  # and the fewest pairs that take lists


def milliseconds(function: Callable[[], Any], before: Callable[[], None]) -> float:
    """The median time of a call with nothing else on the device, from its first operation on the host to its end."""
    found = []
    for number in range(ROUNDS + 2):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if number >= 2:  # the first ones compile
            found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def of_way(way: str, name: str, seqlen: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of the forward and the backward pass."""
    forget_prepared()
    kept_lists.forget_lists()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, seqlen, heads, head_dim, device="cuda", dtype=dtype, generator=generator) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = pattern(name, seqlen, heads, "cuda").mask
    before = kept_lists.forget_lists if way == "anew" else lambda: None
    with mock.patch.object(lists, "FEWEST_PAIRS", WAYS[way]):

        def forward() -> torch.Tensor:
            return tileattn.attention(*leaves, mask=mask, backend="triton")

        o = forward()
        return milliseconds(forward, before), milliseconds(
            lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), before
        )


def main() -> None:
    """Prints a row for each dtype, length and pattern."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    for dtype in options.dtype:
        for seqlen in options.seqlen:
            for name in options.names:
                sizes = name, seqlen, options.heads, options.head_dim, getattr(torch, dtype)
                found = {way: of_way(way, *sizes) for way in WAYS}
                texts = (f"{way} {forward:.2f}, {backward:.2f}" for way, (forward, backward) in found.items())
                print(f"{dtype} {seqlen} {name}: {'; '.join(texts)} ms", flush=True)


if __name__ == "__main__":
    main()
