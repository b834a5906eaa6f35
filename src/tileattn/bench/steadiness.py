"""What makes the times of a run doubtful, as lines for the reader: other work on the machine, rounds that disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tileattn.measure.busy import BUSY, busy_share

# Between the slowest and the fastest round of an implementation, over its median: above this a row is said to vary.
WIDE = 0.1


def busy_line(device: torch.device) -> str | None:
    """What to say of other work on the device before the run; None if there is little, or the system does not tell."""
    share = busy_share(device)
    if share is None or share < BUSY:
        return None
    what = "GPU" if device.type == "cuda" else "CPU"
    return f"the {what} was {share:.0%} busy with other work before the run: times may be too long"


def spread(round_ms: Sequence[float], ms: float) -> float:
    """How far the rounds of one implementation lie apart, as a part of its time. 0 for a single round."""
    return (max(round_ms) - min(round_ms)) / ms


def spread_line(spreads: Mapping[tuple[str, str], float]) -> str | None:
    """One line for all (case, implementation) whose rounds lie far apart; None if there is none."""
    wide = {name: value for name, value in spreads.items() if value > WIDE}
    if not wide:
        return None
    case, name = max(wide, key=lambda each: wide[each])
    return (
        f"the rounds of {len(wide)} of {len(spreads)} rows differ by more than {WIDE:.0%}, "
        f"most by {wide[case, name]:.0%}: {name}, {case}"
    )
