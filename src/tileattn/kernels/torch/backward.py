"""The backward pass of the torch backend: FlashAttention-2's (Dao 2023, arXiv 2307.08691), in plain operations.

The mathematics is that of `tileattn.reference.backward`. The probabilities of a tile are computed again from lse; only
tiles that the mask lets some row see are visited, and the mask is computed only where not all rows see all keys. No
tensor grows with seqlen_q * seqlen_k, but for gradients of tensors that do, such as a bias.

Rows are the outer loop, as in the forward pass: dq of a block of rows is complete after its keys, while dk and dv are
added to in memory. The queries of a group of heads are rows of their kv head, which sums dk and dv over the group.

On a CPU, PyTorch's fused backward pass runs what it expresses without a mask of floats (`fused.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.facts import Gradients
from ...call.inputs import Inputs
from ...variant.masks import Mask
from . import fused
from .mask import KeyRange, ScoreMods, Variant, key_ranges, row_blocks
from .score_gradient import Watched, add_biases, add_to_gradients, only_biases, recording, through_score_mods

# Rows and keys of a tile, and the elements of a tile of all heads: two of them should stay in a CPU's cache.
BLOCK_M = 128
BLOCK_N = 256
MAX_TILE = 2**19


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool
    k: bool
    v: bool
    sink: bool


def backward(
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    mask: Mask | None,
    score_mods: ScoreMods,
    watched: Sequence[Watched | None],
    needs: Needs,
    scale: float,
) -> Gradients:
    """The gradients of attention; arguments as those of `add_gradients`.

    mask, score_mods: the variant, restored.
    watched: of each tensor of the variant, what the score modifications hold in its place if its gradient is wanted.
    """
    variant, sink = Variant.of(inputs.q, inputs.k, mask, score_mods, inputs.dropout), inputs.sink
    wanted = [x for x in watched if x is not None]
    dq, dk, dv, dsink = add_gradients(inputs, o, lse, do, dlse, variant, wanted, needs, scale)
    dsink = None if dsink is None or sink is None else dsink.to(sink.dtype)
    return Gradients(dq, dk, dv, dsink, tuple(None if x is None else x.gradient() for x in watched))


@torch.no_grad()
def add_gradients(
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    watched: Sequence[Watched],
    needs: Needs,
    scale: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv and dsink, None where not wanted; all tensors bshd, of any strides. Adds to the watched tensors.

    do (batch, seqlen_q, heads, head_dim_v) and dlse (batch, heads, seqlen_q) are the gradients of o and lse, which the
    forward pass returned. dsink is in the dtype of sums. Of the inputs q, k, v and sink are read.
    """
    q, k, v, sink, *_ = inputs
    dtype, mask = variant.dtype, variant.mask
    delta = _delta(do, dlse, o, dtype)
    dsink = _sink_gradient(sink, lse, delta) if sink is not None and needs.sink else None
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    elif dlse is None and fused.expresses(variant) and fused.in_one_call(variant, scale):
        dq, dk, dv = fused.one_call_backward(do, q, k, v, o, _finite(lse), scale, causal=mask is not None)
    else:
        dq, dk, dv = _by_blocks(do, delta, q, k, v, _finite(lse), variant, watched, needs, scale)
    dq, dk, dv = (x if need else None for x, need in zip((dq, dk, dv), needs))
    return dq, dk, dv, dsink


def _delta(do: Tensor, dlse: Tensor | None, o: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dO * O) - dlse, (batch, heads, seqlen_q)."""
    delta = (do.to(dtype) * o.to(dtype)).sum(dim=-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Of a key whose value is zero: its probability times (0 - delta), summed over batch and rows."""
    p = torch.exp(sink.to(lse.dtype)[:, None] - _finite(lse))
    return -(p * delta).sum(dim=(0, 2))


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 in rows without keys: their probabilities exp(-inf - 0) are 0, and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


# --- The loop ---


