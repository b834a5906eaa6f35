"""The backward pass that a forward pass expects, on its way from a call to a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tileattn import ALiBi, Bias, attention, varlen_attention
from tileattn.call.expected import backward_of, expecting
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Operands
from tileattn.runtime import operators, prepared
from tileattn.variant.program import program

Q = torch.randn(1, 33, 2, 16, requires_grad=True)
CALL = AttentionCall(torch.float32, 16, 16, needs_grad=True)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BackwardCall]]:
    """What the forward passes expect that are prepared."""
    expected: list[BackwardCall] = []
    prepare = operators.prepare_forward

    def noted(call: AttentionCall, *rest: Any) -> Any:
        expected.append(backward_of(call, len(program(call.variant).tensors)))
        return prepare(call, *rest)

    monkeypatch.setattr(operators, "prepare_forward", noted)
    monkeypatch.setattr(prepared, "prepare_forward", noted)
    prepared.FORWARDS.clear()
    yield expected
    prepared.FORWARDS.clear()


def test_a_prepared_call_says_whether_its_gradients_are_deterministic(found: list[BackwardCall]) -> None:
    attention(Q, Q, Q, causal=True)
    attention(Q, Q, Q, causal=True, deterministic=True)
    assert [each.deterministic for each in found] == [False, True]
    assert all(each.needs == (True, True, True, False) for each in found)
    assert all(each.forward.needs_grad for each in found)


def test_a_packed_call_says_so_too(found: list[BackwardCall]) -> None:
    rows = torch.randn(33, 2, 16, requires_grad=True)
    bounds = torch.tensor([0, 10, 33], dtype=torch.int32)
    varlen_attention(rows, rows, rows, bounds, bounds, 23, 23, deterministic=True)
    assert [(each.forward.packed, each.deterministic) for each in found] == [(True, True)]


def test_algorithms_that_are_deterministic_everywhere(found: list[BackwardCall]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        attention(Q, Q, Q)
        attention(Q, Q, Q, score_mod=ALiBi(torch.ones(2)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [each.deterministic for each in found] == [True, True]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_says_which_tensors_require_gradients(requires_grad: bool, found: list[BackwardCall]) -> None:
    bias = torch.zeros(1, 2, 33, 33, requires_grad=requires_grad)
    attention(Q, Q, Q, score_mod=(Bias(bias), ALiBi(torch.ones(2))), sink=torch.zeros(2))
    assert [each.needs for each in found] == [(True, True, True, True, requires_grad, False)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_expected_is_what_comes(
    deterministic: bool, found: list[BackwardCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass is prepared for the same call."""
    calls: list[BackwardCall] = []
    prepare = operators.prepare_backward
    monkeypatch.setattr(operators, "prepare_backward", lambda call, *rest: calls.append(call) or prepare(call, *rest))
    bias = torch.zeros(1, 2, 33, 33, requires_grad=True)
    attention(Q, Q, Q, score_mod=Bias(bias), deterministic=deterministic).sum().backward()
    attention(Q, Q, Q, causal=True, deterministic=deterministic).sum().backward()
    assert found == calls
    assert len(calls) == 2


def test_outside_nothing_is_known() -> None:
    with expecting(True, Operands([torch.ones(1, requires_grad=True)])):
        assert backward_of(CALL, 1) == BackwardCall(CALL, (True, True, True, False, True), deterministic=True)
        assert backward_of(CALL, 2).needs == (True, True, True, False, False, False)  # of another variant
    assert backward_of(CALL, 1) == BackwardCall(CALL, (True, True, True, False, False))
