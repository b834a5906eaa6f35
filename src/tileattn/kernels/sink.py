"""The gradient of a sink, which GPU backends compute by PyTorch's operations, from what their kernels leave."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink's probability times (0 - delta), summed over batch and rows: its value vector is zero, and so is its dP.

    A sink of -inf has no probability, also in a row that sees no key, where lse is -inf as well. A delta that is NaN
    gives NaN there too, as in the other gradients: 0 * NaN.

    Args:
        sink: (heads,).
        lse, delta: (batch, heads, seqlen_q), float32 or float64.

    Returns:
        (heads,), in the sink's dtype.
    """
    p = torch.exp(sink.detach().to(lse.dtype)[None, :, None] - lse)
    p = torch.where(lse == -torch.inf, 0.0, p)
    return -(p * delta).sum(dim=(0, 2)).to(sink.dtype)
