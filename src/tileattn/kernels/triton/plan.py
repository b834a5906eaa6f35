"""What a Triton kernel is compiled for, as one constant that its code reads: ``plan.block_M``, ``plan.score``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import triton.language as tl


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Static facts of one kernel; numbers, flags and names as Triton's constants.

    Attributes:
        head_dim, head_dim_v: columns of q and k, and of v.
        padded, padded_v: those of tiles: powers of two.
        block_M, block_N: rows of a tile of queries, and of keys.
        tma: dimensions of the descriptors that tensors come as (tile/tiles.py); 0 if they come as pointers.
        precision: of products: what ``tl.dot`` calls it, or "interpreted".
        warp_specialize: whether Triton is to give loads a warp of their own.
        before, within, behind: which loops over tiles there are (tile/loops.py).
        allows, score, slope, any_range, full_range: the variant's functions (tile/expressions.py). The ranges are of
            keys or, in the kernel for dk and dv, of queries. allows and score may be None; without score the scale is
            positive.
        slopes: derivatives with respect to what the score reads from tensors whose gradients are wanted.
        spread: for each of these, whether each score has a place in its workspace.
    """

    head_dim: int
    head_dim_v: int
    padded: int
    padded_v: int
    block_M: int
    block_N: int
    tma: int
    precision: str
    warp_specialize: bool
    before: bool
    within: bool
    behind: bool
    allows: Any
    score: Any
    slope: Any
    any_range: Any
    full_range: Any
    slopes: tuple[Any, ...] = ()
    spread: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, str)):
                object.__setattr__(self, field.name, tl.constexpr(value))

    @property
    def tma_q(self) -> tl.constexpr:
        """As ``tma``, of q and o in the forward pass, which come as descriptors where these have three dimensions."""
        return tl.constexpr(3 if self.tma == 3 else 0)

    @property
    def wanted(self) -> tl.constexpr:
        """How many slopes there are."""
        return tl.constexpr(len(self.slopes))

    @functools.cached_property
    def cache_key(self) -> str:
        """All that it says, functions' sources included, in a few letters: Triton's caches tell kernels apart by it."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        text = repr([_key(value) for value in values])
        return "plan_" + hashlib.sha256(text.encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return self.cache_key


def _key(value: Any) -> Any:
    return [_key(part) for part in value] if isinstance(value, tuple) else getattr(value, "cache_key", value)
