"""Which configurations of the Hopper backward kernels a call prefers, from the best down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .....call.facts import CAUSAL, AttentionCall
from .....variant.derivative import derivative
from .....variant.expression import Expr, nodes, symbol
from .....variant.program import program
from ...architecture import padded_finely
from ...tile.steady import is_uniform
from ..operand_gradients import BY_KEY, Path
from ..query_range import is_known
from ..slopes import slope_program
from .config import QUERIES_PRODUCTS, HopperBackwardConfig, HopperQueriesConfig, HopperWideConfig, path_of_tile


def hopper_preferences(
    call: AttentionCall, paths: tuple[Path, ...], adds_dq: bool
) -> Iterator[HopperBackwardConfig | HopperWideConfig]:
    """Configurations from the best down; the first that is valid counts.

    Args:
        call: the forward call, aligned if all tensors that the kernel reads are.
        paths: the paths to the tensors whose gradients are wanted.
        adds_dq: whether the kernel may add up dq; wide heads leave no registers for it.
    """
    if max(padded_finely(call.head_dim), padded_finely(call.head_dim_v)) > 128:
        yield from _wide(call, paths)
        return
    for config in _narrow(call, paths, adds_dq):
        config = dataclasses.replace(config, mask_words=hides_by_words(call), unpadded=bool(_used_columns(call)))
        yield from _with_tiles(call, paths, config if adds_dq else _without_dq(config))


def _with_tiles(
    call: AttentionCall, paths: tuple[Path, ...], config: HopperBackwardConfig
) -> Iterator[HopperBackwardConfig]:
    """Variants of a configuration with copied tiles, of a bias, say: most tiles in flight first, last with none."""
    if program(call.variant).copied_tile is not None:
        leaves = path_of_tile(call, paths)
        of_gradient = leaves[1].itemsize if leaves else 0
        fewer = (block_M for block_M in (48, 32) if block_M < config.block_M)
        for block_M in (config.block_M, *fewer):
            for ds_buffers, stages in ((config.ds_buffers, config.num_stages), (config.ds_buffers, 1), (1, 1)):
                yield dataclasses.replace(
                    config,
                    block_M=block_M,
                    ds_buffers=min(ds_buffers, config.ds_buffers),
                    tile_stages=stages,
                    gradient_bytes=of_gradient,
                )
    yield config


def _wide(call: AttentionCall, paths: tuple[Path, ...]) -> Iterator[HopperBackwardConfig | HopperWideConfig]:
    """Of wide heads: none if tensors' gradients are wanted, or more than one derivative is kept beside S and dP."""
    score = program(call.variant).score
    kept = _kept(score)
    if paths or kept > (0 if call.dropout else 1):
        return
    # H100, head dim 160: 1.02 to 1.09 of the other's speed, where it has registers for both.
    yield from _with_tiles(call, paths, HopperBackwardConfig(32, num_stages=4, ds_buffers=0, late_dp=kept > 0))
    if not _reads(score):
        yield HopperWideConfig(late_dp=kept > 0)


