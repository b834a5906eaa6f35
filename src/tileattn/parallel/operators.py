"""The ``torch.library`` operators that torch.compile sees of a plan's attention, and their implementation.

An operator takes tensors and numbers, so a plan is given by its number, and the variant by its key and operands. What
the ranks do is what they do eagerly, when compiled code runs: they count the call, agree, and exchange tensors. Eager
calls bypass the operators.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.dropout import draw_seed
from ..call.fp8 import accumulator
from ..call.inputs import Operands
from ..variant.evaluated import call, values_of
from ..variant.key import encode, field_names, normalize
from ..variant.masks import Mask
from ..variant.program import decode
from .algorithms.autograd import run_backward, run_forward
from .algorithms.call import Rows
from .prepare import Given

_numbers = itertools.count()
_plans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def registered(plan: Any) -> int:
    """The number by which operators know a plan, as long as it is there."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def trace(number: int, rows: Sequence[Tensor], given: Given) -> tuple[Tensor, Tensor]:
    """o and lse of a call that torch.compile traces. rows: q, k and v."""
    q, k, v = rows
    mask, mods = normalize(given.mask, given.score_mod, given.causal)
    variant, operands = encode(mask, mods)
    tensors = (*rows, given.sink, *operands.tensors)
    requires = [x is not None and x.requires_grad for x in tensors] if torch.is_grad_enabled() else []
    seed = draw_seed(q.device) if given.dropout_p else None
    o, lse, _ = forward(
        number, q, k, v, given.sink, seed, variant, operands.tensors, operands.ints, operands.floats, requires,
        given.scale, given.dropout_p, given.return_lse, given.deterministic, given.backend, given.algorithm,
        given.head_groups,
    )  # fmt: skip
    return o, lse


def _plan(number: int) -> Any:
    plan = _plans.get(number)
    if plan is None:
        raise RuntimeError(
            "compiled code calls attention of a tileattn.parallel.Plan that is gone: keep the plan as long as the code"
        )
    return plan


@functools.lru_cache(maxsize=1024)
def _without_tensors(variant: str, ints: tuple[int, ...], floats: tuple[float, ...]) -> tuple[Mask | None, Any]:
    """The same objects for the same numbers: a plan keeps with a mask what it has computed for it."""
    return decode(variant, Operands([], list(ints), list(floats)))


def _with_tensors(value: Any, values: dict[str, Any]) -> Any:
    """A decoded mask or modification whose functions hold the tensors that their expressions name."""
    if isinstance(value, functools.partial) and value.func is call:
        return functools.partial(call, value.args[0], values, *value.args[2:])
    if isinstance(value, Mask):
        for name in field_names(type(value)):
            object.__setattr__(value, name, _with_tensors(getattr(value, name), values))
    return value


def _given(
    sink: Tensor | None,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    *others: Any,
) -> Given:
    """The arguments of `Plan.attention`. others: of the operators, from the scale on."""
    scale, dropout_p, return_lse, deterministic, backend, algorithm, head_groups = others
    if tensors:
        operands = Operands(list(tensors), list(ints), list(floats))
        decoded, values = decode(variant, operands), values_of(operands)
        mask, mods = _with_tensors(decoded[0], values), tuple(_with_tensors(mod, values) for mod in decoded[1])
    else:
        mask, mods = _without_tensors(variant, tuple(ints), tuple(floats))
    return Given(
        mask, mods or None, False, scale, sink, dropout_p, return_lse, deterministic, backend, algorithm, head_groups
    )


# --- The forward pass ---


def _forward(
    plan: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seed: Tensor | None,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    requires: Sequence[bool],
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
    algorithm: str,
    head_groups: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse (batch, heads, rows), and the seed of rank 0, empty without dropout.

    seed: which this rank drew. requires: which of q, k, v, the sink and the tensors require gradients; empty where
    gradients are disabled.
    """
    others = (scale, dropout_p, return_lse, deterministic, backend, algorithm, head_groups)
    of_plan, given = _plan(plan), _given(sink, variant, tensors, ints, floats, *others)
    begun = of_plan._begun((q, k, v), given, requires, seed)
    o, lse = run_forward(begun.call, begun.work, Rows(q, k, v), begun.operands)
    agreed = begun.operands.seed
    if agreed is None:
        agreed = q.new_empty(0, dtype=torch.int64)
    return o.contiguous(), lse[..., 0].transpose(1, 2).contiguous(), agreed


forward = torch.library.custom_op("tileattn::parallel_forward", _forward, mutates_args=())


@forward.register_fake
def _(plan, q, k, v, sink, seed, *_):
    batch, rows, heads, _ = q.shape
    o = q.new_empty(batch, rows, heads, v.shape[3])
    lse = q.new_empty(batch, heads, rows, dtype=accumulator(q.dtype))
    return o, lse, q.new_empty(0 if seed is None else 1, dtype=torch.int64)


# --- The backward pass ---


def _backward(
    plan: int,
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seed: Tensor,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    requires: Sequence[bool],
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool,
    backend: str | None,
    algorithm: str,
    head_groups: int | None,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that `needs` asks for, of q, k, v, the sink and the tensors. seed: that of rank 0."""
    others = (scale, dropout_p, return_lse, deterministic, backend, algorithm, head_groups)
    given = _given(sink, variant, tensors, ints, floats, *others)
    of_plan = _plan(plan)
    with of_plan._agreement.telling():
        prepared = of_plan._prepared((q, k, v), given, requires)
    operands = prepared.operands._replace(seed=seed) if dropout_p else prepared.operands
    outputs = o, lse.transpose(1, 2)[..., None]
    found = run_backward(prepared.call, prepared.work, Rows(q, k, v), operands, outputs, (do, dlse), needs, return_lse)
    # What an operator returns must not share memory, as parts of one sum do.
    return [x.contiguous() if place < 3 else x.clone() for place, x in enumerate(found) if x is not None]


backward = torch.library.custom_op("tileattn::parallel_backward", _backward, mutates_args=())


@backward.register_fake
def _(plan, do, dlse, o, lse, q, k, v, sink, seed, variant, tensors, *others):
    return [x.new_empty(x.shape) for x, need in zip((q, k, v, sink, *tensors), others[-1]) if need]


_Q, _SINK, _TENSORS, _LISTS = 1, 4, 7, (8, 9, 10)  # positions in the arguments of `forward`


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    plan, q, k, v, sink, _, variant, tensors, *others = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, sink, *tensors)
    ctx.constants = plan, variant, others


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    """For the arguments of `forward`."""
    plan, variant, others = ctx.constants
    with _plan(plan)._agreement.telling():  # PyTorch raises if one was written since
        o, lse, seed, q, k, v, sink, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [*needs[_Q : _SINK + 1], *needs[_TENSORS]]
    found = iter(backward(plan, do, dlse, o, lse, q, k, v, sink, seed, variant, tensors, *others, wanted))
    of_tensors = [next(found) if need else None for need in wanted]
    given: list[Any] = [None] * len(needs)
    given[_Q : _SINK + 1], given[_TENSORS] = of_tensors[: _SINK + 1 - _Q], of_tensors[_SINK + 1 - _Q :]
    # torch.library takes an empty list for a list of tensors, whose gradient must be a list.
    for place, values in zip(_LISTS, others):
        given[place] = [] if len(values) == 0 else None
    return tuple(given)


def _refuse(*_: Any) -> Any:
    raise NotImplementedError("Plan.attention has no second derivatives")


forward.register_autograd(_gradients, setup_context=_save)
backward.register_autograd(_refuse)
