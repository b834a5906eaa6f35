"""What a decode call computes in this suite: plain attention, or with a score modification, a sink or a window.

Each :class:`Variant` has its options for `tileattn.decode`, and its definition on scores, by which outputs are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileattn import ALiBi, SlidingWindow, SoftCap

CAP = 30.0
SLOPES = 8.0  # ALiBi's slopes are 2 ** (-SLOPES * (head + 1) / heads), as in its paper
DECAY = 1e-3


@dataclass(frozen=True)
class Variant:
    """A variant of attention.

    Attributes:
        name: as in tables.
        options: the keyword arguments of `tileattn.decode`, from the number of heads and the device.
        scores: changes scaled scores (heads of a group, keys), given the heads (heads, 1) and the keys' distances from
            the query (keys,).
        sink: logits (heads, 1) from the heads (heads, 1), which join the softmax's denominator.
        window: the keys that a query sees, the nearest ones; None for all.
        keys: the sequences have so many keys, the first of their caches; None for all.
    """

    name: str
    options: Callable[[int, torch.device], dict[str, Any]] = lambda heads, device: {}
    scores: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda scores, heads, distance: scores
    sink: Callable[[Tensor], Tensor] | None = None
    window: int | None = None
    keys: int | None = None


PLAIN = Variant("plain")
SOFTCAP = Variant(
    "softcap",
    lambda heads, device: {"score_mod": SoftCap(CAP)},
    lambda scores, heads, distance: CAP * torch.tanh(scores / CAP),
)
SINK = Variant(
    "sink",
    lambda heads, device: {"sink": _logits(torch.arange(heads, device=device))},
    sink=lambda heads: _logits(heads),
)
FUNCTION = Variant(
    "function",
    lambda heads, device: {"score_mod": _decay},
    lambda scores, heads, distance: scores - DECAY * distance,
)


def alibi(heads: int) -> Variant:
    """ALiBi with its paper's slopes for a number of heads (Press et al. 2022, arXiv 2108.12409)."""
    return Variant(
        "alibi",
        lambda heads, device: {"score_mod": ALiBi(_slopes(torch.arange(heads, device=device), heads))},
        lambda scores, head, distance: scores - _slopes(head, heads) * distance,
    )


def window(keys: int) -> Variant:
    """A sliding window of so many keys, the query's own included."""
    return Variant(f"window{keys}", lambda heads, device: {"mask": SlidingWindow(keys - 1, 0)}, window=keys)


def shorter(keys: int) -> Variant:
    """Plain attention to sequences of so many keys."""
    return Variant(f"plain{keys}", keys=keys)


def _logits(heads: Tensor) -> Tensor:
    return torch.sin(heads.float())


def _slopes(head: Tensor, heads: int) -> Tensor:
    return torch.exp2(head.float().add(1).mul(-SLOPES / heads))


def _decay(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """What a user may write: scores fall with distance."""
    return score - DECAY * (q - k)
