"""Prepared calls: a table of checked and dispatched calls, which keeps the host's latency low.

A prepared call is eager and has no score modification, no sink and no dropout; its mask, if any, holds numbers and, in
a dense call without gradients, tensors. Its arguments are checked and its backend is chosen once for each combination
of tensor metadata, numbers and options. Later calls with equal ones reuse what was prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..call.expected import expecting
from ..call.facts import Packed, sizes
from ..call.fp8 import FP8, complete
from ..call.inputs import Inputs, Operands, inputs_of
from ..call.sequences import check_metadata
from ..call.validation import check_arguments, check_descales, check_packed_arguments
from ..tuner import state
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.validation import check_operand_devices, check_variant
from . import operators as ops
from .differentiable import Differentiable
from .dispatch import Forward, prepare_forward
from .operators import NO_DESCALES, GivenDescales, Options
from .run import Choices, as_bshd, checked_choices, requires_grad, scale_or_default
from .tables import kept

GivenChoices = tuple[bool, float | None, bool, bool, str | None]  # the fields of Choices, unchecked

# Prepared calls by tensor metadata, the mask's constants and options. Those of attention() take q, k, v (bshd), the
# mask's tensors and the descales; those of varlen_attention() take q, k, v, cu_seqlens_q and cu_seqlens_k. Both return
# o and lse.
FORWARDS: dict[tuple[Any, ...], Callable[..., tuple[torch.Tensor, torch.Tensor | None]]] = {}
state.forgets(FORWARDS.clear)  # prepared passes depend on the tuner's results


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: GivenDescales | None,
    layout: str,
    mask: Mask | None,
    constants: tuple[Any, ...] | None,
    tensors: list[torch.Tensor] | None,
    given: GivenChoices,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o (bshd) and lse of a call of :func:`tileattn.attention`, with q, k and v in `layout`.

    Args:
        mask: None, or a mask that has constants.
        constants, tensors: those that :func:`tileattn.variant.constants.constants_of` finds in it. There is no tensor
            in a call that needs gradients.
        given: the choices as the user gave them.
    """
    causal, _, return_lse, deterministic, _ = given
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, layout, grad,
            constants, given,
            type(causal), type(return_lse), type(deterministic),  # 1 == True, but must not find its forward pass
        )  # fmt: skip
        if descales is not None:
            key += tuple(map(_facts, descales))
        run = FORWARDS.get(key)
    except (TypeError, RuntimeError):  # an unhashable option or a tensor without strides: the checks raise
        _prepare_attention(q, k, v, descales, layout, mask, given, grad)
        raise
    if run is None:
        run = kept(FORWARDS, key, _prepare_attention(q, k, v, descales, layout, mask, given, grad))
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if descales is not None:
        return run(q, k, v, tensors, descales)
    return run(q, k, v, tensors) if tensors else run(q, k, v)


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    mask: Mask | None,
    constants: tuple[Any, ...] | None,
    given: GivenChoices,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and lse of a call of :func:`tileattn.varlen_attention`. The other arguments are as above.

    What is prepared does not depend on the number of rows of the tensors. The batches of a training run therefore share
    it if their `max_seqlen` and number of sequences are equal.
    """
    causal, _, return_lse, deterministic, _ = given
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    of_q, of_k, longest_q, longest_k = packed
    try:
        key = (
            q.shape[1:], k.shape[1:], v.shape[1:], k.shape[0] == v.shape[0], q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, of_q.shape, of_k.shape, of_q.stride(), of_k.stride(),
            of_q.dtype, of_k.dtype, of_q.device, of_k.device, longest_q, longest_k, type(longest_q), type(longest_k),
            grad, constants, given, type(causal), type(return_lse), type(deterministic),
        )  # fmt: skip
        run = FORWARDS.get(key)
    except (TypeError, RuntimeError, AttributeError):  # an argument of a wrong type: the checks raise
        _prepare_varlen(q, k, v, packed, mask, given, grad)
        raise
    if run is None:
        run = kept(FORWARDS, key, _prepare_varlen(q, k, v, packed, mask, given, grad))
    return run(q, k, v, of_q, of_k)


def _facts(descale: Any) -> tuple[Any, ...] | None:
    """The metadata of a descale that is checked."""
    if isinstance(descale, torch.Tensor):
        return descale.shape, descale.dtype, descale.device, descale.requires_grad and torch.is_grad_enabled()
    return None if descale is None else (type(descale),)


def _prepare_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: GivenDescales | None,
    layout: str,
    mask: Mask | None,
    given: GivenChoices,
    needs_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    check_arguments(q, k, v, None, 0.0, layout, given[1])
    choices = checked_choices(*given)
    q, k, v = as_bshd(layout, q, k, v)
    if descales is not None:
        check_descales(descales, q, k)
        needs_grad |= torch.is_grad_enabled() and requires_grad(descales)
    inputs, variant = _with_mask(Inputs(q, k, v), mask, choices.causal)
    if needs_grad:
        call = _differentiable(inputs, variant, choices)
        return call if descales is None else lambda q, k, v, tensors, descales: call(q, k, v)
    numbers = Operands([], inputs.operands.ints, inputs.operands.floats)  # the table keeps no tensor
    return functools.partial(_run, _forward(inputs, variant, choices), numbers, q.dtype == FP8)


def _prepare_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    mask: Mask | None,
    given: GivenChoices,
    needs_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    check_packed_arguments(q, k, v, None, 0.0, given[1])
    choices = checked_choices(*given)
    check_metadata(packed, q.device)
    inputs, variant = _with_mask(Inputs(q[None], k[None], v[None], packed=packed), mask, choices.causal)
    if needs_grad:
        return _differentiable(inputs, variant, choices)
    return functools.partial(_run_packed, _forward(inputs, variant, choices), inputs.operands, packed[2:])


def _with_mask(inputs: Inputs, mask: Mask | None, causal: bool) -> tuple[Inputs, str]:
    """The inputs with the mask's numbers, and the variant's key."""
    whole, _ = normalize(mask, None, causal)
    (batch, seqlen_q, heads, _), of_k = sizes(inputs.q, inputs.k, inputs.packed)
    check_variant(whole, (), batch, heads, seqlen_q, of_k[1])  # not of BlockSparse, which has no constants
    variant, operands = encode(whole, ())
    check_operand_devices(operands.tensors, inputs.q)
    return inputs._replace(operands=operands), variant


def _forward(inputs: Inputs, variant: str, choices: Choices) -> Forward:
    call = ops.make_call(inputs, variant, return_lse=choices.return_lse)
    scale = scale_or_default(choices.scale, inputs.q)
    return prepare_forward(call, choices.backend, *sizes(inputs.q, inputs.k, inputs.packed), scale)


def _differentiable(inputs: Inputs, variant: str, choices: Choices) -> Differentiable:
    _, scale, return_lse, deterministic, backend = choices
    call = ops.make_call(inputs, variant, needs_grad=True)
    scale = scale_or_default(scale, inputs.q)
    with expecting(deterministic or ops.is_deterministic(), inputs.operands):
        forward = prepare_forward(call, backend, *sizes(inputs.q, inputs.k, inputs.packed), scale)
    options = Options(variant, scale, backend, deterministic, True)
    longest = None if inputs.packed is None else inputs.packed[2:]
    return Differentiable(options, forward, inputs.operands, longest, return_lse)


def _run(
    forward: Forward,
    operands: Operands,
    is_fp8: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: list[torch.Tensor] | None = None,
    descales: GivenDescales = NO_DESCALES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs a prepared forward pass. Descales of an fp8 call that are not given are ones."""
    if tensors:
        operands = Operands(tensors, operands.ints, operands.floats)
    return forward(inputs_of((q, k, v, None, operands, None, None, complete(*descales, k) if is_fp8 else None, None)))


def _run_packed(
    forward: Forward,
    operands: Operands,
    longest: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs a prepared forward pass on tensors without a batch dimension."""
    packed = Packed(cu_seqlens_q, cu_seqlens_k, *longest)
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    o, lse = forward(inputs_of((q, k, v, None, operands, None, packed, None, None)))
    return o.squeeze(0), None if lse is None else lse.squeeze(0)
