"""Decode calls of Triton's kernels whose masks hide tiles between others, and what every pair of a mask says."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.tools.triton_kernels.decode import Problem
from tileattn import Causal, FunctionMask, GlobalTokens, Mask, SlidingWindow


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The first keys, and a window that grows with the head: of 8 heads from 20 to 195 keys."""
    return (k <= q) & ((k < 20) | (q - k < 20 + 25 * h))


def third(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every third stretch of 32 keys."""
    return (k <= q) & (k // 32 % 3 == 1)


def nothing(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k > q) & (k < 7)


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Other stretches in each sequence, also behind a query."""
    return (k // 48 + b) % 3 != 1


def floats(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k) * 0.5 < 20.25) | (k < 20)


SINKS = SlidingWindow(40, 0) | (Causal() & GlobalTokens(30))
MASKS: dict[str, Mask] = {
    "by-head": FunctionMask(by_head),
    "third": FunctionMask(third),
    "third-in-window": SlidingWindow(130, 0) & FunctionMask(third),
    "nothing": FunctionMask(nothing),
    "by-batch": FunctionMask(by_batch),
    "floats": FunctionMask(floats),
    "or": SINKS,
}


def seen_by(problem: Problem, b: int, kv_heads: range, rows: range) -> Tensor:
    """Which keys of a sequence its packed rows see, in the heads of these kv heads: bool (rows, keys)."""
    length, group = problem.k_lens[b], problem.heads // problem.kv_heads
    row = torch.tensor(rows, dtype=torch.int64)[:, None]  # also of no rows
    found = []
    for kv_head in kv_heads:
        q, h = length - problem.q_lens[b] + row // group, kv_head * group + row % group
        allowed = problem.mask.allows(torch.tensor(b), h, q, torch.arange(length)[None])
        found.append(torch.as_tensor(allowed).expand(len(rows), length))
    return torch.cat(found)


def row_tiles(problem: Problem, block_M: int, packed: bool) -> Iterator[tuple[int, int, range]]:
    """Of each tile of rows: its number, its sequence, and its rows."""
    group, number = problem.heads // problem.kv_heads, 0
    for b, q_len in enumerate(problem.q_lens):
        if packed:
            number = sum(problem.q_lens[:b]) * group // block_M + b
        for first in range(0, q_len * group, block_M):
            yield number, b, range(first, min(first + block_M, q_len * group))
            number += 1


def kinds_of(seen: Tensor, block_N: int) -> tuple[list[int], list[int]]:
    """The numbers of the tiles that are mixed, and of those that are whole, of :func:`seen_by`."""
    mixed, whole = [], []
    for number, tile in enumerate(seen.split(block_N, dim=1) if seen.shape[1] else ()):
        if tile.all() and tile.shape[1] == block_N:
            whole.append(number)
        elif tile.any():
            mixed.append(number)
    return mixed, whole


def poisoned(problem: Problem, block_N: int) -> tuple[Problem, int]:
    """The problem with NaN in the tiles of keys that are hidden from all rows of a kv head, and how many these are.

    0 * NaN is NaN, so a kernel that visits one is seen.
    """
    other, count = copy.copy(problem), 0
    other.k, other.v = ([each.clone() for each in cache] for cache in (problem.k, problem.v))
    group = problem.heads // problem.kv_heads
    for b, length in enumerate(problem.k_lens):
        for kv_head in range(problem.kv_heads):
            seen = seen_by(problem, b, range(kv_head, kv_head + 1), range(problem.q_lens[b] * group))
            for first in range(0, length, block_N):
                if not seen[:, first : first + block_N].any():
                    count += 1
                    for cache in (other.k, other.v):
                        cache[b][first : first + block_N, kv_head] = math.nan
    return other, count
