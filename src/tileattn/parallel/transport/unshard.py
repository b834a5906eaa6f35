"""`Plan.unshard`: whole tensors from the shards of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import Layout
from .link import Link


def gathered(link: Link, layout: Layout, x: Tensor, dim: int) -> Tensor:
    """The whole tensor, on every rank. x: a shard, with rows in dimension `dim`."""
    whole: Tensor = _Unshard.apply(link, layout, dim, x)
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, layout: Layout, dim: int, x: Tensor) -> Tensor:
        ctx.link, ctx.layout, ctx.dim = link, layout, dim
        whole = x.new_empty(*x.shape[:dim], layout.tokens, *x.shape[dim + 1 :])
        spans = layout.owned
        receives = [[whole.narrow(dim, start, stop - start) for start, stop in of] for of in spans]
        sizes = [stop - start for start, stop in spans[link.rank]]
        sends = [list(x.split(sizes, dim)) if sizes else []] * layout.ranks
        (link.start(sends, receives, x) if layout.ranks > 1 else link.copy(sends, receives)).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        dim = ctx.dim
        spans = ctx.layout.owned[ctx.link.rank]
        parts = [gradient.narrow(dim, start, stop - start) for start, stop in spans]
        return None, None, None, torch.cat(parts, dim) if parts else gradient.narrow(dim, 0, 0).clone()
