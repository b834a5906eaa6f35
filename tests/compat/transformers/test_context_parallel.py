"""Layers on shards of the sequence: a plan gets their variant, and what would be left out is refused.

The plan here has one rank, whose shard is the whole sequence. `tileattn.runtime.context_parallel` is tested in a real
region in tests/compat/test_context_parallel.py; here a patch says that there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers

import tileattn
import tileattn.compat.transformers as adapter
from tests.compat.transformers.test_models import DEVICES, Problem, assert_like_eager
from tests.tools.transformers.models import MODELS, WINDOW
from tileattn import Causal, SlidingWindow
from tileattn.compat.transformers import attention as adapters_attention
from tileattn.compat.transformers import context_parallel as shards
from tileattn.compat.transformers.attention import attend
from tileattn.compat.transformers.mask import make_mask
from tileattn.variant.masks import Mask


class Plan:
    """One rank."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None, score_mod: Any = None, sink: Any = None, scale: Any
    ) -> Tensor:
        self.given.append({"mask": mask, "score_mod": score_mod, "sink": sink, "scale": scale})
        return tileattn.attention(q, k, v, mask=mask, score_mod=score_mod, sink=sink, scale=scale)


@pytest.fixture
def plan() -> Iterator[Plan]:
    plan = Plan()
    adapter.register(context_parallel=plan)
    yield plan
    transformers.AttentionInterface._global_mapping.pop(adapter.NAME)
    transformers.AttentionMaskInterface._global_mapping.pop(adapter.NAME)


@pytest.fixture
def in_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_attention, "is_active", lambda: True)


class Causally(nn.Module):
    is_causal = True


def tensors(keys: int = 9, queries: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, n, 16) for heads, n in ((4, queries), (2, keys), (2, keys))]


# --- A plan ---

