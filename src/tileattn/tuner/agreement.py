"""Compares the outputs of a candidate with those of the default configuration, on the user's tensors.

Both compute exact attention, so they differ only by rounding: of the output, and of the weights, which the two round to
the inputs' dtype relative to different maxima. The relative difference of a row (a vector along the last dimension, as
in :mod:`tileattn.testing.numerics`) is then a few `eps` of the dtype. A wrong tile causes a hundred times that. For
lse the absolute difference counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROUNDINGS = 4.0
LSE_SHARE = 1 / 4
FP8 = torch.float8_e4m3fn


def disagreement(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], dtype: torch.dtype, gradients: bool = False
) -> str | None:
    """A description of how a candidate's outputs differ from the default's, or None if they agree.

    Args:
        got: The candidate's o and lse, or its gradients; None where an output is absent.
        expected: The outputs of the default configuration.
        dtype: of q, k and v, to which weights and their gradients are rounded, whatever the output's is.
        gradients: whether these are gradients; else the second output is lse.
    """
    for index, (mine, its) in enumerate(zip(got, expected, strict=True)):
        if (mine is None) != (its is None):
            return f"output {index} is there in one of the two only"
        if mine is None or its is None:
            continue
        if mine.shape != its.shape or mine.dtype != its.dtype:
            return f"output {index} is {tuple(mine.shape)} {mine.dtype}, not {tuple(its.shape)} {its.dtype}"
        of_lse = index == 1 and not gradients
        reason = _lse_difference(mine, its, dtype) if of_lse else _difference(mine, its, dtype)
        if reason is not None:
            return f"output {index}: {reason}"
    return None


def _lse_difference(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    rows = zip(got[..., None], expected[..., None])
    return _worst(rows, LSE_SHARE * max(torch.finfo(dtype).eps, torch.finfo(torch.bfloat16).eps), absolute=True)


def _difference(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    coarsest = max(torch.finfo(got.dtype).eps, 0.0 if dtype == FP8 else torch.finfo(dtype).eps)
    allowed = max(ROUNDINGS * coarsest, torch.finfo(FP8).eps if dtype == FP8 else 0.0)
    if got.dim() < 2:  # of a sink or of slopes: one row
        got, expected = got.reshape(1, 1, -1), expected.reshape(1, 1, -1)
    return _worst(zip(got, expected), allowed, absolute=False)


def _worst(batches: Iterable[tuple[Tensor, Tensor]], allowed: float, absolute: bool) -> str | None:
    """The largest error over the batch elements; one at a time, so that float32 copies stay small."""
    for mine, its in batches:
        mine, its = mine.float(), its.float()
        finite = its.isfinite()
        same = (mine == its) | (mine.isnan() & its.isnan())
        if bool((~finite & ~same).any()) or not bool(mine.isfinite()[finite].all()):
            return "it is not finite where the default's is, or the reverse"
        difference = torch.where(finite, mine - its, 0.0).norm(dim=-1)
        if not absolute:
            sizes = torch.where(finite, its, 0.0).norm(dim=-1)
            # Rows smaller than the mean row are measured by that: little is left of them where terms cancel.
            difference = difference / sizes.clamp(min=float(sizes.mean()) or 1.0)
        if difference.numel() and float(difference.max()) > allowed:
            return f"its worst row differs by {float(difference.max()):.3g}, allowed is {allowed:.3g}"
    return None
