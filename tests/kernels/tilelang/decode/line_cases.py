"""Decode calls whose masks hide tiles between others; for tests."""

from __future__ import annotations

import torch

from tests.kernels.tilelang.decode.cases import Case
from tileattn import BlockSparse, Causal, FunctionMask, GlobalTokens, Mask, SlidingWindow, SoftCap
from tileattn.call.decoding import FixedSplit


def by_head(b, h, q, k):  # type: ignore[no-untyped-def]
    """The first keys, and a window that grows with the head."""
    return (k <= q) & ((k < 20) | (q - k < 20 + 25 * h))


def every_third(b, h, q, k):  # type: ignore[no-untyped-def]
    """Every third stretch of 32 keys."""
    return (k <= q) & (k // 32 % 3 == 1)


def nothing(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k > q) & (k < 7)


def blocks(lengths: list[int], kv_heads: int, group: int, q_len: int, part: float) -> dict[str, object]:
    """Blocks of 16 keys that each query of each sequence chose for each kv head: a mask, and that of one sequence."""
    count = -(-(max(lengths) + 64) // 16)
    generator = torch.Generator().manual_seed(len(lengths))
    chosen = torch.rand(len(lengths), kv_heads, q_len, count, generator=generator) < part

    def alone(b: int) -> Mask:
        first, own = lengths[b] - q_len, chosen[b]
        return Causal() & FunctionMask(lambda _, h, q, k: own[h // group, q - first, k // 16])

    return {"mask": Causal() & BlockSparse(chosen, (1, 16)), "alone": alone}


LENGTHS = [0, 1, 63, 300, 290]
SINKS = SlidingWindow(40, 0) | (Causal() & GlobalTokens(30))
CASES = {
    "by-head": Case(LENGTHS, 2, 2, 3, page=3, mask=FunctionMask(by_head), workers=7),
    "by-head-fixed": Case(LENGTHS, 1, 4, 2, page=16, mask=FunctionMask(by_head), splits=FixedSplit(128), sink=True),
    "every-third": Case(LENGTHS, 1, 4, 2, page=0, mask=FunctionMask(every_third), mods=(SoftCap(2.0),), workers=9),
    "every-third-splits": Case(LENGTHS, 3, 4, 1, page=16, mask=FunctionMask(every_third), splits=3),
    "nothing": Case([70, 5], 1, 2, 1, page=16, mask=FunctionMask(nothing), sink=True),
    "window-or-first": Case(LENGTHS, 1, 4, 2, page=1, mask=SINKS, workers=11),
    "blocks": Case(LENGTHS, 1, 4, 2, page=16, workers=7, **blocks(LENGTHS, 2, 4, 1, 0.3)),  # type: ignore[arg-type]
    "packed": Case(
        [30, 250, 0, 90], [30, 1, 0, 9], 3, 2, page=1, workers=9, sink=True, rest=5, mask=FunctionMask(by_head)
    ),
    "packed-keys": Case(
        [30, 250, 0, 90, 1], [3, 1, 2, 0, 1], 3, 2, page=0, workers=7, rest=3, packed_keys=True,
        mask=FunctionMask(every_third),
    ),
}  # fmt: skip
