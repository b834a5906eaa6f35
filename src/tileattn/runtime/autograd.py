"""Gradients: how autograd gets from o and lse back to the tensors of a call.

Two ways lead there, to the same backward pass:

- Eager calls, and torch.func, run a `torch.autograd.Function`, which costs the host a part of what an operator does.
- What traces sees the operators `tileattn::forward` and `tileattn::backward` of :mod:`tileattn.runtime.operators`,
  whose formula is registered here.

Kept for the backward pass are q, k, v, o, lse, the sink and the variant's tensors: nothing that grows with
seqlen_q * seqlen_k but a bias that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..call.facts import Packed
from ..variant.key import Operands
from . import operators as ops


class Options(NamedTuple):
    """What a call with gradients is told besides tensors and numbers of its variant, as operators.py has it."""

    variant: str
    scale: float
    backend: str | None
    deterministic: bool
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


def attend(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    operands: Operands,
    seed: Tensor | None = None,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor]:
    """o and lse of an eager call, differentiable in q, k, v (bshd), sink and the operands' tensors."""
    function = _UnderTorchFunc if torch._C._are_functorch_transforms_active() else _Attention
    cu_seqlens_q = cu_seqlens_k = None
    if packed is not None:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packed
        options = options._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    constants = (options, operands.ints, operands.floats, seed, cu_seqlens_q, cu_seqlens_k)
    o, lse = function.apply(*constants, q, k, v, sink, *operands.tensors)
    return o, lse


def _forward(
    options: Options,
    ints: Sequence[int],
    floats: Sequence[float],
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    variant, scale, backend, deterministic, dropout_p, max_seqlen_q, max_seqlen_k = options
    run = ops.forward if ops.is_traced(q) else ops.run_forward
    return run(
        q,
        k,
        v,
        sink,
        variant,
        tensors,
        ints,
        floats,
        scale,
        backend,
        deterministic=deterministic,
        needs_grad=True,
        dropout_p=dropout_p,
        seed=seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _backward(
    options: Options,
    ints: Sequence[int],
    floats: Sequence[float],
    needs: Sequence[bool],
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, sink and tensors that `needs` asks for."""
    variant, scale, backend, deterministic, dropout_p, max_seqlen_q, max_seqlen_k = options
    run = ops.backward if ops.is_traced(do) else ops.run_backward
    constants = (ints, floats, scale, backend, deterministic, needs, dropout_p)
    state = (seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return tuple(run(do, dlse, q, k, v, o, lse, sink, variant, tensors, *constants, *state))


def _save(
    ctx: Any,
    options: Options,
    ints: Sequence[int],
    floats: Sequence[float],
    tensors: Sequence[Tensor | None],
    output: tuple[Tensor, Tensor],
) -> None:
    """tensors are seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink and the variant's."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)
    ctx.constants = options, ints, floats


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Of q, k, v, sink and the variant's tensors, where `needs` says so."""
    if do is None and dlse is None:
        return [None] * len(needs)
    o, lse, *tensors = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    # Gradients are enabled by create_graph=True, and in torch.func.
    run: Any = _Backward.apply if torch.is_grad_enabled() and not ops.is_traced(do) else _backward
    found = iter(run(*ctx.constants, needs, do, dlse, o, lse, *tensors))
    return [next(found) if need else None for need in needs]


# --- Eager calls ------------------------------------------------------------------------------------------------------


_CONSTANTS = 6  # arguments before q: options, ints, floats, seed, cu_seqlens_q, cu_seqlens_k


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, ints, floats, *tensors):
        output = _forward(options, ints, floats, *tensors)
        _save(ctx, options, ints, floats, tensors, output)
        return output

    @staticmethod
    def backward(ctx, do, dlse):
        constants, needs = [None] * _CONSTANTS, ctx.needs_input_grad[_CONSTANTS:]
        return *constants, *_gradients(ctx, do, dlse, needs)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "tileattn.attention has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): its "
            "gradients are those of reverse mode"
        )


class _UnderTorchFunc(_Attention):
    """The same as torch.func wants it; its arguments take longer to bind."""

    forward = staticmethod(_forward)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx, inputs, output):
        options, ints, floats, *tensors = inputs
        _save(ctx, options, ints, floats, tensors, output)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        _refuse_vmap()


class _Backward(torch.autograd.Function):
    """The backward pass as something that would be differentiated again, were there a formula for it."""

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

# Places of the arguments of `ops.forward`.
_SINK, _TENSORS, _INTS, _FLOATS = 3, 5, 6, 7


def _setup_context(ctx, inputs, output):
    q, k, v, sink, variant, tensors, ints, floats, scale, backend, *_ = inputs
    *_, deterministic, _needs_grad, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = inputs
    options = Options(variant, scale, backend, deterministic, dropout_p, max_seqlen_q, max_seqlen_k)
    _save(ctx, options, ints, floats, (seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, *tensors), output)


def _of_arguments(ctx, do, dlse):
    """Gradients for the arguments of `ops.forward`. Those left at their defaults do not count, says torch.library."""
    needs = ctx.needs_input_grad
    found = _gradients(ctx, do, dlse, [*needs[: _SINK + 1], *needs[_TENSORS]])
    gradients: list[Any] = [None] * len(needs)
    gradients[: _SINK + 1], gradients[_TENSORS] = found[: _SINK + 1], found[_SINK + 1 :]
    # It takes an empty list for one of tensors, whose gradient is a list as well.
    _, ints, floats = ctx.constants
    gradients[_INTS], gradients[_FLOATS] = ([] if len(numbers) == 0 else None for numbers in (ints, floats))
    return tuple(gradients)


ops.forward.register_autograd(_of_arguments, setup_context=_setup_context)
ops.backward.register_autograd(_refuse_second_derivative)
ops.forward.register_vmap(_refuse_vmap)
ops.backward.register_vmap(_refuse_vmap)
