"""The most memory that a forward and backward pass take on a rank, counted on tensors of "meta".

Tensors are sent as GPUs send them. What a kernel takes while it runs is in it as `_gradients` says; what NCCL takes is
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.tools.peak_memory import PeakMemory
from tests.tools.ranks.one import playing
from tileattn.call.inputs import Inputs
from tileattn.parallel import Plan
from tileattn.parallel.transport import link
from tileattn.runtime import operators as ops

HEADS, KV_HEADS, DIM = 32, 8, 128
MOST = 28e9 / 2**20  # bytes a token of the whole sequence, on each of two GPUs: 28 GB for a million tokens


def _outputs(options: ops.Options, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, v = inputs.q, inputs.v
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)


def _gradients(options: ops.Options, inputs: Inputs, *_: Any) -> list[Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    sums = q.new_empty(q.shape, dtype=torch.float32), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    del sums  # of dq, and two numbers a row
    return gradients


def _as_on_gpus(self: link.Link, sends: Any, receives: Any, like: Tensor) -> Any:
    return self._start_direct(sends, receives, like.device, frozenset())


def peak(rank: int, seqlen: int, options: dict[str, Any]) -> int:
    """Of the tensors of a call and its backward pass: q, k, v, do and the gradients with them."""
    with (
        playing(rank, 2),
        mock.patch.object(link.Link, "_start_packed", _as_on_gpus),
        mock.patch.object(link, "before_kernels"),
        mock.patch.object(ops, "run_forward", _outputs),
        mock.patch.object(ops, "run_backward", _gradients),
    ):
        plan = Plan(None, seqlen)
        with PeakMemory() as counted:
            counts: Sequence[int] = (HEADS, KV_HEADS, KV_HEADS, HEADS)
            *leaves, do = (
                torch.empty(1, plan.rows, count, DIM, dtype=torch.bfloat16, device="meta") for count in counts
            )
            for x in leaves:
                x.requires_grad_()
            plan.attention(*leaves, causal=True, **options).backward(do)
    return counted.peak


@pytest.mark.parametrize("options", [{}, {"algorithm": "gather", "head_groups": 8}], ids=["auto", "gather"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_million_tokens_on_two_gpus(options: dict[str, Any], rank: int) -> None:
    """Of q, k, v, o, do, dq, dk, dv and lse alone there are 21.5 GB."""
    assert 21.5e9 < peak(rank, 1 << 20, options) <= MOST * (1 << 20)
