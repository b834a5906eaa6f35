"""FlexAttention's functions on a GPU, in 16 bits: ``pytest -m gpu tests/compat/flex_attention/test_gpu.py``.

PyTorch's own definition (flex_oracle.py) in float64 is the oracle, and in the tensors' dtype eager, for the tolerance
rule of `tileattn.testing`. PyTorch's compiled kernels are not involved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tests.compat.flex_attention.test_functions import causal, dilated, neighbourhood, nothing, of_heads, prefix, window
from tests.tools.flex_oracle import expected
from tileattn import FunctionMask
from tileattn.compat.flex_attention import and_masks, create_block_mask, flex_attention, or_masks
from tileattn.testing import assert_accurate, assert_gradients_accurate, eager_gradients, oracle_gradients

pytestmark = pytest.mark.gpu
Function = Callable[..., Any]
MOST = 1500  # tokens
BY_PLANE = ("documents", "of_heads")
NAMES_OF_LEAVES = ("q", "k", "v", "first captured", "second captured")


class Shape(NamedTuple):
    lengths: tuple[int, int]
    dim: int
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.bfloat16


# From 1024 x 1024 tokens on tiles come from lists (docs/design/intervals.md).
SHAPES = {
    "small": Shape((300, 300), 64),
    "cross": Shape((130, 411), 128, (4, 4), torch.float16),
    "listed": Shape((1200, 1200), 64),
    "listed-128": Shape((1100, MOST), 128),
}


def masks() -> dict[str, Function]:
    """Masks by name; tables are on the GPU."""
    documents = torch.arange(MOST, device="cuda") // torch.tensor([113, 290], device="cuda")[:, None]
    of_all = torch.arange(MOST, device="cuda") % 170 == 0
    starts = torch.tensor([0, 200, 470], dtype=torch.int32, device="cuda")
    of_token = (torch.arange(MOST, device="cuda")[:, None] >= starts).sum(1) - 1

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[b, q_idx] == documents[b, kv_idx]

    def local_and_global(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (window(b, h, q_idx, kv_idx) | of_all[kv_idx] | of_all[q_idx]) & (q_idx >= kv_idx)

    def packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        first = starts[of_token[q_idx]]
        return (of_token[q_idx] == of_token[kv_idx]) & or_masks(prefix, causal)(b, h, q_idx - first, kv_idx - first)

    return {
        "causal": causal,
        "window": and_masks(causal, window),
        "prefix": or_masks(prefix, causal),
        "documents": and_masks(document, causal),
        "packed": packed,
        "dilated": dilated,
        "neighbourhood": neighbourhood,
        "of_heads": of_heads,
        "global": local_and_global,
        "rows of none": nothing,
    }


NAMES = ("causal", "window", "prefix", "documents", "packed", "dilated", "neighbourhood", "of_heads", "global",
         "rows of none")  # fmt: skip


def inputs(shape: Shape) -> list[Tensor]:
    """query, key and value."""
    torch.manual_seed(0)
    (seqlen_q, seqlen_k), (heads, kv_heads) = shape.lengths, shape.heads
    sizes = ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k))
    return [torch.randn(2, *size, shape.dim, device="cuda", dtype=shape.dtype).requires_grad_() for size in sizes]


def check(name: str, got: Any, mods: Callable[[Any], tuple[Any, Any]], leaves: list[Tensor], captured: Any) -> None:
    """out, lse and all gradients.

    Args:
        got: out and lse.
        mods: the score and the mask function, given the tensors that the score function captures.
    """
    torch.manual_seed(1)
    do = torch.randn_like(got[0])
    given = dict(zip(NAMES_OF_LEAVES, (*leaves, *captured)))
    exact = {which: x.detach().double().requires_grad_() for which, x in given.items()}
    of_captured = mods(list(exact.values())[3:])
    out, lse = expected(*repeated(list(exact.values())[:3]), *of_captured)
    right = dict(zip(exact, differentiated(out, do, exact)))
    rounded = eager_gradients(given, do.transpose(1, 2), None, *standard(given, mods))
    sizes = oracle_gradients(exact, do.transpose(1, 2), None, *standard(exact, mods))[1]
    eager = expected(*repeated(leaves), *mods(captured))
    assert_accurate(f"lse of {name}", got[1].detach(), lse.detach(), [eager[1].detach()], lse_of=do.dtype)
    assert_accurate(f"out of {name}", got[0].detach(), out.detach(), [eager[0].detach()])
    mine = dict(zip(given, differentiated(got[0], do, given)))
    assert_gradients_accurate(name, mine, right, rounded, sizes, do.dtype)


def differentiated(out: Tensor, do: Tensor, of: dict[str, Tensor]) -> list[Tensor]:
    leaves = list(of.values())
    return list(torch.autograd.grad(out, leaves, do.to(out.dtype), materialize_grads=True, allow_unused=True))


def repeated(leaves: list[Tensor]) -> list[Tensor]:
    """q, and k and v with its heads."""
    return [leaves[0], *(x.repeat_interleave(leaves[0].shape[1] // x.shape[1], 1) for x in leaves[1:])]


def standard(given: dict[str, Tensor], mods: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, ...]:
    """The call as `tileattn.testing` takes it: bshd, and queries that count from the difference of the lengths."""
    q, k, v, *captured = given.values()
    score, mask = mods(captured)
    shift = k.shape[2] - q.shape[2]
    seen = None if mask is None else FunctionMask(lambda b, h, q_idx, kv_idx: mask(b, h, q_idx - shift, kv_idx))
    scores = () if score is None else (lambda x, b, h, q_idx, kv_idx: score(x, b, h, q_idx - shift, kv_idx),)
    return (*(x.transpose(1, 2) for x in (q, k, v)), seen, scores)


@pytest.mark.parametrize("made_by", ["here", "torch"])
@pytest.mark.parametrize("which", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_mask(name: str, which: str, made_by: str) -> None:
    """A function alone, and with the blocks that PyTorch finds."""
    mask, shape = masks()[name], SHAPES[which]
    leaves = inputs(shape)
    create: Any = create_block_mask if made_by == "here" else torch_flex.create_block_mask
    planes = (2, shape.heads[0]) if name in BY_PLANE else (None, None)
    block_mask = create(mask, *planes, *shape.lengths, device="cuda")
    got = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True, return_lse=True)
    check(f"{name}, {which}", got, lambda _: (None, mask), leaves, [])


def score(name: str, captured: Any) -> Function:
    """A score function by its name, of the tensors that it captures: slopes of heads, and a bias."""
    slopes, bias = captured
    return {
        "alibi": lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(),
        "bias": lambda score, b, h, q, k: score + bias[b, 0, q, k],
        "factor": lambda score, b, h, q, k: score * slopes[h] + torch.where(q >= k, 0.0, bias[b, 0, q, k]),
        "soft cap": lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
    }[name]


@pytest.mark.parametrize("which", ["small", "cross"])
@pytest.mark.parametrize("name", ["alibi", "bias", "factor", "soft cap"])
def test_score(name: str, which: str) -> None:
    """With gradients of what is captured, under a causal mask."""
    shape = SHAPES[which]
    leaves = inputs(shape)
    captured = [
        torch.rand(size, device="cuda", dtype=shape.dtype).requires_grad_() for size in ((4,), (2, 1, 512, 512))
    ]
    block_mask = create_block_mask(causal, None, None, *shape.lengths, device="cuda")
    got = flex_attention(*leaves, score(name, captured), block_mask, enable_gqa=True, return_lse=True)
    check(f"{name}, {which}", got, lambda of: (score(name, of), causal), leaves, captured)


@pytest.mark.parametrize("lengths", [(1, 1200), (3, 700)])
def test_few_queries(lengths: tuple[int, int]) -> None:
    """Without gradients these go to the kernels for decoding."""
    leaves = [x.detach() for x in inputs(Shape(lengths, 128))]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= 5) & (kv_idx < 577 + q_idx)

    block_mask = create_block_mask(mask, None, None, *lengths, device="cuda")
    with torch.no_grad():
        out, lse = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True, return_lse=True)
    exact, eager = (
        expected(*(x.to(dtype).repeat_interleave(4 // x.shape[1], 1) for x in leaves), None, mask)
        for dtype in (torch.float64, out.dtype)
    )
    assert_accurate("lse", lse, exact[1], [eager[1]], lse_of=out.dtype)
    assert_accurate("out", out, exact[0], [eager[0]])


def test_compiled() -> None:
    """`torch.compile(fullgraph=True)` of a call with its block mask made inside."""
    leaves = inputs(SHAPES["small"])

    @torch.compile(fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        block_mask = create_block_mask(causal, None, None, 300, 300, device="cuda")
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)

    check("compiled", attend(*leaves), lambda _: (None, causal), leaves, [])
