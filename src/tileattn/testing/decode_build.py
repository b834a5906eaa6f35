"""Builds the tensors of a conformance case of `decode`: queries, caches, page tables, and NaN wherever nothing is read.

NaN is in the rows of a cache behind a sequence's keys, in pages that no sequence has, in packed queries of no sequence,
around the caches in their memory, and in what lies before every window of a sequence. The entries of page tables for
the last two are -1, or far out of range.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from ..variant.masks import SlidingWindow
from .decode_arguments import DecodeArguments, DecodeCase, DecodeShape
from .tensors import LAYOUTS, Draw
from .variants import MASKS, SCORES

NOT_FOLLOWED = (-1, 2**31 - 1, -(2**31), 1_000_000)  # entries of page tables past a length
SPARE_PAGES = 3


def build_decode(case: DecodeCase, device: torch.device | str = "cpu") -> DecodeArguments:
    """The arguments of a case's call on a device, also "meta"; the case's id determines the values."""
    structure, shape, device = case.structure, case.shape, torch.device(device)
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
    cpu, draw = Draw(generator, torch.device("cpu")), Draw(generator, device)
    q = cpu.queries_or_keys(shape.values, (*_of_q(shape), shape.heads, structure.head_dim), +1)
    cu_seqlens_q = None
    if shape.packed:
        cu_seqlens_q = torch.tensor([0, *accumulate(shape.lengths_q)], dtype=torch.int32, device=device)
        q[:, sum(shape.lengths_q) :] = torch.nan
    mask = MASKS[structure.mask](draw, shape)
    first_seen = _first_seen(shape, mask)
    keys = _scattered(cpu, shape, structure.head_dim, shape.values, -1, first_seen)
    values = _scattered(cpu, shape, structure.head_dim_v, "normal", +1, first_seen)
    k_cache, v_cache = CACHE_LAYOUTS[shape.layout](keys.to(case.dtype), values.to(case.dtype), device)
    q_layout = ("bshd", "packed", "bhsd")[len(case.id) % 3] if structure.aligned else "unaligned"
    q = LAYOUTS[q_layout](q.to(case.dtype), device)
    table = _page_table(shape, first_seen)
    return DecodeArguments(
        q[0] if shape.packed else q,
        k_cache,
        v_cache,
        torch.tensor(shape.lengths_k, dtype=torch.int32, device=device),
        page_table=None if table is None else table.to(device),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=shape.seqlen_q if shape.packed else None,
        causal=structure.causal,
        mask=mask,
        score_mods=tuple(SCORES[name](draw, shape) for name in structure.scores),
        tree_mask=_tree(cpu, shape).to(device) if structure.tree else None,
        sink=draw.normal(shape.heads) if structure.sink else None,
        scale=shape.scale,
        splits=shape.splits,
    )


def _of_q(shape: DecodeShape) -> tuple[int, int]:
    """The first dimensions of q, with one batch element where it is packed."""
    return (1, sum(shape.lengths_q) + shape.behind) if shape.packed else (shape.batch, shape.seqlen_q)


def _first_seen(shape: DecodeShape, mask: object) -> list[int]:
    """For each sequence, the first key that some row may see."""
    left = mask.left if isinstance(mask, SlidingWindow) else None
    if left is None:
        return [0] * shape.batch
    return [max(0, keys - rows - left) for rows, keys in zip(shape.lengths_q, shape.lengths_k)]


def _tree(draw: Draw, shape: DecodeShape) -> Tensor:
    """(batch, q_len, q_len), in which each row sees itself and what an earlier row, its parent, sees.

    In every third sequence a row may see anything: also later rows, or none of them.
    """
    rows = shape.seqlen_q
    tree = torch.eye(rows, dtype=torch.bool).repeat(shape.batch, 1, 1)
    for number in range(shape.batch):
        for row in range(1, rows):
            parent = int(draw.integers(row, 1))
            tree[number, row] |= tree[number, parent]
    tree[2::3] = draw.integers(2, *tree[2::3].shape) > 0
    return tree


# --- Pages ---


def pages_of(shape: DecodeShape) -> list[list[int]]:
    """The pages of each sequence, shuffled over the cache; a common prefix is in the first sequence's pages.

    Pages that are shared are full in all sequences, and none of the call's own queries stands in them.
    """
    counts = [-(-keys // shape.page) for keys in shape.lengths_k]
    old = [max(0, keys - rows) // shape.page for rows, keys in zip(shape.lengths_q, shape.lengths_k)]
    common = [(min(old[0], each) + 1) // 2 if shape.shared and number else 0 for number, each in enumerate(old)]
    fresh = sum(counts) - sum(common) + SPARE_PAGES
    order = iter(torch.randperm(fresh, generator=torch.Generator().manual_seed(fresh)).tolist())
    pages: list[list[int]] = []
    for count, shared in zip(counts, common):
        begin = pages[0][:shared] if shared else []
        pages.append(begin + [next(order) for _ in range(count - shared)])
    return pages


def _page_table(shape: DecodeShape, first_seen: list[int]) -> Tensor | None:
    """int32 (batch, width), in rows that are one entry longer in memory."""
    if not shape.page:
        return None
    width = shape.seqlen_k // shape.page
    rows = [[NOT_FOLLOWED[(row + at) % len(NOT_FOLLOWED)] for at in range(width + 1)] for row in range(shape.batch)]
    for row, pages, first in zip(rows, pages_of(shape), first_seen):
        unseen = first // shape.page
        row[unseen : len(pages)] = pages[unseen:]
        row[:unseen] = [-1] * unseen
    return torch.tensor(rows, dtype=torch.int32).reshape(shape.batch, width + 1)[:, :width]


def _scattered(draw: Draw, shape: DecodeShape, dim: int, values: str, sign: int, first_seen: list[int]) -> Tensor:
    """The keys, or the values, of all sequences in a cache (rows, tokens, kv_heads, dim), float32, NaN elsewhere."""
    pages = pages_of(shape) if shape.page else []
    used = len({page for each in pages for page in each})
    rows, tokens = (used + SPARE_PAGES, shape.page) if shape.page else (shape.batch, shape.seqlen_k)
    cache = torch.full((rows, tokens, shape.kv_heads, dim), torch.nan)
    for number, keys in enumerate(shape.lengths_k):
        new = draw.queries_or_keys(values, (keys, shape.kv_heads, dim), sign)
        at = torch.arange(first_seen[number], keys)
        if shape.page:
            cache[torch.tensor(pages[number], dtype=torch.int64)[at // tokens], at % tokens] = new[at]
        else:
            cache[number, at] = new[at]
    return cache


# --- Memory of the caches: (keys, values, device) -> the same in some memory of the device, NaN around it -------------


def _own(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    return k.to(device), v.to(device)


def _stacked(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Halves of one tensor (2, rows, tokens, kv_heads, dim), as vLLM has them."""
    return _views(k, v, device, lambda like: like.new_empty(2, *like.shape), lambda x: (x[0], x[1]))


