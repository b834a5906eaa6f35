"""The launch of the backward pass: workspaces, kernels, and the gradients left to PyTorch's operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ....call.dropout import Dropout
from ....call.facts import BackwardCall, Gradients, Packed
from ....call.inputs import Inputs, Operands
from ....tuner.space import Space
from ....variant.program import program
from ...scale import scaled_first
from ...sink import sink_gradient
from ...tile_lists import Sizes
from ..architecture import padded_finely
from ..build.background import behind
from ..host import as_bytes, one_batch, pattern_arguments
from ..tuned import sizes_of
from .config import BackwardConfig, read_together
from .defaults import MainConfig, adds_dq, default, finished, prepared, queries_default
from .hopper.config import leaving
from .jobs import jobs_of
from .library import Kernels, add_shares, backward_kernels, longest_first, main_kernel
from .listed import cuts_of, lists_for, packed_backward, with_lists
from .operand_gradients import paths
from .shares.choice import of_lengths, split
from .shares.last_wave import Dealt, dealt, first_keys, later_keys, whole_part
from .shares.order import heads_together
from .shares.side_by_side import heads_side_by_side
from .space import backward_space as space_with
from .space import tuned_config
from .tensor_gradients import tensor_gradients, written_to
from .two_streams import launch_beside, runs_beside
from .workspaces import BatchWorkspaces, PackedWorkspaces, rows_of


def prepare_backward(
    call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., Gradients]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    if q_shape[0] == 0 or q_shape[1] == 0 or k_shape[1] == 0:
        return _nothing(call)
    call = _specialised(call, scale)
    if call.forward.packed:
        longest = q_shape[1], k_shape[1]
        return packed_backward(
            call, longest, lambda config: prepare_backward_with(config, call, q_shape, k_shape, scale)
        )
    config, of_groups = configured(call, q_shape, k_shape)
    with behind(lambda: longest_first(jobs_of(call, config or default(call), of_groups))):
        return prepare_backward_with(config, call, q_shape, k_shape, scale, *of_groups)


def configured(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size) -> tuple[MainConfig | None, Dealt]:
    """A dense call's configuration of the main kernel, None for the default, and how groups are dealt to blocks.

    call: what its kernels are compiled for.
    """
    config = tuned_config(call, sizes_of(q_shape, k_shape))
    if config is None:
        config = of_lengths(call, q_shape[1], k_shape[1])
    listed = with_lists(config or default(call), call, q_shape, k_shape)
    return listed or config, dealt(call, listed or config or default(call), q_shape, k_shape)


def _specialised(call: BackwardCall, scale: float) -> BackwardCall:
    """The call that its kernels are compiled for."""
    forward = scaled_first(call.forward, scale)
    return call if forward is call.forward else dataclasses.replace(call, forward=forward)


def backward_space(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> Space | None:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    if q_shape[0] == 0 or q_shape[1] == 0 or k_shape[1] == 0 or call.forward.packed:
        return None
    call = _specialised(call, scale)

    def of_groups(config: MainConfig) -> Dealt:
        return dealt(call, launched(config), q_shape, k_shape)

    def launched(config: MainConfig) -> MainConfig:
        return with_lists(config, call, q_shape, k_shape) or config

    return space_with(
        call,
        sizes_of(q_shape, k_shape),
        lambda config: prepare_backward_with(launched(config), call, q_shape, k_shape, scale, *of_groups(config)),
        lambda config: jobs_of(call, launched(config), of_groups(config)),
    )


def prepare_backward_with(
    tuned: MainConfig | None,
    call: BackwardCall,
    q_shape: torch.Size,
    k_shape: torch.Size,
    scale: float,
    shares: int = 1,
    whole_keys: int = 0,
) -> Callable[..., Gradients]:
    """The backward pass with a given main kernel, None for the default; `call` is what its kernels are compiled for.

    Args:
        shares: blocks that share the query heads of a group.
        whole_keys: how many keys, from the first on, have one block for a whole group instead (shares/last_wave.py).
    """
    heads = q_shape[2]
    before = _before(call, tuned, q_shape, first_keys(k_shape, whole_keys), scale, shares) if whole_keys else None
    later_shape = later_keys(k_shape, whole_keys)
    tuned = _shared(tuned, call, shares, heads // k_shape[2])
    config = default(call) if tuned is None else tuned
    operand_paths = paths(call)
    leaves = (leaving(config, read_together(call), operand_paths) or (None,))[0]
    kernels = backward_kernels(call) if tuned is None else backward_kernels(call, tuned)
    dq_dim = padded_finely(call.forward.head_dim) if adds_dq(call) else None
    own_order = not isinstance(config, BackwardConfig)
    of_main = _of_main(call, config, q_shape, later_shape, scale, shares)
    of_queries = _of_queries(call, q_shape, k_shape, scale)
    of_batch = None if call.forward.packed else BatchWorkspaces(call, config, q_shape, k_shape)
    tiles = prepared(call).tile, queries_default(call).block_M, finished(call, config).tile
    cuts = tuple(dict.fromkeys([(tiles[0], False), (config.block_N, True), (tiles[1 if dq_dim is None else 2], False)]))
    whole = call.needs == (True, True, True, False)
    listed = own_order and config.listed
    cut_of_main, cut_of_queries = cuts_of(call, config) if listed else (None, None)
    sizes = Sizes(q_shape[0], heads, q_shape[1], k_shape[1])
    beside = runs_beside(call, config, q_shape, k_shape)
    if of_batch is not None and whole and shares == 1 and not listed and _is_plain(call, kernels):
        assert dq_dim is not None
        return _plain(kernels, of_batch, dq_dim, own_order, of_main)

    def backward(inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, _, operands, dropout, packed, _, out = inputs
        if q.shape[1] == 0 or k.shape[1] == 0:
            return _nothing(call)(inputs, o, lse, do, dlse)
        workspaces = PackedWorkspaces(call, q, k, packed, cuts) if packed is not None else of_batch
        assert workspaces is not None
        lse2, delta, sums, ordered = rows_of(q, workspaces.q_rows, dq_dim, own_order)
        of_q, of_k, of_v = workspaces.gradients
        dq = q.new_empty(*of_q) if out is None else out
        dk, dv = q.new_empty(*of_k), q.new_empty(*of_v)
        if not (q.stride(0) and k.stride(0) and v.stride(0) and o.stride(0) and do.stride(0)):
            q, k, v, o, do = map(one_batch, (q, k, v, o, do))
        of_lse = () if dlse is None else (dlse.contiguous(),)
        kernels.prepare(*workspaces.work(tiles[0]), o, do, lse.contiguous(), *of_lse, lse2, delta, *sums)
        written_out = written_to(operand_paths, workspaces, operands, leaves)
        tensors, numbers = _of_variant(operands, dropout, heads)

        rows = (q, k, v, do, lse2, delta)
        work = workspaces.work(config.block_N, of_keys=True)
        lists, steps = lists_for(call, inputs, sizes, cut_of_main, work)
        its, parts = _of_later(rows, (dk, dv), shares, whole_keys)

        def run_main() -> None:  # allocates nothing: it may run on a second stream
            if before is not None:
                before(rows, (dk, dv), ordered)
            kernels.main(*work, *its, *parts, *ordered, *written_out, *lists, *tensors, *of_main, *steps, *numbers)
            if shares > 1:
                _add_up(call, parts, (dk, dv), whole_keys)

        def run_queries() -> None:
            assert kernels.queries is not None
            lists, steps = lists_for(call, inputs, sizes, cut_of_queries, of_tiles)
            kernels.queries(*of_tiles, *rows, dq, *lists, *tensors, *of_queries, *steps, *numbers)

        of_tiles = () if kernels.queries is None else workspaces.work(tiles[1])
        _launch(run_main, run_queries if kernels.queries else None, q.device if beside else None)
        if kernels.finish is not None:
            kernels.finish(*workspaces.work(tiles[2]), dq, *ordered, scale)
        if whole:
            return Gradients(dq, dk, dv, None, ())
        of_tensors = tensor_gradients(call, operand_paths, written_out, operands, workspaces)
        return _wanted(call, (dq, dk, dv), inputs, lse, workspaces.by_row(delta), of_tensors)

    return backward


def _wanted(
    call: BackwardCall,
    gradients: tuple[Tensor, ...],
    inputs: Inputs,
    lse: Tensor,
    delta: Tensor,
    of_tensors: tuple[Tensor | None, ...],
) -> Gradients:
    """The gradients that a call needs, with the sink's."""
    dsink = None
    if inputs.sink is not None and call.needs[3]:
        dsink = _sink_gradient(inputs.sink, lse, delta, inputs.packed)
    return Gradients(*(x if need else None for x, need in zip(gradients, call.needs)), dsink, of_tensors)


