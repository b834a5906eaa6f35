"""Which configuration a call gets unless the caller names one."""

from __future__ import annotations

from collections.abc import Iterator

from ...call import AttentionCall
from ...variant import program
from .config import Config, ForwardConfig, HopperConfig, is_valid, padded

SHORT = 1024  # lengths up to here count as short
CAUSAL = "Causal()"


def default(call: AttentionCall, seqlen: int = SHORT + 1) -> Config:
    """The configuration that is used unless another was measured to be faster.

    Args:
        call: the static facts.
        seqlen: the number of keys; short sequences may have a kernel of their own.
    """
    for config in _preferences(call, seqlen <= SHORT):
        if is_valid(call, config):
            return config
    raise NotImplementedError(f"no tile of the forward kernel fits {call}")


def defaults(call: AttentionCall) -> list[Config]:
    """All configurations that a call gets, at one length or another."""
    return list(dict.fromkeys([default(call, SHORT), default(call)]))


def _preferences(call: AttentionCall, short: bool) -> Iterator[Config]:
    """Configurations from the best down; the first that is valid counts."""
    widest = max(padded(call.head_dim), padded(call.head_dim_v))
    if call.arch == "sm_90a" and call.aligned:
        yield from _sm90(widest, call.variant, short)
    elif call.arch.startswith("gfx"):
        yield ForwardConfig(128, 64, 1, 256)
        yield ForwardConfig(64, 64, 0, 128)
        yield ForwardConfig(64, 32, 0, 128)
    else:
        if widest <= 64 and program(call.variant).score is not None:
            yield ForwardConfig(64, 64, 2, 128)  # half the scores per thread leave registers for the modification
        if widest <= 128 and call.aligned:
            yield ForwardConfig(128, 64, 2, 256 if widest > 64 else 128)
        # Wide heads, and copies of single elements, fill the registers: more than 32 keys at a time would spill.
        yield ForwardConfig(128, 32, 2, 256)
        yield ForwardConfig(128, 32, 1, 256)


def _sm90(widest: int, variant: str, short: bool) -> Iterator[Config]:
    """Measured on an H200 (benchmarks/results)."""
    traced = program(variant)
    plain = traced.score is None
    if widest <= 128 or variant in ("", CAUSAL):
        if plain or len(traced.tensors) < 2:
            yield from _sm90_hopper(widest, plain, short)
    # Wide heads leave too few registers for the rest: the generic schedule, which keeps less in flight.
    if widest <= 128:
        yield ForwardConfig(128, 128, 2, 256)
    if not variant:
        yield ForwardConfig(128, 80, 2, 256)
    yield ForwardConfig(128, 64, 2, 256)


def _sm90_hopper(widest: int, plain: bool, short: bool) -> Iterator[Config]:
    if widest <= 64:
        if plain and not short:
            yield HopperConfig(192, 128, ping_pong=True)
        yield HopperConfig(128, 128, 3, q_in_registers=plain, ping_pong=True)
    if widest <= 128:
        if plain:
            yield HopperConfig(128, 128, q_in_registers=True, ping_pong=True)
        yield HopperConfig(128, 112, ping_pong=True)
    for block_N in (128, 112, 80):
        yield HopperConfig(128, block_N, ping_pong=True)
