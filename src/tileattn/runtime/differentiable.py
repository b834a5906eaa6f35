"""Prepared calls with gradients: both passes of an eager call, each checked and dispatched once.

A :class:`Differentiable` stands in the table of :mod:`.prepared` in place of a forward pass. Its backward pass is
looked up by the metadata of the tensors that autograd brings: the gradient of o may have any strides, and hooks on
saved tensors may return others than were saved. What the table is not for (a second derivative, tracing, torch.func,
`tileattn.tuning`) takes the general path of :mod:`.autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.facts import Packed
from ..call.inputs import Inputs, Operands, inputs_of
from ..tuner import state
from . import autograd
from . import operators as ops
from .dispatch import Backward, Forward
from .operators import Options
from .tables import kept


class Differentiable:
    """A call whose mask holds numbers only, for tensors of one metadata. Keeps no tensor.

    Args:
        options: what both passes share.
        forward: the prepared forward pass, with lse.
        operands: the numbers of the mask.
        longest: `max_seqlen_q` and `max_seqlen_k` of a packed call, else None. Its tensors have no batch dimension.
        return_lse: whether lse is asked for, and may have a gradient.
    """

    def __init__(
        self, options: Options, forward: Forward, operands: Operands, longest: tuple[int, int] | None, return_lse: bool
    ) -> None:
        self.options, self.forward, self.operands = options, forward, operands
        self.longest, self.return_lse = longest, return_lse
        self.backwards: dict[tuple[Any, ...], tuple[Backward, bool]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """o, and lse if it is asked for."""
        given = _apply(self, q, k, v) if self.longest is None else _apply(self, q, k, v, cu_seqlens_q, cu_seqlens_k)
        return given if self.return_lse else (given, None)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The forward pass, without a record for autograd. The lse of a packed call has a batch dimension unless it is
        asked for: each view takes the host as long as an allocation.
        """
        if self.longest is None:
            o, lse = self.forward(inputs_of((q, k, v, None, self.operands, None, None, None, None)))
            assert lse is not None
            return o, lse
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        packed = Packed(cu_seqlens_q, cu_seqlens_k, *self.longest)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        o, lse = self.forward(inputs_of((q, k, v, None, self.operands, None, packed, None, None)))
        assert lse is not None
        # In place: autograd treats an output that is a view of another tensor in ways of its own.
        return o.squeeze_(0), lse.squeeze_(0) if self.return_lse else lse

    def gradients(
        self, needs: tuple[bool, ...], saved: tuple[Any, ...], do: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what :class:`_Recorded` is applied to; None where `needs` is False.

        Args:
            needs: of this call, q, k and v; then, of a packed call, cu_seqlens_q and cu_seqlens_k.
            saved: o, lse, q, k and v; then, of a packed call, cu_seqlens_q and cu_seqlens_k.
            do, dlse: the gradients of o and lse; None for zeros, but not both.
        """
        if self.longest is None:
            o, lse, q, k, v = saved
            inputs = inputs_of((q, k, v, None, self.operands, None, None, None, None))
            return None, *self._of_inputs(needs, inputs, o, lse, do, dlse)
        o, lse, q, k, v, cu_seqlens_q, cu_seqlens_k = saved
        o, q, k, v = o.unsqueeze(0), q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if self.return_lse:
            lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
        packed = Packed(cu_seqlens_q, cu_seqlens_k, *self.longest)
        inputs = inputs_of((q, k, v, None, self.operands, None, packed, None, None))
        found = self._of_inputs(needs, inputs, o, lse, None if do is None else do.unsqueeze(0), dlse)
        dq, dk, dv = [None if x is None else x.squeeze(0) for x in found]
        return None, dq, dk, dv, None, None

    def _of_inputs(
        self, needs: tuple[bool, ...], inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None
    ) -> Sequence[Tensor | None]:
        """The gradients of q, k and v, with a batch dimension as the tensors given."""
        if do is None or torch.is_grad_enabled() or state.session is not None or not _is_plain(do):
            return autograd.input_gradients(self.options, inputs, (*needs[1:4], False), o, lse, do, dlse)[:3]
        backward, copies = self._backward(needs, inputs, o, do, dlse is not None)
        dq, dk, dv, _, _ = backward(inputs, o, lse, do.contiguous() if copies else do, dlse)
        dq = None if dq is None else dq.contiguous()
        dk = None if dk is None else dk.contiguous()
        dv = None if dv is None else dv.contiguous()
        return dq, dk, dv

    def _backward(
        self, needs: tuple[bool, ...], inputs: Inputs, o: Tensor, do: Tensor, dlse: bool
    ) -> tuple[Backward, bool]:
        """The prepared backward pass, and whether it must read a copy of do.

        The strides of a packed call's batch, whose size is 1, depend on the number of rows, and are no part of the key.
        They are 0 without rows: that is another backward pass, because do is then copied.
        """
        q, k, v, *_ = inputs
        if self.longest is None:
            sizes: tuple[Any, ...] = q.shape, k.shape, q.stride(), k.stride(), v.stride(), o.stride(), do.stride()
        else:
            rows = q.shape[1] > 0
            sizes = rows, q.stride()[1:], k.stride()[1:], v.stride()[1:], o.stride()[1:], do.stride()[1:]
        places = (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr()) % 16, do.data_ptr() % 16
        key = needs, dlse, ops.is_deterministic(), sizes, places, q.dtype, q.device
        found = self.backwards.get(key)
        if found is None:
            read = ops.readable(do)
            backward = ops.prepared_backward(self.options, inputs, (*needs[1:4], False), o, read, dlse)
            found = kept(self.backwards, key, (backward, read is not do))
        return found


def _is_plain(do: Tensor) -> bool:
    return not (ops.is_traced(do) or torch._C._are_functorch_transforms_active())


class _Recorded(autograd.Attention):
    """The Function of prepared calls. Its tensors are the call's alone, so that autograd has few to look at."""

    @staticmethod
    def forward(ctx, call, *tensors):
        o, lse = call.run(*tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(o, lse, *tensors)
        return (o, lse) if call.return_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        return ctx.call.gradients(ctx.needs_input_grad, ctx.saved_tensors, do, dlse)


# Without what Function.apply does for torch.func, which prepared calls are not under.
_apply: Any = super(torch.autograd.Function, _Recorded).apply
