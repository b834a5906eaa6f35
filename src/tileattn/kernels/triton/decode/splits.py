"""How many parts the keys of a sequence are computed in, decided by sizes alone.

Lengths are known to the device only, and one CUDA graph serves all of them. So the number of parts does not depend on
them. Where the parts lie, the kernel decides by each sequence's own length.
"""

from __future__ import annotations

import functools

import torch

from ....call.decoding import DecodeSizes, FixedSplit, Splits
from ..tile_sizes import Config

PROGRAMS = 2  # that a multiprocessor runs at a time, about
FEWEST_TILES = 2  # of a part, at the longest length
MOST = 128  # parts, unless more are asked for
WORKSPACE_BYTES = 256 * 2**20  # of what parts are kept in, unless more parts are asked for
CPU_MULTIPROCESSORS = 4  # of Triton's interpreter, so that it splits as well


def split_rows(sizes: DecodeSizes, packed: bool, config: Config) -> int:
    """The most rows that a sequence and kv head may have for its keys to be split.

    Packed sequences with more than one tile of rows have enough programs, and would need a workspace for every bound.
    """
    rows = sizes.max_seqlen_q * group_of(sizes)
    return min(rows, config.block_M) if packed else rows


def group_of(sizes: DecodeSizes) -> int:
    """Heads of queries for each of keys."""
    return sizes.heads // max(sizes.kv_heads, 1)


def number_of(splits: Splits, sizes: DecodeSizes, rows: int, head_dim_v: int, config: Config, processors: int) -> int:
    """The number of parts of each sequence; with a FixedSplit 1 also where one program walks over all parts.

    Args:
        splits: what the call asks for.
        sizes: of the call.
        rows: of a sequence and kv head, as :func:`split_rows` says.
        head_dim_v: columns of o.
        config: of the kernel.
        processors: multiprocessors of the device.
    """
    if isinstance(splits, int):
        return splits
    pairs = max(sizes.batch * sizes.kv_heads, 1)
    jobs = pairs * max(-(-rows // config.block_M), 1)
    wanted = -(-PROGRAMS * processors // jobs)
    bytes_of_part = max(pairs * rows * (head_dim_v + 2) * 4, 1)
    if isinstance(splits, FixedSplit):
        parts = max(-(-sizes.capacity // splits.keys), 1)  # without keys a program still writes o and lse
        return parts if wanted > 1 and parts * bytes_of_part <= WORKSPACE_BYTES else 1
    longest = -(-sizes.capacity // (FEWEST_TILES * config.block_N))
    return max(min(wanted, longest, MOST, WORKSPACE_BYTES // bytes_of_part), 1)


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Those of a device."""
    if device.type != "cuda":
        return CPU_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
