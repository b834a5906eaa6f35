"""Prepared calls: what the table of calls may share, and that the short path and the general one agree.

The general path is the short one without its table: `constants_of` says that a mask holds more than numbers.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tileattn import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow, attention
from tileattn import varlen_attention as varlen
from tileattn.call.facts import sizes
from tileattn.runtime import differentiable, prepared
from tileattn.runtime import operators as ops
from tileattn.variant.constants import constants_of
from tileattn.variant.key import encode

MASKS: dict[str, Mask] = {
    "window": SlidingWindow(3, 1),
    "causal and prefix": Causal() | PrefixLM(2),
    "a part of it": SlidingWindow(4, None) & (Causal() | PrefixLM(1)),
}
BOUNDS = (torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32))
LONGEST = (6, 4)
Call = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Half(Mask):
    """A user's mask of numbers, one of which is a float."""

    first: int
    factor: float = 0.5

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= self.first


@dataclass(frozen=True, eq=False)
class Looked(Mask):
    """A user's mask of a tensor, whose check may look at its values."""

    keep: Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= 0


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """A table of its own for each test."""
    monkeypatch.setattr(prepared, "FORWARDS", {})
    return prepared.FORWARDS


def tensors(packed: bool = False, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made = [x[0].clone() for x in made] if packed else made
    return [x.requires_grad_(grad) for x in made]


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return attention(q, k, v, **options)


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return varlen(q, k, v, *BOUNDS, *LONGEST, **options)


CALLS: dict[str, Call] = {"dense": dense, "packed": packed}


def general(call: Call, *arguments: Any, **options: Any) -> Any:
    with (
        mock.patch("tileattn.api.attention.constants_of", return_value=None),
        mock.patch("tileattn.api.varlen.constants_of", return_value=None),
    ):
        return call(*arguments, **options)


def both_passes(call: Call, name: str, return_lse: bool, mask: Mask, do: Callable[[Tensor], Tensor]) -> list[Tensor]:
    leaves = tensors(name == "packed")
    given = call(CALLS[name], *leaves, mask=mask, return_lse=return_lse)
    outputs = given if return_lse else (given,)
    gradients = [do(outputs[0])] + [torch.full_like(x, 0.25) for x in outputs[1:]]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


def short(call: Call, *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options)


def ones(o: Tensor) -> Tensor:
    return torch.ones_like(o)


def expanded(o: Tensor) -> Tensor:
    return torch.ones((), dtype=o.dtype).expand_as(o)


def turned(o: Tensor) -> Tensor:
    return torch.arange(o.numel(), dtype=o.dtype).view(o.shape[::-1]).permute(*reversed(range(o.ndim))) / o.numel()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_both_paths_agree_bit_for_bit(name: str, return_lse: bool, mask: Mask, table: dict[Any, Any]) -> None:
    expected = both_passes(general, name, return_lse, mask, ones)
    assert not table
    for _ in range(2):
        assert_equal(both_passes(short, name, return_lse, mask, ones), expected)
    (call,) = table.values()
    assert isinstance(call, differentiable.Differentiable)
    assert len(call.backwards) == 1


def kept(seed: int) -> Tensor:
    return torch.rand(2, 7, generator=torch.Generator().manual_seed(seed)) > 0.4


OF_TENSORS: dict[str, Callable[[int], Mask]] = {
    "padding": lambda seed: KeyPadding(kept(seed)),
    "documents in a window": lambda seed: SlidingWindow(2 + seed) & Documents(kept(seed).int()),
    "prefixes": lambda seed: PrefixLM(kept(seed).sum(1)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", OF_TENSORS.values(), ids=OF_TENSORS.keys())
def test_masks_of_tensors_share_a_call_and_not_their_values(
    make: Callable[[int], Mask], causal: bool, table: dict[Any, Any]
) -> None:
    q, k, v = tensors(grad=False)
    for seed in (0, 1, 0):
        expected = general(dense, q, k, v, mask=make(seed), causal=causal, return_lse=True)
        assert_equal(dense(q, k, v, mask=make(seed), causal=causal, return_lse=True), expected)
    assert len(table) == (2 if make is OF_TENSORS["documents in a window"] else 1)


def test_a_mask_of_tensors_is_checked_at_each_new_shape() -> None:
    q, k, v = tensors(grad=False)
    some = kept(0)
    dense(q, k, v, mask=KeyPadding(some))
    with pytest.raises(ValueError, match="must have shape"):
        dense(q, k, v, mask=KeyPadding(some[:, :6]))
    with pytest.raises(ValueError, match="must have shape"):
        dense(q, k[:, :6], v[:, :6], mask=KeyPadding(some))


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_pass_is_prepared_for_its_gradients_strides(name: str, table: dict[Any, Any]) -> None:
    mask = SlidingWindow(3, 1)
    for do in (ones, expanded, turned, ones):
        expected = both_passes(general, name, False, mask, do)
        assert_equal(both_passes(short, name, False, mask, do), expected)
    (call,) = table.values()
    assert len(call.backwards) == 3


def test_packed_batches_of_other_numbers_of_rows_share_both_passes(table: dict[Any, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows in (9, 14, 0, 20, 9):
        shapes = [(rows, 4, 8), (rows, 2, 8), (rows, 2, 6)]
        leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        ends = torch.tensor([0, rows // 3, rows], dtype=torch.int32)
        do = torch.randn(rows, 4, 6, generator=generator)
        got, expected = (
            torch.autograd.grad(way(varlen, *leaves, ends, ends, 14, 14, mask=SlidingWindow(3)), leaves, do)
            for way in (short, general)
        )
        assert_equal(got, expected)
    (call,) = table.values()
    assert len(call.backwards) == 2  # with rows, and without


def laid_out(x: Tensor, way: str) -> Tensor:
    """The same numbers in other places; kernels may read some of them with 128-bit copies, and others not."""
    if way == "padded":
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    if way == "odd rows":
        return torch.cat([x, x[..., :1]], dim=-1)[..., : x.shape[-1]]
    if way == "off":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x.clone()


@pytest.mark.parametrize("name", CALLS)
def test_what_is_found_was_prepared_for_these_facts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels depend on alignment: a backend runs only tensors of the facts it was prepared for."""
    ran = {"forward": 0, "backward": 0}

    def forward(call: Any, *rest: Any) -> Any:
        run = prepare_forward(call, *rest)

        def checked(inputs: Any) -> Any:
            now = ops.make_call(inputs, call.variant, needs_grad=call.needs_grad, return_lse=call.return_lse)
            assert (now, *sizes(inputs.q, inputs.k, inputs.packed)) == (call, *rest[1:3])
            ran["forward"] += 1
            return run(inputs)

        return checked

    def backward(call: Any, *rest: Any) -> Any:
        run = prepare_backward(call, *rest)

        def checked(inputs: Any, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Any:
            facts = ops.make_call(inputs, call.forward.variant, needs_grad=True)
            now = facts, ops.is_aligned(o) and ops.is_aligned(do), dlse is not None
            assert (*now, *sizes(inputs.q, inputs.k, inputs.packed)) == (
                call.forward, call.aligned, call.dlse, *rest[1:3],
            )  # fmt: skip
            assert ops.readable(do) is do
            ran["backward"] += 1
            return run(inputs, o, lse, do, dlse)

        return checked

    prepare_forward, prepare_backward = prepared.prepare_forward, ops.prepare_backward
    monkeypatch.setattr(prepared, "prepare_forward", forward)
    monkeypatch.setattr(ops, "prepare_backward", backward)
    monkeypatch.setattr(ops, "_asks_for_alignment", lambda q: True)
    ways = ("plain", "padded", "odd rows", "off")
    for of_k, of_do, return_lse in itertools.product(ways, ways, (False, True)):
        q, k, v = tensors(name == "packed")
        v = v.detach().repeat_interleave(4, dim=-1)[..., :8].contiguous().requires_grad_()  # rows of 16 bytes
        k = laid_out(k.detach(), of_k).requires_grad_()
        given = CALLS[name](q, k, v, mask=SlidingWindow(3), return_lse=return_lse)
        outputs = given if return_lse else (given,)
        gradients = [laid_out(torch.ones_like(outputs[0]), of_do), *map(torch.ones_like, outputs[1:])]
        torch.autograd.grad(outputs, [q, k, v], gradients)
    assert ran == {"forward": 32, "backward": 32}


def test_the_switch_to_deterministic_gradients_is_seen_between_the_passes() -> None:
    asked = []
    original = ops.prepared_backward

    def prepare(*arguments: Any) -> Any:
        asked.append(ops.is_deterministic())
        return original(*arguments)

    with mock.patch.object(ops, "prepared_backward", prepare):
        for deterministic in (False, True, False, True):
            leaves = tensors()
            o = dense(*leaves)
            torch.use_deterministic_algorithms(deterministic)
            try:
                o.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_what_hooks_return_decides_the_backward_pass(table: dict[Any, Any]) -> None:
    """A hook may return a tensor with other strides than the saved one has."""
    leaves = tensors()
    k = leaves[1].shape
    expected = torch.autograd.grad(dense(*leaves, causal=True).sum(), leaves)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: padded(x) if x.shape == k else x):
        o = dense(*leaves, causal=True)
    assert_equal(torch.autograd.grad(o.sum(), leaves), expected)
    (call,) = table.values()
    assert len(call.backwards) == 2


def padded(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_second_derivatives_are_refused(name: str, return_lse: bool) -> None:
    leaves = tensors(name == "packed")
    o = CALLS[name](*leaves, mask=SlidingWindow(3), return_lse=return_lse)
    (dq,) = torch.autograd.grad((o[0] if return_lse else o).sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_only_wanted_gradients_come(name: str) -> None:
    q, k, v = tensors(name == "packed", grad=False)
    k.requires_grad_()
    (expected,) = torch.autograd.grad(general(CALLS[name], q, k, v, mask=SlidingWindow(3)).sum(), [k])
    (dk,) = torch.autograd.grad(CALLS[name](q, k, v, mask=SlidingWindow(3)).sum(), [k])
    assert_equal([dk], [expected])


WRONG: dict[str, dict[str, Any]] = {
    "dtype": {"k": lambda x: x.half()},
    "heads": {"v": lambda x: x[..., :1, :]},
    "no tensor": {"q": lambda x: x.tolist()},
    "scale": {"scale": "1"},
    "causal": {"causal": 1},
    "return_lse": {"return_lse": 1},
    "backend": {"backend": "no"},
    "hidden": {"backend": ["torch"]},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_both_paths_raise_the_same(name: str, wrong: dict[str, Any]) -> None:
    """After a right call, whose entry must not be found."""
    mask = SlidingWindow(3, 1)
    right = dict(zip("qkv", tensors(name == "packed", grad=False)))
    CALLS[name](**right, mask=mask, causal=True)
    changed = {key: change(right[key]) for key, change in wrong.items() if key in right}
    options = {key: value for key, value in wrong.items() if key not in right}
    raised = []
    for way in (short, general):
        with pytest.raises((TypeError, ValueError)) as error:
            way(CALLS[name], **right | changed, **{"mask": mask, "causal": True} | options)
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


def test_masks_with_equal_numbers_share_a_call_and_no_others_do(table: dict[Any, Any]) -> None:
    q, k, v = tensors(grad=False)
    with mock.patch.object(prepared, "encode", side_effect=encode) as encoded:
        for _ in range(3):
            dense(q, k, v, mask=SlidingWindow(3, 1))
            dense(q, k, v, mask=SlidingWindow(3, 1) & Causal())
    assert encoded.call_count == len(table) == 2
    masks = [SlidingWindow(3, 0), SlidingWindow(3, None), SlidingWindow(None, 3), PrefixLM(3), None]
    for number, mask in enumerate(masks, start=3):
        assert_equal([dense(q, k, v, mask=mask)], [general(dense, q, k, v, mask=mask)] if mask else [dense(q, k, v)])
        assert len(table) == number


def test_what_holds_more_than_numbers_has_no_constants() -> None:
    some = torch.ones(2, 7, dtype=torch.bool)
    masks = [KeyPadding(some), Documents(some.int()), PrefixLM(some.sum(1)), FunctionMask(lambda b, h, q, k: k <= q)]
    for mask in [*masks, Half(1), Causal, None, 1, lambda b, h, q, k: k <= q]:
        assert constants_of(mask) is None
        if isinstance(mask, Mask):
            assert constants_of(Causal() & (SlidingWindow(3) | mask)) is None
    assert constants_of(SlidingWindow(3)) == (SlidingWindow, 3, 0)
    for mask in (FunctionMask(lambda b, h, q, k: k <= q), Half(1), Looked(some)):
        assert constants_of(Causal() & mask, []) is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_keeps_the_tensors_of_a_call(name: str, grad: bool) -> None:
    given = tensors(name == "packed", grad)
    bounds, mask = [x.clone() for x in BOUNDS], KeyPadding(kept(0))
    result = attention(*given, mask=mask) if name == "dense" else varlen(*given, *bounds, *LONGEST)
    if grad:
        result.sum().backward()
    alive = [weakref.ref(x) for x in (*given, *bounds, result, mask.keep, mask.begin)]
    del given, bounds, result, mask
    gc.collect()
    assert [x() is None for x in alive] == [True] * len(alive)


def assert_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(list(got), list(expected), rtol=0, atol=0)
