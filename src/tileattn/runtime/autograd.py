"""Autograd: the gradients of o and lse with respect to the tensors of a call.

There are two implementations, which run the same backward pass:

- Eager calls and torch.func use a `torch.autograd.Function`, which has less host overhead than an operator.
- Tracers see the operators `tileattn::forward` and `tileattn::backward` of :mod:`tileattn.runtime.operators`. Their
  autograd formula is registered here.

q, k, v, o, lse, the sink, the variant's tensors, the dropout seed and cu_seqlens are saved for the backward pass. None
of them grows with seqlen_q * seqlen_k, except a bias of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..call.inputs import Inputs, Numbers, join, separate
from . import operators as ops
from .operators import Options


def attend(options: Options, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """o and lse of an eager call, differentiable in q, k, v (bshd), sink and the operands' tensors."""
    function = _UnderTorchFunc if torch._C._are_functorch_transforms_active() else Attention
    numbers, tensors = separate(inputs)
    o, lse = function.apply(options, numbers, *tensors)
    return o, lse


def _forward(options: Options, numbers: Numbers, *tensors: Any) -> tuple[Tensor, Tensor]:
    """The forward pass. Here and below, `tensors` are those that :func:`separate` returns."""
    inputs = join(numbers, *tensors)
    run = ops.trace_forward if ops.is_traced(inputs.q) else ops.run_forward
    return run(options, inputs)


def _backward(
    options: Options,
    numbers: Numbers,
    needs: Sequence[bool],
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *tensors: Any,
) -> tuple[Tensor, ...]:
    """The gradients that `needs` asks for, of q, k, v, sink and the operands' tensors."""
    run = ops.trace_backward if ops.is_traced(do) else ops.run_backward
    return tuple(run(options, join(numbers, *tensors), needs, o, lse, do, dlse))


def _save(
    ctx: Any, options: Options, numbers: Numbers, tensors: Sequence[Tensor | None], output: tuple[Tensor, Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)
    ctx.constants = options, numbers


def gradients(
    constants: tuple[Options, Numbers],
    saved: Sequence[Any],
    do: Tensor | None,
    dlse: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of q, k, v, sink and the variant's tensors; None where `needs` is False.

    saved: o, lse, and the tensors that :func:`separate` returns.
    """
    if do is None and dlse is None:
        return [None] * len(needs)
    o, lse, *tensors = saved
    do = torch.zeros_like(o) if do is None else do
    # Gradients are enabled here only by create_graph=True and by torch.func.
    run: Any = _Backward.apply if torch.is_grad_enabled() and not ops.is_traced(do) else _backward
    wanted = iter(run(*constants, needs, do, dlse, o, lse, *tensors))
    return [next(wanted) if need else None for need in needs]


def input_gradients(
    options: Options,
    inputs: Inputs,
    needs: Sequence[bool],
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """The same, from inputs."""
    numbers, tensors = separate(inputs)
    return gradients((options, numbers), (o, lse, *tensors), do, dlse, needs)


# --- Eager calls ------------------------------------------------------------------------------------------------------


_BEFORE_Q = 5  # arguments: options, numbers, seed, cu_seqlens_q, cu_seqlens_k


class Attention(torch.autograd.Function):
    """An eager call."""

    @staticmethod
    def forward(ctx, options, numbers, *tensors):
        output = _forward(options, numbers, *tensors)
        _save(ctx, options, numbers, tensors, output)
        return output

    @staticmethod
    def backward(ctx, do, dlse):
        needs = ctx.needs_input_grad[_BEFORE_Q:]
        return *[None] * _BEFORE_Q, *gradients(ctx.constants, ctx.saved_tensors, do, dlse, needs)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "tileattn.attention has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): its "
            "gradients are those of reverse mode"
        )


class _UnderTorchFunc(Attention):
    """The same Function in the form that torch.func needs. Its arguments take longer to bind."""

    forward = staticmethod(_forward)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx, inputs, output):
        options, numbers, *tensors = inputs
        _save(ctx, options, numbers, tensors, output)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        _refuse_vmap()


class _Backward(torch.autograd.Function):
    """The backward pass as a Function, so that a second derivative raises a clear error."""

    forward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        _refuse_second_derivative()

    @staticmethod
    def vmap(info, in_dims, *arguments):
        _refuse_vmap()


def _refuse_second_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "tileattn.attention has no second derivatives: its backward pass (create_graph=True, torch.func.hessian) "
        "cannot be differentiated"
    )


def _refuse_vmap(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "tileattn.attention is not mapped by torch.func.vmap: make the mapped dimension a part of the batch"
    )


# --- The operators ----------------------------------------------------------------------------------------------------

# Argument positions in `ops.forward`.
_SINK, _TENSORS, _INTS, _FLOATS = 3, 5, 6, 7


def _setup_context(ctx, inputs, output):
    q, k, v, sink, variant, tensors, ints, floats, scale, backend, *_ = inputs
    *_, deterministic, needs_grad, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = inputs
    options = Options(variant, scale, backend, deterministic, needs_grad)
    numbers = Numbers(ints, floats, dropout_p, max_seqlen_q, max_seqlen_k)
    _save(ctx, options, numbers, (seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, *tensors), output)


def _of_arguments(ctx, do, dlse):
    """Gradients for the arguments of `ops.forward`. torch.library leaves out arguments that have their defaults."""
    needs = ctx.needs_input_grad
    wanted = [*needs[: _SINK + 1], *needs[_TENSORS]]
    of_tensors = gradients(ctx.constants, ctx.saved_tensors, do, dlse, wanted)
    given: list[Any] = [None] * len(needs)
    given[: _SINK + 1], given[_TENSORS] = of_tensors[: _SINK + 1], of_tensors[_SINK + 1 :]
    # torch.library takes an empty list of numbers for a list of tensors, whose gradient must be a list.
    _, numbers = ctx.constants
    given[_INTS], given[_FLOATS] = ([] if len(x) == 0 else None for x in (numbers.ints, numbers.floats))
    return tuple(given)


ops.forward.register_autograd(_of_arguments, setup_context=_setup_context)
ops.backward.register_autograd(_refuse_second_derivative)
ops.forward.register_vmap(_refuse_vmap)
ops.backward.register_vmap(_refuse_vmap)
