"""The tolerance rule, the same for all outputs and backends.

Inputs are quantised once. The oracle is float64 on those inputs; eager is PyTorch in the inputs' own dtype, the worst
of three runs that sum in different orders (for fp8 see `eager_attention`). For every output,

    error <= 2 x error of eager + a rounding of the output's dtype          (`torch.finfo(dtype).eps`)

No test has a tolerance of its own. In a badly conditioned problem eager has a large error, and the kernel may have
one too; otherwise only a rounding is allowed. Errors are relative. The rule must hold for two of them:

- of the **worst row** (vectors along the last dimension): ``|got - oracle| / |oracle|``, its largest value. The rows of
  an output differ in size by orders of magnitude, and a wrong row must not be hidden by larger ones.
- of the **whole** tensor, so that one badly conditioned row of eager does not excuse all others.

Infinities must be at the same places as the oracle's, with the same signs. o must be exactly zero in a row without
keys, and so must gradients that sum no terms. NaN never passes.

A row of a **gradient** may be small because large terms cancel in it, as in dq of a query that sees few keys, or in the
gradient of a sink, which sums over all queries. Its error is that of the terms. So its error is relative to the size of
its terms where that is larger (`oracle_gradients`), or, if the size is unknown, to the median row where that is larger.
A gradient in a wider dtype than the call's, such as a float32 sink's in bfloat16, is allowed a rounding in the call's
dtype, because the backward pass starts from an o that was rounded to it.

For **lse**, a logarithm, the absolute error counts: it is the relative error of all probabilities of its row. Besides
twice eager's error, the rule allows a rounding of lse (of 1, if that is larger) and an eighth of a rounding of 1 in the
inputs' dtype (bfloat16 for fp8). Probabilities are rounded to that dtype before they are multiplied by V, and the exp
of a fast kernel is no more exact than needed (PyTorch's own for CPUs and 16 bits has an error of 5e-5).

All errors of a call's outputs are fetched from the device in one transfer, because processes that share a GPU, as tests
do, wait for each other at each transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .similarity_measures import dissimilarity

EAGER_FACTOR = 2.0
LSE_SHARE = 1 / 8


@dataclass(frozen=True)
class Error:
    """How far a tensor is from the oracle: relative to the worst row, and to the whole tensor."""

    worst_row: float
    whole: float
    where: tuple[int, ...]
    """Index of the worst row; empty if there is no row."""


def row_error(got: Tensor, oracle: Tensor, gradient: bool = False, size: Tensor | None = None) -> Error:
    """Error of finite values, by rows along the last dimension; absolute for a row where the oracle is zero.

    size: rows smaller than its rows are measured by them; of the oracle's shape.
    gradient: without a size, rows smaller than the median row (of those that are not zero) are measured by that.
    """
    return _error(*_RowMeasure(oracle, gradient, size).errors(got))


def lse_error(got: Tensor, oracle: Tensor, rounding: float = 0.0) -> Error:
    """Absolute error of finite values, element by element, less `rounding` times the value (or 1 if that is larger)."""
    return _error(*_LseMeasure(oracle).errors(got, rounding))


def _error(by_row: Tensor, whole: Tensor) -> Error:
    if by_row.numel() == 0:
        return Error(0.0, 0.0, ())
    where = torch.unravel_index(by_row.argmax(), by_row.shape)
    return Error(float(by_row.max()), float(whole), tuple(int(i) for i in where))


class _RowMeasure:
    """What rows are measured by, and the whole."""

    def __init__(self, oracle: Tensor, gradient: bool, size: Tensor | None) -> None:
        self.oracle = oracle.double()
        norms = self.oracle.norm(dim=-1)
        whole = norms.norm()
        if size is not None:
            norms = torch.maximum(norms, size.double().norm(dim=-1))
            whole = torch.maximum(whole, size.double().norm())
        elif gradient and norms.numel():
            median = torch.where(norms > 0, norms, torch.nan).nanmedian()  # NaN if all are zero
            norms = torch.maximum(norms, median.nan_to_num(0.0))
        self.norms, self.whole = (torch.where(norm > 0, norm, 1.0) for norm in (norms, whole))

    def errors(self, got: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
        """Of each row, and of the whole. Roundings are allowed for elsewhere."""
        difference = got.double() - self.oracle
        return difference.norm(dim=-1) / self.norms, difference.norm() / self.whole


class _LseMeasure:
    """Absolute errors, and the root of their mean square."""

    def __init__(self, oracle: Tensor) -> None:
        self.oracle = oracle.double()

    def errors(self, got: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
        """Of each element, and of the whole."""
        difference = (got.double() - self.oracle).abs()
        excess = (difference - rounding * self.oracle.abs().clamp(min=1.0)).clamp(min=0.0)
        return excess, excess.norm() / max(excess.numel(), 1) ** 0.5


@dataclass(frozen=True)
class _Output:
    """One output beside the oracle and eager; see :func:`assert_accurate`.

    nothing_in: what rows may be without, in which the output must be exactly zero; "" if that is not asked.
    """

    name: str
    got: Tensor
    oracle: Tensor
    eager: Sequence[Tensor]
    gradient: bool = False
    size: Tensor | None = None
    call_dtype: torch.dtype | None = None
    lse_of: torch.dtype | None = None
    nothing_in: str = ""

    def numbers(self) -> Tensor:
        """All that the verdict depends on, float64, on the device.

        Whether `got` is NaN somewhere; whether the case is ill-posed; whether infinities of `got` are wrong; whether
        there is something where nothing should be; then the worst row's and the whole's error of `got` and each run.
        """
        assert self.got.shape == self.oracle.shape, (
            f"{self.name}: shape {tuple(self.got.shape)}, the oracle's is {tuple(self.oracle.shape)}"
        )
        infinite = _infinities(self.oracle)
        ill_posed = torch.stack([self.oracle.isnan().any(), *(_differ(run, infinite) for run in self.eager)]).any()
        flags = [self.got.isnan().any(), ill_posed, (_infinities(self.got) != infinite).any()]
        flags.append(self.misplaced().any() if self.nothing_in else torch.zeros_like(ill_posed))
        measure, rounding = self.measure()
        errors_of_runs = [measure.errors(_finite(self.got), rounding)]
        errors_of_runs += [measure.errors(_finite(run)) for run in self.eager]
        nothing = torch.zeros(2, dtype=torch.float64, device=self.got.device)
        errors = [torch.stack([by_row.max(), whole]) if by_row.numel() else nothing for by_row, whole in errors_of_runs]
        return torch.cat([torch.stack(flags).double(), *errors])

    def measure(self) -> tuple[_RowMeasure | _LseMeasure, float]:
        """How errors are measured, and the rounding that `got` is allowed before."""
        oracle = _finite(self.oracle)
        if self.lse_of is None:
            return _RowMeasure(oracle, self.gradient, self.size), 0.0
        return _LseMeasure(oracle), torch.finfo(self.got.dtype).eps

    def misplaced(self) -> Tensor:
        """Where `got` is not zero in rows in which there is nothing."""
        nothing = self.oracle == 0 if self.size is None else (self.oracle == 0) & (self.size == 0)
        return (self.got != 0) & nothing.all(dim=-1, keepdim=True)

    @property
    def band(self) -> float:
        """What is allowed beside twice eager's error."""
        if self.lse_of is not None:
            return LSE_SHARE * torch.finfo(self.lse_of).eps
        return max(torch.finfo(dtype).eps for dtype in (self.got.dtype, self.call_dtype or self.got.dtype))

    def judge(self, numbers: Sequence[float]) -> None:
        """Asserts the rule on the values of `numbers`."""
        (is_nan, ill_posed, wrongly_infinite, misplaced), errors = numbers[:4], numbers[4:]
        got, name = self.got, self.name
        assert not is_nan, f"{name}: {_first(got.isnan())} of {got.numel()} values are NaN"
        if ill_posed:
            raise ValueError(f"{name}: the case is ill-posed: the oracle is NaN, or eager overflows where it does not")
        assert not wrongly_infinite, (
            f"{name}: {_first(_infinities(got) != _infinities(self.oracle))} values are infinite and the oracle is "
            f"not, or the reverse"
        )
        for place, what in enumerate(("worst row", "whole")):
            of_got, *of_eager = errors[place::2]
            allowed = EAGER_FACTOR * max(of_eager) + self.band
            assert of_got <= allowed, (
                f"{name}: error {of_got:.3g} ({what}), allowed {allowed:.3g} "
                f"= {EAGER_FACTOR:g} x {max(of_eager):.3g} (eager) + {self.band:.3g} (rounding)\n{self.worst()}"
            )
        assert not misplaced, f"{name}: {_first(self.misplaced())} values are not 0 in rows without {self.nothing_in}"

    def worst(self) -> str:
        """The worst row, for a message."""
        got, oracle, eager = _finite(self.got), _finite(self.oracle), _finite(self.eager[0])
        measure, rounding = self.measure()
        where = _error(*measure.errors(got, rounding)).where
        return (
            f"1 - similarity: {dissimilarity(got, oracle):.3g}, eager's: {dissimilarity(eager, oracle):.3g}\n"
            f"worst at {where} of {tuple(oracle.shape)}:\n"
            f"  got    {_shown(got, where)}\n  oracle {_shown(oracle, where)}\n  eager  {_shown(eager, where)}"
        )


