"""The way of a decode call: its variant, its static facts and sizes, the choice of the backend, and the operator.

:func:`run` takes a call whose arguments are checked. An eager call goes straight to the backend's decode phase, which
is prepared once for each combination of facts and sizes. A traced call (torch.compile, torch.export, fake tensors)
goes through the operator `tileattn::decode`, which makes the same call when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.decode_validation import check_made_for, check_no_gradient, check_out
from ..call.decoding import DecodeCall, DecodeInputs, DecodePlan, DecodeSizes, FixedSplit, Splits
from ..call.facts import device_arch, is_aligned
from ..call.fp8 import accumulator
from ..call.inputs import NO_OPERANDS, Operands
from ..variant.evaluated import values_of
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.program import with_alignment
from ..variant.scores import with_first
from ..variant.sparse.blocks import for_call
from ..variant.tree_mask import TreeMask
from ..variant.validation import check_operand_devices, check_variant
from . import operators as ops
from .dispatch import PreparedDecode, prepare_decode

MOST_PAGE_ROWS = 64  # of DecodeCall.page_rows


class DecodeOptions(NamedTuple):
    """The options of a decode call whose variant is encoded.

    Attributes:
        variant: the key of the mask and the score modifications (:mod:`tileattn.variant.key`).
        scale: the factor of the scores.
        max_seqlen_q: q_len; for packed queries an upper bound of the lengths.
        splits: how the keys of a sequence are split.
        return_lse: whether lse is needed.
        backend: the name of one of :data:`tileattn.runtime.dispatch.BACKENDS`, or None.
    """

    variant: str
    scale: float
    max_seqlen_q: int
    splits: Splits
    return_lse: bool
    backend: str | None


def sizes_of(inputs: DecodeInputs, max_seqlen_q: int) -> DecodeSizes:
    """The sizes of a call."""
    q, k_cache, table = inputs.q, inputs.k_cache, inputs.page_table
    tokens = k_cache.shape[1]
    capacity, page_size = (tokens, 0) if table is None else (table.shape[1] * tokens, tokens)
    return DecodeSizes(
        inputs.seqlens_k.shape[0],
        max_seqlen_q,
        q.shape[0] * q.shape[1],
        q.shape[2],
        k_cache.shape[2],
        capacity,
        page_size,
    )


def make_decode_call(inputs: DecodeInputs, options: DecodeOptions) -> DecodeCall:
    """The static facts of a call."""
    q, k_cache, v_cache, tensors = inputs.q, inputs.k_cache, inputs.v_cache, inputs.operands.tensors
    look = _asks_for_alignment(q)
    splits, page_size = options.splits, 0 if inputs.page_table is None else k_cache.shape[1]
    return DecodeCall(
        dtype=q.dtype,
        head_dim=q.shape[3],
        head_dim_v=v_cache.shape[3],
        variant=with_alignment(options.variant, tensors) if look and tensors else options.variant,
        sink=inputs.sink is not None,
        aligned=not look or (is_aligned(q) and _has_aligned_rows(k_cache) and _has_aligned_rows(v_cache)),
        return_lse=options.return_lse,
        arch=device_arch(q.device),
        packed=inputs.cu_seqlens_q is not None,
        page_rows=page_rows_of(page_size),
        fixed=splits.keys if isinstance(splits, FixedSplit) else 0,
    )


def page_rows_of(page_size: int) -> int:
    """`DecodeCall.page_rows`: the largest power of two that divides the page size, at most 64; 0 for no pages."""
    return min(MOST_PAGE_ROWS, page_size & -page_size)


def _has_aligned_rows(cache: Tensor) -> bool:
    """Whether a cache is aligned; one that is expanded over its rows is not, for tensor maps cannot step by 0."""
    return is_aligned(cache) and (cache.stride(0) != 0 or cache.shape[0] == 1)


def _asks_for_alignment(q: Tensor) -> bool:
    """Whether the call asks for alignment, as only GPU kernels do. benchmarks/precompile.py replaces this function."""
    return q.is_cuda


def with_variant(
    inputs: DecodeInputs, max_seqlen_q: int, mask: Any, score_mod: Any, causal: bool, tree_mask: Tensor | None
) -> tuple[str, DecodeInputs]:
    """The key of the variant, and the inputs with its operands. Raises if the variant does not fit the call."""

    def first() -> Tensor:
        """The position of each sequence's first query."""
        ends = inputs.cu_seqlens_q
        return inputs.seqlens_k - (inputs.q.shape[1] if ends is None else ends.diff())

    given, mods = normalize(mask, score_mod, causal and tree_mask is None)
    if tree_mask is not None:
        tree: Mask = TreeMask(tree_mask, first())
        given = tree if given is None else tree & given
    if given is None and not mods:
        return "", inputs
    mods = with_first(mods, first)
    sizes = sizes_of(inputs, max_seqlen_q)
    given = for_call(given, lambda: (sizes.batch, sizes.heads, sizes.kv_heads, max_seqlen_q, sizes.capacity), first)
    check_variant(given, mods, sizes.batch, sizes.heads, max_seqlen_q, sizes.capacity)
    variant, operands = encode(given, mods)
    if operands.tensors or operands.ints or operands.floats:
        check_operand_devices(operands.tensors, inputs.q)
        inputs = inputs._replace(operands=operands)
    return variant, inputs


