"""The error of a row's output: some sequences, beside float64 and beside eager attention in the row's own dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn.bench.decode.problem import Problem
from tileattn.bench.decode.variants import PLAIN, Variant
from tileattn.testing.numerics import assert_accurate, row_error

FEWEST_ROWS = 16  # of the matrix products of eager attention
EAGER_RUNS = 3


@dataclass(frozen=True)
class Expected:
    """The expected outputs of the first and the last sequence, (sequences, heads, head_dim).

    o: in float64.
    eager: in the row's dtype, by eager attention that sums in different orders, as the tolerance rule wants.
    """

    sequences: tuple[int, ...]
    o: Tensor
    eager: tuple[Tensor, ...]

    def error(self, o: Tensor) -> float:
        """Largest relative error of a checked row, as in :meth:`tileattn.bench.oracle.output.Oracle.error`."""
        return row_error(self._checked(o), self.o).worst_row

    def check(self, o: Tensor) -> None:
        """Asserts the tolerance rule."""
        assert_accurate("o", self._checked(o), self.o, self.eager)

    def _checked(self, o: Tensor) -> Tensor:
        heads, head_dim = self.o.shape[1:]
        return o.reshape(-1, heads, head_dim)[list(self.sequences)]


@torch.no_grad()
def expect(problem: Problem, variant: Variant = PLAIN) -> Expected:
    """The expected outputs of a problem's first cache, for the query at each sequence's last position."""
    sequences = tuple(sorted({0, problem.case.batch - 1}))
    keys = variant.keys or problem.case.context
    runs = [(torch.float64, 0), *((problem.q.dtype, keys * part // EAGER_RUNS) for part in range(EAGER_RUNS))]
    o, *eager = (torch.stack([_attend(problem, variant, each, *run) for each in sequences]) for run in runs)
    return Expected(sequences, o, tuple(eager))


def _attend(problem: Problem, variant: Variant, sequence: int, dtype: torch.dtype, first: int) -> Tensor:
    """softmax(q K^T) V of one sequence, one KV head at a time: (heads, head_dim). Sums begin at key `first`."""
    case = problem.case
    k, v = (x[: variant.keys] for x in problem.keys_of(sequence))
    q = problem.q[sequence, 0].view(case.kv_heads, -1, case.head_dim).to(dtype)
    heads = torch.arange(case.heads, device=q.device).view(case.kv_heads, -1, 1)
    wide = torch.promote_types(dtype, torch.float32)
    distance = torch.arange(k.shape[0] - 1, -1, -1, dtype=wide, device=q.device).roll(-first, 0)
    group = q.shape[1]
    # A matrix product of few rows is more exact than that of a tile, and no yardstick for one.
    copies = -(-FEWEST_ROWS // group)
    out = []
    for head in range(case.kv_heads):
        of_rows = heads[head].repeat(copies, 1)
        scores = q[head].repeat(copies, 1) @ _rolled(k[:, head], first, dtype).T * problem.scale
        scores = variant.scores(scores, of_rows, distance).to(dtype)
        if variant.window is not None:
            scores = scores.masked_fill(distance >= variant.window, -torch.inf)
        if variant.sink is not None:  # a key without a value
            scores = torch.cat([scores, variant.sink(of_rows).to(dtype)], dim=1)
        out.append((scores.softmax(-1)[:, : k.shape[0]] @ _rolled(v[:, head], first, dtype))[:group])
    return torch.cat(out)


def _rolled(x: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """Keys or values of one head (keys, head_dim), those from `first` on before the others."""
    return (x.roll(-first, 0) if first else x).to(dtype)
