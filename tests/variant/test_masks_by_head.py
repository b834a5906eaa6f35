"""Masks whose key ranges differ by head: code that visits keys for several heads takes the union of their ranges."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import Mask
from tileattn.kernels.triton import defaults as config
from tileattn.kernels.triton.interpreter import interpreted
from tileattn.kernels.triton.tile_sizes import KERNELS, Config
from tileattn.math import load
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    gradients,
    oracle_attention,
    oracle_gradients,
)


@dataclass(frozen=True, eq=False)
class WindowByHead(Mask):
    """As SlidingWindow(left[h], right[h])."""

    left: Tensor
    right: Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k >= q - load(self.left, h)) & (k <= q + load(self.right, h))

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return q_lo - load(self.left, h), q_hi + load(self.right, h) + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return q_hi - load(self.left, h), q_lo + load(self.right, h) + 1

    def q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return k_lo - load(self.right, h), k_hi + load(self.left, h) + 1

    def full_q_range(self, b: Any, h: Any, k_lo: Any, k_hi: Any, seqlen_k: Any) -> tuple[Any, Any]:
        return k_hi - load(self.right, h), k_lo + load(self.left, h) + 1


# (backend, seqlen_q, seqlen_k, left, right): one head sees many more keys before a query than the other.
CASES = [
    ("torch", 300, 900, (400, 3), (500, 500)),
    ("torch", 300, 300, (3, 400), (2, 50)),
    ("triton", 20, 40, (50, 3), (60, 60)),
    ("triton", 33, 33, (3, 50), (2, 9)),
]


@pytest.mark.parametrize(("backend", "seqlen_q", "seqlen_k", "left", "right"), CASES, ids=str)
def test_heads_with_other_ranges(
    backend: str, seqlen_q: int, seqlen_k: int, left: tuple[int, int], right: tuple[int, int]
) -> None:
    if backend == "triton" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, n, 2, 16, generator=generator).half() for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    )
    mask = WindowByHead(torch.tensor(left), torch.tensor(right))
    leaves = {"dq": q.requires_grad_(), "dk": k.requires_grad_(), "dv": v.requires_grad_()}
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    rest = (mask, (), None, None)
    small = {name: Config(16, 16, 4, 1) for name in KERNELS}
    with config.overridden(**small) if backend == "triton" else contextlib.nullcontext():
        got = tileattn.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        grads = gradients(got, leaves, do, None)
    assert_forward_accurate("o", got, oracle_attention(q, k, v, *rest), eager_attention(q, k, v, *rest))
    expected, sizes = oracle_gradients(exact, do, None, *exact.values(), *rest)
    eager = eager_gradients(leaves, do, None, *leaves.values(), *rest)
    assert_gradients_accurate("gradients", grads, expected, eager, sizes, q.dtype)
