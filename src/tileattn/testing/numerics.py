"""The one tolerance rule.

Inputs are quantised once. The oracle is float64 on those inputs; eager is PyTorch in the inputs' own dtype, the worse
of two runs that sum in different orders (for fp8 see `eager_attention`). For every output,

    error <= 2 x error of eager + a rounding of the output's dtype          (`torch.finfo(dtype).eps`)

so that no test holds a tolerance: where the problem is badly conditioned eager is worse, and so may we be; where it is
not, only a rounding is left. Errors are relative, and taken in two ways that must both hold:

- of the **worst row** (vectors along the last dimension): ``|got - oracle| / |oracle|``, its largest value. The rows of
  an output differ in size by orders of magnitude; a row that is wrong must not hide behind larger ones.
- of the **whole** tensor, so that one badly conditioned row of eager's does not excuse all others.

Infinities must stand where the oracle's are, with their sign; o must be exactly zero in a row without keys, and so must
be gradients that are sums of nothing; NaN never passes.

A row of a **gradient** may be small because large terms cancel in it, as in dq of a query that sees few keys, or in the
gradient of a sink, which sums over all queries: its error is that of the terms. So a row is measured by the size of its
terms where that is larger (`gradient_sizes`); where it is not known, by the median row where that is larger. And a
gradient in a wider dtype than that of the call, such as a float32 sink's in bfloat16, is allowed a rounding of the
call's: a backward pass starts from the o of the forward pass, which has been rounded to that.

For **lse**, which is a logarithm, an absolute error is what matters: it is the relative error of all probabilities of
its row. What is allowed besides twice eager's is a rounding of lse itself (of 1, if that is larger), and an eighth of a
rounding of 1 in the inputs' dtype (bfloat16 for fp8): to that the probabilities are rounded before they meet V, and a
fast kernel's exp is not more exact than it need be (PyTorch's own for CPUs and 16 bits errs by 5e-5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .similarity import dissimilarity

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
    difference, norms = got.double() - oracle.double(), oracle.double().norm(dim=-1)
    by_row, whole = difference.norm(dim=-1), norms.norm()
    if size is not None:
        norms = torch.maximum(norms, size.double().norm(dim=-1))
        whole = torch.maximum(whole, size.double().norm())
    elif gradient and bool((norms > 0).any()):
        norms = norms.clamp(min=float(norms[norms > 0].median()))
    return _error(by_row / torch.where(norms > 0, norms, 1.0), difference, float(whole))


def lse_error(got: Tensor, oracle: Tensor, rounding: float = 0.0) -> Error:
    """Absolute error of finite values, element by element, less `rounding` times the value (or 1 if that is larger)."""
    difference = (got.double() - oracle.double()).abs()
    excess = (difference - rounding * oracle.double().abs().clamp(min=1.0)).clamp(min=0.0)
    return _error(excess, excess, excess.numel() ** 0.5)


def _error(by_row: Tensor, difference: Tensor, norm: float) -> Error:
    if by_row.numel() == 0:
        return Error(0.0, 0.0, ())
    where = torch.unravel_index(by_row.argmax(), by_row.shape)
    return Error(
        float(by_row.max()), float(difference.norm()) / (norm if norm > 0 else 1.0), tuple(int(i) for i in where)
    )


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
        name: what the output is called in the message.
        got: the output; its dtype says what a rounding is.
        oracle: what it should be, float64, of the same shape.
        eager: the same computed by `eager_attention`, in the inputs' dtype: one or more runs; the worst counts.
        gradient: whether this output is a gradient.
        size: of a gradient, the size of its terms, as `gradient_sizes` finds it; None if that is not known.
        call_dtype: of a gradient, the dtype of q, k and v, if a rounding of that is allowed.
        lse_of: the dtype of the inputs (of o, for fp8) if this output is lse, else None.

    Raises:
        AssertionError: got is wrong.
        ValueError: eager or the oracle is NaN or infinite where it must not be, so that the rule says nothing.
    """
    assert got.shape == oracle.shape, f"{name}: shape {tuple(got.shape)}, the oracle's is {tuple(oracle.shape)}"
    assert not bool(got.isnan().any()), f"{name}: {_first(got.isnan())} of {got.numel()} values are NaN"
    infinite = _infinities(oracle)
    if bool(oracle.isnan().any()) or not all(torch.equal(_infinities(run), infinite) for run in eager):
        raise ValueError(f"{name}: the case is ill-posed: the oracle is NaN, or eager overflows where it does not")
    wrong = _infinities(got) != infinite
    assert not bool(wrong.any()), f"{name}: {_first(wrong)} values are infinite and the oracle is not, or the reverse"
    got, oracle, eager, dtype = _finite(got), _finite(oracle), [_finite(run) for run in eager], got.dtype

    if lse_of is None:
        error = row_error(got, oracle, gradient, size)
        eager_errors = [row_error(run, oracle, gradient, size) for run in eager]
        band = max(torch.finfo(rounded).eps for rounded in (dtype, call_dtype or dtype))
    else:
        error = lse_error(got, oracle, rounding=torch.finfo(dtype).eps)
        eager_errors = [lse_error(run, oracle) for run in eager]
        band = LSE_SHARE * torch.finfo(lse_of).eps
    for what in ("worst_row", "whole"):
        found, of_eager = getattr(error, what), max(getattr(run, what) for run in eager_errors)
        allowed = EAGER_FACTOR * of_eager + band
        assert found <= allowed, (
            f"{name}: error {found:.3g} ({what.replace('_', ' ')}), allowed {allowed:.3g} "
            f"= {EAGER_FACTOR:g} x {of_eager:.3g} (eager) + {band:.3g} (rounding)\n"
            f"1 - similarity: {dissimilarity(got, oracle):.3g}, eager's: {dissimilarity(eager[0], oracle):.3g}\n"
            f"worst at {error.where} of {tuple(oracle.shape)}:\n"
            f"  got    {_shown(got, error.where)}\n  oracle {_shown(oracle, error.where)}\n"
            f"  eager  {_shown(eager[0], error.where)}"
        )


