"""`generate_batch` with ``"paged|tileattn"``: the same tokens as with transformers' ``"paged|eager"``, in float32.

Requests of different lengths are generated together, their prompts in one step and then token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import tileattn.compat.transformers as adapter
from tests.tools.transformers_models import CPU, MODELS, VOCABULARY
from tileattn.compat.transformers import paged

NEW = 5
PROMPTS = [1, 7, 33]  # lengths; the window of a model is 12
PAGED = f"paged|{adapter.NAME}"


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """tileattn is registered, and calls of its kernels are recorded."""
    recorded: list[Any] = []
    attend = paged.varlen_attention

    def recording(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        recorded.append((q.shape[0], options))
        return attend(q, *arguments, **options)

    monkeypatch.setattr(paged, "varlen_attention", recording)
    adapter.register()
    yield recorded
    for name in (adapter.NAME, PAGED):
        transformers.AttentionInterface._global_mapping.pop(name)
    transformers.AttentionMaskInterface._global_mapping.pop(adapter.NAME)


def generated(model: Any, name: str) -> list[list[int]]:
    """The new tokens of each request."""
    model.set_attn_implementation(name)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in PROMPTS]
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(block_size=16, num_blocks=24, max_batch_tokens=64)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=how, continuous_batching_config=small, progress_bar=False
    )
    ordered = sorted(outputs.values(), key=lambda request: request.request_id)
    return [list(request.generated_tokens) for request in ordered]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("name", [adapter.NAME, PAGED])
def test_the_same_tokens_as_eager(kind: str, name: str, calls: list[Any]) -> None:
    """Asked for by its plain name, transformers takes the paged one (where no flash-attn is installed)."""
    model = MODELS[kind].build(CPU).eval()
    expected = generated(model, "paged|eager")
    assert calls == []
    assert [len(tokens) for tokens in expected] == [NEW] * len(PROMPTS)
    assert generated(model, name) == expected
    assert len(calls) == 2 * NEW  # layers, steps
    assert calls[0][0] >= sum(PROMPTS)
    assert (calls[0][1]["mask"] is None) == (kind == "llama")


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
