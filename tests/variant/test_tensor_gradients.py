"""Gradients of the tensors that score modifications read, with seqlen_q and seqlen_k different.

Query positions then do not begin at 0, so code that sums a gradient by rows or by positions must add the offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import Bias, FunctionMask, SlidingWindow, SoftCap
from tileattn.kernels.triton.interpreter import interpreted
from tileattn.testing import assert_gradients_accurate, eager_gradients, gradients, oracle_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS = 4, 2
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def by_distance(table: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    return (lambda score, b, h, q, k: score + table[h, q - k + seqlen_q],)


def by_row(table: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    return (lambda score, b, h, q, k: score * table[q - (seqlen_k - seqlen_q)] + 0.01 * k,)


def by_key(table: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    return (lambda score, b, h, q, k: score + table[b, k],)


def bias(table: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    return (Bias(table), SoftCap(3.0))


# The modifications that read a table, and its shape for (batch, seqlen_q, seqlen_k).
TABLES: dict[str, tuple[Callable[..., tuple[Any, ...]], Callable[[int, int, int], tuple[int, ...]]]] = {
    "distance": (by_distance, lambda batch, seqlen_q, seqlen_k: (HEADS, seqlen_q + seqlen_k)),
    "row": (by_row, lambda batch, seqlen_q, seqlen_k: (seqlen_q,)),
    "key": (by_key, lambda batch, seqlen_q, seqlen_k: (batch, seqlen_k)),
    "bias": (bias, lambda batch, seqlen_q, seqlen_k: (batch, HEADS, seqlen_q, seqlen_k)),
    "bias of all heads": (bias, lambda batch, seqlen_q, seqlen_k: (batch, 1, seqlen_q, seqlen_k)),
    "bias of all rows": (bias, lambda batch, seqlen_q, seqlen_k: (1, HEADS, 1, seqlen_k)),
}
# Those whose gradients have one order of summation anyway are run once.
BACKENDS = [("torch", False), ("triton", False)]
BACKENDS += [("tilelang", False), ("tilelang", True)] if DEVICE == "cuda" else []


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)


@pytest.mark.slow_cases(
    "triton-False-distance-(37, 21)",
    "triton-False-row-(21, 37)",
    "triton-False-key-(37, 21)",
    "triton-False-bias-(21, 37)",
    "triton-False-bias of all heads-(37, 21)",
    "triton-False-bias of all rows-(21, 37)",
    reason="1.5 s each in Triton's interpreter",
)
@pytest.mark.parametrize("seqlens", [(21, 37), (37, 21)], ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("backend", "deterministic"), BACKENDS)
def test_gradient(backend: str, table: str, seqlens: tuple[int, int], deterministic: bool) -> None:
    if backend == "triton" and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    seqlen_q, seqlen_k = seqlens
    make, shape = TABLES[table]
    leaves = {
        "dq": drawn(2, seqlen_q, HEADS, 16, seed=0),
        "dk": drawn(2, seqlen_k, KV_HEADS, 16, seed=1),
        "dv": drawn(2, seqlen_k, KV_HEADS, 16, seed=2),
        "dt0": drawn(*shape(2, *seqlens), seed=3),
    }
    exact = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    do, dlse = drawn(2, seqlen_q, HEADS, 16, seed=4), drawn(2, HEADS, seqlen_q, seed=5).float()
    mask = SlidingWindow(None, 20)  # every query sees a key

    def standard(given: dict[str, Tensor]) -> tuple[Any, ...]:
        *qkv, tensor = given.values()
        return (*qkv, mask, make(tensor, *seqlens), None, None)

    q, k, v, mask_, mods, *_ = standard(leaves)
    got = tileattn.attention(
        q, k, v, mask=mask_, score_mod=mods, return_lse=True, backend=backend, deterministic=deterministic
    )
    expected, sizes = oracle_gradients(exact, do, dlse, *standard(exact))
    eager = eager_gradients(leaves, do, dlse, *standard(leaves))
    grads = gradients(got, leaves, do, dlse)
    assert_gradients_accurate(f"{table} {seqlens}", grads, expected, eager, sizes, q.dtype)


@pytest.mark.parametrize(("backend", "deterministic"), BACKENDS)
@pytest.mark.parametrize("by", ["head", "key"])
def test_slopes_of_hidden_scores_are_in_no_gradient(backend: str, deterministic: bool, by: str) -> None:
    """Infinite ones: 0 times that is NaN. The oracle and eager take a modification that is finite there."""
    if backend == "triton" and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    leaves = {name: drawn(1, 21, 2, 16, seed=seed) for seed, name in enumerate(("dq", "dk", "dv"))}
    leaves["dt0"] = drawn(2 if by == "head" else 21, seed=3)
    exact = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    mask, do = FunctionMask(lambda b, h, q, k: q != k), drawn(1, 21, 2, 16, seed=4)

    def standard(given: dict[str, Tensor], finite: bool) -> tuple[Any, ...]:
        *qkv, table = given.values()

        def nearer(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            distance = torch.where(q == k, 1, q - k) if finite else q - k
            return score + table[h if by == "head" else k] / distance

        return (*qkv, mask, (nearer,), None, None)

    q, k, v, _, mods, *_ = standard(leaves, finite=False)
    got = tileattn.attention(
        q, k, v, mask=mask, score_mod=mods, return_lse=True, backend=backend, deterministic=deterministic
    )
    expected, sizes = oracle_gradients(exact, do, None, *standard(exact, finite=True))
    eager = eager_gradients(leaves, do, None, *standard(leaves, finite=True))
    assert_gradients_accurate(by, gradients(got, leaves, do, None), expected, eager, sizes, q.dtype)
