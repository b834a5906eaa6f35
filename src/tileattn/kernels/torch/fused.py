"""PyTorch's fused attention for CPUs, on one block of rows.

`F.scaled_dot_product_attention` runs `aten::_scaled_dot_product_flash_attention_for_cpu` on a CPU. Called directly, the
operator also returns lse. It needs equal head dims and at least one query and one key. It supports GQA without
expanding K and V, and a floating-point mask that it adds to the scores. It returns lse = 0 for rows without keys and
for rows whose scores are NaN. Therefore its results are used only if all scores are finite (`has_infinite`,
`has_failed`).
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call.facts import SMALLEST_SCALE
from ...variant.masks import Causal
from ...variant.scores import ALiBi, Bias
from .mask import KeyRange, ScoreMatrix
from .softmax import merge
from .visits import Visits

# The most elements of a floating-point mask: 64 MiB in float32.
MAX_MASK = 2**24
# The operator's blocks have 32 rows or more. With fewer rows per head, the heads of a group share a block.
FOLDED_ROWS = 32

# Candidates for the rows of a block, and the overhead of a call, in multiply-adds.
BLOCKS_M = (64, 128, 256, 512)
CALL_COST = 4e6


def expresses(matrix: ScoreMatrix) -> bool:
    """Whether the operator supports the matrix: any mask, score modifications that only add, no dropout, on a CPU."""
    if matrix.device.type != "cpu" or matrix.dropout is not None:
        return False
    return all(isinstance(mod, (Bias, ALiBi)) for mod in matrix.score_mods)


def in_one_call(matrix: ScoreMatrix, scale: float) -> bool:
    """Whether one call of the operator suffices, without a floating-point mask.

    That is so without a mask, and for a causal mask with seqlen_q = seqlen_k: the operator's causal mask is aligned
    top-left. The operator multiplies its causal mask by the scale, so a scale that is not positive would turn -inf into
    NaN or +inf.
    """
    if matrix.score_mods:
        return False
    if matrix.mask is None:
        return True
    return type(matrix.mask) is Causal and matrix.seqlen_q == matrix.seqlen_k and scale >= SMALLEST_SCALE


def are_few(q: Tensor, k: Tensor) -> bool:
    """Whether the norms of q and k cost no more than calling an operator; they may make `has_failed` unnecessary."""
    return q.numel() + k.numel() <= 2**14


def may_overflow(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether a score may be NaN or infinite: False if the bound |q| |k| of all inner products is small enough."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    size = math.prod(float(torch.linalg.vector_norm(x, dtype=dtype)) for x in (q, k))
    return not size * max(abs(scale), 1.0) < torch.finfo(dtype).max / 2


def has_infinite(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether q or k may contain NaN or Inf. Their sums, half as expensive as norms, are checked first."""
    return not math.isfinite(float(q.sum() + k.sum())) and may_overflow(q, k, scale)