def prepared(inputs: DecodeInputs, options: DecodeOptions) -> PreparedDecode:
    """The decode phase that runs a call."""
    call, sizes = make_decode_call(inputs, options), sizes_of(inputs, options.max_seqlen_q)
    return prepare_decode(call, options.backend, sizes, options.scale, options.splits)


def run(inputs: DecodeInputs, options: DecodeOptions, plan: DecodePlan | None) -> tuple[Tensor, Tensor | None]:
    """o and lse of a call; lse may be None if it is not needed."""
    ops.refuse_transforms("tileattn.decode")
    check_no_gradient((inputs.q, inputs.k_cache, inputs.v_cache, inputs.sink, inputs.out, *inputs.operands.tensors))
    if inputs.out is not None:
        check_out(inputs.out, inputs)
    return (
        _trace(inputs, options, plan) if ops.is_traced(inputs.q) else run_phase(prepared(inputs, options), inputs, plan)
    )


def run_phase(phase: PreparedDecode, inputs: DecodeInputs, plan: DecodePlan | None) -> tuple[Tensor, Tensor | None]:
    """o and lse by a prepared phase, with the plan if there is one."""
    tensor = None
    if plan is not None:
        check_made_for(plan.made_for, planned_for(phase, inputs.operands))
        tensor = plan.tensor
    if inputs.out is not None and not inputs.out.is_inference():  # tensors made in inference mode have no version
        torch.autograd.graph.increment_version(inputs.out)
    return phase.run(inputs, tensor)


def make_plan(inputs: DecodeInputs, options: DecodeOptions) -> DecodePlan:
    """The plan of a call.

    Raises:
        NotImplementedError: the call is traced: the size of a plan is known when its backend has been chosen.
    """
    if ops.is_traced(inputs.q):
        raise NotImplementedError(
            "decode_plan is not traced: make the plan outside of torch.compile and torch.export, and pass it to decode"
        )
    phase = prepared(inputs, options)
    return DecodePlan(phase.run.plan(inputs), planned_for(phase, inputs.operands))


def planned_for(phase: PreparedDecode, operands: Operands) -> str:
    """What a plan of a call is made for (:class:`DecodePlan`): layers of one kernel may have windows of other sizes."""
    if not phase.of_mask:
        return phase.made_for
    values = values_of(operands)
    return f"{phase.made_for}, numbers={[values[name] for name in phase.of_mask]}"


# --- The operator ---


def _trace(inputs: DecodeInputs, options: DecodeOptions, plan: DecodePlan | None) -> tuple[Tensor, Tensor]:
    """The same as :func:`run`, by the operator."""
    q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, operands, out = inputs
    variant, scale, max_seqlen_q, splits, return_lse, backend = options
    number, fixed = (0, splits.keys) if isinstance(splits, FixedSplit) else (splits or 0, 0)
    tensor, made_for = (None, "") if plan is None else (plan.tensor, plan.made_for)
    caches = (q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink)
    numbers = (operands.ints, operands.floats, scale, max_seqlen_q, number, fixed)
    o, lse = decode(*caches, variant, operands.tensors, *numbers, return_lse, backend, tensor, made_for)
    # An operator that writes to `out` would have to mutate it under tracing; a copy of o, which is small, is simpler.
    return (o if out is None else out.copy_(o)), lse


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens_k: Tensor,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    sink: Tensor | None,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    scale: float,
    max_seqlen_q: int,
    splits: int = 0,
    fixed: int = 0,
    return_lse: bool = True,
    backend: str | None = None,
    plan: Tensor | None = None,
    made_for: str = "",
) -> tuple[Tensor, Tensor]:
    """The decode operator: :func:`run` with inputs as separate arguments.

    q is (batch, q_len, heads, head_dim), or (1, total_q, heads, head_dim) with cu_seqlens_q. `splits` is a number of
    parts and `fixed` the keys of a FixedSplit; 0 is neither. `made_for` is that of the plan, "" without one. lse is
    empty if it is not needed.
    """
    operands = Operands(list(tensors), list(ints), list(floats)) if tensors or ints or floats else NO_OPERANDS
    inputs = DecodeInputs(q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, operands)
    how: Splits = FixedSplit(fixed) if fixed else splits or None
    phase = prepared(inputs, DecodeOptions(variant, scale, max_seqlen_q, how, return_lse, backend))
    if made_for:
        check_made_for(made_for, planned_for(phase, operands))
    o, lse = phase.run(inputs, plan)
    if lse is None or not return_lse:
        lse = q.new_empty(0, dtype=accumulator(q.dtype))
    return o, lse


decode = torch.library.custom_op("tileattn::decode", _decode, mutates_args=())


@decode.register_fake
def _(q, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, sink, variant, tensors, *others):
    batch, seqlen_q, heads, _ = q.shape
    return_lse = others[6] if len(others) > 6 else True  # after ints, floats, scale, max_seqlen_q, splits and fixed
    lse_shape = (batch, heads, seqlen_q) if return_lse else (0,)
    return (
        q.new_empty(batch, seqlen_q, heads, v_cache.shape[3]),
        q.new_empty(lse_shape, dtype=accumulator(q.dtype)),
    )
