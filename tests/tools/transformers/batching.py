"""Continuous batching of tiny models of transformers (`generate_batch`), and what its log probabilities should be."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.tools.transformers.models import VOCABULARY, InFloat64, with_attention
from tileattn.testing import assert_accurate

NEW = 9
PROMPTS = [1, 7, 33]  # lengths; the window of a model is 12
BLOCK = 16


class Request(NamedTuple):
    """A request: its prompt, the tokens that were generated, and the log probability of each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def generate_batch(model: Any, name: str, **more: Any) -> list[Request]:
    """All requests, generated together with an attention implementation, in float32 log probabilities."""
    model.set_attn_implementation(name)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in PROMPTS]
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = {"block_size": BLOCK, "num_blocks": 24, "max_batch_tokens": 64, "return_logprobs": True, **more}
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=how,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    ordered = sorted(outputs.values(), key=lambda request: request.request_id)
    assert [len(request.generated_tokens) for request in ordered] == [NEW] * len(PROMPTS)
    return [
        Request(prompt, list(request.generated_tokens), list(request.logprobs))
        for prompt, request in zip(prompts, ordered, strict=True)
    ]


@torch.no_grad()
def _at_once(model: nn.Module, requests: list[Request]) -> Tensor:
    """The log probabilities of the same tokens, each request by itself in one pass over its text."""
    device, found = next(model.parameters()).device, []
    for prompt, tokens, _ in requests:
        text = torch.tensor([prompt + tokens[:-1]], device=device)
        logits = model(text, use_cache=False).logits[0, len(prompt) - 1 :]
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        found.append(wide.log_softmax(-1)[torch.arange(len(tokens)), tokens])
    return torch.stack(found).cpu()


def check(what: str, model: nn.Module, requests: list[Request]) -> None:
    """The rule, for the log probability of each token given those before it."""
    with InFloat64():
        exact = _at_once(with_attention(model, "eager").double(), requests)
    eager = [_at_once(with_attention(model, name), requests) for name in ("eager", "sdpa")]
    got = torch.tensor([request.logprobs for request in requests])
    assert_accurate(f"log probabilities, {what}", got, exact, eager)
