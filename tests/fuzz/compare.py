"""The verdict on a call: each output's error over its bound, as one number on the device. Imports no tileattn.

A row (along the last dimension) may be off by `FACTOR` standard deviations of its error; a whole tensor by
`WHOLE_FACTOR` of its own. lse is compared element by element. Its bound has in addition an eighth of a rounding in the
inputs' dtype, because the exp of GPUs is approximate. Infinities must be where the oracle's are, except that a number
beyond the output dtype's largest may be infinite. Rows of no sequence are 0 (-inf in lse). NaN never passes: it counts
as an infinite error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .oracle import Truth
from .packing import Padding
from .spec import Call

FACTOR = 4.0
WHOLE_FACTOR = 2.5
IN_ROWS = ("o", "q", "k", "v")
LSE_BAND = {"fp64": 2.0**-50, "fp32": 2.0**-21, "bf16": 2.0**-10, "fp16": 2.0**-13, "fp8": 2.0**-7}


def wrong_form(call: Call, t: dict[str, Tensor], got: dict[str, Tensor], truth: dict[str, Truth]) -> str | None:
    """What is wrong about names, shapes and dtypes; asks nothing of the device."""
    if got.keys() != truth.keys():
        return f"outputs {sorted(got)}, expected {sorted(truth)}"
    out = torch.bfloat16 if call.dtype == "fp8" else call.torch_dtype
    for name, x in got.items():
        like = {"o": t["do"], "lse": t["dlse"]}.get(name, t.get(name))
        dtype = out if name == "o" else like.dtype
        if x.shape != like.shape or x.dtype != dtype or x.device != like.device:
            return f"{name}: {tuple(x.shape)} {x.dtype} {x.device}, expected {tuple(like.shape)} {dtype} {like.device}"
    return None


def ratios(call: Call, t: dict[str, Tensor], got: dict[str, Tensor], truth: dict[str, Truth]) -> dict[str, Tensor]:
    """For each output a number on the device; above 1 it is wrong."""
    padding = Padding(call, t)
    by_name = {}
    for name, x in got.items():
        value, variance = truth[name]
        if name == "lse":
            by_name[name] = _of_lse(call, padding, x, value, variance)
        else:
            by_name[name] = _of_rows(padding, name, x, value, variance)
    return by_name


def _of_rows(padding: Padding, name: str, x: Tensor, value: Tensor, variance: Tensor) -> Tensor:
    unused = padding.unused(x, name) if name in IN_ROWS else None
    rows = padded(padding, name, x)
    if rows.ndim < 1:
        rows, value, variance = rows[None], value.reshape(1), variance.reshape(1)
    largest = torch.finfo(x.dtype).max
    error2 = (rows.double().clamp(-largest, largest) - value.clamp(-largest, largest)).square().sum(-1)
    allowed2 = variance.sum(-1)
    worst = _over(error2, FACTOR**2 * allowed2)
    whole = _over(error2.sum()[None], WHOLE_FACTOR**2 * allowed2.sum()[None] + 1e-300)
    if unused is not None:
        worst = torch.maximum(worst, _there((x != 0) & unused))
    return torch.maximum(worst, whole).sqrt()


def _of_lse(call: Call, padding: Padding, x: Tensor, value: Tensor, variance: Tensor) -> Tensor:
    unused = padding.unused(x.movedim(-1, 0), "o")
    wrong = None if unused is None else _there((x.movedim(-1, 0) != -torch.inf) & unused)
    rows = padded(padding, "lse", x).double()
    finite = value != -torch.inf
    error = torch.where(finite, rows - value, torch.where(rows == -torch.inf, 0.0, torch.inf))
    allowed = FACTOR * variance.sqrt() + LSE_BAND[call.dtype]
    worst = _over(error.square(), allowed.square()).sqrt()
    return worst if wrong is None else torch.maximum(worst, wrong)


def padded(padding: Padding, name: str, x: Tensor) -> Tensor:
    """An output in the shape of the oracle's."""
    if name == "lse" and padding.packed:
        return padding.padded(x.movedim(-1, -2), "o", -torch.inf).transpose(1, 2)
    return padding.padded(x, name) if name in IN_ROWS else x


def _over(error2: Tensor, allowed2: Tensor) -> Tensor:
    """The largest quotient; 0 / 0 is 0, and NaN is inf."""
    if error2.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=error2.device)
    quotient = torch.where(error2 == 0, 0.0, error2 / allowed2)
    return quotient.nan_to_num(nan=torch.inf, posinf=torch.inf).amax()


def _there(wrong: Tensor) -> Tensor:
    return torch.where(wrong.any(), torch.inf, 0.0).double()
