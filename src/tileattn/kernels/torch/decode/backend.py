"""The torch backend's decode phase, as dispatch sees it: `refusal` and `prepare`.

On a CPU each sequence is computed by itself over its own keys (`sequences.py`, `batch_invariant.py`). On a GPU that
would need a synchronisation; there all sequences are computed at once over the whole capacity, with masks
(`capacity.py`). This is a fallback for what no kernel runs: its time grows with the capacity, not with the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit, Splits
from ....call.fp8 import accumulator
from ....variant.program import restore
from ..autocast import no_autocast
from . import batch_invariant, capacity, sequences


def refusal(call: DecodeCall) -> str | None:
    """The reason why the backend cannot run a call; None if it can."""
    if call.packed_keys:
        return "packed keys are not decoded by PyTorch's operations"
    if call.fixed and call.arch != "cpu":
        return "FixedSplit is not batch-invariant in PyTorch's operations on a GPU, only on a CPU"
    return None


def runs_attention(call: DecodeCall, sizes: DecodeSizes) -> bool:
    """Whether decoding is faster than the forward pass: on a CPU, and where PyTorch's fused attention is slow.

    That is so in float16, and in bfloat16 for one query of heads that share no keys: at 8k keys 4.5 and 5 times.
    """
    if call.arch != "cpu":
        return False
    one = sizes.max_seqlen_q == 1 and sizes.heads == sizes.kv_heads
    return call.dtype == torch.float16 or (call.dtype == torch.bfloat16 and one)


@dataclass(frozen=True)
class _Decode:
    """See :class:`tileattn.runtime.dispatch.Decode`."""

    call: DecodeCall
    sizes: DecodeSizes
    scale: float
    splits: Splits

    def plan(self, inputs: DecodeInputs) -> Tensor | None:
        """Nothing is dealt."""
        return None

    def __call__(self, inputs: DecodeInputs, plan: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :class:`tileattn.runtime.dispatch.Decode`."""
        call, sizes, splits = self.call, self.sizes, self.splits
        mask, score_mods = restore(call.variant, inputs.operands, accumulator(call.dtype))
        with torch.no_grad(), no_autocast(inputs.q.device):
            if inputs.q.device.type != "cpu":
                return capacity.decode(inputs, sizes, mask, score_mods, self.scale)
            if isinstance(splits, FixedSplit):
                return batch_invariant.decode(inputs, sizes, mask, score_mods, self.scale, splits)
            return sequences.decode(inputs, sizes, mask, score_mods, self.scale, splits)


def prepare(call: DecodeCall, sizes: DecodeSizes, scale: float, splits: Splits) -> _Decode:
    """See :class:`tileattn.runtime.dispatch.DecodePhase`."""
    return _Decode(call, sizes, scale, splits)