def _judge(outputs: Sequence[_Output]) -> None:
    """The rule for several outputs, in their order."""
    numbers = [output.numbers() for output in outputs]
    fetched = torch.cat(numbers).tolist()
    for output, each in zip(outputs, numbers):
        output.judge(fetched[: len(each)])
        del fetched[: len(each)]


def assert_accurate(
    name: str,
    got: Tensor,
    oracle: Tensor,
    eager: Sequence[Tensor],
    *,
    gradient: bool = False,
    size: Tensor | None = None,
    call_dtype: torch.dtype | None = None,
    lse_of: torch.dtype | None = None,
) -> None:
    """Asserts the rule for one output, or fails with both errors and the worst row.

    Args:
        name: Name of the output in the message.
        got: The output; its dtype determines the size of a rounding.
        oracle: The expected output, float64, of the same shape.
        eager: The output of `eager_attention` in the inputs' dtype, from one or more runs; the largest error counts.
        gradient: Whether this output is a gradient.
        size: For a gradient, the size of its terms, as `oracle_gradients` returns it; None if unknown.
        call_dtype: For a gradient, the dtype of q, k and v, if a rounding in that is allowed.
        lse_of: The dtype of the inputs (of o, for fp8) if this output is lse, else None.

    Raises:
        AssertionError: got violates the rule.
        ValueError: The oracle is NaN, or eager is infinite where the oracle is not: the rule does not apply.
    """
    _judge([_Output(name, got, oracle, eager, gradient, size, call_dtype, lse_of)])


