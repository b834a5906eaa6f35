"""Tile sizes of the generic backward kernels, their limits, and the defaults of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....call.facts import AttentionCall, BackwardCall
from ....variant.program import program
from ..architecture import ARCHITECTURES, padded_finely
from .operand_gradients import paths
from .slopes import slope_program

# Rows of lse and delta, and of dq's sums, are padded to a multiple of this, which tiles of queries divide.
ROWS = 128


@dataclass(frozen=True)
class Part:
    """The part of a tile that a block of prepare.py or finish.py takes.

    Attributes:
        rows: of queries, about 64.
        parts: that a tile of the work list has; 1 in a dense call.
    """

    rows: int = 64
    parts: int = 1

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.rows * self.parts


def part_of(tile: int) -> Part:
    """The part of a packed sequence's tile."""
    return Part(64, tile // 64) if tile % 64 == 0 else Part(tile)


def read_together(call: BackwardCall) -> AttentionCall:
    """The forward call, aligned if all that the main kernel reads is: q, k, v and do."""
    return dataclasses.replace(call.forward, aligned=call.forward.aligned and call.aligned)


def copy_options(call: AttentionCall) -> dict[str, Any]:
    """How a generic kernel copies tiles of the caller's tensors."""
    # A tensor map does not end with a sequence. TileLang 0.1.15 cannot generate a guarded copy of more than four
    # elements at once for AMD.
    options = {"disable_tma": not call.aligned or call.packed}
    return options | ({"coalesced_width": 4} if call.arch.startswith("gfx") else {})


def store_options(call: AttentionCall) -> dict[str, Any]:
    """How a generic kernel stores tiles of gradients, which TileLang would do by TMA where it can."""
    return {"disable_tma": True} if call.packed else {}


@dataclass(frozen=True)
class BackwardConfig:
    """How a generic backward kernel cuts its work.

    Attributes:
        block_M: rows of Q and dO in a tile.
        block_N: rows of K and V in a tile.
        num_stages: tiles in flight: of Q and dO in the main kernel, of K and V in that for dq alone.
        threads: per block, without the producer warpgroup that TileLang adds on sm_90 and later.
        split: whether several blocks share the query heads of a group (shares/).
    """

    block_M: int
    block_N: int
    num_stages: int
    threads: int
    split: bool = dataclasses.field(default=False, kw_only=True)

    def rows_per_warp(self, arch: str) -> int:
        """Rows per warp of a product of which each warp keeps whole rows."""
        return 16 if ARCHITECTURES[arch].warp == 32 else 32

    def weights_shared(self, call: AttentionCall) -> bool:
        """Whether P and dS reach their products through shared memory: there are more warps than rows of keys.

        Wide heads need this. What a thread keeps of dK and dV must not grow with the head dim.
        """
        warps = self.threads // ARCHITECTURES[call.arch].warp
        return self.block_N < warps * self.rows_per_warp(call.arch)


def column_step(call: AttentionCall, config: BackwardConfig, rows: int) -> int:
    """The number that the columns of a product must be a multiple of, so that warps can share them.

    A warpgroup's part of a wgmma must be a multiple of 16 columns: of 8 or 24, TileLang 0.1.15 wants the second operand
    in shared memory without a swizzle, and no other product can read it there. Smaller products take 8 columns a warp.
    """
    if call.arch.startswith("gfx"):
        return 16
    if call.arch == "sm_90a" and rows >= 64 and config.threads % 128 == 0:
        return 16 * (config.threads // 128)
    return 8 * max(1, config.threads // 32 * 16 // rows)


def value_columns(call: AttentionCall, config: BackwardConfig) -> int:
    """Columns of the main kernel's tiles of V, dO and dV: the padded head dim, and zeros that let warps share dV's."""
    columns = padded_finely(call.head_dim_v)
    step = column_step(call, config, config.block_N) if config.weights_shared(call) else 16
    return -(-columns // step) * step


def shared_bytes(call: AttentionCall, config: BackwardConfig) -> int:
    """Shared memory of one block of the main kernel: K and V; the stages of Q, dO, lse and delta; dS and P; dK and dV.

    dK and dV, on their way out, lie where others were; but in a packed call beside them.
    """
    dims = padded_finely(call.head_dim) + value_columns(call, config)
    stages = max(config.num_stages, 1)
    weights = (1 + config.weights_shared(call)) * config.block_M * config.block_N
    elements = config.block_N * dims + stages * config.block_M * dims + weights
    if _gradients_apart(call):
        elements += config.block_N * dims
    return 2 * elements + 8 * stages * config.block_M


def shared_bytes_queries(call: AttentionCall, config: BackwardConfig) -> int:
    """Shared memory of one block of the kernel for dq alone: Q and dO; the stages of K and V; dQ, as above."""
    dims = padded_finely(call.head_dim) + padded_finely(call.head_dim_v)
    elements = dims * (config.block_M + max(config.num_stages, 1) * config.block_N)
    if _gradients_apart(call):
        elements += config.block_M * padded_finely(call.head_dim)
    return 2 * elements


def _gradients_apart(call: AttentionCall) -> bool:
    """Whether gradients that are about to be stored have shared memory of their own.

    TileLang 0.1.15 gives two tiles the same place only where they are used one after another at the top of a kernel. In
    a packed call all of a block's work is in a branch: there may be no tile for the block (see places.py).
    """
    return call.packed


def is_valid(call: AttentionCall, config: BackwardConfig) -> bool:
    """Whether the main kernel's configuration fits: rows and columns for the warps, shared memory."""
    split = [config.block_M, *[config.block_N] * config.weights_shared(call)]  # rows of dQ, and of dK
    return (
        ROWS % config.block_M == 0
        and config.block_M % 16 == 0
        and config.block_N % config.rows_per_warp(call.arch) == 0
        and all(padded_finely(call.head_dim) % column_step(call, config, rows) == 0 for rows in split)
        and shared_bytes(call, config) <= ARCHITECTURES[call.arch].shared_bytes
    )


def is_valid_queries(call: AttentionCall, config: BackwardConfig) -> bool:
    """The same of the kernel for dq alone."""
    warps = config.threads // ARCHITECTURES[call.arch].warp
    return (
        config.block_M % (warps * config.rows_per_warp(call.arch)) == 0
        and config.block_N % 16 == 0
        and shared_bytes_queries(call, config) <= ARCHITECTURES[call.arch].shared_bytes
    )


def default_queries(call: BackwardCall) -> BackwardConfig:
    """The configuration of a call's kernel for dq alone: the first that fits."""
    forward = read_together(call)
    for config in _preferences_queries(forward):
        if is_valid_queries(forward, config):
            return config
    raise NotImplementedError(f"no tile of the backward kernel for dq fits {call}")


def kept_derivatives(call: BackwardCall) -> int:
    """How many tiles of derivatives the main kernel keeps in registers, beside S and dP (see slopes.py)."""
    score = program(call.forward.variant).score
    if score is None:
        return 0
    return len(slope_program(score, tuple(path.load for path in paths(call)), hardware_tanh=True).kept)


def preferences(call: AttentionCall, kept: int) -> Iterator[BackwardConfig]:
    """Configurations of the main kernel, best first; the first valid one is used."""
    traced, widest = program(call.variant), max(padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    has_wgmma = call.arch.startswith(("sm_90", "sm_100", "sm_103"))
    has_producer = has_wgmma and call.aligned and not call.packed
    if call.arch.startswith("gfx"):
        yield BackwardConfig(64, 64, 0, 128)
        yield BackwardConfig(32, 64, 0, 128)
        yield BackwardConfig(16, 32, 0, 128)
    # Where operands of products are loaded into registers, 64 rows leave too few for wide heads and modifications.
    rows = 64 if has_wgmma or (widest <= 128 and traced.score is None) else 32
    if padded_finely(call.head_dim) % 32:
        yield BackwardConfig(rows, 64, 2, 128)  # two warpgroups would halve dQ's columns; see column_step
    if has_producer and widest <= 64 and traced.score is None and not traced.tensors:
        yield BackwardConfig(128, 128, 2, 256)
    if (has_producer and widest <= 128 and kept < 2) or (widest <= 64 and traced.score is None):
        yield BackwardConfig(64, 128, 2, 256)
    yield BackwardConfig(rows, 64, 2, 256)
    yield BackwardConfig(rows, 64, 1, 256)
    yield BackwardConfig(32, 64, 1, 256)
    yield BackwardConfig(32, 32, 1, 128)
    yield BackwardConfig(16, 32, 1, 128)


def _preferences_queries(call: AttentionCall) -> Iterator[BackwardConfig]:
    if call.arch.startswith("gfx"):
        yield BackwardConfig(64, 32, 0, 128)
        yield BackwardConfig(32, 16, 0, 64)
    traced, widest = program(call.variant), max(padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    # Several tensors' addresses take the registers that more keys would need; so do those of rows that may begin
    # anywhere, together with a sequence's bounds.
    anywhere = call.packed and not call.aligned and widest > 64
    if not anywhere and (widest <= 128 or traced.score is None or len(traced.tensors) < 2):
        yield BackwardConfig(128, 64, 2, 256)
        yield BackwardConfig(128, 64, 1, 256)
    yield BackwardConfig(128, 16 if anywhere and widest > 128 else 32, 1, 256)
    yield BackwardConfig(64, 32, 1, 128)
    yield BackwardConfig(32, 32, 1, 64)
