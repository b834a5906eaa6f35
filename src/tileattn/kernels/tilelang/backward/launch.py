"""The launch of the backward pass: workspaces, kernels, and the gradients left to PyTorch's operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ....call.facts import BackwardCall, Gradients, Packed
from ....call.inputs import Inputs, Operands
from ....tuner.space import Space
from ....variant.program import program
from ...scale import scaled_first
from ...sink import sink_gradient
from ..architecture import padded
from ..host import L2_BYTES, as_bytes, divisors, one_batch, pattern_arguments
from ..tuned import sizes_of
from .config import BackwardConfig, read_together
from .defaults import SHORT, MainConfig, adds_dq, default, finished, prepared, queries_default, short_default
from .hopper.config import leaving
from .hopper.dq_order import COLUMNS
from .library import backward_kernels
from .operand_gradients import AXES, STORED, Path, paths
from .space import backward_space as space_with
from .space import tuned_config
from .workspaces import BatchWorkspaces, PackedWorkspaces

MIN_SIDE_BY_SIDE = 4  # kv heads under a mask, whatever the L2 cache holds: with fewer, long tiles come last


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    if q_shape[0] == 0 or q_shape[1] == 0 or k_shape[1] == 0:
        return _nothing(call)
    call = _specialised(call, scale)
    if call.forward.packed:
        return prepare_backward_with(None, call, q_shape, k_shape, scale)
    chosen = tuned_config(call, sizes_of(q_shape, k_shape))
    if chosen is None and q_shape[1] <= SHORT:
        chosen = short_default(call)
    return prepare_backward_with(chosen, call, q_shape, k_shape, scale)


def _specialised(call: BackwardCall, scale: float) -> BackwardCall:
    """The call that its kernels are compiled for."""
    forward = scaled_first(call.forward, scale)
    return call if forward is call.forward else dataclasses.replace(call, forward=forward)


def backward_space(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> Space | None:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    if q_shape[0] == 0 or q_shape[1] == 0 or k_shape[1] == 0 or call.forward.packed:
        return None
    call = _specialised(call, scale)
    return space_with(
        call,
        sizes_of(q_shape, k_shape),
        lambda config: prepare_backward_with(config, call, q_shape, k_shape, scale),
    )


def prepare_backward_with(
    tuned: MainConfig | None, call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """The backward pass with a given main kernel, None for the default; `call` is what its kernels are compiled for."""
    heads, kv_heads = q_shape[2], k_shape[2]
    config = default(call) if tuned is None else tuned
    operand_paths = paths(call)
    leaves = (leaving(config, read_together(call), operand_paths) or (None,))[0]
    kernels = backward_kernels(call) if tuned is None else backward_kernels(call, tuned)
    scalars: tuple[float, ...] = (scale, heads // kv_heads)
    dq_dim = padded(call.forward.head_dim) if adds_dq(call) else None
    own_order = not isinstance(config, BackwardConfig)
    of_main = of_queries = scalars
    if own_order:
        of_main += (_kv_heads_side_by_side(call, q_shape, kv_heads),)
    if not isinstance(queries_default(call), BackwardConfig):
        of_queries += (_heads_side_by_side(call, q_shape, k_shape),)
    of_batch = None if call.forward.packed else BatchWorkspaces(call, config, q_shape, k_shape)
    tiles = prepared(call).tile, queries_default(call).block_M, finished(call, config).tile
    cuts = tuple(dict.fromkeys([(tiles[0], False), (config.block_N, True), (tiles[1 if dq_dim is None else 2], False)]))
    nothing = _nothing(call)

    def backward(inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, operands, dropout, packed, _ = inputs
        if 0 in (q.shape[1], k.shape[1]):
            return nothing(inputs, o, lse, do, dlse)
        workspaces = PackedWorkspaces(call, q, k, packed, cuts) if packed is not None else of_batch
        assert workspaces is not None
        lse2, delta = (q.new_empty(workspaces.q_rows, dtype=torch.float32) for _ in range(2))
        sums = () if dq_dim is None else (q.new_empty((*workspaces.q_rows, dq_dim), dtype=torch.float32),)
        of_lse = () if dlse is None else (dlse.contiguous(),)
        dq, dk, dv = (q.new_empty(shape) for shape in workspaces.gradients)
        q, k, v, o, do = map(one_batch, (q, k, v, o, do))
        kernels.prepare(*workspaces.work(tiles[0]), o, do, lse.contiguous(), *of_lse, lse2, delta, *sums)

        written_out = [
            _workspace(path, workspaces, operands, number == leaves) for number, path in enumerate(operand_paths)
        ]
        tensors = [as_bytes(tensor) for tensor in operands.tensors]
        seeds, of_pattern = pattern_arguments(dropout)
        numbers = (*of_pattern, *operands.ints, *operands.floats)
        if own_order:
            sums = tuple(x.view(*x.shape[:2], -1, COLUMNS) for x in sums)
        rows = (q, k, v, do, lse2, delta)
        work = workspaces.work(config.block_N, of_keys=True)
        kernels.main(*work, *rows, dk, dv, *sums, *written_out, *seeds, *tensors, *of_main, *numbers)
        if kernels.queries is not None:
            kernels.queries(*workspaces.work(tiles[1]), *rows, dq, *seeds, *tensors, *of_queries, *numbers)
        if kernels.finish is not None:
            kernels.finish(*workspaces.work(tiles[2]), dq, *sums, scale)
        dsink = None
        if sink is not None and call.needs[3]:
            dsink = _sink_gradient(sink, lse, workspaces.by_row(delta), packed)
        dtensors = [
            _tensor_gradient(index, operand_paths, written_out, operands, workspaces) if need else None
            for index, need in enumerate(call.needs[4:])
        ]
        wanted = [x if need else None for x, need in zip((dq, dk, dv), call.needs)]
        return Gradients(*wanted, dsink, tuple(dtensors))

    return backward


def _heads_side_by_side(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> int:
    """The number of heads whose tiles of queries run side by side in the kernel for dq alone.

    Those are the heads of one kv head's group, which read the same keys; under a mask, of several groups.
    """
    _, _, heads, head_dim = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    group = heads // kv_heads
    if program(call.forward.variant).allows is None:
        return group
    row_bytes = 2 * (head_dim + call.forward.head_dim_v)  # of k and v
    fitting = max(L2_BYTES // (row_bytes * seqlen_k), MIN_SIDE_BY_SIDE)
    return group * max(d for d in divisors(_together(call, q_shape) * kv_heads) if d <= fitting)


def _kv_heads_side_by_side(call: BackwardCall, q_shape: torch.Size, kv_heads: int) -> int:
    """The number of kv heads whose tiles of keys run side by side: a divisor of all, so that the grid has no gaps.

    Without a mask it is 1: blocks that run together read the same queries and add to the same dq. Under a mask tiles
    differ in cost, and with several heads long tiles can start first; but the heads' queries and sums should stay in
    the L2 cache.
    """
    _, seqlen_q, heads, head_dim = q_shape
    if program(call.forward.variant).allows is None:
        return 1
    row_bytes = 2 * (head_dim + call.forward.head_dim_v) + 4 * head_dim  # of q, do and dq's sums
    fitting = max(L2_BYTES // (row_bytes * seqlen_q * (heads // kv_heads)), MIN_SIDE_BY_SIDE)
    return max(d for d in divisors(_together(call, q_shape) * kv_heads) if d <= fitting)


def _together(call: BackwardCall, q_shape: torch.Size) -> int:
    """Batch elements whose heads may run side by side: all, or 1 for packed sequences."""
    return 1 if call.forward.packed else q_shape[0]


def _nothing(call: BackwardCall) -> Callable[..., Gradients]:
    """The gradients of calls without rows or keys: zeros, except the sink's: lse equals the sink there."""

    def backward(inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, operands, _, packed, _ = inputs
        zeros = [
            None if tensor is None or not need else torch.zeros_like(tensor)
            for tensor, need in zip((q, k, v, sink, *operands.tensors), call.needs, strict=True)
        ]
        dsink = zeros[3]
        if sink is not None and dsink is not None:
            delta = (do.float() * o.float()).sum(dim=-1).transpose(1, 2)  # 0, or NaN
            delta = delta if dlse is None else delta - dlse
            dsink = _sink_gradient(sink, lse, delta, packed)
        return Gradients(*zeros[:3], dsink, tuple(zeros[4:]))

    return backward


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor, packed: Packed | None) -> Tensor:
    """The sink's gradient. Where lse is -inf in a packed call, the row may belong to no sequence, and delta be NaN."""
    return sink_gradient(sink, lse, delta if packed is None else delta.masked_fill(lse == -torch.inf, 0.0))


