"""`varlen_attention` with `seqused_k` and `block_table`: each sequence against the oracle over its own keys.

Keys and pages that no sequence uses are NaN, and table entries behind a sequence's last page are -1. The same tests run
on a GPU by ``pytest -m gpu``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS, DIM = 4, 2, 64
SEQLENS_Q = [1, 17, 0, 5, 3]
USED = [63, 17, 9, 130, 0]
HELD = [70, 17, 9, 131, 4]  # keys that k holds of each sequence
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": tileattn.SlidingWindow(20, 0)},
    "softcap": {"causal": True, "score_mod": tileattn.SoftCap(5.0)},
    "own": {"score_mod": lambda score, b, h, q, k: score - 0.01 * (q - k), "causal": True, "scale": 0.2},
}
FORMS = ["packed", "pages of 1", "pages of 16", "pages of 5 without seqused_k"]


def ends(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed_keys(used: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """k and v with NaN behind the used keys of each sequence, and behind the last sequence."""
    result = []
    for which in (0, 1):
        x = torch.full((sum(HELD) + 3, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
        for begin, keys in zip(accumulate([0, *HELD]), (pair[which] for pair in used)):
            x[begin : begin + len(keys)] = keys
        result.append(x)
    return result


def paged_keys(used: list[tuple[Tensor, Tensor]], page_size: int) -> tuple[list[Tensor], Tensor]:
    """Pages of k and v in any order, and the block table."""
    width = -(-max(HELD) // page_size)
    pages = torch.randperm(len(used) * width).view(len(used), width)
    caches = [torch.full((pages.numel(), page_size, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for b, pair in enumerate(used):
        j = torch.arange(len(pair[0]))
        for cache, keys in zip(caches, pair):
            cache[pages[b, j // page_size], j % page_size] = keys
    table = pages.int()
    for b, (keys, _) in enumerate(used):
        table[b, -(-len(keys) // page_size) :] = -1
    return caches, table


def drawn() -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    q = torch.randn(sum(SEQLENS_Q), HEADS, DIM).bfloat16()
    return q, [tuple(torch.randn(n, KV_HEADS, DIM).bfloat16() for _ in range(2)) for n in USED]  # type: ignore[misc]


def attended(q: Tensor, used: list[tuple[Tensor, Tensor]], variant: str, form: str, device: str) -> Any:
    """o and lse of the call."""
    seqused_k: Tensor | None = torch.tensor(USED, dtype=torch.int32, device=device)
    cu_seqlens_q, table = ends(SEQLENS_Q, device), None
    cu_seqlens_k: Tensor | None = ends(HELD, device)
    if form == "packed":
        caches = packed_keys(used)
    else:
        caches, table = paged_keys(used, int(form.split()[2]))
        table = table.to(device)
        seqused_k, cu_seqlens_k = (None, ends(USED, device)) if "without" in form else (seqused_k, None)
    k, v = (cache.to(device) for cache in caches)
    starts = (cu_seqlens_q, cu_seqlens_k, max(SEQLENS_Q) + 2, max(HELD) + 1)
    return tileattn.varlen_attention(
        q.to(device), k, v, *starts, seqused_k=seqused_k, block_table=table, return_lse=True, **VARIANTS[variant]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_by_itself(variant: str, form: str, device: str) -> None:
    q, used = drawn()
    o, lse = attended(q, used, variant, form, device)
    options = VARIANTS[variant]
    assert (o.shape, lse.shape) == (q.shape, (HEADS, len(q)))
    for b, (begin, count) in enumerate(zip(accumulate([0, *SEQLENS_Q]), SEQLENS_Q)):
        rows = slice(begin, begin + count)
        one = [x[None].to(device) for x in (q[rows], *used[b])]
        got = o[None, rows], lse[None, :, rows]
        if 0 in (count, USED[b]):
            assert not got[0].any()
            assert (got[1] == -torch.inf).all()
            continue
        mask = tileattn.Causal() if options.get("causal") else options.get("mask")
        given = (mask, [options["score_mod"]] if "score_mod" in options else [], None, options.get("scale"))
        name = f"{variant} {form} {b}"
        assert_forward_accurate(name, got, oracle_attention(*one, *given), eager_attention(*one, *given))


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""
    q, used = drawn()
    for variant, form in product(VARIANTS, FORMS):
        yield functools.partial(attended, q, used, variant, form, "meta")


def test_a_graph_for_all_lengths() -> None:
    """torch.compile(fullgraph): neither another length nor another table compiles anew."""
    q, used = drawn()
    k, v = packed_keys(used)
    seqused_k = torch.tensor(USED, dtype=torch.int32)
    starts = (ends(SEQLENS_Q, "cpu"), ends(HELD, "cpu"), 20, 140)
    torch._dynamo.reset()
    call = torch.compile(tileattn.varlen_attention, fullgraph=True, backend="eager")
    for lengths in (seqused_k, seqused_k // 2):
        o = call(q, k, v, *starts, seqused_k=lengths)
        assert torch.equal(o, tileattn.varlen_attention(q, k, v, *starts, seqused_k=lengths))


Q, K, PAGES = torch.zeros(5, 4, 16), torch.zeros(9, 2, 16), torch.zeros(3, 4, 2, 16)
OF_Q, OF_K = (torch.tensor([0, 2, n], dtype=torch.int32) for n in (5, 9))
LENGTHS, TABLE = torch.tensor([1, 3], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("keys", "cu_seqlens_k", "options", "error", "message"),
    [
        (K, OF_K, {"seqused_k": LENGTHS.long()}, TypeError, "seqused_k must be int32, got torch.int64"),
        (K, OF_K, {"seqused_k": LENGTHS[:1]}, ValueError, r"seqused_k must have shape \(sequences,\) = \(2,\), got"),
        (K, OF_K, {"seqused_k": LENGTHS + 2}, ValueError, r"seqused_k must lie in 0 \.\. .* 2, got 3 \(sequence 0\)"),
        (K, OF_K, {"seqused_k": LENGTHS - 2}, ValueError, r"seqused_k must lie in 0 \.\. .*, got -1"),
        (K, OF_K[:2], {"seqused_k": LENGTHS}, ValueError, "of one number of sequences, got 2 and 1"),
        (K, None, {"seqused_k": LENGTHS}, TypeError, "cu_seqlens_k may be None only with block_table and seqused_k"),
        (K, OF_K, {"seqused_k": LENGTHS, "dropout_p": 0.1}, ValueError, "dropout_p must be 0 with seqused_k"),
        (K, OF_K, {"block_table": TABLE}, ValueError, r"k must have 4 dimensions, \(pages, page_size"),
        (PAGES, OF_K, {"block_table": TABLE.long()}, TypeError, "block_table must be int32"),
        (PAGES, OF_K, {"block_table": TABLE[:1]}, ValueError, "block_table must have shape"),
        (PAGES, OF_K, {"block_table": TABLE + 3}, ValueError, "block_table"),
        (PAGES, OF_K * 3, {"block_table": TABLE}, ValueError, "the lengths of cu_seqlens_k must lie in 0 .. 8"),
        (PAGES, None, {"block_table": TABLE}, TypeError, "cu_seqlens_k may be None only with"),
        (PAGES, None, {"block_table": TABLE, "seqused_k": LENGTHS * 3}, ValueError, "seqused_k must lie in 0 .. 8"),
    ],
)
def test_errors(keys: Tensor, cu_seqlens_k: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tileattn.varlen_attention(Q, keys, keys, OF_Q, cu_seqlens_k, 5, 9, **options)


def test_no_gradients() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="varlen_attention has no gradients with seqused_k or block_table"):
        tileattn.varlen_attention(q, K, K, OF_Q, OF_K, 5, 9, seqused_k=LENGTHS)
    with torch.no_grad():
        tileattn.varlen_attention(q, K, K, OF_Q, OF_K, 5, 9, seqused_k=LENGTHS)
