"""The tensors of a case: the same whole ones on all ranks, of which each implementation keeps its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.bench.parallel.cases import Case

NAMES = ("q", "k", "v", "do")


class Part(NamedTuple):
    """What a rank holds: some tokens of all heads, or all tokens of some heads; None means all."""

    tokens: Tensor | None = None
    heads: slice | None = None
    kv_heads: slice | None = None


class Inputs(NamedTuple):
    """q, k, v and the gradient of o of a part, (1, rows, heads, head_dim); q, k and v take gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def bytes(self) -> int:
        """Of all of them."""
        return sum(x.numel() * x.element_size() for x in self)


@dataclass(frozen=True)
class Source:
    """Makes the tensors of a case. Each is drawn anew from its seed: whole ones would take the memory of a GPU."""

    case: Case
    device: torch.device
    dtype: torch.dtype

    def inputs(self, part: Part) -> Inputs:
        """The tensors of a part."""
        q, k, v, do = (self._drawn(name, part) for name in NAMES)
        return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do)

    def _drawn(self, name: str, part: Part) -> Tensor:
        case, keys = self.case, name in ("k", "v")
        generator = torch.Generator(self.device).manual_seed(NAMES.index(name))
        shape = (1, case.seqlen, case.kv_heads if keys else case.heads, case.head_dim)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        heads = part.kv_heads if keys else part.heads
        if heads is not None:
            x = x[:, :, heads]
        if part.tokens is not None:
            return x[:, part.tokens.to(self.device)]
        return x.clone(memory_format=torch.contiguous_format)
