"""Shared memory of kernels whose masks or modifications read a value for each score, as a bias is read.

Triton's pipeliner treats such a load like those of K and V: it copies ahead, for which it buffers num_stages - 1 tiles,
block_M x block_N elements each. What the tables of defaults.py leave free does not hold several tiles of float32. The
sizes here were read off what Triton 3.6 allots on Hopper; elsewhere they are estimates, and
tests/kernels/triton/test_compile.py sees whether what is compiled fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...call.decoding import DecodeCall
from ...call.facts import AttentionCall
from ...variant.expression import nodes
from ...variant.program import program
from .tile_sizes import Config

HOPPER_BYTES = 227 * 1024
NVIDIA_BYTES = 99 * 1024  # on the smaller ones
COPIED = 4  # bytes of an element, at least, as each is copied by itself: indices are clamped
FEW_WALKED, FEWEST_WALKED = 64, 32  # rows of a tile that is walked over, as long as anything is copied ahead


def padded(head_dim: int) -> int:
    """Columns of a tile: a power of two, and at least what the matrix units take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def fitting(kernel: str, call: AttentionCall | DecodeCall, config: Config) -> Config:
    """`config`, or what is left of it where the tiles that scores are read from would not fit."""
    limit = HOPPER_BYTES if call.arch == "sm_90a" else NVIDIA_BYTES

    def fits(config: Config) -> bool:
        read = _read_bytes(call, config)
        return not read or _other_bytes(kernel, call, config) + read <= limit

    return next(filter(fits, _smaller(kernel, config)))


def _smaller(kernel: str, config: Config) -> Iterator[Config]:
    """First tiles that are walked over become smaller, then less is copied ahead; both again, and at last nothing is.

    Smaller tiles come first because a tile of a bias takes as many registers as one of scores.
    """
    walked, stages = "block_M" if kernel == "keys" else "block_N", config.num_stages
    rows = getattr(config, walked)
    yield config
    while rows > FEW_WALKED:
        rows //= 2
        yield config._replace(**{walked: rows})
    for fewer in range(stages - 1, 1, -1):
        yield config._replace(num_stages=fewer, **{walked: rows})
    while rows > FEWEST_WALKED:
        rows //= 2
        yield config._replace(num_stages=min(stages, 2), **{walked: rows})
    yield config._replace(num_stages=1)


def _read_bytes(call: AttentionCall | DecodeCall, config: Config) -> int:
    """Buffers of the loads that differ from score to score; in a decode call rows differ in the head as well."""
    of_rows = {"q", "h"} if isinstance(call, DecodeCall) else {"q"}
    traced = program(call.variant)
    sizes = {tensor.name: tensor.dtype.itemsize for tensor in traced.tensors if tensor.dtype.itemsize >= COPIED}
    loads = {str(node): node for part in (traced.allows, traced.score) for node in nodes(part) if node.op == "load"}
    symbols = {text: _symbols(load) for text, load in loads.items()}
    tiles = [load for text, load in loads.items() if "k" in symbols[text] and symbols[text] & of_rows]
    widths = [sizes.get(load.args[0], 0) for load in tiles]
    return (config.num_stages - 1) * config.block_M * config.block_N * sum(widths)


def _symbols(load: object) -> set[object]:
    return {node.args[0] for node in nodes(load) if node.op == "symbol"}


def _other_bytes(kernel: str, call: AttentionCall | DecodeCall, config: Config) -> int:
    """At most what the kernel takes without these: its operands' tiles, and what registers are exchanged through.

    Less than that in float32 with one stage; there nothing is copied ahead, and :func:`fitting` asks no more.
    """
    rows, walked = config.block_M, config.block_N
    if kernel == "keys":
        rows, walked = walked, rows
    d, dv = padded(call.head_dim), padded(call.head_dim_v)
    hopper = call.arch == "sm_90a"
    staying = rows * (d + dv if kernel in ("keys", "queries") else d)
    buffers = config.num_stages if hopper else config.num_stages - 1  # wgmma reads one while the next is filled
    exchanged = (6 if call.dtype.itemsize == 2 else 8) * 1024 if hopper else 4 * config.block_M * config.block_N + 1024
    return call.dtype.itemsize * (staying + buffers * walked * (d + dv)) + exchanged
