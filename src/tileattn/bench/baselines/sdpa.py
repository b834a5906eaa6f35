"""PyTorch's `scaled_dot_product_attention`: with its own choice of kernel, and restricted to one.

`is_causal` is aligned top-left, so it is used for square cases only. Other masks and additive biases become a dense
`attn_mask`, built beforehand, as a user of SDPA would do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tileattn.bench.baselines.base import Prepared, tensor_bytes, unusual
from tileattn.bench.problem import Problem


class Sdpa:
    """SDPA with PyTorch's choice of kernel."""

    name = "sdpa"

    def refusal(self, problem: Problem) -> str | None:
        return _unspeakable(problem)

    def prepare(self, problem: Problem) -> Prepared:
        return _prepare(problem, nullcontext)


@dataclass(frozen=True)
class RestrictedSdpa:
    """SDPA restricted to one CUDA kernel; `check` is PyTorch's own test whether that kernel takes the arguments."""

    name: str
    kernel: SDPBackend
    check: Callable[[SDPAParams, bool], bool]

    def refusal(self, problem: Problem) -> str | None:
        if problem.q.device.type != "cuda":
            return "runs on CUDA only"
        return _unspeakable(problem) or self._kernel_refusal(problem)

    def _kernel_refusal(self, problem: Problem) -> str | None:
        case = problem.case
        if case.seqlen_q != case.seqlen_k and case.terms.plain and case.causal and not _takes_dense_mask(self.kernel):
            return "SDPA's is_causal is aligned top-left, so it means something else when seqlen_q != seqlen_k"
        if not case.terms.plain and not _takes_dense_mask(self.kernel):
            return "the kernel takes full or causal attention only"
        if problem.case.terms.dbias and self.kernel == SDPBackend.CUDNN_ATTENTION:
            return "PyTorch has no gradient of a bias through cuDNN"
        q, k, v = _heads_first(problem)
        mask = _mask_of_a_call(problem)[1]()
        if mask is not None:
            mask = mask.expand(case.batch, case.heads, -1, -1)
        params = SDPAParams(q, k, v, mask, 0.0, _is_causal(problem), case.heads != case.kv_heads)
        with sdpa_kernel(self.kernel), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accepted = self.check(params, True)
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
        return None if accepted else "; ".join(reasons) or "PyTorch gives no reason"

    def prepare(self, problem: Problem) -> Prepared:
        def only_this_kernel() -> AbstractContextManager[None]:
            return sdpa_kernel(self.kernel)

        return _prepare(problem, only_this_kernel)


def restricted_sdpas() -> tuple[RestrictedSdpa, ...]:
    """SDPA's three CUDA kernels under the names that the tables use: FlashAttention-2, cuDNN, memory-efficient."""
    cuda = torch.backends.cuda
    return (
        RestrictedSdpa("fa2", SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention),
        RestrictedSdpa("cudnn", SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention),
        RestrictedSdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention),
    )


def _takes_dense_mask(kernel: SDPBackend) -> bool:
    return kernel != SDPBackend.FLASH_ATTENTION


def _unspeakable(problem: Problem) -> str | None:
    """The reason why SDPA has no arguments for the problem, or None."""
    if (reason := unusual(problem)) is not None:
        return reason
    if problem.case.terms.softcap is not None:
        return "SDPA has no softcap"
    if problem.case.terms.userscore:
        return "SDPA has no score modification"
    return "SDPA has no sink" if problem.sink is not None else None


def _is_causal(problem: Problem) -> bool:
    case = problem.case
    return case.variant == "causal" and case.seqlen_q == case.seqlen_k


def _dense_mask(problem: Problem) -> Tensor | None:
    """SDPA's `attn_mask`: bool (seqlen_q, seqlen_k), or a float bias (batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    if problem.case.variant == "full" or _is_causal(problem):
        return None
    biases = [problem.alibi_bias()[None]] if problem.slopes is not None else []
    biases += [problem.bias.detach().float()] if problem.bias is not None else []
    if not biases:
        return problem.allowed()
    total = sum(biases[1:], start=biases[0])
    if problem.case.terms.masked:
        total = total.masked_fill(~problem.allowed(), -torch.inf)
    return total.to(problem.q.dtype)


def _heads_first(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, heads, seqlen, head_dim) views; nothing is copied."""
    return problem.q.transpose(1, 2), problem.k.transpose(1, 2), problem.v.transpose(1, 2)


def _prepare(problem: Problem, context: Callable[[], AbstractContextManager[None]]) -> Prepared:
    q, k, v = _heads_first(problem)
    held, mask = _mask_of_a_call(problem)
    is_causal, gqa = _is_causal(problem), problem.case.heads != problem.case.kv_heads

    def call() -> Tensor:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask(), is_causal=is_causal, enable_gqa=gqa)
        return out.transpose(1, 2)

    return Prepared(call, tensor_bytes(held), context)


def _mask_of_a_call(problem: Problem) -> tuple[Tensor | None, Callable[[], Tensor | None]]:
    """The tensor built beforehand, and a function for each call's `attn_mask`.

    They are the same, unless the gradient of a bias is wanted. Such a bias changes at every training step, so each call
    adds it to the rest.
    """
    bias = problem.bias
    if bias is None or not problem.case.terms.dbias:
        mask = _dense_mask(problem)
        return mask, lambda: mask
    if not problem.case.terms.masked and problem.slopes is None:
        return None, lambda: bias
    rest = _dense_mask(replace(problem, bias=None))
    assert rest is not None
    if rest.dtype != torch.bool:
        return rest, lambda: bias + rest
    hidden = ~rest
    return hidden, lambda: bias.masked_fill(hidden, -torch.inf)