def assert_forward_accurate(
    name: str,
    got: tuple[Tensor, Tensor],
    oracle: tuple[Tensor, Tensor],
    eager: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Asserts the rule for o and lse, against what `oracle_attention` and `eager_attention` return."""
    (o, lse), (oracle_o, oracle_lse), (eager_o, eager_lse) = got, oracle, eager
    # lse first: where it is wrong the softmax is, and o's message would only say so less clearly.
    of_lse = _Output(f"lse of {name}", lse, oracle_lse, eager_lse, lse_of=o.dtype)
    _judge([of_lse, _Output(f"o of {name}", o, oracle_o, eager_o, nothing_in="keys")])


def assert_gradients_accurate(
    name: str,
    got: Mapping[str, Tensor],
    oracle: Mapping[str, Tensor],
    eager: Sequence[Mapping[str, Tensor]],
    sizes: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Asserts the rule for the gradients of a call, by their names.

    Args:
        name: Name of the call in the message.
        got: The gradients.
        oracle: The gradients of `oracle_gradients`.
        eager: The gradients of `eager_gradients`.
        sizes: The sizes of `oracle_gradients`.
        dtype: Dtype of q, k and v.
    """
    assert got.keys() == oracle.keys(), f"{name}: gradients {list(got)}, the oracle's are {list(oracle)}"
    _judge(
        [
            _Output(
                f"{which} of {name}", got[which], exact, [run[which] for run in eager],
                gradient=True, size=sizes[which], call_dtype=dtype, nothing_in="terms",
            )
            for which, exact in oracle.items()
        ]
    )  # fmt: skip


def _infinities(x: Tensor) -> Tensor:
    """-1, 0, 1: the sign where x is not finite (2 for NaN)."""
    return torch.where(x.isinf(), x.sign(), x.isnan() * 2).to(torch.int8)


def _differ(x: Tensor, infinite: Tensor) -> Tensor:
    """Whether infinities of x are elsewhere, as one boolean on the device."""
    return (_infinities(x) != infinite).any()


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), 0.0)


def _first(wrong: Tensor) -> str:
    """How many values are wrong and the index of the first."""
    return f"{int(wrong.sum())} (first at {tuple(wrong.nonzero()[0].tolist())})"


def _shown(x: Tensor, where: tuple[int, ...], count: int = 6) -> str:
    row = x[where].flatten()
    return " ".join(f"{value:+.5g}" for value in row[:count].tolist()) + (" ..." if row.numel() > count else "")
