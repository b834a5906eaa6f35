"""Which plan a call's kernels are compiled for."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ...call.facts import SMALLEST_SCALE, AttentionCall
from ...variant.key import program
from .backend import interpreted
from .backward.operand_gradients import paths
from .defaults import Config, has_descriptors
from .plan import Plan
from .shared_memory import padded
from .tile.expressions import functions
from .tile.loops import loops


def scaled_variant(call: AttentionCall, scale: float) -> AttentionCall:
    """The call, with a modification (the identity) unless its scale is positive.

    Kernels take the maximum of unscaled scores, which is right for positive scales; with a modification they scale
    first.
    """
    if scale < SMALLEST_SCALE and program(call.variant).score is None:
        return dataclasses.replace(call, variant=call.variant + "+{score}")
    return call


@functools.lru_cache(maxsize=1024)
def make_plan(call: AttentionCall, config: Config, kernel: str, tma: int, wanted: tuple[bool, ...] = ()) -> Plan:
    """The plan of one of the kernels "forward", "keys" and "queries"; `wanted`: which tensors' gradients are.

    tma: how many dimensions the tensors' descriptors would have; 0 for none.
    """
    traced, of = program(call.variant), functions(call.variant, wanted, exact=call.dtype == torch.float32)
    of_keys = kernel == "keys"
    tma = tma if call.aligned and call.dtype.itemsize == 2 and has_descriptors(call.arch) else 0
    return Plan(
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        padded=padded(call.head_dim),
        padded_v=padded(call.head_dim_v),
        block_M=config.block_M,
        block_N=config.block_N,
        tma=tma,
        precision=_precision(call),
        warp_specialize=config.warp_specialize,
        **loops(traced, of_keys)._asdict(),
        allows=of.allows,
        score=of.score,
        slope=of.slope,
        any_range=of.q_range if of_keys else of.kv_range,
        full_range=of.full_q_range if of_keys else of.full_range,
        slopes=of.slopes,
        spread=tuple(path.spread for path in paths(call.variant, wanted)),
    )


def _precision(call: AttentionCall) -> str:
    """What is multiplied: 16 bits as they are ("tf32" says nothing about them), or float32.

    "bf16x6" writes each number of float32 as the sum of three of bfloat16, which has all its bits, and leaves out the
    three smallest of the nine products. The tensor cores sum the others, with less error over a tensor than eager
    PyTorch's, two to five times as fast as the best tiles with products of float32 (docs/design.md).
    """
    if call.dtype == torch.bfloat16 and interpreted():
        return "interpreted"
    if call.dtype == torch.float32:
        return "bf16x6" if call.arch.startswith("sm_") else "ieee"
    return "tf32"
