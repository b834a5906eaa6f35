"""The torch backend's interface to dispatch: `refusal`, `prepare` and `prepare_backward`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...call.facts import AttentionCall, BackwardCall, Gradients
from ...call.fp8 import FP8, accumulator, dequantize
from ...call.inputs import Inputs, Operands
from ...variant.program import restore
from .autocast import no_autocast
from .backward import Needs
from .backward import backward as torch_backward
from .forward import forward as torch_forward
from .packed import packed_backward, packed_forward
from .score_gradient import Watched


def refusal(call: AttentionCall) -> str | None:
    """The reason why the backend cannot run a call; None if it can. It refuses only gradients of float8 inputs."""
    if call.dtype == FP8 and call.needs_grad:
        return "float8_e4m3fn has no backward pass (an input requires grad): use 16 bits, or torch.no_grad()"
    return None


def prepare(
    call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""

    def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, sink, operands, dropout, packed, descales, _ = inputs
        mask, score_mods = restore(call.variant, operands, accumulator(call.dtype))
        with no_autocast(q.device):
            if descales is not None:
                # Dequantize to float32: 16 bits would round the values again.
                q, k, v = (dequantize(x, descale) for x, descale in zip((q, k, v), descales))
            if packed is None:
                o, lse = torch_forward(q, k, v, mask, score_mods, sink, scale, dropout)
            else:
                o, lse = packed_forward(q, k, v, mask, score_mods, sink, scale, packed, dropout)
        return o.to(call.out_dtype), lse

    return forward


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""

    def backward(
        inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        operands = inputs.operands
        dtype = accumulator(call.forward.dtype)
        mask, _ = restore(call.forward.variant, operands, dtype)
        watched = [
            Watched(x, dtype) if need else None for x, need in zip(operands.tensors, call.needs[4:], strict=True)
        ]
        read = [x if watch is None else watch for x, watch in zip(operands.tensors, watched)]
        _, score_mods = restore(call.forward.variant, Operands(read, operands.ints, operands.floats), dtype)
        run = torch_backward if inputs.packed is None else packed_backward
        with no_autocast(inputs.q.device):
            return run(inputs, o, lse, do, dlse, mask, score_mods, watched, Needs(*call.needs[:4]), scale)

    return backward
