"""The error of o and gradients of packed sequences: some sequences are checked, each as a dense problem.

The checked sequences have lengths from the shortest to the longest; within each, `output` and `gradients` choose
a sample. The rule is applied to the rows of all of them together, because eager's error on a few rows varies by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.bench.oracle import gradients as gradient_oracle
from tileattn.bench.oracle import output as oracle
from tileattn.bench.oracle.gradients import GradientOracle
from tileattn.bench.oracle.output import Oracle, Sample
from tileattn.bench.problem import Problem
from tileattn.testing.numerics import assert_accurate, row_error

CHECKED = 8  # sequences


class Compared(NamedTuple):
    """The rows (rows, dim) of one tensor, from all checked sequences."""

    got: Tensor
    expected: Tensor
    eager: list[Tensor]
    size: Tensor | None = None


@dataclass(frozen=True)
class PackedOracle:
    """The expected o, or gradients, of some sequences: an oracle for each of their spans of tokens."""

    sample: Sample
    spans: Sequence[slice]
    parts: Sequence[Oracle | GradientOracle]

    def error(self, result: Tensor | Sequence[Tensor]) -> float:
        """The largest error of a row of o or, where a problem has gradients, of these; NaN if any is NaN."""
        gradient = not isinstance(result, Tensor)
        errors = [
            row_error(each.got, each.expected, gradient=gradient, size=each.size).worst_row
            for each in self._compared(result).values()
        ]
        return float(torch.tensor(errors, dtype=torch.float64).max())

    def check(self, result: Tensor | Sequence[Tensor]) -> None:
        """Asserts the tolerance rule."""
        gradient = not isinstance(result, Tensor)
        for name, each in self._compared(result).items():
            assert_accurate(name, each.got, each.expected, each.eager, gradient=gradient, size=each.size)

    def _compared(self, result: Tensor | Sequence[Tensor]) -> dict[str, Compared]:
        each = [_compare(part, span, result) for span, part in zip(self.spans, self.parts)]
        return {name: _joined([of_part[name] for of_part in each]) for name in each[0]}


def _compare(part: Oracle | GradientOracle, span: slice, result: Tensor | Sequence[Tensor]) -> dict[str, Compared]:
    """The checked tensors of one sequence, by name."""
    if isinstance(part, Oracle):
        assert isinstance(result, Tensor)
        return {"o": Compared(part.sampled(result[None, span]), part.expected, [part.eager])}
    got = part.sampled([gradient[None, span] for gradient in result])
    return {
        name: Compared(x, part.expected[name], [run[name] for run in part.eager], part.sizes.get(name))
        for name, x in got.items()
    }


def _joined(parts: Sequence[Compared]) -> Compared:
    runs = zip(*(part.eager for part in parts))
    sizes = [part.size for part in parts if part.size is not None]
    return Compared(
        _rows(part.got for part in parts),
        _rows(part.expected for part in parts),
        list(map(_rows, runs)),
        _rows(sizes) if sizes else None,
    )


def _rows(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, -2) for x in tensors])


@torch.no_grad()
def build(problem: Problem) -> PackedOracle:
    """The oracle of a packed problem: of its gradients where it has any, else of o."""
    spans = chosen(problem)
    build_one: Callable[[Problem], Oracle | GradientOracle] = (
        oracle.build if problem.do is None else gradient_oracle.build
    )
    parts = [build_one(problem.of_sequence(span)) for span in spans]
    return PackedOracle(_sample(problem, spans, [part.sample for part in parts]), spans, parts)


def chosen(problem: Problem) -> list[slice]:
    """The sequences to check: all, or `CHECKED` of them, evenly spaced in the order of their lengths."""
    spans = problem.spans()
    if len(spans) <= CHECKED:
        return spans
    by_length = sorted(spans, key=lambda span: span.stop - span.start)
    return [by_length[round(i * (len(spans) - 1) / (CHECKED - 1))] for i in range(CHECKED)]


def _sample(problem: Problem, spans: Sequence[slice], samples: Sequence[Sample]) -> Sample:
    """The sample in words."""
    whole = all(sample.text == "all rows" for sample in samples)
    text = "all rows" if whole else "some rows"
    if len(spans) < len(problem.case.lengths):
        lengths = sorted(span.stop - span.start for span in spans)
        text += f" of {len(spans)} of {len(problem.case.lengths)} sequences, of {lengths[0]} to {lengths[-1]} tokens"
    return Sample((), (), torch.empty(0), text)
