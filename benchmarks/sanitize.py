"""Runs the forward kernels once each on small shapes, for compute-sanitizer.

    python benchmarks/sanitize.py                  # compiles the kernels, so that the sanitizer sees only launches
    for tool in memcheck racecheck synccheck; do
        timeout 900 compute-sanitizer --tool $tool --error-exitcode 1 python benchmarks/sanitize.py --blocks 3
    done

Inputs are made on the CPU: under the sanitizer each kernel of PyTorch's own costs seconds. Whether the results are
right is what the tests ask (`pytest -m gpu`); here outputs must be finite. With `--blocks N` the persistent kernels run
with that many blocks, so that even small shapes use the queue of tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import tileattn
from tileattn import Causal, Documents, Mask, SlidingWindow, SoftCap
from tileattn.kernels.tilelang import backend

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96))
# (seqlen_q, seqlen_k), (heads, kv_heads)
SIZES = (((1, 1), (1, 1)), ((1, 300), (4, 1)), ((63, 63), (2, 2)), ((129, 257), (4, 2)), ((300, 200), (2, 1)))


def masks(seqlen_k: int) -> Iterator[tuple[str, Mask | None, Any]]:
    """(name, mask, modification of the score)"""
    yield "full", None, None
    yield "causal", Causal(), None
    yield "window", SlidingWindow(40, 3), None
    yield "documents", Documents((torch.arange(seqlen_k) // 70).to("cuda", torch.int32)) & Causal(), None
    yield "causal softcap", Causal(), SoftCap(20.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, help="of the persistent kernels; all multiprocessors unless given")
    parser.add_argument("--head-dim", type=int, action="append", help="only these")
    options = parser.parse_args()
    if options.blocks:
        backend.multiprocessors = lambda device: options.blocks  # type: ignore[assignment]
    launches = 0
    for head_dim, head_dim_v in HEAD_DIMS:
        if options.head_dim and head_dim not in options.head_dim:
            continue
        for (seqlen_q, seqlen_k), (heads, kv_heads) in SIZES:
            shapes = ((seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim), (seqlen_k, kv_heads, head_dim_v))
            q, k, v = (torch.randn(2, *shape).to(torch.bfloat16).cuda() for shape in shapes)
            for name, mask, score_mod in masks(seqlen_k):
                o, lse = tileattn.attention(
                    q, k, v, mask=mask, score_mod=score_mod, return_lse=True, backend="tilelang"
                )
                launches += 1
                assert o.cpu().isfinite().all(), (name, q.shape, k.shape)
                assert not lse.cpu().isnan().any(), (name, q.shape, k.shape)
    print(f"{launches} launches")


if __name__ == "__main__":
    main()
