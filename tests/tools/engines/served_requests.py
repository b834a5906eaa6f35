"""Requests of a serving engine, the pages that hold their keys, and a plain reference: what tests of engines share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tileattn.testing import assert_accurate


@dataclass(frozen=True)
class Layer:
    """What a layer of a model computes; `window` counts the keys that a query sees, its own included."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    slopes: tuple[float, ...] = ()
    sinks: tuple[float, ...] = ()

    @property
    def scale(self) -> float:
        return 0.3


@dataclass(eq=False)
class Request:
    """A request: queries, keys and values of all its tokens in each layer, and what has been computed of it.

    Attributes:
        tokens: (q, k, v) of each layer, (total, heads or kv_heads, head_dim or head_dim_v).
        length: the tokens that are computed.
        pages: its pages, in order.
        slot: its row in an engine's tables.
    """

    tokens: list[tuple[Tensor, Tensor, Tensor]]
    length: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0


class Requests:
    """Makes requests, and deals pages to them in a random order; page 0 belongs to no request."""

    def __init__(self, layers: list[Layer], pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        self.layers, self.page_size, self.dtype, self.device = layers, page_size, dtype, device
        self.free = list(range(1, pages))
        random.Random(5).shuffle(self.free)
        self.generator = torch.Generator().manual_seed(3)
        self.made = 0

    def draw(self, total: int) -> Request:
        """A request of so many random tokens."""

        def rows(heads: int, dim: int) -> Tensor:
            return torch.randn(total, heads, dim, generator=self.generator).to(self.device, self.dtype)

        tokens = [
            (rows(x.heads, x.head_dim), rows(x.kv_heads, x.head_dim), rows(x.kv_heads, x.head_dim_v))
            for x in self.layers
        ]
        self.made += 1
        return Request(tokens, slot=self.made)

    def fork(self, parent: Request, total: int, most: int) -> Request:
        """A request with at most so many of the parent's computed tokens in front: those of whole pages, shared."""
        child = self.draw(total)
        pages = min(parent.length, most) // self.page_size
        child.length, child.pages = pages * self.page_size, parent.pages[:pages]
        for mine, theirs in zip(child.tokens, parent.tokens):
            for x, y in zip(mine, theirs):
                x[: child.length] = y[: child.length]
        return child

    def advance(self, request: Request, count: int) -> list[int]:
        """Makes a request longer; the slots of its new tokens, page * page_size + place."""
        first, request.length = request.length, request.length + count
        while len(request.pages) * self.page_size < request.length:
            request.pages.append(self.free.pop())
        size = self.page_size
        return [request.pages[i // size] * size + i % size for i in range(first, request.length)]

    def new(self, step: list[tuple[Request, int]], layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a step's new tokens, packed."""
        spans = [[x[r.length - n : r.length] for x in r.tokens[layer]] for r, n in step]
        q, k, v = map(torch.cat, zip(*spans))
        return q, k, v

    def check(self, step: list[tuple[Request, int]], layer: int, o: Tensor) -> None:
        """Asserts that o, (rows, heads, head_dim_v), is right for the step's new tokens, and 0 behind them."""
        at = 0
        for request, count in step:
            q, k, v = request.tokens[layer]
            span = slice(request.length - count, request.length)
            call = (q[span], k[: request.length], v[: request.length])
            oracle, eager = (plain(*call, self.layers[layer], dtype) for dtype in (torch.float64, self.dtype))
            name = f"layer {layer}, request {request.slot}, {count} of {request.length} tokens"
            assert_accurate(name, o[at : at + count], oracle, [eager])
            at += count
        assert (o[at:] == 0).all(), "rows of no request"


def plain(q: Tensor, k: Tensor, v: Tensor, layer: Layer, dtype: torch.dtype) -> Tensor:
    """Attention by its definition, with matrix products in `dtype`. The queries are the last of the keys' positions."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k).to(exact) * layer.scale
    if layer.soft_cap:
        s = layer.soft_cap * torch.tanh(s / layer.soft_cap)
    key = torch.arange(k.shape[0], device=q.device)
    query = key[k.shape[0] - q.shape[0] :, None]
    if layer.slopes:
        s = s + torch.tensor(layer.slopes, dtype=exact, device=q.device)[:, None, None] * (key - query)
    seen = (key <= query) & (key > query - (layer.window or k.shape[0]))
    s = s.masked_fill(~seen, -torch.inf)
    if layer.sinks:
        sinks = torch.tensor(layer.sinks, dtype=exact, device=q.device)[:, None, None].expand(-1, q.shape[0], 1)
        s = torch.cat((s, sinks), -1)
    p = torch.softmax(s, -1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", p.to(dtype), v)
