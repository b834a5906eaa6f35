"""Scales that are negative, 0 or close to 0: results are correct through every public function and adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import Causal, Mask, SlidingWindow
from tileattn.compat.flash_attn import flash_attn_func
from tileattn.kernels.torch import fused
from tileattn.kernels.torch.mask import ScoreMatrix
from tileattn.testing import (
    assert_accurate,
    assert_forward_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    gradients,
    oracle_attention,
    oracle_gradients,
)

SCALES = (-0.3, -1e-60, -0.0, 0.0, 1e-60, 1e-39, 1e-30)
SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 70, 4, 2, 16


def qkv(dtype: torch.dtype, seqlen: int = SEQLEN) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seqlen, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def packed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    ends = torch.arange(3, dtype=torch.int32) * SEQLEN
    o = tileattn.varlen_attention(
        *(x.flatten(0, 1) for x in (q, k, v)), ends, ends, SEQLEN, SEQLEN, causal=True, scale=scale
    )
    return o.unflatten(0, (2, SEQLEN))  # type: ignore[union-attr]


def as_pytorch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return tileattn.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


ENTRY_POINTS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "attention": lambda q, k, v, scale: tileattn.attention(q, k, v, causal=True, scale=scale),
    "mask": lambda q, k, v, scale: tileattn.attention(q, k, v, mask=Causal(), scale=scale),
    "bhsd": lambda q, k, v, scale: tileattn.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, scale=scale, layout="bhsd"
    ).transpose(1, 2),
    "packed": packed,
    "sdpa": as_pytorch,
    "flash_attn": lambda q, k, v, scale: flash_attn_func(q, k, v, softmax_scale=scale, causal=True),
    "operator": lambda q, k, v, scale: torch.ops.tileattn.forward(q, k, v, None, "Causal()", [], [], [], scale, None)[
        0
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS.keys())
def test_causal_through_every_entry_point(entry_point: Callable[..., Tensor], scale: float, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    arguments = (q, k, v, Causal(), (), None, scale)
    (oracle, _), (eager, _) = oracle_attention(*arguments), eager_attention(*arguments)
    assert_accurate("o", entry_point(q, k, v, scale), oracle, eager)


MASKS = {"full": None, "causal": Causal(), "window": SlidingWindow(9, 3)}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


@each_mask
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-60])
def test_o_and_lse(scale: float, dtype: torch.dtype, mask: Mask | None) -> None:
    q, k, v = qkv(dtype)
    got = tileattn.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    arguments = (q, k, v, mask, (), None, scale)
    assert_forward_accurate("forward", got, oracle_attention(*arguments), eager_attention(*arguments))


@each_mask
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-60])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
def test_gradients(scale: float, dtype: torch.dtype, mask: Mask | None, with_dlse: bool) -> None:
    """Without a gradient of lse PyTorch's fused backward pass may run."""
    q, k, v = qkv(dtype)
    leaves = {name: x.requires_grad_() for name, x in zip(("dq", "dk", "dv"), (q, k, v))}
    outputs = tileattn.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dlse = torch.ones_like(outputs[1]) if with_dlse else None
    grads = gradients(outputs, leaves, do, dlse)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    options = (mask, (), None, scale)
    oracle, sizes = oracle_gradients(exact, do, dlse, *exact.values(), *options)
    eager = eager_gradients(leaves, do, dlse, q, k, v, *options)
    assert_gradients_accurate("backward", grads, oracle, eager, sizes, dtype)


@pytest.mark.parametrize("scale", SCALES)
def test_the_fused_operator_runs_no_causal_call_that_it_gets_wrong(scale: float) -> None:
    """The operator is right with a mask of floats, which it adds to scaled scores."""
    q, k, v = (x.transpose(1, 2) for x in qkv(torch.float32))
    o, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    matrix = ScoreMatrix(Causal(), (), slice(0, 2), HEADS, SEQLEN, SEQLEN, torch.float32, q.device)
    assert fused.in_one_call(matrix, 0.25)
    if o.isnan().any():
        assert not fused.in_one_call(matrix, scale)
    else:
        assert scale > 0
