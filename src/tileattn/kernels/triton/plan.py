"""The static facts of a Triton kernel, as one constant that its code reads: ``plan.block_M``, ``plan.score``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ...call.decoding import DecodeCall
from ...call.facts import AttentionCall
from ...variant.program import program
from .interpreter import interpreted
from .lists import Walk, walk_of
from .shared_memory import padded
from .tile.expressions import functions
from .tile.loops import BY_LISTS, loops
from .tile.paths import paths
from .tile_sizes import Config, has_descriptors


@dataclass(frozen=True, eq=False, repr=False)
class TritonPlan:
    """Static facts of one kernel; numbers, flags and names as Triton's constants.

    Attributes:
        head_dim, head_dim_v: columns of q and k, and of v.
        padded, padded_v: those of tiles: powers of two.
        block_M, block_N: rows of a tile of queries, and of keys.
        tma: dimensions of the descriptors that tensors come as (tile/tiles.py); 0 if they come as pointers.
        precision: of products: what ``tl.dot`` calls it, or "interpreted".
        warp_specialize: whether Triton is to give loads a warp of their own.
        before, within, behind: which loops over tiles there are (tile/loops.py); with lists those over mixed and over
            whole tiles.
        allows, score, slope, any_range, full_range: the variant's functions (tile/expressions.py). The ranges are of
            keys or, in the kernel for dk and dv, of queries. allows and score may be None; without score the scale is
            positive.
        slopes: derivatives with respect to what the score reads from tensors whose gradients are wanted.
        spread: for each of these, whether each score has a place in its workspace.
        listed, line_rows: steps of a loop for each tile of a list, 0 without lists; and rows of a line (lists.py).
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
    listed: int = 0
    line_rows: int = 0

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
    def step_M(self) -> tl.constexpr:
        """By what a loop over tiles of queries counts: rows, or with lists steps."""
        return tl.constexpr(1) if self.listed else self.block_M

    @property
    def step_N(self) -> tl.constexpr:
        """The same of keys."""
        return tl.constexpr(1) if self.listed else self.block_N

    @property
    def natural(self) -> tl.constexpr:
        """Whether scores and lse are kept in natural units, for results in float32, or in units of log2(e)."""
        return tl.constexpr(self.precision in ("bf16x6", "ieee"))

    @property
    def wanted(self) -> tl.constexpr:
        """The number of slopes."""
        return tl.constexpr(len(self.slopes))

    @functools.cached_property
    def cache_key(self) -> str:
        """A short hash of all fields, functions' sources included, by which Triton's caches tell kernels apart."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        text = repr([_key(value) for value in values])
        return "plan_" + hashlib.sha256(text.encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return self.cache_key


def _key(value: Any) -> Any:
    return [_key(part) for part in value] if isinstance(value, tuple) else getattr(value, "cache_key", value)


@functools.lru_cache(maxsize=1024)
def make_plan(
    call: AttentionCall, config: Config, kernel: str, tma: int, wanted: tuple[bool, ...] = (), listed: bool = False
) -> TritonPlan:
    """The plan of one of the kernels "forward", "keys" and "queries"; `wanted`: whether each tensor has a gradient.

    tma: how many dimensions the tensors' descriptors would have; 0 for none.
    listed: whether tiles are taken from lists.
    """
    traced, of = program(call.variant), functions(call.variant, wanted, exact=call.dtype == torch.float32)
    of_keys = kernel == "keys"
    walk = walk_of(kernel, config) if listed else Walk()
    tma = tma if call.aligned and call.dtype.itemsize == 2 and has_descriptors(call.arch) else 0
    return TritonPlan(
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        padded=padded(call.head_dim),
        padded_v=padded(call.head_dim_v),
        block_M=config.block_M,
        block_N=config.block_N,
        tma=tma,
        precision=precision_of(call),
        warp_specialize=config.warp_specialize,
        **(BY_LISTS if listed else loops(traced, of_keys))._asdict(),
        allows=of.allows,
        score=of.score,
        slope=of.slope,
        any_range=of.q_range if of_keys else of.kv_range,
        full_range=of.full_q_range if of_keys else of.full_range,
        slopes=of.slopes,
        spread=tuple(path.spread for path in paths(call.variant, wanted)),
        listed=walk.steps,
        line_rows=walk.line_rows,
    )


def precision_of(call: AttentionCall | DecodeCall) -> str:
    """The precision of products: of 16 bits as they are ("tf32" does not apply to them), or of float32.

    "bf16x6" writes each number of float32 as the sum of three of bfloat16, which has all its bits, and leaves out the
    three smallest of the nine products. The tensor cores sum the others, with less error over a tensor than eager
    PyTorch's, two to five times as fast as the best tiles with products of float32 (docs/design/lessons.md).
    """
    if call.dtype == torch.bfloat16 and interpreted():
        return "interpreted"
    if call.dtype == torch.float32:
        return "bf16x6" if call.arch.startswith("sm_") else "ieee"
    return "tf32"
