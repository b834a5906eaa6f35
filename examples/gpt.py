"""A small GPT with a choice of attention implementations, tileattn's or PyTorch's. `train_gpt.py` trains it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileattn import PagedKVCache, SlidingWindow, attention

# --- Attention: causal, of q, k and v with shape (batch, seqlen, heads, head_dim) ---

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# The same of new tokens, with earlier ones from a cache; q and k are not yet rotated.
Cached = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend | None = None) -> Tensor:
    """PyTorch's attention, which takes (batch, heads, seqlen, head_dim), by the given kernel or PyTorch's choice."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Backend(str, Enum):
    """The attention implementation of the model."""

    tileattn = "tileattn"  # the first of tileattn's backends that accepts the call
    tilelang = "tilelang"  # tileattn's TileLang kernels; an error if they refuse the call
    torch = "torch"  # tileattn's PyTorch operations
    sdpa = "sdpa"  # PyTorch's attention
    fa2 = "fa2"  # PyTorch's attention with FlashAttention-2, on a GPU
    cudnn = "cudnn"  # PyTorch's attention with cuDNN, on a GPU


ATTEND: dict[Backend, Attend] = {
    Backend.tileattn: functools.partial(attention, causal=True),
    Backend.tilelang: functools.partial(attention, causal=True, backend="tilelang"),
    Backend.torch: functools.partial(attention, causal=True, backend="torch"),
    Backend.sdpa: sdpa,
    Backend.fa2: functools.partial(sdpa, kernel=SDPBackend.FLASH_ATTENTION),
    Backend.cudnn: functools.partial(sdpa, kernel=SDPBackend.CUDNN_ATTENTION),
}


# --- Model ---


def rotary(seqlen: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seqlen, head_dim / 2) of the angles at each position."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.arange(seqlen, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotated(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotary position embedding: rotates pairs of elements of queries or keys by angles of their position.

    x: (batch, seqlen, heads, head_dim). positions: (seqlen,), for rows that are a shard of a sequence. A score then
    depends on the distance between query and key. This lets even a small model learn words within a minute. Source: Su
    et al. 2021 (arXiv 2104.09864).
    """
    last = x.shape[1] if positions is None else int(positions.max()) + 1 if len(positions) else 0
    tables = rotary(last, x.shape[3], x.device)
    cos, sin = (table[slice(None) if positions is None else positions][:, None].to(x.dtype) for table in tables)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.positions: Tensor | None = None  # of the rows, where they are a shard of a sequence
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cached: Cached | None = None) -> Tensor:
        """Maps (batch, seqlen, dim) to the same shape. `cached`: attention of new tokens, with all earlier ones."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        if cached is None:
            o = self.attend(rotated(q, self.positions), rotated(k, self.positions), v)
        else:
            o = cached(q, k, v)
        x = x + self.proj(o.flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps tokens (batch, seqlen) to logits of each next token, (batch, seqlen, vocabulary)."""

    def __init__(self, vocabulary: int, seqlen: int, layers: int, heads: int, dim: int, attend: Attend) -> None:
        super().__init__()
        self.seqlen, self.heads, self.head_dim = seqlen, heads, dim // heads
        self.token = nn.Embedding(vocabulary, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, attend) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # 2 * layers terms are added to the residual stream; smaller weights keep the sum's variance constant.
                into_residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if into_residual else 1))
        self.head.weight = self.token.weight  # tied weights: one matrix embeds tokens and computes logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token. tokens: (batch, seqlen), int64; training uses the model's `seqlen`."""
        return self.head(self.norm(self.blocks(self.token(tokens))))

    def new_cache(self, batch: int, max_seqlen: int) -> PagedKVCache:
        """An empty cache for `batch` sequences, in the dtype of the projections: autocast's, if there is one."""
        weight = self.token.weight
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        sizes = (batch, max_seqlen, self.heads, self.head_dim)
        return PagedKVCache(*sizes, layers=len(self.blocks), dtype=dtype, device=weight.device)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: PagedKVCache) -> Tensor:
        """Logits of each next token, of new tokens (batch, new) behind those in the cache, which gets them, too.

        They are those of `forward` on all tokens, while these are at most the model's `seqlen`. Beyond, each token sees
        the last `seqlen`, as far as it was trained to look.
        """
        step, x = cache.step(tokens.shape[1]), self.token(tokens)
        cos, sin = rotary(cache.max_seqlen, self.head_dim, x.device)
        window = SlidingWindow(self.seqlen - 1, 0)
        for index, block in enumerate(self.blocks):
            x = block(x, functools.partial(step.layer(index).attend, mask=window, cos=cos, sin=sin))
        return self.head(self.norm(x))

    @torch.no_grad()
    def continued(self, tokens: Tensor, count: int, generator: torch.Generator, temperature: float = 0.7) -> Tensor:
        """The tokens (batch, n) followed by `count` tokens, each sampled from the model's prediction.

        The keys and values of all tokens are kept in a cache: each new token costs one row, not a forward pass.
        """
        cache = self.new_cache(tokens.shape[0], tokens.shape[1] + count)
        new = tokens
        for _ in range(count):
            logits = self.step(new, cache)[:, -1].float().cpu()
            drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            new = drawn.to(tokens.device)
            tokens = torch.cat((tokens, new), dim=1)
        return tokens
