"""Sizes of tiles, and which call gets which: a small table, nothing is tuned unasked.

They are chosen by what compiles without spilling registers. On Hopper, those of plain calls at head dims 64 and 128
are the fastest that benchmarks/tune_triton.py found on an H200 (8192 tokens; causal, and in the forward pass full): see
benchmarks/results/triton/bwd-tiles-h200.txt and benchmarks/results/triton/fwd-tiles-d128-h200.txt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...call.facts import AttentionCall
from ...variant.key import CAUSAL
from ...variant.program import program
from .shared_memory import fitting, padded
from .tile_sizes import Config

# By kernel, then by the larger head dim, padded; for 16 bits. They hardly spill where neither mask nor modification is
# more than causal (docs/design/triton.md has figures).
_HOPPER = {
    "forward": {
        64: Config(128, 128, 8, 3, tma=True),
        128: Config(128, 128, 8, 2, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "keys": {
        64: Config(128, 64, 4, 2, tma=True),
        128: Config(64, 64, 4, 2, tma=True),
        256: Config(32, 64, 8, 2, tma=True),
    },
    "queries": {
        64: Config(64, 64, 4, 3, tma=True),
        128: Config(128, 64, 8, 3, tma=True),
        256: Config(64, 64, 8, 2, tma=True),
    },
}
# The forward pass without a score modification, and without a mask either.
_HOPPER_UNMODIFIED = {64: Config(64, 128, 4, 2, tma=True), 128: Config(64, 64, 4, 3, tma=True)}
_HOPPER_FULL = _HOPPER_UNMODIFIED | {128: Config(128, 64, 4, 2, tma=True)}
# Keys from which on a causal call has the tiles of a full one. In single calls its own are as fast; in calls one after
# another the GPU is at its limit of power, and the larger tiles, which read K and V half as often, keep a higher clock.
LONG = 8192
# Other NVIDIA GPUs: within the 99 KiB of shared memory that a block has on the smaller ones.
_NVIDIA = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 2)},
    "keys": {64: Config(64, 128, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(16, 64, 8, 1)},
    "queries": {64: Config(64, 64, 4, 3), 128: Config(64, 32, 4, 2), 256: Config(64, 32, 8, 1)},
}
_AMD = {
    "forward": {64: Config(128, 64, 4, 1), 128: Config(128, 64, 4, 1), 256: Config(128, 32, 8, 1)},
    "keys": {64: Config(32, 128, 4, 1), 128: Config(32, 64, 4, 1), 256: Config(16, 64, 4, 1)},
    "queries": {64: Config(128, 32, 4, 1), 128: Config(64, 32, 4, 1), 256: Config(64, 16, 4, 1)},
}
# Few steps, which are what takes the interpreter its time.
_INTERPRETER = Config(64, 64, 4, 1)

# float32 on NVIDIA's GPUs: six products of 16 bits each (plan.py), whose factors take registers. The fastest of those
# measured on an H200 (benchmarks/results/triton/fp32-tiles-h200.txt; at 256 in the backward pass the fastest
# with a bias); elsewhere small ones, without wgmma.
_HOPPER_FLOAT32 = {
    "forward": {64: Config(64, 64, 4, 1), 128: Config(64, 32, 4, 2), 256: Config(128, 16, 8, 1)},
    "keys": {64: Config(32, 64, 4, 1), 128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "queries": {64: Config(128, 32, 8, 1), 128: Config(64, 16, 4, 1), 256: Config(16, 16, 4, 1)},
}
_NVIDIA_FLOAT32 = {
    "forward": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "keys": {64: Config(32, 32, 4, 1), 128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "queries": {64: Config(32, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 4, 1)},
}
_AMD_FLOAT32 = {64: Config(32, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)}

_overrides: dict[str, Config] = {}


def default(kernel: str, call: AttentionCall, seqlen_k: int = 0) -> Config:
    """The configuration of one of :data:`.tile_sizes.KERNELS`."""
    if kernel in _overrides:
        return _overrides[kernel]
    if call.arch == "cpu":
        return _INTERPRETER
    width = max(padded(call.head_dim), padded(call.head_dim_v), 64)
    if call.dtype.itemsize > 2:
        return _float32(kernel, call, width)
    tables = _AMD if call.arch.startswith("gfx") else _HOPPER if call.arch == "sm_90a" else _NVIDIA
    config = tables[kernel][width]
    if kernel == "forward" and tables is _HOPPER and program(call.variant).score is None:
        as_full = not call.variant or (call.variant == str(CAUSAL) and seqlen_k >= LONG)
        config = (_HOPPER_FULL if as_full else _HOPPER_UNMODIFIED).get(width, config)
    # Both the scores and their slopes are kept there.
    if kernel == "keys" and program(call.variant).score is not None:
        config = config._replace(block_M=max(config.block_M // 2, 16))
    return config if call.arch.startswith("gfx") else fitting(kernel, call, config)


def _float32(kernel: str, call: AttentionCall, width: int) -> Config:
    """That of `default`, in float32."""
    if call.arch.startswith("gfx"):
        return _AMD_FLOAT32[width]
    table = _HOPPER_FLOAT32 if call.arch == "sm_90a" else _NVIDIA_FLOAT32
    return fitting(kernel, call, table[kernel][width])


@contextlib.contextmanager
def overridden(**configs: Config) -> Iterator[None]:
    """Within it, the kernels that are named have these configurations: for benchmarks/tune_triton.py."""
    _overrides.update(configs)
    try:
        yield
    finally:
        for name in configs:
            del _overrides[name]
