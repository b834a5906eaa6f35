"""The error of a row's output: some sequences, beside float64 and beside eager attention in the row's own dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn.bench.decode.problem import Problem
from tileattn.testing.numerics import assert_accurate, row_error


@dataclass(frozen=True)
class Expected:
    """The expected outputs of the first and the last sequence, (sequences, heads, head_dim), in float64 and eager."""

    sequences: tuple[int, ...]
    o: Tensor
    eager: Tensor

    def error(self, o: Tensor) -> float:
        """Largest relative error of a checked row, as in :meth:`tileattn.bench.oracle.output.Oracle.error`."""
        return row_error(self._checked(o), self.o).worst_row

    def check(self, o: Tensor) -> None:
        """Asserts the tolerance rule."""
        assert_accurate("o", self._checked(o), self.o, [self.eager])

    def _checked(self, o: Tensor) -> Tensor:
        heads, head_dim = self.o.shape[1:]
        return o.reshape(-1, heads, head_dim)[list(self.sequences)]


@torch.no_grad()
def expect(problem: Problem) -> Expected:
    """The expected outputs of a problem's first cache."""
    sequences = tuple(sorted({0, problem.case.batch - 1}))
    both = [[_attend(problem, each, dtype) for each in sequences] for dtype in (torch.float64, problem.q.dtype)]
    return Expected(sequences, *map(torch.stack, both))


def _attend(problem: Problem, sequence: int, dtype: torch.dtype) -> Tensor:
    """softmax(q K^T) V of one sequence, one KV head at a time: (heads, head_dim)."""
    case = problem.case
    k, v = problem.keys_of(sequence)
    q = problem.q[sequence, 0].view(case.kv_heads, -1, case.head_dim).to(dtype)
    out = []
    for head in range(case.kv_heads):
        scores = q[head] @ k[:, head].to(dtype).T * problem.scale
        out.append(scores.softmax(-1) @ v[:, head].to(dtype))
    return torch.cat(out)
