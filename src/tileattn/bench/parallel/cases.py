"""The cases of the suite: lengths that stand for those of long-context training, masks, and packed documents.

All lengths are parts or multiples of one, which stands for 128k tokens: 131,072 on GPUs, and less in tests on CPUs.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist

from tileattn import Causal, Mask, SlidingWindow

STANDS_FOR = "128k"
BASE = {"cuda": 2**17, "cpu": 2**10}  # tokens that stand for 128k
HEADS = {"cuda": (32, 8), "cpu": (8, 2)}
HEAD_DIM = {"cuda": 128, "cpu": 32}
LENGTHS = {"32k": (1, 4), "128k": (1, 1), "256k": (2, 1), "1M": (8, 1)}  # as parts of the base
LONG = "1M"  # is measured only where it is asked for, and not beside the ideal

WINDOW = {"cuda": 1024, "cpu": 16}
DOCUMENTS, SEED = 64, 26
# PyTorch's balancer cuts each document into twice as many parts as there are ranks: up to 8 of them.
MULTIPLE = 16
LARGEST = 0.7  # of the tokens, in the case of one large document


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        name: of the row.
        seqlen, heads, kv_heads, head_dim: the shape; batch size 1.
        window: keys before a query that it sees, or None for all.
        documents: cu_seqlens of packed documents; () for one sequence.
        is_long: only we are measured, in one timed step.
    """

    name: str
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    documents: tuple[int, ...] = ()
    is_long: bool = False

    @property
    def mask(self) -> Mask:
        """The mask, for one sequence or each document."""
        return Causal() if self.window is None else SlidingWindow(self.window, 0)

    @property
    def lengths(self) -> list[int]:
        """Of the documents, or of the only sequence."""
        ends = self.documents or (0, self.seqlen)
        return [stop - start for start, stop in pairwise(ends)]

    def area(self) -> int:
        """Pairs of query and key that the mask lets through."""
        span = self.seqlen if self.window is None else self.window + 1
        return sum(_area(length, min(length, span)) for length in self.lengths)

    def flops(self, direction: str) -> float:
        """Of all heads: two matrix products forward, five backward."""
        forward = 4.0 * self.area() * self.heads * self.head_dim
        return forward * (1.0 if direction == "fwd" else 3.5)


def _area(length: int, span: int) -> int:
    """Pairs of a causal mask in which a query sees at most `span` keys."""
    return span * (span + 1) // 2 + (length - span) * span


def suite(device_type: str, base: int | None = None, head_dim: int | None = None) -> list[Case]:
    """All cases, the long one last. base: tokens that stand for 128k."""
    tokens = base or BASE[device_type]
    dim = head_dim or HEAD_DIM[device_type]
    heads, kv_heads = HEADS[device_type]
    grouped, plain = (heads, kv_heads, dim), (heads, heads, dim)

    def case(length: str, shape: tuple[int, int, int], kind: str, **options: object) -> Case:
        times, part = LENGTHS[length]
        name = f"{length} {shape[0]}/{shape[1]} {kind}"
        return Case(name, tokens * times // part, *shape, **options)  # type: ignore[arg-type]

    packed = {f"documents sigma {sigma}": lognormal(tokens, sigma) for sigma in (1, 2)}
    packed[f"documents, one of {LARGEST:.0%}"] = with_a_large_one(tokens)
    return [
        *(case(length, shape, "causal") for length in ("32k", "128k", "256k") for shape in (grouped, plain)),
        case("128k", grouped, f"window {WINDOW[device_type]}", window=WINDOW[device_type]),
        *(case("128k", grouped, kind, documents=ends) for kind, ends in packed.items()),
        case(LONG, grouped, "causal", is_long=True),
    ]


def selected(cases: Sequence[Case], terms: str | None) -> list[Case]:
    """The cases whose names have one of the alternatives of each term, such as "128k,256k 32/8"; the long one only by
    its length."""
    wanted = [term.split(",") for term in (terms or "").split()]
    asked_for_long = any(LONG in term for term in wanted)
    return [
        case
        for case in cases
        if (asked_for_long or not case.is_long) and all(any(_has(case.name, part) for part in term) for term in wanted)
    ]


def _has(name: str, part: str) -> bool:
    """Whether a word of the name is `part`, or is `part` without its comma."""
    return part in re.split(r"[ ,]+", name)


def lognormal(tokens: int, sigma: float) -> tuple[int, ...]:
    """cu_seqlens of documents with log-normal lengths."""
    return _ends(_shared(tokens, _weights(_count(tokens), sigma)))


def with_a_large_one(tokens: int) -> tuple[int, ...]:
    """cu_seqlens of one large document among small ones, somewhere in the middle."""
    large = round(LARGEST * tokens / MULTIPLE) * MULTIPLE
    small = _shared(tokens - large, _weights(_count(tokens) // 2, 1.0))
    middle = len(small) // 2
    return _ends([*small[:middle], large, *small[middle:]])


def _count(tokens: int) -> int:
    return max(2, min(DOCUMENTS, tokens // (4 * MULTIPLE)))


def _weights(count: int, sigma: float) -> list[float]:
    source, normal = random.Random(SEED), NormalDist()
    # Of `random.Random` only `random()`, whose sequence Python keeps.
    return [math.exp(sigma * normal.inv_cdf(source.random())) for _ in range(count)]


def _shared(tokens: int, weights: Sequence[float]) -> list[int]:
    """Lengths in proportion to weights, multiples of `MULTIPLE` but for the largest, with `tokens` as their sum."""
    total = sum(weights)
    lengths = [max(1, round(tokens * weight / total / MULTIPLE)) * MULTIPLE for weight in weights]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return lengths


def _ends(lengths: Sequence[int]) -> tuple[int, ...]:
    return (0, *accumulate(lengths))
