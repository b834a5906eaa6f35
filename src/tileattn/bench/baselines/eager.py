"""Eager attention: softmax(QK^T)V in plain PyTorch, with the whole score matrix in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tileattn.bench.baselines.base import Prepared, tensor_bytes, unusual
from tileattn.bench.problem import Problem
from tileattn.bench.variants import user_score


class Eager:
    """Plain PyTorch operators, in the inputs' dtype; no fusion, no `torch.compile`."""

    name = "eager"

    def refusal(self, problem: Problem) -> str | None:
        if (reason := unusual(problem)) is not None:
            return reason
        if problem.has_empty_rows():
            return "a row without keys is NaN in a plain softmax"
        return None

    def prepare(self, problem: Problem) -> Prepared:
        hidden = ~problem.allowed() if problem.case.terms.masked else None
        alibi = problem.alibi_bias().to(problem.q.dtype) if problem.slopes is not None else None

        def call() -> Tensor:
            return _attention(problem, hidden, alibi)

        return Prepared(call, tensor_bytes(hidden, alibi))


def _attention(problem: Problem, hidden: Tensor | None, alibi: Tensor | None) -> Tensor:
    """hidden (seqlen_q, seqlen_k) is True where no key is seen; alibi (heads, seqlen_q, seqlen_k)."""
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    group = problem.case.heads // problem.case.kv_heads
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * problem.scale
    if problem.case.terms.softcap is not None:
        scores = problem.case.terms.softcap * torch.tanh(scores / problem.case.terms.softcap)
    for bias in (alibi, problem.bias):
        if bias is not None:
            scores = scores + bias
    if problem.case.terms.userscore:
        keys = torch.arange(problem.case.seqlen_k, device=q.device)
        heads = torch.arange(problem.case.heads, device=q.device)[:, None, None]
        scores = user_score(scores, 0, heads, problem.q_pos()[:, None], keys).to(q.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (_softmax(scores, problem.sink) @ v).transpose(1, 2)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The probabilities of the keys. The sink is one more column of the softmax, dropped afterwards."""
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
