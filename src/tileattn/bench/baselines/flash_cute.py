"""FlashAttention-4: flash-attn's CuTe path (Hopper and Blackwell), where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tileattn.bench.baselines.base import NO_FP8, Prepared
from tileattn.bench.problem import Problem


class FlashCute:
    """`flash_attn.cute.flash_attn_func` of the package flash-attn-4.

    `flash_attn_varlen_func` for packed sequences, and for documents in a batch of which it takes each as a sequence.
    """

    name = "fa4"

    def refusal(self, problem: Problem) -> str | None:
        if problem.q.device.type != "cuda":
            return "runs on CUDA only"
        if not _installed():
            return "flash_attn.cute is not installed (pip install flash-attn-4)"
        if problem.fp8 is not None:
            return NO_FP8
        if problem.q.dtype not in (torch.float16, torch.bfloat16):
            return "float16 and bfloat16 only"
        return _unspeakable(problem)

    def prepare(self, problem: Problem) -> Prepared:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        terms = problem.case.terms
        documents = terms.documents is not None
        packed = problem.cu_seqlens is not None or documents
        attention = flash_attn_varlen_func if packed else flash_attn_func
        left, right = terms.window or (None, None)
        sink = problem.sink.bfloat16() if problem.sink is not None else None
        options = {
            "causal": terms.causal and terms.window is None,
            "window_size": (left, 0) if terms.causal else (left, right),
            "learnable_sink": sink,
            "softcap": terms.softcap or 0.0,
            **(_documents(problem) if documents else _where(problem)),
        }

        def call() -> Tensor:
            q, k, v = (x.flatten(0, 1) if documents else x for x in (problem.q, problem.k, problem.v))
            out = attention(q, k, v, **options)
            # Versions differ in whether they return lse beside o.
            o = out[0] if isinstance(out, tuple) else out
            return o.unflatten(0, (problem.case.batch, -1)) if documents else o

        return Prepared(call)


def _where(problem: Problem) -> dict[str, Any]:
    """The arguments of packed sequences, by name because their order differs between versions."""
    if problem.cu_seqlens is None:
        return {}
    ends, longest = problem.cu_seqlens, max(problem.case.lengths)
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _documents(problem: Problem) -> dict[str, Any]:
    """The documents of all batch elements as packed sequences."""
    case = problem.case
    length = min(case.terms.documents or case.seqlen_k, case.seqlen_k)
    starts = torch.arange(0, case.seqlen_k, length)
    starts = (torch.arange(case.batch)[:, None] * case.seqlen_k + starts).flatten()
    ends = torch.cat([starts, torch.tensor([case.batch * case.seqlen_k])]).to(problem.q.device, torch.int32)
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}


def _installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def _unspeakable(problem: Problem) -> str | None:
    """The parts of the variant that `flash_attn_func` has no argument for; CuTe mask_mod and score_mod are not used."""
    terms = problem.case.terms
    absent = {
        "prefix masks": terms.prefix is not None,
        "documents with another number of queries": terms.documents is not None
        and problem.case.seqlen_q != problem.case.seqlen_k,
        "ALiBi": terms.alibi,
        "a bias": terms.bias is not None,
        "a user's score modification": terms.userscore,
    }
    said = [name for name, asked in absent.items() if asked]
    return f"flash_attn_func has no argument for {' and '.join(said)}" if said else None