def _in_page(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """One tensor (rows, 2, tokens, kv_heads, dim): a page's keys, then its values."""
    return _views(
        k, v, device, lambda like: like.new_empty(like.shape[0], 2, *like.shape[1:]), lambda x: (x[:, 0], x[:, 1])
    )


def _in_row(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """One tensor (rows, tokens, kv_heads, 2, dim): a key beside its value."""
    return _views(
        k,
        v,
        device,
        lambda like: like.new_empty(*like.shape[:3], 2, like.shape[3]),
        lambda x: (x[..., 0, :], x[..., 1, :]),
    )


def _heads_first(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory (rows, kv_heads, tokens, dim)."""
    k, v = (x.transpose(1, 2).contiguous().to(device).transpose(1, 2) for x in (k, v))
    return k, v


def _flat(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both in one flat tensor, behind something else, as transformers has them."""
    memory = torch.full((64 + k.numel() + v.numel() + 64,), torch.nan, dtype=k.dtype, device=device)
    of_k, of_v = memory[64:][: k.numel()], memory[64 + k.numel() :][: v.numel()]
    return of_k.view(k.shape).copy_(k), of_v.view(v.shape).copy_(v)


def _views(
    k: Tensor,
    v: Tensor,
    device: torch.device,
    whole: Callable[[Tensor], Tensor],
    halves: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Two views of one tensor, which is as wide as the wider of both, and 16 elements more."""
    dim = max(k.shape[3], v.shape[3]) + 16
    like = torch.empty((*k.shape[:3], dim), dtype=k.dtype, device=device)
    of_k, of_v = halves(whole(like).fill_(torch.nan))
    return of_k[..., : k.shape[3]].copy_(k), of_v[..., 8 : 8 + v.shape[3]].copy_(v)


def _unaligned(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows that begin at odd elements."""
    return LAYOUTS["unaligned"](k, device), LAYOUTS["unaligned"](v, device)


CACHE_LAYOUTS: dict[str, Callable[[Tensor, Tensor, torch.device], tuple[Tensor, Tensor]]] = {
    "own": _own,
    "stacked": _stacked,
    "in_page": _in_page,
    "heads_first": _heads_first,
    "flat": _flat,
    "in_row": _in_row,
    "unaligned": _unaligned,
}
