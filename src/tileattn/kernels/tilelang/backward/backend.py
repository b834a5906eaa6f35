"""How dispatch reaches the backward kernels: workspaces, launches, and what is left to PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....call import BackwardCall, Gradients
from ....variant import Operands
from ..config import padded
from .config import ROWS, default, read_together
from .launch import backward_kernels
from .operands import Path, add_by_key, paths


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.dispatch.Backend`."""
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    if batch == 0 or seqlen_q == 0 or seqlen_k == 0:
        return _nothing(call)
    padded_q = -(-seqlen_q // ROWS) * ROWS
    block_N = default(read_together(call)).block_N
    padded_k = -(-seqlen_k // block_N) * block_N
    found = paths(call)
    kernels = backward_kernels(call)
    scalars = (scale, heads // kv_heads)

    def backward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        sink: Tensor | None,
        operands: Operands,
    ) -> Gradients:
        rows = (batch, heads, padded_q)
        lse2, delta = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
        sums = () if call.deterministic else (q.new_empty((*rows, padded(call.forward.head_dim)), dtype=torch.float32),)
        of_lse = () if dlse is None else (dlse.contiguous(),)
        q, k, v, o, do = map(_one_batch, (q, k, v, o, do))
        kernels.prepare(o, do, lse.contiguous(), *of_lse, lse2, delta, *sums)

        dq, dk, dv = q.new_empty(q_shape), q.new_empty(k_shape), q.new_empty((*k_shape[:3], call.forward.head_dim_v))
        handed_over = [
            q.new_zeros(
                (batch, heads, padded_k) if path.by_key else operands.tensors[path.tensor].shape, dtype=torch.float32
            )
            for path in found
        ]
        tensors = [_as_bytes(tensor) for tensor in operands.tensors]
        variant = (*tensors, *scalars, *operands.ints, *operands.floats)
        kernels.main(q, k, v, do, lse2, delta, dk, dv, *sums, *handed_over, *variant)
        if kernels.queries is not None:
            kernels.queries(q, k, v, do, lse2, delta, dq, *variant)
        if kernels.finish is not None:
            kernels.finish(dq, *sums, scale)
        dsink = _sink_gradient(sink, lse, delta[:, :, :seqlen_q]) if sink is not None and call.needs[3] else None
        sums_of_keys = [x[..., :seqlen_k] if path.by_key else x for path, x in zip(found, handed_over)]
        dtensors = _tensor_gradients(call, found, sums_of_keys, operands)
        wanted = [x if need else None for x, need in zip((dq, dk, dv), call.needs)]
        return Gradients(*wanted, dsink, dtensors)

    return backward


def _nothing(call: BackwardCall) -> Callable[..., Gradients]:
    """Of calls without rows, or without keys: nothing depends on anything."""

    def backward(do, dlse, q, k, v, o, lse, sink, operands: Operands) -> Gradients:
        zeros = [
            None if tensor is None or not need else torch.zeros_like(tensor)
            for tensor, need in zip((q, k, v, sink, *operands.tensors), call.needs, strict=True)
        ]
        return Gradients(*zeros[:4], tuple(zeros[4:]))

    return backward


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Its probability times (0 - delta), summed over batch and rows: its value is zero, and so is its dP.

    A sink of -inf has no probability, also in a row that sees no key, where lse is -inf as well.
    """
    p = torch.exp(sink.detach().float()[None, :, None] - lse)
    p = torch.where(lse == -torch.inf, 0.0, p)
    return -(p * delta).sum(dim=(0, 2)).to(sink.dtype)


def _tensor_gradients(
    call: BackwardCall, found: tuple[Path, ...], handed_over: list[Tensor], operands: Operands
) -> tuple[Tensor | None, ...]:
    """Of the variant's tensors that are wanted, from what the kernel has handed over for each path."""
    gradients: list[Tensor | None] = []
    for index, (tensor, need) in enumerate(zip(operands.tensors, call.needs[4:], strict=True)):
        parts = [(path, part) for path, part in zip(found, handed_over) if path.tensor == index]
        total = None
        if need:
            total = next((part for path, part in parts if not path.by_key), None)
            total = tensor.new_zeros(tensor.shape, dtype=torch.float32) if total is None else total
            for path, part in parts:
                if path.by_key:
                    add_by_key(total, path, part, operands)
                elif part is not total:
                    total += part
            total = total.to(tensor.dtype)
        gradients.append(total)
    return tuple(gradients)


def _one_batch(tensor: Tensor) -> Tensor:
    """A tensor that is expanded over the batch (stride 0, which tensor maps refuse), as its one batch."""
    return tensor if tensor.stride(0) else tensor[0][None]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Kernels read booleans as bytes."""
    return tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
