"""PyTorch's FlashAttention-2 on packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tileattn.bench.baselines.base import Prepared
from tileattn.bench.problem import Problem


class FlashVarlen:
    """`aten::_flash_attention_forward` with cu_seqlens: what `torch.nn.attention.varlen.varlen_attn` calls.

    It is called directly, without the overhead of that function's operator. PyTorch differentiates it.
    """

    name = "fa2-varlen"

    def refusal(self, problem: Problem) -> str | None:
        if problem.q.device.type != "cuda":
            return "runs on CUDA only"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without FlashAttention"
        if problem.cu_seqlens is None:
            return "it is there for packed sequences; fa2 is its dense form"
        if problem.q.dtype not in (torch.float16, torch.bfloat16):
            return "float16 and bfloat16 only"
        case = problem.case
        if case.head_dim != case.head_dim_v or case.head_dim % 8 or case.head_dim > 256:
            return "one head dim for q, k and v, a multiple of 8 up to 256"
        if case.terms.modified or case.terms.prefix is not None or problem.sink is not None:
            return "causal masks and windows only"
        return None

    def prepare(self, problem: Problem) -> Prepared:
        terms, cu_seqlens = problem.case.terms, problem.cu_seqlens
        longest = max(problem.case.lengths)
        left, right = terms.window or (None, None)
        window = (left, 0 if terms.causal else right)
        causal = terms.causal and terms.window is None

        def call() -> Tensor:
            out: Tensor = torch.ops.aten._flash_attention_forward(
                problem.q,
                problem.k,
                problem.v,
                cu_seqlens,
                cu_seqlens,
                longest,
                longest,
                0.0,
                causal,
                False,
                scale=problem.scale,
                window_size_left=None if causal else window[0],
                window_size_right=None if causal else window[1],
            )[0]
            return out

        return Prepared(call)
