"""How dispatch reaches the torch backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...call import AttentionCall
from ...variant import Operands, restore
from .forward import forward as torch_forward


def refusal(call: AttentionCall) -> str | None:
    """None: PyTorch operations run every call."""
    return None


def prepare(
    call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :class:`tileattn.dispatch.Backend`."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, operands: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask, score_mods = restore(call.variant, operands)
        return torch_forward(q, k, v, mask, score_mods, sink, scale)

    return forward