FIRST_DEVICE = DEVICES[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_a_models_variants_reach_the_plan(name: str, plan: Plan) -> None:
    """Windows, caps and sinks with them: logits and gradients are those of the whole."""
    device = getattr(FIRST_DEVICE, "values", [FIRST_DEVICE])[0]
    problem = Problem(MODELS[name], device)
    assert_like_eager(name, problem.run("tileattn"), problem)
    assert len(plan.given) == MODELS[name].attentions
    windows = [given["mask"].left for given in plan.given if isinstance(given["mask"], SlidingWindow)]
    assert windows == ([] if name == "llama" else [WINDOW - 1])
    assert all((given["sink"] is not None) == (name == "gpt-oss") for given in plan.given)
    assert all((given["score_mod"] is not None) == (name == "gemma2") for given in plan.given)


def masks(kind: str) -> tuple[Any, dict[str, Any]]:
    """The mask of a layer with a window of 30 on a shard of 9, and further arguments of its call."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    if kind == "made":
        return make_mask(1, 9, 9, mask_function=sliding_window_causal_mask_function(30), of_shard=True), {}
    return None, {"sliding_window": 30}


@pytest.mark.parametrize("kind", ["made", "taken away by accelerate"])
def test_a_window_that_is_wider_than_the_shard_stays(kind: str) -> None:
    plan = Plan()
    mask, more = masks(kind)
    attend(Causally(), *tensors(), mask, context_parallel=plan, **more)
    (given,) = plan.given
    assert type(given["mask"]) is SlidingWindow
    assert (given["mask"].left, given["mask"].right) == (29, 0)


def test_a_layer_without_a_mask_is_what_is_causal_says() -> None:
    plan = Plan()
    for is_causal in (None, True, False):
        attend(Causally(), *tensors(), None, is_causal=is_causal, scaling=0.5, context_parallel=plan)
    kinds: list[Mask | None] = [given["mask"] for given in plan.given]
    assert [type(mask) for mask in kinds] == [Causal, Causal, type(None)]
    assert [given["scale"] for given in plan.given] == [0.5] * 3


def padding(*hidden: int) -> Tensor:
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, list(hidden)] = False
    return mask


def sequences(b: Any, h: Any, q: Any, k: Any) -> Any:
    ids = torch.tensor([[0] * 4 + [1] * 5])
    return ids[b, q] == ids[b, k]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padding": ({"mask": lambda: make_mask(1, 9, 9, attention_mask=padding(0), of_shard=True)}, "padding"),
    "packed": ({"mask": lambda: make_mask(1, 9, 9, mask_function=sequences, of_shard=True)}, "packed sequences"),
    "a tensor": ({"mask": lambda: torch.ones(1, 1, 9, 9, dtype=torch.bool)}, "a mask of your own"),
    "dropout": ({"dropout": 0.1}, "dropout"),
    "a bias": ({"position_bias": torch.zeros(1, 4, 9, 9)}, "position_bias"),
    "cu_seq_lens": ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q"),
    "a cache": ({"tensors": tensors(keys=12)}, "takes no cache"),
    "a two-sided window": ({"is_causal": False, "sliding_window": 4}, "how far a query sees to its right"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_does_not_get_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    given = dict(options)
    mask, inputs = given.pop("mask", lambda: None)(), given.pop("tensors", None) or tensors()
    plan = Plan()
    with pytest.raises(NotImplementedError, match=message):
        attend(Causally(), *inputs, mask, context_parallel=plan, **given)
    assert plan.given == []


def test_a_padding_mask_that_hides_nothing_is_none() -> None:
    assert make_mask(1, 9, 9, attention_mask=padding(), of_shard=True).padding is None


def test_register_asks_for_the_method() -> None:
    with pytest.raises(TypeError, match=r"context_parallel must have a method attention\(.* got object"):
        adapter.register(context_parallel=object())  # type: ignore[arg-type]


# --- A region of PyTorch's, without a plan ---


class Chunked(Causally):
    config = SimpleNamespace(layer_types=["full_attention", "chunked_attention"])
    layer_idx = 1


class Windowed(Causally):
    sliding_window = 4


LOST: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "sink": (Causally(), {"s_aux": torch.zeros(4)}, r"Causally has sinks \(s_aux\)"),
    "cap": (Causally(), {"softcap": 3.0}, r"a cap \(softcap\)"),
    "window": (Causally(), {"sliding_window": 30}, r"a window \(sliding_window\)"),
    "window of the module": (Windowed(), {}, r"Windowed has a window"),
    "chunks": (Chunked(), {}, "a mask of its own .layer type 'chunked_attention'"),
    "not causal": (Causally(), {"is_causal": False}, "no causal mask"),
}


@pytest.mark.usefixtures("in_region")
@pytest.mark.parametrize("name", LOST)
def test_what_the_ring_would_leave_out_is_refused(name: str) -> None:
    module, options, message = LOST[name]
    with pytest.raises(NotImplementedError, match=rf"{message}.*\.register\(context_parallel=tileattn\.parallel\.Plan"):
        attend(module, *tensors(), None, **options)


@pytest.mark.usefixtures("in_region")
def test_a_made_mask_that_is_no_causal_one_is_refused() -> None:
    for mask, message in (
        (make_mask(1, 9, 9, attention_mask=padding(0)), "padding"),
        (make_mask(1, 9, 9, mask_function=masks_window(4)), "a window"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attend(Causally(), *tensors(), mask)


def masks_window(size: int) -> Any:
    from transformers.masking_utils import sliding_window_causal_mask_function

    return sliding_window_causal_mask_function(size)


@pytest.mark.usefixtures("in_region")
def test_a_plain_causal_layer_goes_to_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the region replaces by its ring; only while tileattn is its flash implementation."""
    asked: list[dict[str, Any]] = []

    def ring(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        asked.append(options)
        return tileattn.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ring)
    with pytest.raises(NotImplementedError, match=r'only after .*activate_flash_attention_impl\("tileattn"\)'):
        attend(Causally(), *tensors(), None)
    monkeypatch.setattr(shards, "current_flash_attention_impl", lambda: "tileattn")
    q, k, v = tensors()
    for mask in (None, make_mask(1, 9, 9)):
        o, _ = attend(Causally(), q, k, v, mask, scaling=0.5)
        expected = tileattn.attention(q, k, v, causal=True, scale=0.5, layout="bhsd").transpose(1, 2)
        torch.testing.assert_close(o, expected)
    assert asked == [{"is_causal": True, "scale": 0.5, "enable_gqa": True}] * 2
