"""Autograd: a call of a plan as one function of q, k, v, the sink and the variant's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transport.transfer import summed
from .call import Call, Operands, Outputs, PartGradients, Rows


class Work(Protocol):
    """The work of a rank by one algorithm. Shapes are those of `tileattn.parallel.algorithms.gather.GatherWork`."""

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """o (batch, rows, heads, head_dim_v) and lse (batch, rows, heads, 1) of this rank's rows."""

    def backward(
        self, call: Call, saved: Rows, outputs: Outputs, of_rows: Sequence[bool], sums: PartGradients
    ) -> list[Tensor | None]:
        """Gradients of q, k and v; those of sink and variant are added to `sums`."""


def attend(
    call: Call, work: Work, rows: Sequence[Tensor], operands: Operands, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """o (batch, rows, heads, head_dim_v) and lse (batch, heads, rows), differentiable once. rows: q, k and v."""
    o, lse = _Attend.apply(call, work, return_lse, operands.seed, *rows, operands.sink, *operands.variant)
    return o, lse


_BEFORE_Q = 4  # arguments of _Attend


def run_forward(call: Call, work: Work, rows: Rows, operands: Operands) -> tuple[Tensor, Tensor]:
    """o (batch, rows, heads, head_dim_v) and lse (batch, rows, heads, 1) of this rank's rows."""
    with call.agreement.telling():
        return work.forward(call, *rows, operands)


def run_backward(
    call: Call,
    work: Work,
    rows: Rows,
    operands: Operands,
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    needs: Sequence[bool],
    return_lse: bool,
) -> list[Tensor | None]:
    """The gradients that `needs` asks for, of q, k, v, sink and the variant's tensors.

    outputs: o and lse, of the forward pass. gradients: do and dlse (batch, heads, rows).
    """
    (o, lse), (do, dlse) = outputs, gradients
    # On another rank the loss may depend on o and lse, so gradients that are missing here are sent as zeros.
    do = torch.zeros_like(o) if do is None else do
    if return_lse:
        dlse = torch.zeros_like(lse) if dlse is None else dlse.transpose(1, 2)[..., None]
    else:
        dlse = None
    sums = PartGradients(operands, needs[3:], lse.dtype)
    with call.agreement.telling():
        of_rows = work.backward(call, rows, Outputs(o, lse, do, dlse), needs[:3], sums)
        return [*of_rows, *_totals(call, sums)]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        work: Work,
        return_lse: bool,
        seed: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        o, lse = run_forward(call, work, Rows(q, k, v), Operands(others[0], others[1:], seed))
        ctx.call, ctx.work, ctx.return_lse = call, work, return_lse
        ctx.save_for_backward(o, lse, seed, q, k, v, *others)
        return o, lse[..., 0].transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.call.agreement.telling():  # PyTorch raises if one was written since
            o, lse, seed, q, k, v, sink, *tensors = ctx.saved_tensors
        operands = Operands(sink, tuple(tensors), seed)
        needs = ctx.needs_input_grad[_BEFORE_Q:]
        return *[None] * _BEFORE_Q, *run_backward(
            ctx.call, ctx.work, Rows(q, k, v), operands, (o, lse), (do, dlse), needs, ctx.return_lse
        )


def _totals(call: Call, sums: PartGradients) -> list[Tensor | None]:
    """Gradients of sink and variant: summed over all ranks where the tensor is whole, in the tensor's dtype."""
    given = (sums.operands.sink, *sums.operands.variant)
    whole = {
        place: total
        for place, (total, local) in enumerate(zip(sums.sums, (False, *call.local)))
        if total is not None and not local
    }
    totals = list(sums.sums)
    for place, total in zip(whole, summed(call.link, list(whole.values()), call.layout.ranks)):
        totals[place] = total
    return [None if total is None or x is None else total.to(x.dtype) for total, x in zip(totals, given)]