def has_failed(lse: Tensor, q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether the operator's result may be wrong: a score was NaN or +inf, or all scores of a row overflowed to -inf.

    In the last case the operator returns lse = 0, which may also be a correct value.
    """
    smallest, largest = (float(x) for x in torch.aminmax(lse.abs()))
    if math.isnan(largest) or (math.isinf(largest) and bool((lse == torch.inf).any())):
        return True
    return smallest == 0 and may_overflow(q, k, scale)


def equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v padded with zeros to the larger head dim: the scores do not change, o gets columns of 0."""
    more_v = v.shape[3] - q.shape[3]
    if more_v > 0:
        return F.pad(q, (0, more_v)), F.pad(k, (0, more_v)), v
    return q, k, v if more_v == 0 else F.pad(v, (0, -more_v))


def one_call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of all rows, without a mask or causal: o (batch, rows, heads, dim), lse (batch, heads, rows)."""
    return _call(q, k, v, scale, None, causal)


def one_call_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `one_call`; all tensors are bshd, the results contiguous. o and lse may include a sink.

    lse (batch, heads, rows) must be finite. The operator supports neither a gradient of lse nor one of a mask.
    """
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    q, k, v = equal_head_dims(q, k, v)
    do, o = (F.pad(x, (0, v.shape[3] - head_dim_v)) if v.shape[3] > head_dim_v else x for x in (do, o))
    bhsd = (x.transpose(1, 2) for x in (do, q, k, v, o))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *bhsd, lse, 0.0, causal, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq[..., :head_dim].contiguous(), dk[..., :head_dim].contiguous(), dv[..., :head_dim_v].contiguous()


def cheapest_blocks(matrix: ScoreMatrix, head_dim: int) -> tuple[int, list[list[KeyRange]]]:
    """The cheapest block_M and its key ranges. Smaller blocks compute fewer masked scores, but need more calls."""
    heads = matrix.heads * (matrix.batch.stop - matrix.batch.start)
    cost_of_score = heads * 2 * head_dim
    candidates = BLOCKS_M
    if matrix.seqlen_q * matrix.seqlen_k * cost_of_score < 4 * CALL_COST:
        candidates = BLOCKS_M[-1:]  # the problem is so small that smaller blocks save nothing
    visits = Visits(matrix, candidates[0])

    def cost(block_M: int, ranges: list[list[KeyRange]]) -> float:
        keys = sum(seen.visited for element in ranges for seen in element) / len(ranges)
        calls = sum(max(1, len(seen.stretches or ())) for element in ranges for seen in element)
        return keys * block_M * cost_of_score + CALL_COST * calls

    def ranges_of(block_M: int) -> list[list[KeyRange]]:
        # Fewer hidden keys than this cost less than one call more.
        return visits.keys(block_M, int(CALL_COST / (block_M * cost_of_score)))

    return min(((block_M, ranges_of(block_M)) for block_M in candidates), key=lambda choice: cost(*choice))


def attend(
    q: Tensor, k: Tensor, v: Tensor, matrix: ScoreMatrix, rows: slice, seen: KeyRange, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a block of rows: o (batch, rows, heads, dim) in q's dtype, lse (batch, heads, rows).

    q (batch, rows, heads, dim) are those rows; k, v (batch, seqlen_k, kv_heads, dim) all keys; dims are equal.
    """
    if seen.lo == seen.hi:
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=matrix.dtype)
        return torch.zeros_like(q), lse
    step = _keys_at_once(matrix, rows, seen)
    parts = []
    for keys in seen.tiles(step):
        added = _added(matrix, rows, keys, seen)
        o, lse = _call(q, k[:, keys], v[:, keys], scale, added, causal=False)
        if added is not None:
            top = added.amax(dim=-1)
            lse = lse.masked_fill(top == -torch.inf, -torch.inf)
            # The added tensor may contain NaN or +inf; lse = NaN reports it to `has_failed`.
            lse = lse.masked_fill(~(top < torch.inf), torch.nan)
        parts.append((o, lse))
    return merge(parts)


def _keys_at_once(matrix: ScoreMatrix, rows: slice, seen: KeyRange) -> int:
    """The number of keys for which the added tensor has at most `MAX_MASK` elements."""
    count, heads = rows.stop - rows.start, matrix.heads * (matrix.batch.stop - matrix.batch.start)
    if count * (seen.hi - seen.lo) * heads <= MAX_MASK:
        return seen.hi - seen.lo
    # Most masks are the same for all heads and batch elements; the shape for one key shows whether this one is.
    added = _added(matrix, rows, slice(seen.lo, seen.lo + 1), KeyRange(seen.lo, seen.hi, seen.hi, seen.hi))
    copies = 1 if added is None else added.shape[0] * added.shape[1]
    return max(1024, MAX_MASK // (count * copies))


def _added(matrix: ScoreMatrix, rows: slice, keys: slice, seen: KeyRange) -> Tensor | None:
    """The tensor to add to a tile of scores, (batch | 1, heads | 1, rows, keys): modifications, -inf for masked keys.

    None if there is nothing to add.
    """
    partial, shape = seen.partial(keys), (rows.stop - rows.start, keys.stop - keys.start)
    if not matrix.score_mods and not partial:
        return None
    first = matrix.score_mods[0] if matrix.score_mods else None
    if isinstance(first, Bias) and first.tensor.dtype == matrix.dtype:
        # A view of the bias: it is copied only if more is added to it.
        added = matrix.cut(first.tensor, rows, keys)
        added = added.expand(*added.shape[:2], *shape)
        matrix = dataclasses.replace(matrix, score_mods=matrix.score_mods[1:])
    else:
        added = torch.zeros(1, 1, *shape, dtype=matrix.dtype)
    added = matrix.modified(added, rows, keys)
    return added.masked_fill(matrix.forbidden(rows, keys), -torch.inf) if partial else added


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Calls the operator on bshd tensors; returns o in bshd and lse (batch, heads, rows)."""
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    fold = heads > kv_heads and rows < FOLDED_ROWS and not causal
    if fold:
        # The queries of a group of heads become rows of one head, so that K and V are read once for the group.
        q = q.unflatten(2, (kv_heads, -1)).transpose(2, 3).reshape(batch, -1, kv_heads, dim)
        added = None if added is None else _folded(added, heads // kv_heads, kv_heads)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=added, scale=scale
    )
    o = o.transpose(1, 2)
    if fold:
        # rows x group -> heads, with heads = kv_heads x group.
        o = o.reshape(batch, rows, -1, kv_heads, dim).transpose(2, 3).reshape(batch, rows, heads, dim)
        lse = lse.reshape(batch, kv_heads, rows, -1).transpose(2, 3).reshape(batch, heads, rows)
    return o, lse


def _folded(added: Tensor, group: int, kv_heads: int) -> Tensor:
    """(batch, heads | 1, rows, keys) -> (batch, kv_heads | 1, rows * group, keys), ordered like the folded queries."""
    if added.shape[1] == 1:
        return added.repeat_interleave(group, dim=2)
    return added.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(2, 3)
