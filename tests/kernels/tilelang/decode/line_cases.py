"""Decode calls whose masks hide tiles between others; for tests."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels.tilelang.decode.cases import Case, Tensors
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


def blocks(lengths: list[int], kv_heads: int, group: int, q_len: int, part: float, size: int = 16) -> dict[str, Any]:
    """Blocks of keys that each query of each sequence chose for each kv head: a mask, and that of one sequence."""
    count = -(-(max(lengths) + 64) // size)
    generator = torch.Generator().manual_seed(len(lengths))
    chosen = torch.rand(len(lengths), kv_heads, q_len, count, generator=generator) < part

    def alone(b: int) -> Mask:
        first, own = lengths[b] - q_len, chosen[b]
        return Causal() & FunctionMask(lambda _, h, q, k: own[h // group, q - first, k // size])

    return {"mask": Causal() & BlockSparse(chosen, (1, size)), "alone": alone}


def poison_hidden(tensors: Tensors, block_N: int) -> int:
    """Writes NaN to keys and values in tiles that are hidden from all rows of all jobs; returns how many tiles.

    0 * NaN is NaN, so a kernel that visits one is seen.
    """
    case, count = tensors.case, 0
    for b, length in enumerate(case.lengths):
        mask, q_len = case.mask if case.alone is None else case.alone(b), case.each[b]
        assert mask is not None
        q = torch.arange(length - q_len, length)[:, None]
        k = torch.arange(length)
        for kv_head in range(case.kv_heads):
            heads = range(kv_head * case.group, (kv_head + 1) * case.group)
            seen = torch.zeros(length, dtype=torch.bool)
            for h in heads:
                seen |= torch.as_tensor(mask.allows(0 if case.alone else b, h, q, k)).expand(q_len, length).any(0)
            for tile in range(-(-length // block_N)):
                keys = slice(tile * block_N, min((tile + 1) * block_N, length))
                if not seen[keys].any():
                    count += 1
                    for key in range(keys.start, keys.stop):
                        tensors.erase(b, key, kv_head)
    return count


LENGTHS = [0, 1, 63, 300, 290]
SINKS = SlidingWindow(40, 0) | (Causal() & GlobalTokens(30))
CASES = {
    "by-head": Case(LENGTHS, 2, 2, 3, page=3, mask=FunctionMask(by_head), workers=7),
    "by-head-fixed": Case(LENGTHS, 1, 4, 2, page=16, mask=FunctionMask(by_head), splits=FixedSplit(128), sink=True),
    "every-third": Case(LENGTHS, 1, 4, 2, page=0, mask=FunctionMask(every_third), mods=(SoftCap(2.0),), workers=9),
    "every-third-splits": Case(LENGTHS, 3, 4, 1, page=16, mask=FunctionMask(every_third), splits=3),
    "third-in-window": Case(
        LENGTHS, 2, 4, 2, page=16, mask=SlidingWindow(200, 0) & FunctionMask(every_third), workers=13
    ),
    "nothing": Case([70, 37], 1, 2, 1, page=16, mask=FunctionMask(nothing), sink=True),
    "window-or-first": Case(LENGTHS, 1, 4, 2, page=1, mask=SINKS, workers=11),
    "blocks": Case(LENGTHS, 1, 4, 2, page=16, workers=7, **blocks(LENGTHS, 2, 4, 1, 0.3)),
    "packed": Case(
        [30, 250, 0, 90], [30, 1, 0, 9], 3, 2, page=1, workers=9, sink=True, rest=5, mask=FunctionMask(by_head)
    ),
    "packed-keys": Case(
        [30, 250, 0, 90, 1], [3, 1, 2, 0, 1], 3, 2, page=0, workers=7, rest=3, packed_keys=True,
        mask=FunctionMask(every_third),
    ),
}  # fmt: skip
