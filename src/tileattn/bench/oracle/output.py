"""The error of an output: float64 attention on the quantised inputs, for all rows or a sample of them.

`tileattn.testing.oracle` holds all scores at once, which is too much for the sizes of a benchmark. Here the scores are
computed in chunks of query rows. The masks come from `Variant.key_range`, not from `tileattn.masks`, so that a mistake
there shows. The same code in the inputs' own dtype is the eager attention of the tolerance rule
(`tileattn.testing.numerics`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn.bench.cases import Case
from tileattn.bench.problem import Problem
from tileattn.bench.variants import user_score
from tileattn.testing.numerics import assert_accurate, row_error

# Scores computed per case before rows are sampled: about a second of float64 work on the device.
SCORES_CHECKED = {"cuda": 2**33, "cpu": 2**26}
# Scores alive at once: 256 MiB in float64, a few times over.
SCORES_PER_CHUNK = 2**25


@dataclass(frozen=True)
class Sample:
    """The checked rows of an output: batch elements x heads x query indices."""

    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: Tensor
    text: str


def sample(case: Case, device: torch.device, most: int | None = None) -> Sample:
    """The checked rows: all if affordable, else the first and last batch element, then head, then blocks of 64 rows.

    most: The number of scores that is affordable, if not `SCORES_CHECKED`.
    """
    most = most or SCORES_CHECKED[device.type]
    batches, heads = tuple(range(case.batch)), tuple(range(case.heads))
    rows = torch.arange(case.seqlen_q, device=device)
    left = most // (case.seqlen_q * case.seqlen_k)
    if len(batches) * len(heads) <= left:
        return Sample(batches, heads, rows, "all rows")
    batches = ends(batches)
    if len(batches) * len(heads) > left:
        heads = ends(heads)
    pairs = len(batches) * len(heads)
    if pairs > left:
        rows = _blocks(case.seqlen_q, most // (pairs * case.seqlen_k), device)
    text = f"{len(rows)} of {case.seqlen_q} rows, batch elements {listed(batches)}, heads {listed(heads)}"
    return Sample(batches, heads, rows, text)


def ends(indices: tuple[int, ...]) -> tuple[int, ...]:
    """The first and the last."""
    return indices if len(indices) == 1 else (indices[0], indices[-1])


def listed(indices: tuple[int, ...]) -> str:
    """All, or which ends of them."""
    return "all" if len(indices) > 2 else " and ".join(map(str, indices))


def _blocks(seqlen: int, count: int, device: torch.device, block: int = 64) -> Tensor:
    """About `count` query indices: blocks of 64 rows spread evenly from the first row to the last."""
    blocks = max(2, count // block)
    starts = torch.linspace(0, max(0, seqlen - block), blocks, dtype=torch.float64).round().long()
    rows = starts[:, None] + torch.arange(block)
    return rows.flatten().clamp(max=seqlen - 1).unique().to(device)


@dataclass(frozen=True)
class Oracle:
    """The expected output of the sampled rows in float64, and that of eager PyTorch.

    Both are (batches, heads, rows, head_dim_v).
    """

    sample: Sample
    expected: Tensor
    eager: Tensor

    def error(self, o: Tensor) -> float:
        """Largest relative error of a checked row: `max over rows of |o - expected|_2 / |expected|_2`.

        The error is by row, because early causal rows are tens of times larger than late ones and would dominate an
        error over the whole tensor. NaN if any checked value is NaN. o is (batch, seqlen_q, heads, head_dim_v).
        """
        return row_error(self.sampled(o), self.expected).worst_row

    def check(self, o: Tensor) -> None:
        """Asserts the tolerance rule."""
        assert_accurate("o", self.sampled(o), self.expected, [self.eager])

    def sampled(self, o: Tensor) -> Tensor:
        """The checked rows of an output: (batches, heads, rows, head_dim_v)."""
        return torch.stack([take(o[b], self.sample.heads)[:, self.sample.rows] for b in self.sample.batches])


@torch.no_grad()
def build(problem: Problem, most: int | None = None) -> Oracle:
    """Computes the checked rows of a problem, in float64 and in its own dtype. most: As for `sample`.

    PyTorch has no eager attention in fp8: eager is then bfloat16 attention on the quantised values.
    """
    chosen = sample(problem.case, problem.q.device, most)
    left = problem.dequantised()
    return Oracle(chosen, _attend(problem, chosen, torch.float64), _attend(left, chosen, left.q.dtype))


def take(x: Tensor, heads: Sequence[int]) -> Tensor:
    """(seqlen, heads, dim) -> (chosen heads, seqlen, dim)."""
    return x[:, list(heads)].transpose(0, 1)


def _attend(problem: Problem, chosen: Sample, dtype: torch.dtype) -> Tensor:
    """softmax(QK^T)V of the sampled rows, computed in `dtype`: (batches, heads, rows, head_dim_v)."""
    out = []
    for b in chosen.batches:
        group = problem.case.heads // problem.case.kv_heads
        kv_heads = tuple(h // group for h in chosen.heads)
        k, v = (take(x[b], kv_heads).to(dtype) for x in (problem.k, problem.v))
        q = take(problem.q[b], chosen.heads)
        out.append(torch.cat([_rows(problem, b, chosen, q, k, v, rows) for rows in chunks(problem, chosen)], dim=1))
    return torch.stack(out)


def chunks(problem: Problem, chosen: Sample) -> Iterator[Tensor]:
    """The checked query indices, a few at a time."""
    size = max(1, SCORES_PER_CHUNK // (len(chosen.heads) * problem.case.seqlen_k))
    return iter(chosen.rows.split(size))


def _rows(problem: Problem, b: int, chosen: Sample, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention of some query indices of batch element b, for (chosen heads, seqlen, dim) tensors, in k's dtype."""
    scores = q[:, rows].to(k.dtype) @ k.mT * problem.scale
    bias = bias_rows(problem, b, chosen.heads, rows)
    return probabilities(*logits(problem, scores, b, chosen.heads, rows, bias), problem.case.seqlen_k) @ v


