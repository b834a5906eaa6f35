"""The one value that holds a call's tensors and numbers, and its way through what must see tensors one by one."""

from __future__ import annotations

import itertools

import pytest
import torch

from tileattn.call.dropout import Dropout
from tileattn.call.facts import Packed
from tileattn.call.inputs import NO_OPERANDS, Inputs, Operands, inputs_of, join, separate

Q, K, V, SINK, TABLE, SLOPES = (torch.full((2,), float(value)) for value in range(6))
SEED, ENDS_Q, ENDS_K = (torch.full((2,), value) for value in range(3))
PARTS = list(
    itertools.product(
        [None, SINK],
        [NO_OPERANDS, Operands([TABLE, SLOPES], [3], []), Operands([], [], [0.5, 2.0]), Operands([TABLE])],
        [None, Dropout(0.25, SEED)],
        [None, Packed(ENDS_Q, ENDS_K, 7, 9)],
    )
)


@pytest.mark.parametrize("parts", PARTS)
def test_inputs_that_are_taken_apart_and_put_together_are_the_same(parts: tuple[object, ...]) -> None:
    inputs = Inputs(Q, K, V, *parts)  # type: ignore[arg-type]
    numbers, tensors = separate(inputs)
    assert all(x is None or isinstance(x, torch.Tensor) for x in tensors)
    assert not any(isinstance(x, torch.Tensor) for x in numbers)
    again = join(numbers, *tensors)  # type: ignore[arg-type]
    assert type(again) is Inputs
    assert [id(x) for x in separate(again)[1]] == [id(x) for x in tensors]
    assert separate(again)[0] == numbers
    assert (again.dropout is None, again.packed is None) == (inputs.dropout is None, inputs.packed is None)


def test_inputs_of_a_tuple_are_inputs() -> None:
    parts = (Q, K, V, SINK, NO_OPERANDS, None, None, None, None)
    assert type(inputs_of(parts)) is Inputs
    assert inputs_of(parts) == Inputs(*parts)
    assert len(parts) == len(Inputs._fields)


def test_calls_share_operands_that_stay_empty() -> None:
    assert Inputs(Q, K, V).operands is NO_OPERANDS
    assert Operands() == NO_OPERANDS


SIGNATURES = {
    "forward": "q, k, v, sink, variant, tensors, ints, floats, scale, backend, q_descale, k_descale, v_descale, "
    "deterministic, needs_grad, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "backward": "do, dlse, q, k, v, o, lse, sink, variant, tensors, ints, floats, scale, backend, deterministic, "
    "needs, dropout_p, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_operators_keep_their_arguments(name: str) -> None:
    """Exported programs name them."""
    schema = getattr(torch.ops.tileattn, name).default._schema
    assert ", ".join(argument.name for argument in schema.arguments) == SIGNATURES[name]
