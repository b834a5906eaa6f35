"""Tiles of windows and documents, which hide scores by a bit for each (tile/key_words.py).

A window takes three comparisons and a selection for each score of a tile at its ends, and has such tiles at both of
them; documents take a load and a comparison. A bit for each score takes one instruction and a seventh. Measured on an
H200 and an H100 (docs/design/masked-tiles.md); a causal mask, with one comparison, gains nothing.
"""

from __future__ import annotations

from ....call.facts import CAUSAL, AttentionCall
from ....variant.expression import Expr, nodes
from ....variant.program import program
from ..architecture import padded
from ..tile.key_range import key_range
from .config import HopperConfig

SHORT = 4096  # keys; up to here a window at head dim 64 counts as short


def is_window(call: AttentionCall) -> bool:
    """Whether a call is one that was measured: 16 bits, dense, a window of positions, no modification."""
    return _was_measured(call) and key_range(program(call.variant)) is not None and not _loads(call)


def is_documents(call: AttentionCall) -> bool:
    """The same of a mask that reads tensors and tells ranges of keys, as `Documents` does.

    So do `KeyPadding` and a user's own mask with such ranges. Only `Documents` was timed.
    """
    return _was_measured(call) and _loads(call) and isinstance(program(call.variant).full_range[1], Expr)


def _was_measured(call: AttentionCall) -> bool:
    if call.variant in ("", CAUSAL) or call.packed or call.dropout or call.dtype.itemsize != 2:
        return False
    narrow = max(padded(call.head_dim), padded(call.head_dim_v)) <= 128
    traced = program(call.variant)
    return narrow and call.arch == "sm_90a" and call.aligned and traced.allows is not None and traced.score is None


def _loads(call: AttentionCall) -> bool:
    return any(node.op == "load" for node in nodes(program(call.variant).allows))


def window_row(call: AttentionCall, short: bool) -> HopperConfig:
    """The tile of such a call. Three warpgroups gain 7 to 12 % at head dim 64 where windows are wide."""
    if max(padded(call.head_dim), padded(call.head_dim_v)) > 64:
        return HopperConfig(128, 128, q_in_registers=True, ping_pong=True, mask_words=True)
    if short:
        return HopperConfig(128, 128, num_stages=3, q_in_registers=True, ping_pong=True, mask_words=True)
    return HopperConfig(192, 128, num_stages=3, ping_pong=True, mask_words=True)
