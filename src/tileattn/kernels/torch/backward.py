"""The backward pass of the torch backend: FlashAttention-2's (Dao 2023, arXiv 2307.08691), in PyTorch operations.

`tileattn.reference.backward` explains the mathematics. The probabilities of a tile are recomputed from lse. Fully
masked tiles are skipped, and the mask is evaluated only in tiles that it cuts through. No tensor grows with
seqlen_q * seqlen_k, except gradients of tensors that do, such as a bias.

The outer loop is over blocks of rows, as in the forward pass: dq of a block is complete after the loop over its keys,
and dk and dv are summed in memory. The queries of a group of heads are treated as rows of their kv head; so dk and dv
are summed over the group.

On a CPU, PyTorch's fused backward pass computes the calls that it can without a floating-point mask (`fused.py`).
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
from .mask import KeyRange, ScoreMatrix, ScoreMods, row_blocks
from .score_gradient import Watched, add_biases, add_to_gradients, only_biases, recording, through_score_mods
from .visits import Visits

# Rows and keys of a tile, and the most elements of a tile of all heads: two such tiles fit into a CPU's cache.
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

    mask, score_mods: the matrix, restored.
    watched: of each tensor of the matrix, what the score modifications hold in its place if its gradient is wanted.
    """
    matrix, sink = ScoreMatrix.of(inputs.q, inputs.k, mask, score_mods, inputs.dropout), inputs.sink
    wanted = [x for x in watched if x is not None]
    dq, dk, dv, dsink = add_gradients(inputs, o, lse, do, dlse, matrix, wanted, needs, scale)
    dsink = None if dsink is None or sink is None else dsink.to(sink.dtype)
    return Gradients(dq, dk, dv, dsink, tuple(None if x is None else x.gradient() for x in watched))