def logits(
    problem: Problem, scores: Tensor, b: int, heads: Sequence[int], rows: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The inputs of the softmax, and the rows that see no key.

    scores: the scaled scores (heads, rows, seqlen_k) of some heads and query indices of batch element b. bias: of these
    heads and rows, see `bias_rows`. The logits are the modified scores, -inf where the mask hides a key, and the sink
    behind the keys if there is one; differentiable in scores and bias.
    """
    case = problem.case
    scores = _modified(problem, scores, b, heads, rows, bias)
    lo, hi = case.terms.key_range(problem.q_pos()[rows], case.seqlen_k)
    keys = torch.arange(case.seqlen_k, device=scores.device)
    # A row without keys has no softmax. It gets some scores, and then probabilities that are zero.
    empty = (hi <= lo)[:, None]
    hidden = ((keys < lo[:, None]) | (keys >= hi[:, None])) & ~empty
    scores = scores.masked_fill(hidden, -torch.inf)
    if problem.sink is not None:
        sink = problem.sink[list(heads), None, None].to(scores.dtype).expand(-1, len(rows), 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores, empty


def probabilities(logits: Tensor, empty: Tensor, seqlen_k: int) -> Tensor:
    """Of the keys: (heads, rows, seqlen_k)."""
    return logits.softmax(dim=-1)[..., :seqlen_k].masked_fill(empty, 0.0)


def bias_rows(problem: Problem, b: int, heads: Sequence[int], rows: Tensor) -> Tensor | None:
    """The bias of some heads and query indices of batch element b: (heads, rows, seqlen_k), or (1, ..) where shared."""
    if problem.bias is None:
        return None
    per_batch, per_head = (size > 1 for size in problem.bias.shape[:2])
    bias = problem.bias[b if per_batch else 0]
    return (bias[list(heads)] if per_head else bias)[:, rows]


def _modified(
    problem: Problem, scores: Tensor, b: int, heads: Sequence[int], rows: Tensor, bias: Tensor | None
) -> Tensor:
    """The score modifications of the variant, in its order: softcap, ALiBi, bias, the user's."""
    cap = problem.case.terms.softcap
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if problem.slopes is not None:
        at_least_float32 = torch.promote_types(scores.dtype, torch.float32)
        scores = scores + problem.alibi_bias(rows, at_least_float32)[list(heads)].to(scores.dtype)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if problem.case.terms.userscore:
        h = torch.tensor(heads, device=rows.device)[:, None, None]
        keys = torch.arange(problem.case.seqlen_k, device=rows.device)
        scores = user_score(scores, b, h, problem.q_pos()[rows][:, None], keys).to(scores.dtype)
    return scores
