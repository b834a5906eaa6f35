"""The tensors of conformance cases: random values, and the memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Random tensors for one case: drawn on the CPU, returned on the device. For "meta" nothing is drawn."""

    generator: torch.Generator
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """float32, standard normal."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self.generator).to(self.device)

    def integers(self, count: int, *shape: int) -> Tensor:
        """int64, 0 to count - 1."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(count, shape, generator=self.generator).to(self.device)

    def queries_or_keys(self, kind: str, shape: tuple[int, ...], sign: int) -> Tensor:
        """float32 on the CPU (or "meta"), see `Shape.values`; `sign` is that of the "negative" values."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        if kind == "normal":
            return torch.randn(shape, generator=self.generator)
        if kind == "large":
            return 16.0 * (torch.randint(3, shape, generator=self.generator) - 1)
        return sign * 16.0 * torch.randint(2, shape, generator=self.generator)


# --- Memory layouts: (value on the CPU, device) -> the same values, in some memory of the device ----------------------


def _bshd(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device)


def _bhsd(x: Tensor, device: torch.device) -> Tensor:
    return x.transpose(1, 2).contiguous().to(device).transpose(1, 2)


def _packed(x: Tensor, device: torch.device) -> Tensor:
    """The middle of three tensors of a (batch, seqlen, 3, heads, dim) projection."""
    return _cut(x, device, (*x.shape[:2], 3, *x.shape[2:]), (..., 1, slice(None), slice(None)))


def _expanded(x: Tensor, device: torch.device) -> Tensor:
    """Batch elements that share memory: stride 0."""
    return x[:1].to(device).expand(x.shape) if x.shape[0] else x.to(device)


def _island(x: Tensor, device: torch.device) -> Tensor:
    """A part of every dimension of a larger tensor, NaN around it: what is read beyond the edges shows."""
    batch, seqlen, heads, dim = x.shape
    margin = max(8, 16 // x.element_size())  # rows stay aligned
    inner = (slice(1, 1 + batch), slice(8, 8 + seqlen), slice(1, 1 + heads), slice(margin, margin + dim))
    return _cut(x, device, (batch + 2, seqlen + 16, heads + 2, dim + 2 * margin), inner)


def _unaligned(x: Tensor, device: torch.device) -> Tensor:
    """Rows that begin at odd elements."""
    return _cut(x, device, (*x.shape[:3], x.shape[3] + 1), (..., slice(1, None)))


def _cut(x: Tensor, device: torch.device, shape: Iterable[int], index: tuple[Any, ...]) -> Tensor:
    """`x` as a view, by `index`, of a tensor of `shape` that is NaN elsewhere."""
    view = torch.full(tuple(shape), torch.nan, dtype=x.dtype, device=device)[index]
    return view.copy_(x)


LAYOUTS: dict[str, Callable[[Tensor, torch.device], Tensor]] = {
    "bshd": _bshd,
    "bhsd": _bhsd,
    "packed": _packed,
    "expanded": _expanded,
    "island": _island,
    "unaligned": _unaligned,
}
