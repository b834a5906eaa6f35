"""Tiles of 192 queries for calls without a mask or with a causal one: three consumer warpgroups.

Three hide each other's softmax better than two, but have 160 registers per thread. At head dim 128 O and the scores of
112 keys take 120 of them, so the weights lie in shared memory. These rows stand beside those of sm90_table.py; for
which sizes they are taken is up to choice.py.
"""

from __future__ import annotations

from ....call.facts import CAUSAL, AttentionCall
from .config import HopperConfig, is_valid

WIDE = {
    (96, 96, "masked"): HopperConfig(192, 96, ping_pong=True),
    (128, 128, "full"): HopperConfig(192, 112, ping_pong=True, weights_in_shared=True),
    (128, 128, "masked"): HopperConfig(192, 112, ping_pong=True, weights_in_shared=True),
}


def is_plain(call: AttentionCall) -> bool:
    """Whether a call is one that was measured in tiles of this kind: 16 bits, dense, no mask but a causal one."""
    plain = call.variant in ("", CAUSAL) and not (call.packed or call.dropout)
    return plain and call.dtype.itemsize == 2 and call.arch == "sm_90a" and call.aligned


def wide_row(call: AttentionCall, dims: tuple[int, int]) -> HopperConfig | None:
    """The wide tile of a call whose row of the table is that of these head dims."""
    config = WIDE.get((*dims, "masked" if call.variant else "full"))
    return config if config is not None and is_plain(call) and is_valid(call, config) else None
