"""`block_table` of `flash_attn_varlen_func`: the same results as of the gathered keys, and no gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn.compat.flash_attn import flash_attn_varlen_func
from tileattn.testing import assert_forward_accurate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEQLENS_Q, SEQLENS_K = [1, 30, 7, 0], [301, 30, 256, 12]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 3)},
    "wide-window": {"window_size": (1000, 0)},
    "softcap": {"softcap": 7.0, "causal": True},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.0, 0.3, 0.05, 0.4], "causal": True},
    "scale": {"softmax_scale": 0.3},
}


class Paged:
    """Packed queries, and keys both in pages (NaN where there is none) and packed."""

    def __init__(self, dim: int, page_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(sum(SEQLENS_Q), 6, dim).to(dtype)
        self.k, self.v = (torch.randn(sum(SEQLENS_K), 3, dim).to(dtype) for _ in range(2))
        width = -(-max(SEQLENS_K) // page_size)
        pages = torch.randperm(2 * len(SEQLENS_K) * width)[: len(SEQLENS_K) * width].view(-1, width)
        self.caches = [torch.full((2 * pages.numel(), page_size, 3, dim), torch.nan, dtype=dtype) for _ in range(2)]
        for b, (begin, length) in enumerate(zip(accumulate([0, *SEQLENS_K]), SEQLENS_K)):
            j = torch.arange(length)
            for cache, x in zip(self.caches, (self.k, self.v)):
                cache[pages[b, j // page_size], j % page_size] = x[begin : begin + length]
        self.table = pages.int()
        for b, length in enumerate(SEQLENS_K):
            self.table[b, -(-length // page_size) :] = -1
        self.ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (SEQLENS_Q, SEQLENS_K)]
        self.longest = max(SEQLENS_Q), max(SEQLENS_K)

    def call(self, device: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors = [x.to(device) for x in (self.q, *self.caches, *self.ends)]
        table = self.table.to(device)
        result = flash_attn_varlen_func(*tensors, *self.longest, **options, block_table=table, return_attn_probs=True)
        assert isinstance(result, tuple)
        return result

    def gathered(self, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
        """The same call, of packed keys on the CPU in another dtype."""
        tensors = [x.to(dtype) for x in (self.q, self.k, self.v)]
        result = flash_attn_varlen_func(*tensors, *self.ends, *self.longest, **options, return_attn_probs=True)
        assert isinstance(result, tuple)
        return result[0], result[1]


SIZES = [(64, 256), (59, 16), (128, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "page_size"), SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_as_of_gathered_keys(name: str, dim: int, page_size: int, device: str) -> None:
    paged = Paged(dim, page_size, torch.float16)
    options, there = dict(OPTIONS[name]), dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"])
        there["alibi_slopes"] = options["alibi_slopes"].to(device)
    out, lse, probabilities = paged.call(device, **there)
    assert probabilities.numel() == 0
    eager = paged.gathered(torch.float16, **options)
    exact = paged.gathered(torch.float64, **options)
    of_exact = exact[0][None], exact[1][None]
    assert_forward_accurate(name, (out.cpu()[None], lse.cpu()[None]), of_exact, (
        [eager[0][None]],
        [eager[1][None]],
    ))  # fmt: skip


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""
    for options in OPTIONS.values():
        there = {
            name: torch.tensor(value, device="meta") if name == "alibi_slopes" else value
            for name, value in options.items()
        }
        for dim, page_size in SIZES:
            if dim % 8 == 0:  # others are Triton's
                yield functools.partial(Paged(dim, page_size, torch.float16).call, "meta", **there)


def test_a_backward_pass_raises() -> None:
    paged = Paged(16, 16, torch.float32)
    paged.q.requires_grad_()
    out, _, _ = paged.call("cpu")
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func with block_table: a call that reads a cache"):
        out.sum().backward()


def test_no_dropout() -> None:
    with pytest.raises(ValueError, match=r"dropout_p must be 0 with block_table, got 0\.1"):
        Paged(16, 16, torch.float32).call("cpu", dropout_p=0.1)
