"""How dispatch reaches the torch backend."""

from __future__ import annotations

import torch

from ...call import AttentionCall
from ...variant import Operands, restore
from .forward import forward as torch_forward


def refusal(call: AttentionCall) -> str | None:
    """None: PyTorch operations run every call."""
    return None


def forward(
    call: AttentionCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    operands: Operands,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`tileattn.dispatch.Forward`."""
    mask, score_mods = restore(call.variant, operands)
    return torch_forward(q, k, v, mask, score_mods, sink, scale)