def _launch(main: Callable[[], None], queries: Callable[[], None] | None, beside: torch.device | None) -> None:
    """Launches the kernel for dk and dv, and that for dq if there is one: on two streams of the device `beside`."""
    if beside is not None and queries is not None:
        launch_beside(queries, main, beside)
        return
    main()
    if queries is not None:
        queries()


def _shared(tuned: MainConfig | None, call: BackwardCall, shares: int, group: int) -> MainConfig | None:
    """The main kernel's configuration with a number of shares; None for the default without."""
    if shares > group:
        raise ValueError(f"shares is {shares}, and a group has {group} heads: it must be at most that")
    if shares == 1:
        return tuned
    add_shares(call)  # loaded now, with the other kernels
    return split(call, tuned or default(call), shares)


def _of_main(
    call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size, scale: float, shares: int
) -> tuple[float, ...]:
    """The numbers that the main kernel takes of the call."""
    numbers = (scale, q_shape[2] // k_shape[2])
    if isinstance(config, BackwardConfig):
        return numbers
    return (*numbers, heads_together(call, config, q_shape, k_shape, shares))


def _of_queries(call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> tuple[float, ...]:
    """The same for the kernel for dq alone."""
    numbers = (scale, q_shape[2] // k_shape[2])
    if isinstance(queries_default(call), BackwardConfig):
        return numbers
    return (*numbers, heads_side_by_side(call, q_shape, k_shape))


def _is_plain(call: BackwardCall, kernels: Kernels) -> bool:
    """Whether kernels take no other tensors than the pass itself has, and the main one adds up dq."""
    forward = call.forward
    others = forward.packed or forward.sink or forward.dropout or call.dlse or program(forward.variant).tensors
    return not others and kernels.queries is None


def _plain(
    kernels: Kernels, workspaces: BatchWorkspaces, dq_dim: int, own_order: bool, scalars: tuple[float, ...]
) -> Callable[..., Gradients]:
    """The pass of a call whose variant has numbers only, in as few operations of the host as there are.

    Short passes take the host longer than the GPU.

    Args:
        scalars: of the main kernel, first the scale.
    """
    prepare, main, finish, _ = kernels
    assert finish is not None
    q_rows = workspaces.q_rows
    of_q, of_k, of_v = workspaces.gradients

    def backward(inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, _, operands, _, _, _, out = inputs
        lse2, delta, (sums,), (ordered,) = rows_of(q, q_rows, dq_dim, own_order)
        dq = q.new_empty(*of_q) if out is None else out
        dk, dv = q.new_empty(*of_k), q.new_empty(*of_v)
        if not (q.stride(0) and k.stride(0) and v.stride(0) and o.stride(0) and do.stride(0)):
            q, k, v, o, do = map(one_batch, (q, k, v, o, do))
        prepare(o, do, lse.contiguous(), lse2, delta, sums)
        main(q, k, v, do, lse2, delta, dk, dv, ordered, *scalars, *operands.ints, *operands.floats)
        finish(dq, ordered, scalars[0])
        return Gradients(dq, dk, dv, None, ())

    return backward


def _before(
    call: BackwardCall,
    tuned: MainConfig | None,
    q_shape: torch.Size,
    k_shape: torch.Size,
    scale: float,
    shares: int,
) -> Callable[[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]], None]:
    """The launch for the first keys, of shape `k_shape`, each of whose groups has one block.

    It takes (q, k, v, do, lse2, delta), (dk, dv) and dq's sums, and fills dk and dv of these keys.
    """
    call, config = whole_part(call, tuned or default(call), shares)
    main = main_kernel(call, config)
    numbers = _of_main(call, config, q_shape, k_shape, scale, 1)
    count = k_shape[1]

    def launch(rows: tuple[Tensor, ...], gradients: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
        q, k, v, *others = rows
        main(q, k[:, :count], v[:, :count], *others, *(x[:, :count] for x in gradients), *sums, *numbers)

    return launch


def _of_later(
    rows: tuple[Tensor, ...], gradients: tuple[Tensor, ...], shares: int, whole_keys: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the launch for the keys from `whole_keys` on takes: (q, k, v, ...), and where it stores dk and dv."""
    if whole_keys:
        q, k, v, *others = rows
        rows = (q, k[:, whole_keys:], v[:, whole_keys:], *others)
        gradients = tuple(x[:, whole_keys:] for x in gradients)
    return rows, gradients if shares == 1 else _parts(shares, *gradients)


def _parts(shares: int, *gradients: Tensor) -> tuple[Tensor, ...]:
    """The workspaces of the shares' float32 parts of dk and dv, side by side for each key."""
    return tuple(x.new_empty((*x.shape[:2], shares * x.shape[2], x.shape[3]), dtype=torch.float32) for x in gradients)


def _add_up(call: BackwardCall, parts: tuple[Tensor, ...], gradients: tuple[Tensor, ...], whole_keys: int) -> None:
    """Adds up the shares' parts of dk and dv, of the keys from `whole_keys` on."""
    batch, keys, kv_heads, _ = gradients[0].shape
    shares = parts[0].shape[2] // kv_heads
    by_share = (x.view(batch, keys - whole_keys, shares, -1, 8) for x in parts)
    add_shares(call)(*by_share, *(x.view(batch, keys, -1, 8) for x in gradients), whole_keys)


def _nothing(call: BackwardCall) -> Callable[..., Gradients]:
    """The gradients of calls without rows or keys: zeros, except the sink's: lse equals the sink there."""

    def backward(inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, operands, _, packed, *_ = inputs
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


def _of_variant(
    operands: Operands, dropout: Dropout | None, heads: int
) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """The tensors and the numbers that kernels take for dropout, the mask and the score modifications."""
    if dropout is None and not operands.tensors:
        return (), (*operands.ints, *operands.floats)
    seeds, of_pattern = pattern_arguments(dropout, heads)
    return (*seeds, *map(as_bytes, operands.tensors)), (*of_pattern, *operands.ints, *operands.floats)
