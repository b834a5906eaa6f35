"""The default configurations of the decode kernel: small tables.

There are two sizes of a tile of rows: 16 where the rows of a sequence and a kv head are no more, else a larger one.
With a FixedSplit there is one size, because the order of sums within a tile may depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from ....call.decoding import DecodeCall
from ..shared_memory import fitting, padded
from ..tile_sizes import Config

FEW_ROWS = 16  # the fewest that the matrix units take


class _Of(NamedTuple):
    """The configurations for few rows, for more, and with a FixedSplit, which keeps two outputs."""

    few: Config
    more: Config
    fixed: Config


# By the larger head dim, padded. Keys of a tile divide 128, to which splits are fixed.
_Table = dict[int, _Of]
_HOPPER: _Table = {
    64: _Of(Config(16, 64, 4, 4), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    128: _Of(Config(16, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 8, 3)),
    256: _Of(Config(16, 32, 4, 3), Config(64, 32, 8, 2), Config(64, 32, 8, 2)),
}
# Other NVIDIA GPUs: within the 99 KiB of shared memory that a block has on the smaller ones.
_NVIDIA: _Table = {
    64: _Of(Config(16, 64, 4, 4), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    128: _Of(Config(16, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
    256: _Of(Config(16, 32, 4, 2), Config(64, 32, 8, 2), Config(32, 32, 8, 2)),
}
_AMD: _Table = {
    64: _Of(Config(16, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    128: _Of(Config(16, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 8, 1)),
    256: _Of(Config(16, 32, 4, 1), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
}
_FLOAT32: _Table = {
    64: _Of(Config(16, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
    128: _Of(Config(16, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 8, 2)),
    256: _Of(Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
}
# Few steps, which are what takes the interpreter its time.
_INTERPRETER = _Of(Config(16, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1))

_override: list[Config] = []


def default(call: DecodeCall, rows: int) -> Config:
    """The configuration for sequences of at most so many rows."""
    if _override:
        return _override[-1]
    of = _table_of(call)
    config = of.fixed if call.fixed else of.few if rows <= FEW_ROWS else of.more
    if not call.arch.startswith("sm_"):
        return config._replace(num_stages=1)
    # Of a paged cache the page's number is loaded first, which is a stage for each of K and V.
    stages = 2 * config.num_stages - 1 if call.paged else config.num_stages
    return fitting("decode", call, config._replace(num_stages=stages))


def _table_of(call: DecodeCall) -> _Of:
    if call.arch == "cpu":
        return _INTERPRETER
    width = max(padded(call.head_dim), padded(call.head_dim_v), 64)
    if call.dtype.itemsize > 2:
        return _FLOAT32[width]
    table = _AMD if call.arch.startswith("gfx") else _HOPPER if call.arch == "sm_90a" else _NVIDIA
    return table[width]


@contextlib.contextmanager
def overridden(config: Config) -> Iterator[None]:
    """Within it, calls are prepared with this configuration: for measurements and tests."""
    _override.append(config)
    try:
        yield
    finally:
        _override.pop()
