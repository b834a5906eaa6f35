"""Prepared forward passes: a cache of checked and dispatched plain calls, which keeps the host's latency low.

A plain call is eager and has no mask but causal, no score modification, no sink and no dropout. Its arguments are
checked and its backend is chosen once for each combination of tensor metadata and options. Later calls with equal
metadata and options reuse the prepared forward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..call.facts import Packed, sizes
from ..call.fp8 import FP8, complete
from ..call.inputs import NO_OPERANDS, Inputs, inputs_of
from ..call.sequences import check_metadata
from ..call.validation import check_arguments, check_descales, check_packed_arguments
from ..tuner import state
from ..variant.key import encode, normalize
from . import autograd
from . import operators as ops
from .dispatch import Forward, prepare_forward, select
from .operators import NO_DESCALES, GivenDescales, Options
from .run import Choices, as_bshd, checked_choices, requires_grad, scale_or_default
from .tables import kept

GivenChoices = tuple[bool, float | None, bool, bool, str | None]  # the fields of Choices, unchecked

# Prepared forward passes by tensor metadata and options.
FORWARDS: dict[tuple[Any, ...], Forward] = {}
state.forgets(FORWARDS.clear)  # prepared passes depend on the tuner's results


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: GivenDescales | None,
    layout: str,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o (bshd) and lse of a plain call of :func:`tileattn.attention`, with q, k and v in `layout`."""
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, layout, grad,
            causal, scale, return_lse, deterministic, backend,
            type(causal), type(return_lse), type(deterministic),  # 1 == True, but must not find its forward pass
        )  # fmt: skip
        if descales is not None:
            key += tuple(map(_facts, descales))
        forward = FORWARDS.get(key)
    except (TypeError, RuntimeError):  # an unhashable option or a tensor without strides: the checks raise
        _prepare_attention(q, k, v, descales, layout, (causal, scale, return_lse, deterministic, backend), grad)
        raise
    if forward is None:
        choices = (causal, scale, return_lse, deterministic, backend)
        forward = kept(FORWARDS, key, _prepare_attention(q, k, v, descales, layout, choices, grad))
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    of_fp8 = None if descales is None else complete(*descales, k)
    return forward(inputs_of((q, k, v, None, NO_OPERANDS, None, None, of_fp8)))


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    causal: bool,
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and lse, with one batch element, of a plain call of :func:`tileattn.varlen_attention`.

    The prepared forward pass does not depend on the number of rows of the tensors. The batches of a training run
    therefore share one if their `max_seqlen` and number of sequences are equal.
    """
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        of_q, of_k, *longest = packed
        key = (
            q.shape[1:], k.shape[1:], v.shape[1:], k.shape[0] == v.shape[0], q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, of_q.shape, of_k.shape, of_q.stride(), of_k.stride(),
            of_q.dtype, of_k.dtype, of_q.device, of_k.device, *longest, *map(type, longest), grad,
            causal, scale, return_lse, deterministic, backend,
            type(causal), type(return_lse), type(deterministic),  # 1 == True, but must not find its forward pass
        )  # fmt: skip
        forward = FORWARDS.get(key)
    except (TypeError, RuntimeError, AttributeError):  # an argument of a wrong type: the checks raise
        _prepare_varlen(q, k, v, packed, (causal, scale, return_lse, deterministic, backend), grad)
        raise
    if forward is None:
        choices = (causal, scale, return_lse, deterministic, backend)
        forward = kept(FORWARDS, key, _prepare_varlen(q, k, v, packed, choices, grad))
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    return forward(inputs_of((q, k, v, None, NO_OPERANDS, None, packed, None)))


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
    given: GivenChoices,
    needs_grad: bool,
) -> Forward:
    check_arguments(q, k, v, None, 0.0, layout, given[1])
    choices = checked_choices(*given)
    q, k, v = as_bshd(layout, q, k, v)
    if descales is not None:
        check_descales(descales, q, k)
        needs_grad |= torch.is_grad_enabled() and requires_grad(descales)
    forward = _prepare(Inputs(q, k, v), choices, needs_grad)
    # The dtype is tested here, at preparation, so that calls in other dtypes have no overhead.
    return functools.partial(_without_descales, forward) if descales is None and q.dtype == FP8 else forward


def _prepare_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, given: GivenChoices, needs_grad: bool
) -> Forward:
    check_packed_arguments(q, k, v, None, 0.0, given[1])
    choices = checked_choices(*given)
    check_metadata(packed, q.device)
    return _prepare(Inputs(q[None], k[None], v[None], packed=packed), choices, needs_grad)


def _prepare(inputs: Inputs, choices: Choices, needs_grad: bool) -> Forward:
    causal, scale, return_lse, deterministic, backend = choices
    variant, _ = encode(normalize(None, None, causal)[0], ())
    scale = scale_or_default(scale, inputs.q)
    call = ops.make_call(inputs, variant, needs_grad=needs_grad, return_lse=return_lse)
    if needs_grad:
        select(call, backend)  # only to raise a refusal here: `attend` prepares its own call, which returns lse
        return functools.partial(autograd.attend, Options(variant, scale, backend, deterministic, needs_grad))
    return prepare_forward(call, backend, *sizes(inputs.q, inputs.k, inputs.packed), scale)


def _without_descales(forward: Forward, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs an fp8 call without descales: those of q, k and v are ones."""
    return forward(inputs._replace(descales=complete(*NO_DESCALES, inputs.k)))
