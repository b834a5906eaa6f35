"""The distribution of the suite random, and its draw.

A case is drawn in this order, and drawn anew where it breaks a limit or has the shape and causal flag of another:

    head dim        64, 80, 96, 112, 128, 160, 192, 256, and 192 for q and k with 128 for v; `HEAD_DIMS` has the weights
    kv heads        1 to 64, also 3, 5, 7, 14, ...; times 1 to 16 query heads for each; 6 to 64 query heads
    batch           1 to 32, small ones more often
    keys            333 to 65,536, log-uniform; one case in eight has a multiple of 128
    mask            causal (4 of 10), full (3), a causal window (1.5), documents (1.5; three of four also causal)
    window          128 to 4,096 keys before the query, log-uniform, at most half of the keys
    document        128 tokens to half of the keys, log-uniform; all documents of a case have this length
    queries         as many as keys; without documents, one case in five has fewer: 1/16 of the keys or more, from 333

`Limits` bounds the FLOPs of a forward pass from both sides, and the bytes of q, k and v. So cases are neither launches
nor minutes, and long sequences come with few heads.

At least nine of ten cases of any draw, counted from its first case, have a baseline that is known to run them: FA-2 and
cuDNN without a mask or with a square causal one, FA-4 elsewhere at head dim 64, 96 and 128 (`has_sure_baseline`).

The same seed gives the same cases with any version of Python and torch: of `random.Random` only `random()` is used,
whose sequence Python keeps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tileattn.bench.cases import Case

SUITE = "random"
CASES = 40  # of a draw
MULTIPLE = 128
SURE_HEAD_DIMS = (64, 96, 128)
UNSURE = 0.1  # the largest part of a draw's cases without a sure baseline
MOST_TRIES = 100_000

HEAD_DIMS = {
    (64, 64): 3,
    (80, 80): 1,
    (96, 96): 2,
    (112, 112): 1,
    (128, 128): 5,
    (160, 160): 1,
    (192, 192): 1,
    (256, 256): 2,
    (192, 128): 2,
}
MASKS = {"causal": 8, "full": 6, "window": 3, "documents": 3}
GROUPS = {1: 5, 2: 2, 4: 4, 5: 1, 7: 2, 8: 3, 16: 1}
MULTIPLE_OF_128, FEWER_QUERIES, CAUSAL_DOCUMENTS = 1 / 8, 1 / 5, 3 / 4

T = TypeVar("T")
# What no two cases of a draw share: batch, both lengths, both numbers of heads, both head dims, the causal flag.
Shape = tuple[int, int, int, int, int, int, int, bool]


@dataclass(frozen=True)
class Limits:
    """The sizes of a draw.

    flops: The least and the most of a forward pass.
    most_bytes: Of q, k and v together, in 16 bits.
    """

    keys: tuple[int, int]
    batches: tuple[int, ...]
    kv_heads: tuple[int, ...]
    heads: tuple[int, int]
    span: tuple[int, int]  # of a window, and the least of a document
    flops: tuple[float, float]
    most_bytes: float


# 0.1 to 8 ms of a forward pass at 500 TFLOPS, and 2.5 times that of a backward pass.
GPU = Limits(
    keys=(333, 65_536),
    batches=(1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16, 24, 32),
    kv_heads=(1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64),
    heads=(6, 64),
    span=(128, 4096),
    flops=(5e10, 4e12),
    most_bytes=2**30,
)
# Milliseconds of a laptop.
CPU = Limits(
    keys=(33, 700),
    batches=(1, 2, 3),
    kv_heads=(1, 2, 3),
    heads=(2, 8),
    span=(16, 128),
    flops=(1e5, 1e8),
    most_bytes=2**22,
)
LIMITS = {"cuda": GPU, "cpu": CPU}


def draw(seed: int, count: int, dtype: str = "bf16", limits: Limits = GPU, taken: Collection[Shape] = ()) -> list[Case]:
    """The first `count` cases of a seed; those of a larger count begin with them.

    taken: Shapes of other draws, which are not drawn again.

    Raises:
        ValueError: The limits leave too few different cases.
    """
    source = random.Random(seed)
    drawn: list[Case] = []
    shapes, unsure = set(taken), 0
    for _ in range(MOST_TRIES):
        if len(drawn) == count:
            return drawn
        case = _candidate(source, dtype, limits)
        if case is None or shape_of(case) in shapes:
            continue
        if not has_sure_baseline(case):
            if unsure + 1 > UNSURE * (len(drawn) + 1):
                continue
            unsure += 1
        shapes.add(shape_of(case))
        drawn.append(case)
    raise ValueError(f"of {count} cases only {len(drawn)} were found in {MOST_TRIES} tries within {limits}")


def draws(seeds: Sequence[int], count: int, dtype: str, device_type: str) -> dict[int, list[Case]]:
    """The draw of each seed, for a device of type "cuda" or "cpu"; no shape is in two of them."""
    found: dict[int, list[Case]] = {}
    for seed in seeds:
        taken = {shape_of(case) for cases in found.values() for case in cases}
        found[seed] = draw(seed, count, dtype, LIMITS[device_type], taken)
    return found


def shape_of(case: Case) -> Shape:
    """What no two cases of a draw share."""
    sizes = (case.batch, case.seqlen_q, case.seqlen_k, case.heads, case.kv_heads, case.head_dim, case.head_dim_v)
    return (*sizes, case.causal)


def has_sure_baseline(case: Case) -> bool:
    """Whether a baseline is known to run both passes of a case, on Hopper and in 16 bits."""
    return not needs_dense_mask(case) or (case.head_dim == case.head_dim_v and case.head_dim in SURE_HEAD_DIMS)


def needs_dense_mask(case: Case) -> bool:
    """Whether PyTorch's SDPA can express the case's mask only as a tensor of all pairs."""
    return case.variant != "full" and not (case.variant == "causal" and case.seqlen_q == case.seqlen_k)


def _candidate(source: random.Random, dtype: str, limits: Limits) -> Case | None:
    """One case, or None where it breaks a limit."""
    head_dim, head_dim_v = _weighted(source, HEAD_DIMS)
    kv_heads = _one_of(source, limits.kv_heads)
    heads = kv_heads * _weighted(source, GROUPS)
    batch = _one_of(source, limits.batches)
    keys = _length(source, limits.keys)
    variant = _variant(source, keys, limits)
    queries = keys
    if "documents" not in variant and source.random() < FEWER_QUERIES:
        queries = _log_uniform(source, max(limits.keys[0], keys // 16), keys)
    if not limits.heads[0] <= heads <= limits.heads[1]:
        return None
    case = Case(batch, queries, keys, heads, kv_heads, head_dim, head_dim_v, variant, dtype)
    elements = batch * (queries * heads * head_dim + keys * kv_heads * (head_dim + head_dim_v))
    fits = 2 * elements <= limits.most_bytes and limits.flops[0] <= case.flops() <= limits.flops[1]
    return case if fits else None


def _length(source: random.Random, bounds: tuple[int, int]) -> int:
    """A multiple of 128 in one case of eight, and none elsewhere."""
    length = _log_uniform(source, *bounds)
    if source.random() < MULTIPLE_OF_128:
        return max(MULTIPLE, length // MULTIPLE * MULTIPLE) if length >= bounds[0] + MULTIPLE else length
    return length - 1 if length % MULTIPLE == 0 else length


def _variant(source: random.Random, keys: int, limits: Limits) -> str:
    mask, half = _weighted(source, MASKS), max(1, keys // 2)
    low, high = limits.span
    if mask == "window":
        return f"window{_log_uniform(source, min(low, half), min(high, half))}"
    if mask == "documents":
        length = _log_uniform(source, min(low, half), half)
        return f"causal+documents{length}" if source.random() < CAUSAL_DOCUMENTS else f"documents{length}"
    return mask


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    """An integer from low to high; its logarithm is uniform."""
    return min(high, int(math.exp(math.log(low) + source.random() * math.log((high + 1) / low))))


def _one_of(source: random.Random, values: Sequence[T]) -> T:
    return values[int(source.random() * len(values))]


def _weighted(source: random.Random, weights: dict[T, int]) -> T:
    return _one_of(source, list(_repeated(weights)))


def _repeated(weights: dict[T, int]) -> Iterator[T]:
    for value, weight in weights.items():
        yield from [value] * weight
