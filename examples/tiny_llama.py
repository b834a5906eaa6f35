"""A tiny model like Llama, with random weights, whose attention is given by the caller. `serve_tiny.py` serves it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Attention of a layer: (layer, q, k, v) -> o. q and o are (tokens, heads, head_dim); k and v (tokens, kv_heads,
# head_dim). Rotary embeddings are its business, since some caches apply them while they store the keys.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), with a gated mlp."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        """Maps (tokens, dim) to the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        x = x + self.out(attend(index, q, k, v).flatten(1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TinyLlama(nn.Module):
    """Maps packed tokens of any number of sequences to hidden states; `attend` knows which sequence a token is of."""

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        longest: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        # Every layer changes the state by as much as it is large, so that outputs depend on all of the context.
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        self.to(device, dtype).requires_grad_(False)
        half = dim // heads // 2
        angle = torch.arange(longest, device=device)[:, None] * 10000.0 ** (-torch.arange(half, device=device) / half)
        self.register_buffer("cos", angle.cos())  # (longest, head_dim / 2), float32 whatever the weights are
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Hidden states (tokens, dim) of token ids (tokens,)."""
        x = self.token(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.norm(x)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (tokens, heads, head_dim), rotated by their positions (tokens,)."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def alone(self, tokens: Tensor) -> Tensor:
        """Logits of each next token of one sequence (tokens,), by PyTorch's attention and without a cache."""
        positions = torch.arange(tokens.shape[0], device=tokens.device)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.rotated(q, positions), self.rotated(k, positions)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        return self.head(self(tokens, attend))