def _by_blocks(
    do: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    variant: Variant,
    watched: Sequence[Watched],
    needs: Needs,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, contiguous, where they are wanted."""
    dq, dk, dv = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None for x, need in zip((q, k, v), needs)
    )
    block_M = max(16, min(BLOCK_M, variant.seqlen_q, MAX_TILE // (BLOCK_N * variant.heads)))
    for batch, ranges in _batches(variant, block_M):
        part = dataclasses.replace(variant, batch=batch)
        tiles = _Tiles(k[batch], v[batch], part, watched, needs, block_M)
        for rows, seen in zip(row_blocks(variant.seqlen_q, block_M), ranges):
            of_rows = (do[batch, rows], delta[batch, :, rows], q[batch, rows], lse[batch, :, rows])
            dq_rows = tiles.visit(*of_rows, rows, seen, scale)
            if dq is not None:
                dq[batch, rows] = dq_rows
        for total, of_batch in ((dk, tiles.dk), (dv, tiles.dv)):
            if total is not None:
                total[batch] = tiles.unfolded(of_batch, variant.seqlen_k)
    return dq, dk, dv


def _batches(variant: Variant, block_M: int) -> Iterator[tuple[slice, list[KeyRange]]]:
    """Batch elements that are computed at once, as many as a tile may hold, and the ranges of their blocks of rows."""
    ranges, batch = key_ranges(variant, block_M), variant.batch.stop
    if len(ranges) > 1:
        yield from ((slice(element, element + 1), of_element) for element, of_element in enumerate(ranges))
        return
    step = max(1, MAX_TILE // (variant.heads * block_M * min(BLOCK_N, variant.seqlen_k)))
    for element in range(0, batch, step):
        yield slice(element, min(element + step, batch)), ranges[0]


class _Tiles:
    """All tiles of some batch elements: what they share, and dk and dv, which all rows add to.

    Products are of matrices (batch * kv_heads, group * rows, dim): the queries of a group of heads are rows of one. The
    same tile by head is (batch, heads, rows, keys).
    """

    def __init__(
        self, k: Tensor, v: Tensor, variant: Variant, watched: Sequence[Watched], needs: Needs, block_M: int
    ) -> None:
        self.batch, self.seqlen_k, self.kv_heads, _ = k.shape
        self.variant, self.watched, self.needs = variant, watched, needs
        self.k, self.v = self.folded(k), self.folded(v)
        self.dk = torch.zeros_like(self.k) if needs.k else None
        self.dv = torch.zeros_like(self.v) if needs.v else None
        self.only_biases = only_biases(variant)
        self.needs_ds = needs.q or needs.k or bool(watched)
        size = self.batch * variant.heads * block_M * min(BLOCK_N, self.seqlen_k)
        scores, p, ds = (torch.empty(size, dtype=variant.dtype, device=variant.device) for _ in range(3))
        # Scores that autograd does not need become probabilities in place.
        self.memory = (p if self.only_biases else scores, p, ds)

    def folded(self, x: Tensor) -> Tensor:
        """(batch, rows, heads, dim) -> (batch * kv_heads, group * rows, dim), contiguous, in the dtype of sums."""
        x = x.to(self.variant.dtype).unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        return x.contiguous().flatten(2, 3).flatten(0, 1)

    def unfolded(self, x: Tensor, rows: int) -> Tensor:
        """The inverse: (batch, rows, heads, dim), a view."""
        return x.view(self.batch, self.kv_heads, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def by_head(self, tile: Tensor) -> Tensor:
        """(batch * kv_heads, group * rows, keys) -> (batch, heads, rows, keys), a view."""
        return tile.view(self.batch, self.variant.heads, -1, tile.shape[-1])

    def visit(
        self, do: Tensor, delta: Tensor, q: Tensor, lse: Tensor, rows: slice, seen: KeyRange, scale: float
    ) -> Tensor | None:
        """Adds to dk, dv and the watched tensors what a block of rows gives; returns its dq (batch, rows, heads, dim).

        do, q (batch, rows, heads, dim), delta, lse (batch, heads, rows) are of those rows.
        """
        variant = self.variant
        # Kept probabilities are multiplied by their weight only where they meet dO.
        q, do = self.folded(q) * scale, self.folded(do) * variant.weight_of_kept
        lse, delta = lse[..., None], delta[..., None]
        dq = torch.zeros_like(q) if self.needs.q else None
        for lo in range(seen.lo, seen.hi, BLOCK_N):
            keys = slice(lo, min(lo + BLOCK_N, seen.hi))
            k, v = self.k[:, keys], self.v[:, keys]
            scores, p, ds = self.tiles(q.shape[1], k.shape[1])
            forbidden = variant.forbidden(rows, keys) if seen.partial(keys) else None
            dropped = None if variant.dropout is None else variant.dropped(rows, keys)
            # S = scale * Q K^T, modified
            torch.bmm(q, k.mT, out=scores)
            leaf, modified = self.modified(self.by_head(scores), rows, keys, forbidden is not None)
            # P = exp(S - lse)
            p_by_head = torch.sub(modified.detach(), lse, out=self.by_head(p)).exp_()
            if forbidden is not None:
                p_by_head.masked_fill_(forbidden, 0.0)
            if self.needs_ds:
                # dS = P * (dO V^T - delta)
                torch.bmm(do, v.mT, out=ds)
                ds_by_head = self.by_head(ds)
                if dropped is not None:
                    ds_by_head.masked_fill_(dropped, 0.0)
                ds_by_head.sub_(delta).mul_(p_by_head)
                raw = self.through_score_mods(leaf, modified, ds_by_head, rows, keys, forbidden)
                # dQ += dS K, dK += dS^T Q, times the scale
                if dq is not None and raw is not None:
                    dq.baddbmm_(raw, k)
                if self.dk is not None and raw is not None:
                    self.dk[:, keys].baddbmm_(raw.mT, q)
            # dV += P^T dO
            if self.dv is not None:
                if dropped is not None:
                    p_by_head.masked_fill_(dropped, 0.0)
                self.dv[:, keys].baddbmm_(p.mT, do)
        return None if dq is None else self.unfolded(dq.mul_(scale), rows.stop - rows.start)

    def tiles(self, rows: int, keys: int) -> tuple[Tensor, ...]:
        """Memory for scores, probabilities and dS of a tile: (batch * kv_heads, group * rows, keys)."""
        shape = (self.k.shape[0], rows, keys)
        return tuple(memory[: math.prod(shape)].view(shape) for memory in self.memory)

    def modified(self, scores: Tensor, rows: slice, keys: slice, masked: bool) -> tuple[Tensor, Tensor]:
        """The scores of a tile, by head, and the modified ones: in place, or as a function of them for autograd."""
        if self.only_biases:
            add_biases(self.variant, rows, keys, scores)
            return scores, scores
        scores = scores.detach().requires_grad_()
        for tensor in self.watched:
            tensor.tile = scores.shape if masked else None
        with recording():
            return scores, self.variant.modified(scores, rows, keys)

    def through_score_mods(
        self, scores: Tensor, modified: Tensor, ds: Tensor, rows: slice, keys: slice, forbidden: Tensor | None
    ) -> Tensor | None:
        """dS before the modifications (batch * kv_heads, group * rows, keys), None for 0, given dS after them, by head.

        Adds to the gradients of the watched tensors.
        """
        if self.only_biases:
            add_to_gradients(self.variant, rows, keys, ds)
        else:
            through = through_score_mods(scores, modified, ds, self.watched, forbidden)
            if through is None:
                return None
            # A modification may be NaN where the mask forbids, and so may its slope.
            ds = through if forbidden is None else through.masked_fill(forbidden, 0.0)
        return ds.reshape(self.k.shape[0], -1, ds.shape[-1])
