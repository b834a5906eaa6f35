"""One call compared with the oracle: each output's error over its bound, as numbers on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import adapters, compare, values
from .oracle import Truth, truths
from .spec import Call


class WrongFormError(AssertionError):
    """Outputs of the wrong names, shapes, dtypes or devices."""


def trial(call: Call, device: str) -> dict[str, Tensor]:
    """Above 1 an output is wrong. Raises what the call raises, and WrongFormError."""
    got, truth, t, more = _both(call, device)
    return compare.ratios(call, t, got, truth) | more


def _both(call: Call, device: str) -> tuple[dict[str, Tensor], dict[str, Truth], dict[str, Tensor], dict[str, Tensor]]:
    t = values.make(call, device)
    given, exact = adapters.quantized(call, t) if call.dtype == "fp8" else (t, t)
    more = {}
    with torch.no_grad():
        kept = None
        if call.dropout:
            kept = adapters.kept_weights(call, device)
            more["dropout's share"] = _share(kept, call.dropout)
        truth = truths(call, exact, kept)
    got = adapters.run(call, given)
    wrong = compare.wrong_form(call, t, got, truth)
    if wrong is not None:
        raise WrongFormError(wrong)
    return got, truth, t, more


def _share(kept: Tensor, p: float) -> Tensor:
    """How far the share of kept weights is from 1 - p, in six standard deviations."""
    if kept.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=kept.device)
    share = (kept > 0).double().mean()
    return (share - (1 - p)).abs() / (6 * (p * (1 - p) / kept.numel()) ** 0.5 + 2.0**-16)


def failure(call: Call, device: str) -> str | None:
    """What is wrong with a call, in words, or None. Waits for the device."""
    try:
        ratios = {name: float(ratio) for name, ratio in trial(call, device).items()}
    except torch.AcceleratorError:
        raise  # the process can do nothing more on its device
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    if not wrong:
        return None
    shown = ", ".join(f"{name} is off by {ratio:.3g} times what is allowed" for name, ratio in wrong.items())
    fine = [name for name in ratios if name not in wrong]
    return shown + (f" ({', '.join(fine)}: right)" if fine else "")


def detail(call: Call, device: str) -> str:
    """The worst element of each output, for a report; empty where the call raises."""
    try:
        got, truth, t, _ = _both(call, device)
    except Exception:
        return ""
    padding = compare.Padding(call, t)
    lines = []
    for name, x in got.items():
        value = truth[name].value
        rows = x if name == "lse" and not call.packed else compare.padded(padding, name, x)
        difference = (rows.double() - value).nan_to_num(nan=torch.inf).abs()
        if difference.numel() == 0:
            continue
        where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
        computed, right = float(rows[where]), float(value[where])
        lines.append(f"  {name}{list(where)} of {list(value.shape)}: {computed:.6g}, right is {right:.6g}")
    return "\n".join(lines)
