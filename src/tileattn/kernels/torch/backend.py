"""How dispatch reaches the torch backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...call import AttentionCall, BackwardCall, Gradients
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


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.dispatch.Backend`."""

    def backward(
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        sink: torch.Tensor | None,
        operands: Operands,
    ) -> Gradients:
        inputs = [q, k, v, sink, *operands.tensors]
        leaves = [
            x if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, call.needs, strict=True)
        ]
        wanted = [leaf for leaf, need in zip(leaves, call.needs) if need]
        tensors = Operands(leaves[4:], operands.ints, operands.floats)
        with torch.enable_grad():
            outputs = torch_forward(*leaves[:3], *restore(call.forward.variant, tensors), leaves[3], scale)
        # Where no key is visible, o and lse may depend on nothing.
        paths = [(x, dx) for x, dx in zip(outputs, (do, dlse)) if dx is not None and x.requires_grad]
        found = [None] * len(wanted)
        if paths and wanted:
            xs, dxs = zip(*paths)
            found = torch.autograd.grad(xs, wanted, dxs, allow_unused=True)
        found = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, wanted))
        gradients = [next(found) if need else None for need in call.needs]
        return Gradients(*gradients[:4], tuple(gradients[4:]))

    return backward
