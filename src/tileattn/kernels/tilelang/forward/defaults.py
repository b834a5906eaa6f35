"""The default configuration of a forward call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ....call.facts import CAUSAL, AttentionCall
from ....call.fp8 import FP8
from ....variant.expression import nodes
from ....variant.program import Program, program
from ...tile_lists import has_function, is_listed
from ..architecture import padded
from ..lists.bits import may_have_bits
from ..tile.key_range import key_range
from ..tile.steady import is_uniform
from . import sm90_table
from .amd.config import AmdConfig, amd_preferences, is_valid_amd
from .config import ForwardConfig, HopperConfig, hopper_dims, is_valid
from .wide import wide_row
from .windows import SHORT as SHORT_WINDOW
from .windows import is_documents, is_window, window_row

SHORT = 1024  # keys; up to here a call counts as short, with narrow heads and a mask up to twice as many
SHORT_DOCUMENTS = 8192  # keys; up to here a call with documents at head dim 64 counts as short
LONG = max(2 * SHORT, SHORT_WINDOW, SHORT_DOCUMENTS) + 1
DOCUMENTS_TENSORS = 5  # of Documents, and of KeyPadding; with the tensors of both, addresses take twice the registers

Config = ForwardConfig | HopperConfig | AmdConfig


def default(call: AttentionCall, seqlen: int = LONG) -> Config:
    """The configuration that is used unless another was measured to be faster.

    Args:
        call: the static facts.
        seqlen: the number of keys; short sequences may have a kernel of their own.
    """
    for config in _preferences(call, _is_short(call, seqlen)):
        if fits(call, config):
            return config
    raise NotImplementedError(f"no tile of the forward kernel fits {call}")


def fits(call: AttentionCall, config: Config) -> bool:
    """Whether a configuration of any schedule is valid for a call."""
    return is_valid_amd(call, config) if isinstance(config, AmdConfig) else is_valid(call, config)


def defaults(call: AttentionCall) -> list[Config]:
    """The configurations that a call gets at any length."""
    configs = [default(call, 1), default(call, LONG)]
    tile = wide(call)
    configs += [tile] if tile is not None else []
    if is_listed(call.variant) and call.dtype.itemsize == 2:
        of_bits = (False, True) if may_have_bits(call.variant) and not call.packed else (False,)
        hopper = [config for config in configs if isinstance(config, HopperConfig)]
        configs += [with_lists(config, call, bits) for config in hopper for bits in of_bits]
    return list(dict.fromkeys(configs + [for_skewed_lengths(config) for config in configs if call.packed]))


def with_lists(config: HopperConfig, call: AttentionCall, bits: bool = False) -> HopperConfig:
    """The configuration that takes its tiles from lists.

    Ranges of a function's rows are never known, so a call that has them and no range by its expression evaluates the
    mask at once (tile/key_words.py).

    Args:
        bits: whether mixed tiles have bits, unless words come from each row's range at once.
    """
    by_expression = key_range(program(call.variant)) is not None
    words = config.mask_words and (by_expression or not has_function(call.variant))
    bits = bits and not (words and by_expression)
    return dataclasses.replace(config, listed=True, mask_words=words and not bits, bits=bits)


def wide(call: AttentionCall) -> HopperConfig | None:
    """The wide tile that a call has beside its rows of the table, or None."""
    dims = row_dims(call.head_dim, call.head_dim_v)
    return None if dims is None else wide_row(call, dims)


def for_skewed_lengths(config: Config) -> Config:
    """The configuration for packed sequences of which many are much shorter than the longest.

    Two blocks that share keys take twice as many queries at a time, and waste as many more at the end of a sequence.
    """
    return dataclasses.replace(config, cluster=1) if isinstance(config, HopperConfig) else config


def _is_short(call: AttentionCall, seqlen: int) -> bool:
    # Wide tiles of queries, which long sequences get at head dim 64, waste most under a mask; and masks other than the
    # causal one take registers that three warpgroups do not have. Documents hidden by bits do with theirs: 13.7k tokens
    # run 1.15 (5891 in a document) and 1.08 times as fast (1487, causal), but 3.5k 0.94 (304, causal; an H200).
    narrow = max(padded(call.head_dim), padded(call.head_dim_v)) <= 64
    if narrow and is_window(call):
        return seqlen <= SHORT_WINDOW
    if narrow and is_documents(call):
        return seqlen <= SHORT_DOCUMENTS
    if narrow and program(call.variant).allows is not None:
        return seqlen <= 2 * SHORT or not call.variant.startswith(CAUSAL)
    return seqlen <= SHORT


def _preferences(call: AttentionCall, short: bool) -> Iterator[Config]:
    """Configurations from the best down; the first that is valid counts."""
    widest = max(padded(call.head_dim), padded(call.head_dim_v))
    if call.dtype == FP8:
        yield from _fp8(call)
    elif call.arch == "sm_90a" and call.aligned:
        yield from _sm90(call, widest, short)
    elif call.arch.startswith("gfx"):
        yield from amd_preferences(call)
    else:
        traced = program(call.variant)
        if widest <= 64 and traced.score is not None:
            # Half the scores per thread leave registers for the modification, a quarter for several tensors' addresses.
            yield ForwardConfig(64, 64 if len(traced.tensors) < 2 else 32, 2, 128)
        if widest <= 128 and call.aligned:
            yield ForwardConfig(128, 64, 2, 256 if widest > 64 else 128)
        # Wide heads, and copies of single elements, fill the registers: more than 32 keys at a time would spill.
        yield ForwardConfig(128, 32, 2, 256)
        yield ForwardConfig(128, 32, 1, 256)


def _sm90(call: AttentionCall, widest: int, short: bool) -> Iterator[Config]:
    """The Hopper schedule as measured; the generic one for what has no row."""
    traced = program(call.variant)
    # Wide heads leave too few registers for modifications, and two tensors of one too few at any width: the generic
    # schedule, which keeps less in flight. A tensor that is copied tile by tile needs no addresses.
    tensors = len(traced.tensors) - (traced.copied_tile is not None)
    if call.dropout:
        yield from _dropped(call, widest, tensors)
        return
    if widest > 128 and traced.score is None and call.variant not in ("", CAUSAL):
        yield from _wide_masked(call, tensors)
    if widest <= 128 and traced.copied_tile is not None:
        yield from _copied(traced.copied_tile[1].itemsize, tensors + _fetches(traced))
    if widest <= 128 and _fetches(traced) and tensors < 2:
        yield _fetched()
    if (widest <= 128 or call.variant in ("", CAUSAL)) and (traced.score is None or tensors < 2):
        tuned = tuned_row(call.head_dim, call.head_dim_v, kind(call.variant), short)
        if is_window(call):
            yield window_row(call, short)
        elif tuned is not None:
            yield dataclasses.replace(tuned, mask_words=is_documents(call))
        # For head dims that differ, where O neither fits beside the tuned tiles nor where Q was.
        yield from (HopperConfig(128, block_N, ping_pong=True) for block_N in (80, 64, 48))
    if widest <= 128:
        yield ForwardConfig(128, 128, 2, 256)
    if not call.variant:
        yield ForwardConfig(128, 80, 2, 256)
    yield ForwardConfig(128, 64, 2, 256)


def _wide_masked(call: AttentionCall, tensors: int) -> Iterator[Config]:
    """Of head dims above 128 with another mask than the causal one.

    Masks of positions take the causal row's tiles, in which ptxas spills nothing. With documents it spills 48 to 100
    bytes in those, in these 12 and 0; packed, 64 and more. On an H100 windows take 0.65 to 0.85 of the generic
    schedule's time, documents 0.84 to 0.88 at head dim 192. At 256, in the 48 keys that fit, they take 1.03: not
    taken (docs/design/forward.md). Words of bits (windows.py) gain 1 to 6 % at head dims 160 and 256.
    """
    widest = max(hopper_dims(call))
    if tensors == 0:
        row = tuned_row(call.head_dim, call.head_dim_v, "masked", False)
        measured = widest in (160, 256) and not call.packed and call.aligned and call.dtype.itemsize == 2
        words = measured and key_range(program(call.variant)) is not None
        yield from [] if row is None else [dataclasses.replace(row, mask_words=words)]
        yield from (HopperConfig(128, block_N, ping_pong=True, mask_words=words) for block_N in (80, 64, 48))
    elif tensors <= DOCUMENTS_TENSORS and not call.packed and widest <= 192:
        yield HopperConfig(128, 96 if widest <= 160 else 80, ping_pong=True)


def _dropped(call: AttentionCall, widest: int, tensors: int) -> Iterator[Config]:
    """With dropout: the pattern is computed beside the scores, in registers that more keys would need.

    With these tiles ptxas spills no more than it does without dropout. They have not been tuned for speed.
    """
    traced = program(call.variant)
    simple = call.variant in ("", CAUSAL)
    if simple and widest <= (64 if call.variant else 128):
        tuned = tuned_row(call.head_dim, call.head_dim_v, kind(call.variant), False)
        if tuned is not None:
            yield tuned
    if traced.score is None and (simple or widest <= 128):
        yield HopperConfig(128, 112 if widest <= 128 else 80 if widest <= 192 else 64, ping_pong=True)
        yield HopperConfig(128, 64, ping_pong=True)
    elif widest <= 128 and traced.score is not None and tensors < 2:
        yield HopperConfig(128, 64 if _fetches(traced) else 96 if traced.copied_tile is None else 80, ping_pong=True)
        yield HopperConfig(128, 48, ping_pong=True)
    yield ForwardConfig(128, 64, 2, 256)


def _copied(itemsize: int, others: int) -> Iterator[HopperConfig]:
    """With a bias whose tiles are copied: the widest that fit into shared memory.

    In bfloat16 96, 112 and 128 keys ran within 4 % of each other on an H200. With 128 the bias's rows are multiples of
    128 bytes, which its copy takes at a time. `others` are tensors whose addresses take registers, as a copied one's do
    not. (Five of them spill 8 bytes with 64 keys.)
    """
    if others == 0:
        for stages in (3, 2):
            yield HopperConfig(128, 128, stages, ping_pong=True)
    if others == 0 and itemsize == 4:
        yield HopperConfig(128, 96, 2, ping_pong=True)
    yield HopperConfig(128, 64 if others < 5 else 32, 2, ping_pong=True)


def _fetches(traced: Program) -> bool:
    """Whether the modification reads memory for each score."""
    copied = traced.copied_tile[0].text if traced.copied_tile else None
    return any(node.op == "load" and not is_uniform(node) and str(node) != copied for node in nodes(traced.score))


def _fetched() -> HopperConfig:
    """The loads of elements take registers that wider tiles would need."""
    return HopperConfig(128, 96, ping_pong=True)


def kind(variant: str) -> str:
    """Which rows of the tuned table are a variant's."""
    traced = program(variant)
    return "scored" if traced.score is not None else "masked" if traced.allows is not None else "full"