def _narrow(call: AttentionCall, paths: tuple[Path, ...], adds_dq: bool) -> Iterator[HopperBackwardConfig]:
    widest = max(padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    score, fetches = program(call.variant).score, _fetches(call)
    # Dropout, and derivatives kept beside P, dP, dK and dV, leave registers for fewer queries.
    if call.dropout and widest > 64 and (paths or _bends(score)):
        yield HopperBackwardConfig(32 if paths and _bends(score) else 48, late_dp=True)
    if paths and widest > 64:
        yield HopperBackwardConfig(32 if _bends(score) else 48 if _crowded(call, paths) else 64, late_dp=True)
    if paths or _bends(score) or fetches:
        yield HopperBackwardConfig(64, late_dp=bool(paths))
    elif widest <= 64:
        yield HopperBackwardConfig(128, late_dp=_slants(score), **_exchange(call))
    elif not call.dropout and (call.variant == "" or (call.variant == CAUSAL and not call.packed)):
        # Evaluating other masks takes registers. Packed sequences are mostly short, and their lengths, which would tell
        # whether 64 queries hide fewer scores (shares/choice.py, `of_lengths`), are known on the device alone. Head dim
        # 112, causal: 64 queries are 2 % faster if padding is left out (H100).
        if call.variant == "" or not adds_dq or _used_columns(call) != {128: 112}:
            yield HopperBackwardConfig(80, **_exchange(call))
    yield HopperBackwardConfig(64, **_exchange(call))


def _used_columns(call: AttentionCall) -> dict[int, int]:
    """The columns that products take if padding is left out; empty if they take whole tiles."""
    return HopperBackwardConfig(64, unpadded=True).used_columns(call)


def hides_by_words(call: AttentionCall) -> bool:
    """Whether masked tiles hide scores by a bit for each: in windows, documents and the like, without modifications.

    A causal mask alone takes one comparison for each score, and gains nothing (docs/design/masked-tiles.md).
    """
    traced = program(call.variant)
    return call.variant != CAUSAL and traced.score is None and not call.dropout and is_known(traced)


def _exchange(call: AttentionCall) -> dict[str, Any]:
    """How dS and dQ go through shared memory, in the calls where it was measured (docs/design/backward.md)."""
    dims = (padded_finely(call.head_dim), padded_finely(call.head_dim_v))
    if call.dropout or call.variant not in ("", CAUSAL):
        return {}
    if dims == (64, 64) and call.variant == "" and not call.packed:
        return {"adders": 2, "words": True}  # 20 bytes of spills in a packed call
    if dims == (64, 64):
        # 1.012 to 1.029 of the speed with dS stored last (H200, benchmarks/results/backward/exchange-h200.txt); packed
        # 1.001 to 1.009 without a mask, 1.023 with (benchmarks/results/packed/exchange-h200.txt).
        return {"adders": 2, "stores_first": True}
    if call.packed:
        return {}
    # At head dim 96 it gains nothing (H100: 0.99); without the padding of 80 it does.
    gains = dims == (128, 128) or (dims == (96, 96) and _used_columns(call) != {})
    return {"adders": 2, "stores_first": True, "words": True} if gains and call.variant == "" else {}


def plainest(config: HopperBackwardConfig) -> HopperBackwardConfig:
    """The same tiles for blocks that share groups (shares/), without ways of exchange that gained nothing there.

    That of head dim 64 without a mask gained 4 %, that of 128 lost 2 % (H100); others were not measured.
    """
    gains = config.words and not config.stores_first
    return config if gains else dataclasses.replace(config, adders=1, stores_first=False, words=False)


def _without_dq(config: HopperBackwardConfig) -> HopperBackwardConfig:
    """The same tiles if another kernel computes dq: dS is not exchanged."""
    return dataclasses.replace(config, ds_buffers=0, adders=1, stores_first=False, words=False)


def queries_preferences(call: AttentionCall) -> Iterator[HopperQueriesConfig]:
    """The same for the kernel for dq alone: the largest tiles of keys whose products fit into registers first."""
    score, copied = program(call.variant).score, program(call.variant).copied_tile
    kept = _kept(score)
    # 1 to 3 % less time of a pass at head dim 192, none at 256 and 160 (docs/design/backward.md).
    plain = call.variant in ("", CAUSAL) and not call.dropout and not call.packed
    settles = plain and (call.head_dim, call.head_dim_v) in ((192, 128), (192, 192))
    for tile_stages in (2, 1, 0) if copied is not None else (0,):
        reads = _reads(score) if tile_stages == 0 else _fetches(call)
        largest = 128 if score is None else 48 if kept and reads else 64
        for block_N in range(largest, 0, -16):
            for v_stages in (2, 1):
                config = HopperQueriesConfig(block_N, v_stages=v_stages, tile_stages=tile_stages, settles=settles)
                if config.products(call, kept) <= QUERIES_PRODUCTS:
                    yield config


def _kept(score: Any) -> int:
    """The number of derivatives kept beside S if no tensors' gradients are wanted."""
    return 0 if score is None else len(_derivatives(score, ()))


def _derivatives(score: Any, paths: tuple[Path, ...]) -> tuple[Any, ...]:
    """The derivatives that are kept beside S."""
    return slope_program(score, tuple(path.load for path in paths), hardware_tanh=True).kept


def _crowded(call: AttentionCall, paths: tuple[Path, ...]) -> bool:
    """Whether the tensors' gradients take more registers than the scores' gradients.

    For example, a copied tile that multiplies the score stays in registers until the slope is computed.
    """
    traced = program(call.variant)
    multiplies = traced.copied_tile is not None and len(_derivatives(traced.score, paths)) > 0
    return any(path.way == BY_KEY for path in paths) or len(paths) > 1 or multiplies


def _reads(score: Any) -> bool:
    """Whether a modification reads memory for each score."""
    return any(node.op == "load" and not is_uniform(node) for node in nodes(score))


def _fetches(call: AttentionCall) -> bool:
    """Whether a modification reads memory for each score, other than the tensor whose tiles are copied."""
    traced = program(call.variant)
    copied = traced.copied_tile[0].text if traced.copied_tile else None
    return any(node.op == "load" and not is_uniform(node) and str(node) != copied for node in nodes(traced.score))


def _slants(score: Any) -> bool:
    """Whether a modification adds positions times constants, which nvcc keeps in registers that dP's product needs."""
    slope = derivative(score, symbol("score"))
    if score is None or isinstance(slope, Expr) or slope != 1.0:
        return False
    products = [node.args for node in nodes(score) if node.op == "mul" and node.dtype == "float"]
    return any(isinstance(x, float) and not is_uniform(y) for xy in products for x, y in (xy, xy[::-1]))


def _bends(score: Any) -> bool:
    """Whether a modification's slope depends on the score."""
    slope = derivative(score, symbol("score"))
    return any(node.op == "symbol" and node.args[0] == "score" for node in nodes(slope))
