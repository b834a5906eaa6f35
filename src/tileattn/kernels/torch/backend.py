"""How dispatch reaches the torch backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...call import AttentionCall
from ...fp8 import FP8, Descales, dequantize
from ...variant import Operands, restore
from .forward import forward as torch_forward


def refusal(call: AttentionCall) -> str | None:
    """None, but for one thing: PyTorch operations run every call."""
    if call.dtype == FP8 and call.needs_grad:
        return "float8_e4m3fn has no backward pass (an input requires grad): use 16 bits, or torch.no_grad()"
    return None


def prepare(
    call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :class:`tileattn.dispatch.Backend`."""

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        operands: Operands,
        *,
        descales: Descales | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask, score_mods = restore(call.variant, operands)
        if descales is not None:
            # To float32, in which the values are exact to its rounding; in 16 bits they would be rounded once more.
            q, k, v = (dequantize(x, descale) for x, descale in zip((q, k, v), descales))
        o, lse = torch_forward(q, k, v, mask, score_mods, sink, scale)
        return o.to(call.out_dtype), lse

    return forward
