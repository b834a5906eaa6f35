"""FlexAttention compiled with static shapes, which is its fastest form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from tileattn.bench.baselines.base import Prepared, tensor_bytes, unusual
from tileattn.bench.problem import Problem
from tileattn.bench.variants import user_score

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
INDEXABLE = 2**31


class Flex:
    """`torch.compile(flex_attention)` with a block mask and a score_mod; compiled anew for every case."""

    name = "flex"

    def refusal(self, problem: Problem) -> str | None:
        if (reason := unusual(problem)) is not None:
            return reason
        if problem.do is not None and problem.q.device.type == "cpu":
            return "FlexAttention has no backward pass on a CPU"
        if problem.sink is not None and problem.q.device.type == "cpu":
            return "FlexAttention returns no lse on a CPU, which a sink needs"
        # It would read outside the bias, and an illegal access ends the whole process.
        if problem.bias is not None and problem.bias.numel() > INDEXABLE and problem.q.device.type != "cpu":
            return "FlexAttention indexes a bias in 32 bits, and this one has more than 2^31 elements"
        return None

    def prepare(self, problem: Problem) -> Prepared:
        # After eight shapes in one process Dynamo stops recompiling and falls back to the unfused path, 50 to 150
        # times slower: every case starts with an empty cache, and `fullgraph` makes a fallback an error.
        torch._dynamo.reset()
        q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
        block_mask = _block_mask(problem)
        compiled = torch.compile(_attention, dynamic=False, fullgraph=True)
        score_mod, sink = _score_mod(problem), problem.sink
        gqa = problem.case.heads != problem.case.kv_heads

        def call() -> Tensor:
            out: Tensor = compiled(q, k, v, score_mod, block_mask, sink, gqa)
            return out.transpose(1, 2)

        return Prepared(call, _block_mask_bytes(block_mask), nullcontext if problem.do is None else _kept_graphs)


@contextmanager
def _kept_graphs() -> Iterator[None]:
    """Allows repeated calls of a compiled backward pass inside.

    By default it overwrites the tensors saved by the forward pass, and refuses `retain_graph`. The setting belongs to
    the thread, so autograd must stay in this one.
    """
    from torch._functorch import config

    with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
        yield


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    sink: Tensor | None,
    gqa: bool,
) -> Tensor:
    """flex_attention; a sink, which it lacks, rescales o by exp(lse) / (exp(lse) + exp(sink))."""
    if sink is None:
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa)
        assert isinstance(out, Tensor)
        return out
    out, aux = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa, return_aux=AuxRequest(lse=True)
    )
    assert isinstance(out, Tensor)
    assert isinstance(aux.lse, Tensor)
    share = torch.sigmoid(aux.lse - sink[:, None])
    return (out * share[..., None]).to(out.dtype)


def _block_mask(problem: Problem) -> BlockMask | None:
    case = problem.case
    if not case.terms.masked:
        return None
    mask_mod = _mask_mod(problem)
    return create_block_mask(mask_mod, None, None, case.seqlen_q, case.seqlen_k, device=problem.q.device)


def _block_mask_bytes(block_mask: BlockMask | None) -> int:
    if block_mask is None:
        return 0
    return tensor_bytes(*(part for part in block_mask.as_tuple() if isinstance(part, Tensor)))


def _mask_mod(problem: Problem) -> MaskMod:
    """The conjunction of the variant's masks, each written as FlexAttention's documentation does."""
    terms, ids = problem.case.terms, problem.document_ids
    causal, window, prefix = terms.causal, terms.window, terms.prefix
    offset = problem.case.seqlen_k - problem.case.seqlen_q

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_pos = q + offset
        seen = k >= 0
        if causal:
            seen = seen & (k <= q_pos)
        if window is not None:
            seen = seen & (k >= q_pos - window[0]) & (k <= q_pos + window[1])
        if prefix is not None:
            seen = seen & ((k < prefix) | (k <= q_pos))
        if ids is not None:
            seen = seen & (q_pos >= 0) & (ids[q_pos.clamp(min=0)] == ids[k])
        return seen

    return mask_mod


def _score_mod(problem: Problem) -> ScoreMod | None:
    """The variant's modifications in one function, written as FlexAttention's documentation does."""
    userscore = problem.case.terms.userscore
    softcap, slopes, bias = problem.case.terms.softcap, problem.slopes, problem.bias
    offset = problem.case.seqlen_k - problem.case.seqlen_q
    if not problem.case.terms.modified:
        return None
    per_batch, per_head = bias is not None and bias.shape[0] > 1, bias is not None and bias.shape[1] > 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (q + offset - k).abs()
        if bias is not None:
            score = score + bias[b if per_batch else 0, h if per_head else 0, q, k]
        if userscore:
            score = user_score(score, b, h, q + offset, k)
        return score

    return score_mod
