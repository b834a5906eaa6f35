"""`generate_batch` with ``"paged|tileattn"``: the tokens of transformers' ``"paged|eager"``, and the rule for logits.

Requests of different lengths are generated together, their prompts in one step and then token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers

import tileattn.compat.transformers as adapter
from tests.tools.transformers.batching import BLOCK, NEW, PROMPTS, check, generate_batch
from tests.tools.transformers.models import CPU, GPU, MODELS
from tileattn.compat.transformers import blocks, paged

# 5.23 refuses every implementation but its own.
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.23"), reason="transformers takes no paged implementation of others"
)
PAGED = f"paged|{adapter.NAME}"
DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda", torch.bfloat16, id="cuda", marks=pytest.mark.gpu),
]


class Calls(SimpleNamespace):
    """The calls of tileattn's functions: their queries, and the keyword arguments."""

    varlen: list[tuple[int, dict[str, Any]]]
    decode: list[tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """tileattn is registered, and its calls are recorded."""
    recorded = Calls(varlen=[], decode=[])

    def recording(attend: Callable[..., Any], into: list[Any]) -> Callable[..., Any]:
        def call(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            into.append((q.shape[0], options))
            return attend(q, *arguments, **options)

        return call

    monkeypatch.setattr(paged, "varlen_attention", recording(paged.varlen_attention, recorded.varlen))
    monkeypatch.setattr(blocks, "decode", recording(blocks.decode, recorded.decode))
    adapter.register()
    yield recorded
    for name in (adapter.NAME, PAGED):
        transformers.AttentionInterface._global_mapping.pop(name)
    transformers.AttentionMaskInterface._global_mapping.pop(adapter.NAME)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("llama", adapter.NAME, marks=pytest.mark.slow),  # 5 s each
        ("llama", PAGED),
        pytest.param("mistral", PAGED, marks=pytest.mark.slow),
    ],
)
def test_the_same_as_eager(kind: str, name: str, device: str, dtype: torch.dtype, calls: Calls) -> None:
    """Asked for by its plain name, transformers takes the paged one (where no flash-attn is installed)."""
    model: Any = MODELS[kind].build(CPU if device == "cpu" else GPU).to(device, dtype)
    expected = generate_batch(model, "paged|eager")
    assert not calls.varlen
    assert not calls.decode
    got = generate_batch(model, name)
    if dtype == torch.float32:  # in 16 bits two tokens may be as likely as each other
        assert [request.tokens for request in got] == [request.tokens for request in expected]
    # Two layers; the first step has the prompts, and the others have a token of each request.
    steps = 2 * (NEW - 1)
    layers = {"llama": (2, steps), "mistral": (2 + steps, 0)}[kind]
    assert (len(calls.varlen), len(calls.decode)) == layers
    assert calls.varlen[0][0] >= sum(PROMPTS)
    for queries, options in calls.decode:
        assert queries == len(PROMPTS)
        assert options["page_table"].shape == (len(PROMPTS), -(-(max(PROMPTS) + NEW) // BLOCK))
    assert (calls.varlen[0][1]["mask"] is None) == (kind == "llama")
    check(f"{kind} by {name}", with_plain_name(model), got)


def with_plain_name(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def test_layers_of_a_step_share_a_page_table(calls: Calls) -> None:
    model: Any = MODELS["llama"].build(CPU)
    generate_batch(model, PAGED)
    tables = [options["page_table"] for _, options in calls.decode]
    assert all(one is other for one, other in zip(tables[::2], tables[1::2], strict=True))
    assert len({id(table) for table in tables}) == NEW - 1


def test_errors() -> None:
    layer = SimpleNamespace(layer_idx=0)
    x = torch.zeros(1, 2, 5, 16)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"is for continuous batching .* got no paged cache"):
        paged.attend_paged(layer, x, x, x, None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="does not take an attention mask"):
        paged.attend_paged(layer, x, x, x, x, cache=layer, cu_seq_lens_q=ends, cu_seq_lens_k=ends)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keyword argument 'own_thing'"):
        paged.attend_paged(layer, x, x, x, None, cache=layer, cu_seq_lens_q=ends, cu_seq_lens_k=ends, own_thing=1)  # type: ignore[arg-type]
