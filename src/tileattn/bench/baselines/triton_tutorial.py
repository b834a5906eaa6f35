"""The fused attention of Triton's tutorials, loaded from a copy of its file, since no package contains it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tileattn.bench.baselines.base import Prepared, unusual
from tileattn.bench.problem import Problem

FILE = "TILEATTN_TRITON_TUTORIAL"  # the environment variable that names the file
BLOCK = 128  # its kernels take whole tiles only


class TritonTutorial:
    """`attention` of python/tutorials/06-fused-attention.py in the sources of Triton, of the version that is installed.

    It takes contiguous tensors (batch, heads, seqlen, head_dim). Where gradients are measured, the call copies the
    tensors, and copies their gradients back: a few per cent of a backward pass on long sequences. In some versions the
    backward pass is always causal; the errors in the report show it.
    """

    name = "triton-tutorial"

    def refusal(self, problem: Problem) -> str | None:
        if problem.q.device.type != "cuda":
            return "runs on GPUs only"
        path = os.environ.get(FILE)
        if not path or not Path(path).is_file():
            return f"{FILE} must name a copy of Triton's python/tutorials/06-fused-attention.py, not {path!r}"
        if (reason := unusual(problem)) is not None:
            return reason
        case = problem.case
        if case.variant not in ("full", "causal"):
            return "full and causal attention only"
        if problem.q.dtype != torch.float16 and problem.do is not None:
            return "its backward pass is in float16"
        if case.heads != case.kv_heads or case.seqlen_q != case.seqlen_k or case.head_dim != case.head_dim_v:
            return "it wants q, k and v of one shape"
        if case.seqlen_q % BLOCK or case.head_dim not in (16, 32, 64, 128, 256):
            return f"seqlen must be a multiple of {BLOCK}, and head_dim 16, 32, 64, 128 or 256"
        return None

    def prepare(self, problem: Problem) -> Prepared:
        attention = _attention(os.environ[FILE])
        causal, differentiable = problem.case.terms.causal, problem.do is not None
        inputs = (problem.q, problem.k, problem.v)
        ready = None if differentiable else tuple(_bhsd(x) for x in inputs)

        def call() -> Tensor:
            o = attention(*(ready or map(_bhsd, inputs)), causal, problem.scale)
            if o.requires_grad:
                o.register_hook(lambda do: do.contiguous())
            return o.transpose(1, 2)

        return Prepared(call)


def _bhsd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


@functools.cache
def _attention(path: str) -> Callable[..., Tensor]:
    """The function in the file, as the tutorial itself calls it on Hopper: without warp specialisation."""
    spec = importlib.util.spec_from_file_location("triton_tutorial", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = inspect.signature(module._attention.forward).parameters
    last = (False,) if "warp_specialize" in options else ()
    return lambda *arguments: module.attention(*arguments, *last)
