"""The rule for scales that are not positive."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from ..call.decoding import DecodeCall
from ..call.facts import SMALLEST_SCALE, AttentionCall
from ..variant.program import program

Call = TypeVar("Call", AttentionCall, DecodeCall)


def scaled_first(call: Call, scale: float) -> Call:
    """The call as its kernel is compiled: where the scale is not positive, with a score modification (the identity).

    Kernels take the maximum of unscaled scores, and hide scores before they are scaled; both are right for positive
    scales only. With a modification they scale first.
    """
    if scale < SMALLEST_SCALE and program(call.variant).score is None:
        return dataclasses.replace(call, variant=call.variant + "+{score}")
    return call
