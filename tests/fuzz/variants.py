"""Masks and score modifications by their definitions, on whole matrices in float64. Imports nothing of tileattn.

These are independent of the functions that :mod:`fuzz.adapters` passes to tileattn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import Call, mod_tensor, terms

TANH_ERROR = 2.0**-20  # absolute, of a GPU's tanh and exp2


class Places(NamedTuple):
    """Indices that broadcast to (elements, heads, rows, keys)."""

    b: Tensor
    h: Tensor
    row: Tensor
    key: Tensor
    q: Tensor
    """The position of a row: aligned with the last key, or (top) its number."""


class Step(NamedTuple):
    """What one modification did: derivative by the score, and by its tensor (before its reduction), if it has one."""

    derivative: Tensor | float
    tensor: str | None = None
    by_tensor: Tensor | None = None
    by_tanh: float = 0.0
    """How much an error of tanh changes the derivative, at most."""


def allowed(call: Call, t: dict[str, Tensor], at: Places) -> Tensor:
    """Which pairs the mask, `causal` and the key padding allow."""
    seen = torch.ones((), dtype=torch.bool, device=at.q.device)
    if call.causal:
        seen = seen & (at.q - at.key >= 0)
    if call.key_padding:
        seen = seen & t["key_padding"][:, None, None, :]
    if call.mask is not None:
        names = iter([name for name, _ in terms(call.mask)])
        seen = seen & _mask(call.mask, names, t, at)
    return seen


def _mask(mask: Any, names: Any, t: dict[str, Tensor], at: Places) -> Tensor:
    kind = mask[0]
    if kind in ("and", "or"):
        x, y = _mask(mask[1], names, t, at), _mask(mask[2], names, t, at)
        return torch.logical_and(x, y) if kind == "and" else torch.logical_or(x, y)
    name = next(names)
    ahead = at.key - at.q  # how far the key is in front of the query
    if kind == "causal":
        return ahead <= 0
    if kind == "window":
        left, right = mask[1], mask[2]
        far = torch.zeros_like(ahead, dtype=torch.bool)
        if left is not None:
            far = far | (-ahead > left)
        if right is not None:
            far = far | (ahead > right)
        return ~far
    if kind == "prefix":
        return (at.key < mask[1]) | (ahead <= 0)
    if kind == "prefixes":
        return (at.key < t[name].long()[:, None, None, None]) | (ahead <= 0)
    if kind == "padding":
        return t[name][:, None, None, :] & (ahead == ahead)
    if kind == "bools":
        return t[name]
    if kind == "docs":
        return _same_document(t[name], at)
    if kind in _PATTERNS:
        return _PATTERNS[kind](at, *mask[1:])
    if kind == "images":
        return _images(t[name], at)
    if kind == "block_sparse":
        return _in_blocks(t[name], at, mask[2], mask[3])
    return _MASK_FUNCTIONS[mask[1]](at, mask[2], t.get(name))


def _same_document(ids: Tensor, at: Places) -> Tensor:
    if ids.shape[1] == 0:
        return torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=ids.device)
    of_query = torch.gather(
        ids[:, None, None, :].expand(-1, 1, 1, -1).flatten(1),
        1,
        at.q.clamp(0, ids.shape[1] - 1).expand(len(ids), 1, -1, 1).flatten(1),
    )
    return (of_query[:, None, :, None] == ids[:, None, None, :]) & (at.q >= 0)


def _dilated(at: Places, left: int | None, right: int | None, step: int) -> Tensor:
    back = at.q - at.key
    seen = torch.remainder(back, step) == 0
    seen = seen if left is None else seen & (back <= left)
    return seen if right is None else seen & (back >= -right)


def _strided(at: Places, stride: int, local: int) -> Tensor:
    back = at.q - at.key
    return (back >= 0) & ((back <= local) | (torch.remainder(back, stride) == 0))


def _global(at: Places, count: int) -> Tensor:
    return (at.key < count) | ((at.q >= 0) & (at.q < count))


def _grid(at: Places, height: int, width: int, tall: int, wide: int) -> Tensor:
    seen = (at.q >= 0) & (at.q < height * width) & (at.key < height * width)
    sides = (
        (torch.div(at.q, width, rounding_mode="floor"), torch.div(at.key, width, rounding_mode="floor"), height, tall),
        (torch.remainder(at.q, width), torch.remainder(at.key, width), width, wide),
    )
    for i, j, size, window in sides:
        middle = i.clamp(window // 2, size - window + window // 2)  # where the window is not moved
        seen = seen & (j >= middle - window // 2) & (j < middle - window // 2 + window)
    return seen


_PATTERNS: dict[str, Callable[..., Tensor]] = {
    "dilated": _dilated,
    "strided": _strided,
    "global": _global,
    "grid": _grid,
}


def _images(ids: Tensor, at: Places) -> Tensor:
    """The document of a position is its id // 4, its image id % 4 - 1."""
    same_image = _same_document(ids, at) & (ids % 4 != 0)[:, None, None, :]
    return same_image | (_same_document(ids // 4, at) & (at.key <= at.q))


def _in_blocks(blocks: Tensor, at: Places, rows: int, keys: int) -> Tensor:
    elements, heads, *counts = blocks.shape
    row, key = torch.div(at.row, rows, rounding_mode="floor"), torch.div(at.key, keys, rounding_mode="floor")
    head = torch.div(at.h, at.h.numel() // heads, rounding_mode="floor")
    b = at.b if elements > 1 else torch.zeros_like(at.b)
    return blocks[b, head, row.clamp(max=counts[0] - 1), key.clamp(max=counts[1] - 1)]


_MASK_FUNCTIONS: dict[str, Callable[[Places, int, Any], Tensor]] = {
    # Every `n`-th diagonal.
    "stripes": lambda at, n, _: torch.remainder(at.q - at.key, n) == 0,
    # Head 0 sees all, others what is nearer than n.
    "first_head": lambda at, n, _: (at.h == 0) | ((at.q - at.key).abs() < n),
    # Blocks of n positions see themselves.
    "blocks": lambda at, n, _: torch.div(at.q, n, rounding_mode="floor") == torch.div(at.key, n, rounding_mode="floor"),
    # A captured table of heads and keys.
    "table": lambda at, n, table: table[None, :, None, :] & (at.q == at.q),
}


class Scores(NamedTuple):
    """Modified scores, the variance of their error, and the steps in between."""

    value: Tensor
    variance: Tensor
    steps: list[Step]


def modified(
    call: Call, t: dict[str, Tensor], at: Places, scores: Tensor, variance: Tensor, eps: float, tanh: float
) -> Scores:
    """The call's modifications of scaled scores, in order. `eps` is the rounding of scores, `tanh` that of tanh."""
    steps: list[Step] = []
    for number, mod in enumerate(call.mods):
        name = mod_tensor(number, mod)
        x = None if name is None else t[name].double()
        new, step, added = _modify(mod, name, x, at, scores)
        variance = (
            variance * _squared(step.derivative) + (4 * eps * _finite(added)) ** 2 + (2 * eps * _finite(new)) ** 2
        )
        if mod[0] == "softcap":
            variance = variance + (mod[1] * tanh_error(eps)) ** 2 + (tanh * _finite(new)) ** 2
        if mod[0] == "fn" and mod[1] in ("squash", "decay"):
            variance = variance + (4 * (tanh_error(eps) + tanh)) ** 2
        steps.append(step)
        scores = new
    return Scores(scores, variance, steps)


def _finite(x: Any) -> Any:
    return x.nan_to_num(neginf=0.0, posinf=0.0) if isinstance(x, Tensor) else x


def tanh_error(eps: float) -> float:
    """Absolute, where arithmetic has this rounding."""
    return TANH_ERROR if eps > 1e-12 else 4 * eps


def _squared(x: Tensor | float) -> Tensor | float:
    return x * x


def _modify(mod: list[Any], name: str | None, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    """The new scores, the step, and the size of what was added."""
    if mod[0] == "softcap":
        squashed = torch.tanh(s / mod[1])
        return mod[1] * squashed, Step(1 - squashed * squashed, by_tanh=2.0), 0.0
    if mod[0] == "alibi":
        slope = x[None, :, None, None] if x.ndim == 1 else x[:, :, None, None]
        distance = -(at.q - at.key).abs().double()
        return s + slope * distance, Step(1.0, name, distance), slope * distance
    if mod[0] == "bias":
        return s + x, Step(1.0, name, torch.ones_like(s)), x
    return _FUNCTIONS[mod[1]](name, x, at, s)


def _slopes(name: Any, x: Tensor, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    distance = (at.key - at.q).double()
    added = x[None, :, None, None] * distance
    return s + added, Step(1.0, name, distance), added


def _keybias(name: Any, x: Tensor, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    return s + x[:, None, None, :], Step(1.0, name, torch.ones_like(s)), x[:, None, None, :]


def _gate(name: Any, x: Tensor, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    factor = x[None, :, None, None]
    return s * factor, Step(factor, name, s), s * factor


def _temperature(name: Any, x: Tensor, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    return s * x, Step(x, name, s), s * x


def _relative(name: Any, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    added = (at.q - at.key).double() * -0.125
    return s + added, Step(1.0), added


def _squash(name: Any, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    squashed = torch.tanh(s * 0.5)
    return 3 * squashed + 0.25 * s, Step(1.5 * (1 - squashed**2) + 0.25, by_tanh=3.0), 0.25 * s


def _hidden(name: Any, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    hide = torch.remainder(at.q + 2 * at.key, 3) == 1
    return s.masked_fill(hide, -math.inf), Step((~hide).double()), 0.0


def _decay(name: Any, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    added = 2.0 * torch.pow(2.0, -0.25 * (at.q - at.key).abs().double())
    return s + added, Step(1.0), added


def _odd_heads(name: Any, x: Any, at: Places, s: Tensor) -> tuple[Tensor, Step, Any]:
    odd = torch.remainder(at.h + at.b, 2) == 1
    factor = torch.where(odd, 0.5, 1.0).double()
    return s * factor, Step(factor), s * factor


_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Step, Any]]] = {
    "slopes": _slopes,
    "keybias": _keybias,
    "gate": _gate,
    "temperature": _temperature,
    "relative": _relative,
    "squash": _squash,
    "hidden": _hidden,
    "decay": _decay,
    "odd_heads": _odd_heads,
}
