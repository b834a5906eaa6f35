"""A small encoder that uses flash-attn, as an example of existing code. It does not mention tileattn.

The input is a padded batch of sequences of different lengths. The encoder packs it, runs the layers without padding,
and pads the output again.
"""

from __future__ import annotations

from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention and a feed-forward network on packed sequences (total, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen).flatten(-2))
        return x + self.mlp(x)


class Encoder(nn.Module):
    """Maps tokens (batch, seqlen) and a mask, False for padding, to logits (batch, seqlen, classes)."""

    def __init__(self, tokens: int, classes: int, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x, indices, cu_seqlens, max_seqlen, *_ = unpad_input(self.embed(tokens), mask)
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return self.head(pad_input(x, indices, *mask.shape))