def tuned_row(head_dim: int, head_dim_v: int, kind: str, short: bool) -> HopperConfig | None:
    """The row of the smallest tuned head dims that hold these."""
    dims = row_dims(head_dim, head_dim_v)
    return None if dims is None else sm90_table.TABLE.get((*dims, kind, "short" if short else "long"))


def row_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest tuned head dims that hold these."""
    holding = [
        (dim, dim_v) for dim, dim_v, _, _ in sm90_table.TABLE if dim >= padded(head_dim) and dim_v >= padded(head_dim_v)
    ]
    return min(holding, key=sum, default=None)


def _fp8(call: AttentionCall) -> Iterator[Config]:
    """Measured on an H200. Weights in e4m3 allow a rescale threshold of 4 (FP8_SHIFT, in hopper/plan.py)."""
    traced = program(call.variant)
    widest = max(padded(call.head_dim, 1), padded(call.head_dim_v, 1))
    simple = call.variant in ("", CAUSAL)
    if widest <= 64 and traced.score is None:
        yield HopperConfig(192, 160 if simple else 128, 3, ping_pong=True, rescale_threshold=4.0)
    if widest <= 128 and simple:
        yield HopperConfig(128, 192, 2, ping_pong=True, rescale_threshold=4.0)
    if widest > 192 and simple:
        yield HopperConfig(128, 128, 2, ping_pong=True, rescale_threshold=4.0, producer_registers=24)
    tensors = len(traced.tensors)
    if (widest <= 128 and tensors < 2) or (widest <= 192 and simple):
        yield HopperConfig(128, 128, 3, ping_pong=True, rescale_threshold=4.0, producer_registers=48)
        yield HopperConfig(128, 128, 2, ping_pong=True, rescale_threshold=4.0, producer_registers=48)
    # Modifications that read tensors, and wide heads, take the registers that more keys would need.
    crowded = 0 if traced.score is None else (tensors >= 2) + (tensors >= 1 and widest > 128)
    for block_N in (96, 64, 32)[crowded:]:
        yield HopperConfig(128, block_N, 2, ping_pong=True, rescale_threshold=4.0, producer_registers=48)