def _workspace(path: Path, workspaces: BatchWorkspaces | PackedWorkspaces, operands: Operands, leaves: bool) -> Tensor:
    """The zeroed workspace that the main kernel writes a path's gradients to.

    Args:
        leaves: whether the kernel stores by TMA, for which rows must begin at multiples of 16 bytes.
    """
    tensor = operands.tensors[path.tensor]
    shape = workspaces.shapes.get(path.way, tensor.shape)
    dtype = tensor.dtype if path.way == STORED else torch.float32
    if not leaves:
        return tensor.new_zeros(shape, dtype=dtype)
    *outer, columns = shape
    step = 16 // dtype.itemsize
    return tensor.new_zeros((*outer, -(-columns // step) * step), dtype=dtype)[..., :columns]


def _tensor_gradient(
    index: int,
    operand_paths: tuple[Path, ...],
    parts: list[Tensor],
    operands: Operands,
    workspaces: BatchWorkspaces | PackedWorkspaces,
) -> Tensor:
    """The gradient of one of the variant's tensors, from what the main kernel wrote for each path."""
    tensor = operands.tensors[index]
    its = [(path, part) for path, part in zip(operand_paths, parts) if path.tensor == index]
    whole = [part for path, part in its if path.way not in AXES]
    if len(its) == len(whole) == 1:
        return whole[0].to(tensor.dtype)
    total = tensor.new_zeros(tensor.shape, dtype=torch.float32)
    for part in whole:
        total += part
    for path, part in its:
        if path.way in AXES:
            workspaces.add_up(total, path, part, operands)
    return total.to(tensor.dtype)
