"""Which calls on a static cache `decode` computes, and which slots they see; test_models.py runs whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from tileattn.compat.transformers import attention, step
from tileattn.compat.transformers.mask import MaskParts, make_mask
from tileattn.testing import assert_accurate

BATCH, HEADS, KV_HEADS, DIM, SLOTS = 2, 4, 2, 16, 40


class Layer(torch.nn.Module):
    is_causal = True


def tensors(q_length: int) -> list[Tensor]:
    """q, k and v as models pass them; unused slots hold zeros, as transformers' do."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, q_length, DIM), *[(BATCH, KV_HEADS, SLOTS, DIM)] * 2]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def mask_of(q_length: int, before: int | Tensor, window: int | None = None, padding: Tensor | None = None) -> MaskParts:
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return make_mask(BATCH, q_length, SLOTS, before, 0, function, padding)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of the calls of `decode`."""
    recorded: list[dict[str, Any]] = []
    decode = step.decode

    def recording(*arguments: Any, **options: Any) -> Any:
        recorded.append(options)
        return decode(*arguments, **options)

    monkeypatch.setattr(step, "decode", recording)
    return recorded


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("q_length", "before"), [(1, 0), (1, 39), (1, torch.tensor(17)), (5, torch.tensor(11))])
def test_a_step_sees_its_mask(
    q_length: int, before: int | Tensor, window: int | None, padded: bool, steps: list[dict[str, Any]]
) -> None:
    """Bit by bit the mask's definition: NaN in unused slots does not get in."""
    padding = torch.arange(SLOTS)[None] >= torch.tensor([[0], [int(before) - 1]]) if padded else None
    mask = mask_of(q_length, before, window, padding)
    q, k, v = tensors(q_length)
    stop = int(before) + q_length
    k[:, :, stop:], v[:, :, stop:] = torch.nan, torch.nan
    o, _ = attention.attend(Layer(), q, k, v, mask, scaling=0.25)
    assert len(steps) == int(stop < SLOTS or isinstance(before, Tensor))
    seen = mask.tensor()[..., :stop]
    keys, values = (x[:, :, :stop].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))

    def eager(dtype: torch.dtype) -> Tensor:
        scores = (q.to(dtype) @ keys.to(dtype).mT * 0.25).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ values.to(dtype)).transpose(1, 2)

    assert_accurate("o", o, eager(torch.float64), [eager(torch.float32)])


def test_lengths_are_those_of_the_queries() -> None:
    assert mask_of(3, torch.tensor(11)).filled.tolist() == [14, 14]  # type: ignore[union-attr]
    assert mask_of(1, 4, 7).filled.tolist() == [5, 5]  # type: ignore[union-attr]
    assert mask_of(1, 39).filled is None, "a full cache: causal attention"
    assert mask_of(17, torch.tensor(11)).filled is None, "many queries"
    both_sides = make_mask(BATCH, 1, SLOTS, torch.tensor(3), 0, lambda b, h, q, k: abs(q - k) <= 3)
    assert both_sides.filled is None
    moved = mask_of(1, torch.tensor(11), 7).to("meta")
    assert moved.filled is not None
    assert moved.filled.is_meta


@pytest.mark.parametrize("how", ["gradients", "autocast", "dropout", "bias"])
def test_what_is_no_step(how: str, steps: list[dict[str, Any]]) -> None:
    q, k, v = tensors(1)
    mask = mask_of(1, torch.tensor(11))
    options: dict[str, Any] = {"dropout": 0.5} if how == "dropout" else {}
    if how == "bias":
        options["position_bias"] = torch.zeros(1, HEADS, 1, SLOTS)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        attention.attend(Layer(), q.requires_grad_(how == "gradients"), k, v, mask, **options)
    assert not steps
    if how == "gradients":
        with torch.no_grad():
            attention.attend(Layer(), q, k, v, mask)
        assert len(steps) == 1


def test_what_fits() -> None:
    mask, q = mask_of(1, torch.tensor(11)), torch.zeros(BATCH, 16, 4, DIM)
    one, two = (torch.zeros(BATCH, SLOTS, heads, DIM) for heads in (1, 2))
    assert step.is_step(mask, q, one, one, None, 0.0)
    assert not step.is_step(mask, q.repeat(1, 1, 2, 1), one, one, None, 0.0), "128 rows: more than a tile"
    assert step.is_step(mask, q.repeat(1, 1, 2, 1), two, two, None, 0.0)
    assert not step.is_step(mask, q, one.half(), one, None, 0.0)
    assert not step.is_step(None, q, one, one, None, 0.0)
    assert not step.is_step(mask, q[:1], one[:1], one[:1], None, 0.0), "a mask made for another batch"