def assert_forward_accurate(
    name: str,
    got: tuple[Tensor, Tensor],
    oracle: tuple[Tensor, Tensor],
    eager: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Asserts the rule for o and lse of a forward pass; the oracle's and eager's are as their functions return them."""
    (o, lse), (oracle_o, oracle_lse), (eager_o, eager_lse) = got, oracle, eager
    # lse first: where it is wrong the softmax is, and o's message would only say so less clearly.
    assert_accurate(f"lse of {name}", lse, oracle_lse, eager_lse, lse_of=o.dtype)
    assert_accurate(f"o of {name}", o, oracle_o, eager_o)
    wrong = (o != 0) & (oracle_o == 0).all(dim=-1, keepdim=True)
    assert not bool(wrong.any()), f"o of {name}: {_first(wrong)} values are not 0 in rows without keys"


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
        name: what the call is called in the message.
        got: the gradients.
        oracle: by `gradients`, of `oracle_attention`.
        eager: by `eager_gradients`.
        sizes: by `gradient_sizes`.
        dtype: of q, k and v.
    """
    assert got.keys() == oracle.keys(), f"{name}: gradients {list(got)}, the oracle's are {list(oracle)}"
    for which, exact in oracle.items():
        assert_accurate(
            f"{which} of {name}",
            got[which],
            exact,
            [run[which] for run in eager],
            gradient=True,
            size=sizes[which],
            call_dtype=dtype,
        )
        wrong = (got[which] != 0) & ((exact == 0) & (sizes[which] == 0)).all(dim=-1, keepdim=True)
        assert not bool(wrong.any()), f"{which} of {name}: {_first(wrong)} values are not 0 in rows without terms"


def _infinities(x: Tensor) -> Tensor:
    """-1, 0, 1: the sign where x is not finite (2 for NaN)."""
    return torch.where(x.isinf(), x.sign(), x.isnan() * 2).to(torch.int8)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), 0.0)


def _first(wrong: Tensor) -> str:
    """How many values are wrong and the index of the first."""
    return f"{int(wrong.sum())} (first at {tuple(wrong.nonzero()[0].tolist())})"


def _shown(x: Tensor, where: tuple[int, ...], count: int = 6) -> str:
    row = x[where].flatten()
    return " ".join(f"{value:+.5g}" for value in row[:count].tolist()) + (" ..." if row.numel() > count else "")