@torch.no_grad()
def add_gradients(
    inputs: Inputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    matrix: ScoreMatrix,
    watched: Sequence[Watched],
    needs: Needs,
    scale: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv and dsink, None where not wanted; all tensors bshd, of any strides. Adds to the watched tensors.

    do (batch, seqlen_q, heads, head_dim_v) and dlse (batch, heads, seqlen_q) are the gradients of o and lse, which the
    forward pass returned. dsink is in the dtype of sums. Of the inputs q, k, v and sink are read.
    """
    q, k, v, sink, *_ = inputs
    dtype, mask = matrix.dtype, matrix.mask
    delta = _delta(do, dlse, o, dtype)
    dsink = _sink_gradient(sink, lse, delta) if sink is not None and needs.sink else None
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    elif dlse is None and fused.expresses(matrix) and fused.in_one_call(matrix, scale):
        dq, dk, dv = fused.one_call_backward(do, q, k, v, o, _finite(lse), scale, causal=mask is not None)
    else:
        dq, dk, dv = _by_blocks(do, delta, q, k, v, _finite(lse), matrix, watched, needs, scale)
    dq, dk, dv = (x if need else None for x, need in zip((dq, dk, dv), needs))
    return dq, dk, dv, dsink


def _delta(do: Tensor, dlse: Tensor | None, o: Tensor, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(dO * O) - dlse, (batch, heads, seqlen_q)."""
    delta = (do.to(dtype) * o.to(dtype)).sum(dim=-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink's probability times (0 - delta), summed over batch and rows; a sink is a key whose value is zero."""
    p = torch.exp(sink.to(lse.dtype)[:, None] - _finite(lse))
    return -(p * delta).sum(dim=(0, 2))


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 in place of -inf: rows without keys then have probabilities exp(-inf - 0) = 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


# --- The loop ---


def _by_blocks(
    do: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    matrix: ScoreMatrix,
    watched: Sequence[Watched],
    needs: Needs,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, contiguous, or None where `needs` is False."""
    dq, dk, dv = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None for x, need in zip((q, k, v), needs)
    )
    block_M = max(16, min(BLOCK_M, matrix.seqlen_q, MAX_TILE // (BLOCK_N * matrix.heads)))
    for batch, ranges in _batches(matrix, block_M):
        part = dataclasses.replace(matrix, batch=batch)
        tiles = _Tiles(k[batch], v[batch], part, watched, needs, block_M)
        for rows, seen in zip(row_blocks(matrix.seqlen_q, block_M), ranges):
            of_rows = (do[batch, rows], delta[batch, :, rows], q[batch, rows], lse[batch, :, rows])
            dq_rows = tiles.visit(*of_rows, rows, seen, scale)
            if dq is not None:
                dq[batch, rows] = dq_rows
        for total, of_batch in ((dk, tiles.dk), (dv, tiles.dv)):
            if total is not None:
                total[batch] = tiles.unfolded(of_batch, matrix.seqlen_k)
    return dq, dk, dv


def _batches(matrix: ScoreMatrix, block_M: int) -> Iterator[tuple[slice, list[KeyRange]]]:
    """Splits the batch into slices that are computed at once, with the key ranges of their blocks of rows.

    A slice has as many elements as MAX_TILE allows; elements with different ranges are computed one by one.
    """
    ranges, batch = Visits(matrix, block_M).keys(block_M), matrix.batch.stop
    if len(ranges) > 1:
        yield from ((slice(element, element + 1), of_element) for element, of_element in enumerate(ranges))
        return
    step = max(1, MAX_TILE // (matrix.heads * block_M * min(BLOCK_N, matrix.seqlen_k)))
    for element in range(0, batch, step):
        yield slice(element, min(element + step, batch)), ranges[0]


class _Tiles:
    """Computes the tiles of some batch elements, and sums their dk and dv.

    Matrix products use the shape (batch * kv_heads, group * rows, dim), in which the queries of a group of heads are
    rows of one matrix. `by_head` gives a tile the shape (batch, heads, rows, keys).
    """

    def __init__(
        self, k: Tensor, v: Tensor, matrix: ScoreMatrix, watched: Sequence[Watched], needs: Needs, block_M: int
    ) -> None:
        self.batch, self.seqlen_k, self.kv_heads, _ = k.shape
        self.matrix, self.watched, self.needs = matrix, watched, needs
        self.k, self.v = self.folded(k), self.folded(v)
        self.dk = torch.zeros_like(self.k) if needs.k else None
        self.dv = torch.zeros_like(self.v) if needs.v else None
        self.only_biases = only_biases(matrix)
        self.needs_ds = needs.q or needs.k or bool(watched)
        size = self.batch * matrix.heads * block_M * min(BLOCK_N, self.seqlen_k)
        scores, p, ds = (torch.empty(size, dtype=matrix.dtype, device=matrix.device) for _ in range(3))
        # If autograd does not need the scores, they become probabilities in place.
        self.memory = (p if self.only_biases else scores, p, ds)

    def folded(self, x: Tensor) -> Tensor:
        """(batch, rows, heads, dim) -> (batch * kv_heads, group * rows, dim), contiguous, in the accumulation dtype."""
        x = x.to(self.matrix.dtype).unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        return x.contiguous().flatten(2, 3).flatten(0, 1)

    def unfolded(self, x: Tensor, rows: int) -> Tensor:
        """The inverse of `folded`: (batch, rows, heads, dim), a view."""
        return x.view(self.batch, self.kv_heads, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def by_head(self, tile: Tensor) -> Tensor:
        """(batch * kv_heads, group * rows, keys) -> (batch, heads, rows, keys), a view."""
        return tile.view(self.batch, self.matrix.heads, -1, tile.shape[-1])

    def visit(
        self, do: Tensor, delta: Tensor, q: Tensor, lse: Tensor, rows: slice, seen: KeyRange, scale: float
    ) -> Tensor | None:
        """Adds a block of rows' parts to dk, dv and the watched tensors; returns its dq (batch, rows, heads, dim).

        do, q (batch, rows, heads, dim), delta, lse (batch, heads, rows) are those of the block.
        """
        matrix = self.matrix
        # The dropout factor of kept probabilities is applied to dO, with which they are multiplied.
        q, do = self.folded(q) * scale, self.folded(do) * matrix.weight_of_kept
        lse, delta = lse[..., None], delta[..., None]
        dq = torch.zeros_like(q) if self.needs.q else None
        for keys in seen.tiles(BLOCK_N):
            k, v = self.k[:, keys], self.v[:, keys]
            scores, p, ds = self.tiles(q.shape[1], k.shape[1])
            forbidden = matrix.forbidden(rows, keys) if seen.partial(keys) else None
            dropped = None if matrix.dropout is None else matrix.dropped(rows, keys)
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
        """Views of `memory` for a tile's scores, probabilities and dS: (batch * kv_heads, group * rows, keys)."""
        shape = (self.k.shape[0], rows, keys)
        return tuple(memory[: math.prod(shape)].view(shape) for memory in self.memory)

    def modified(self, scores: Tensor, rows: slice, keys: slice, masked: bool) -> tuple[Tensor, Tensor]:
        """A tile's scores by head and the modified scores: the same tensor, or a function of it for autograd."""
        if self.only_biases:
            add_biases(self.matrix, rows, keys, scores)
            return scores, scores
        scores = scores.detach().requires_grad_()
        for tensor in self.watched:
            tensor.tile = scores.shape if masked else None
        with recording():
            return scores, self.matrix.modified(scores, rows, keys)

    def through_score_mods(
        self, scores: Tensor, modified: Tensor, ds: Tensor, rows: slice, keys: slice, forbidden: Tensor | None
    ) -> Tensor | None:
        """The gradient of the scores (batch * kv_heads, group * rows, keys), None for 0; adds to the watched tensors.

        ds: the gradient of the modified scores, by head.
        """
        if self.only_biases:
            add_to_gradients(self.matrix, rows, keys, ds)
        else:
            through = through_score_mods(scores, modified, ds, self.watched, forbidden)
            if through is None:
                return None
            # Where the mask hides a key, a modification and its derivative may be NaN.
            ds = through if forbidden is None else through.masked_fill(forbidden, 0.0)
        return ds.reshape(self.k.shape[0], -1, ds.shape[-1])
