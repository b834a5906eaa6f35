"""Models on two ranks, each with a shard of the sequence and a real plan: logits and gradients are one process's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")
pytest.importorskip("torch.distributed", reason="needs torch.distributed")

import torch.distributed as dist

import tileattn.compat.transformers as adapter
from tests.tools.ranks.pools import pool, returned
from tests.tools.transformers.models import CPU, MODELS, WINDOW, with_attention
from tileattn.parallel import Plan

SEQLEN = 3 * WINDOW + 1  # windows end within a shard and reach into others
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # transformers computes norms and rotations in float32
IDS = torch.arange(2 * SEQLEN).view(2, SEQLEN) * 7 % 59


def on_shards(name: str) -> tuple[Tensor, list[Tensor]]:
    """The logits of the whole sequence, and the gradients of the parameters, summed over the ranks."""
    plan = Plan(None, SEQLEN)
    adapter.register(context_parallel=plan)
    model = with_attention(MODELS[name].build(CPU).double(), "tileattn")
    ids = plan.shard(IDS)
    # The positions of a shard jump: with a mask of ones transformers does not take the jump for packed sequences.
    inputs = {"position_ids": plan.positions.expand_as(ids), "attention_mask": torch.ones_like(ids)}
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits.backward(plan.shard(d_logits(logits.shape[-1])))
    for parameter_name, parameter in model.named_parameters():
        if not parameter_name.endswith("sinks"):  # a plan has summed theirs already
            dist.all_reduce(parameter.grad)
    return plan.unshard(logits.detach()), [parameter.grad for parameter in model.parameters()]


def d_logits(vocabulary: int) -> Tensor:
    return torch.randn(*IDS.shape, vocabulary, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_models(name: str) -> None:
    """Windows, caps and sinks with them."""
    model = with_attention(MODELS[name].build(CPU).double(), "eager")
    expected = model(input_ids=IDS, use_cache=False).logits
    expected.backward(d_logits(expected.shape[-1]))
    for logits, gradients in returned(pool(2).run(on_shards, name)):
        torch.testing.assert_close(logits, expected.detach(), **CLOSE)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, **CLOSE)
