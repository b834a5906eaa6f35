"""What skipping tiles of user functions brings on a CPU: the torch backend with and without the interval analysis.

    python benchmarks/torch_visits.py --seqlen 1024 4096

docs/design/intervals.md has the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import tileattn
from tileattn.kernels.torch import visits
from tileattn.kernels.torch.mask import ScoreMatrix
from tileattn.variant.key import encode
from tileattn.variant.masks import FunctionMask
from tileattn.variant.program import restore

IDS = torch.arange(2**17) // 700
HEADS, HEAD_DIM = 4, 64
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: k <= q,
    "window of 512": lambda b, h, q, k: (q - k < 512) & (k <= q),
    "documents of 700, causal": lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q),
    "local and global": lambda b, h, q, k: ((q - k).abs() < 256) | (k < 64) | (q < 64),
    "windows by head": lambda b, h, q, k: (k <= q) & (q - k < (h + 1) * 64),
    "all tiles mixed": lambda b, h, q, k: (q + k) % 3 != 0,
}


def times(fn: Callable[..., Any], seqlen: int, mod: Any, analysed: bool) -> tuple[float, float]:
    """Milliseconds of the forward pass and of the gradients, the least of three."""
    visits.FEWEST_SCORES = 0 if analysed else 2**62
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, HEADS, HEAD_DIM, generator=random, requires_grad=True) for _ in range(3))
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        o = tileattn.attention(q, k, v, mask=fn, score_mod=mod, backend="torch")
        middle = time.perf_counter()
        torch.autograd.grad(o.sum(), (q, k, v))
        found.append((middle - begin, time.perf_counter() - middle))
    forward, backward = (1e3 * min(each) for each in zip(*found))
    return forward, backward


def of_analysis(fn: Callable[..., Any], seqlen: int) -> float:
    """Milliseconds of finding the kinds of tiles, the least of five."""
    mask, _ = restore(*encode(FunctionMask(fn), ()))
    matrix = ScoreMatrix(mask, (), slice(0, 1), HEADS, seqlen, seqlen, torch.float32, torch.device("cpu"))
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        visits.Visits(matrix, 64)
        found.append(time.perf_counter() - begin)
    return 1e3 * min(found)


def main() -> None:
    """Prints a row for each function and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--softcap", action="store_true", help="with a soft cap, so in the loop and not the fused call")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mod = tileattn.SoftCap(30.0) if options.softcap else None
    for seqlen in options.seqlen:
        for name, fn in FUNCTIONS.items():
            before, after = (times(fn, seqlen, mod, analysed) for analysed in (False, True))
            passes = "; ".join(f"{x:.0f} -> {y:.0f} ms" for x, y in zip(before, after))
            print(f"{seqlen} {name}: {passes}; analysis {of_analysis(fn, seqlen):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
