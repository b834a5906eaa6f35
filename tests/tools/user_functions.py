"""Masks and score functions as FlexAttention's users write them, with torch's functions and tensors' methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

HEADS, SEQLEN_Q, SEQLEN_K = 2, 50, 20  # positions from -30 on: integers that are negative

slopes = torch.tensor([0.5, 0.3])
slopes_16 = slopes.bfloat16()
factor = torch.tensor(0.7)
# int64: what differs beyond 32 bits, what does not fit into int32.
documents = torch.randint(0, 3, (1, 64), generator=torch.Generator().manual_seed(0)) * 2**32 + 5
large = torch.tensor([3, 2**40])

SCORES: dict[str, Function] = {
    "slopes in 16 bits": lambda s, b, h, q, k: s + slopes_16[h] * (k + 1001),
    "tensor without dimensions": lambda s, b, h, q, k: s * factor + torch.where(s > 0, factor, s) + factor.exp(),
    "floor of negative integers": lambda s, b, h, q, k: s + 0.1 * ((q - k) // 3) + 0.2 * ((q - k) % 5),
    "floor by a negative integer": lambda s, b, h, q, k: s + 0.1 * ((q - k) // -4) + 0.1 * ((k - q) % -3),
    "functions of remainders": lambda s, b, h, q, k: (
        s + 0.1 * torch.remainder(q - k, 3) + 0.1 * torch.floor_divide(q - k, 7) + 0.1 * torch.fmod(q - k, 4)
    ),
    "rounding modes": lambda s, b, h, q, k: (
        s + torch.div(q - k, 3, rounding_mode="trunc") * 0.1 + torch.div(q, 4, rounding_mode="floor") * 0.1
    ),
    "bits and shifts": lambda s, b, h, q, k: s + 0.1 * ((q >> 2) ^ k) + 0.01 * (q << 3) + 0.1 * (q & 3),
    "product beyond int32": lambda s, b, h, q, k: s + 0.1 * (((q + 70000) * (k + 70000)) % 7),
    "constant beyond int32": lambda s, b, h, q, k: s + 0.1 * ((q * 3000000000) % 11),
    "integers of 64 bits": lambda s, b, h, q, k: (
        s + (documents[b, k] == documents[b, k + 1]) * 0.5 + (large[h] > 2**35) * 1.0
    ),
    "conditions on floats": lambda s, b, h, q, k: torch.where(0.1 * (q - k) <= 1.0, s, s - 5.0),
    "floor of floats": lambda s, b, h, q, k: s - 3.0 * ((0.1 * (q - k)) // 1.0),
    "clamp": lambda s, b, h, q, k: (
        s.clamp(-0.5, 0.5) + torch.clamp(s, max=0.3) + torch.clamp(s, min=-0.2) + (q - k).clamp(0, 8) * 0.1
    ),
    "rectified": lambda s, b, h, q, k: (
        torch.relu(s) + F.relu(s - 0.1) + F.leaky_relu(s, 0.2) + F.relu6(4 * s) + F.elu(s)
    ),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(9 * s) + s.sigmoid() + F.silu(s) + F.sigmoid(s),
    "softplus": lambda s, b, h, q, k: F.softplus(9 * s) + F.logsigmoid(7 * s) + F.softplus(s, beta=2.0),
    "exponentials": lambda s, b, h, q, k: torch.exp2(-s.abs()) + s.abs().neg().exp() + torch.expm1(s.clamp(max=1.0)),
    "logarithms": lambda s, b, h, q, k: (s.square() + 1).log() + torch.log2(s.abs() + 1) + torch.log1p(s.square()),
    "powers": lambda s, b, h, q, k: (
        s + torch.square(s) + (s.abs() + 1) ** -2 + (s.abs() + 1) ** 0.5 + s.pow(3) + 2.0 ** (-0.1 * (q - k).abs())
    ),
    "roots": lambda s, b, h, q, k: (s.abs() + 1).sqrt() + torch.rsqrt(s.square() + 1) + (s.square() + 2).reciprocal(),
    "trigonometry": lambda s, b, h, q, k: s.tanh() + s.sin() * s.cos(),
    "conversions": lambda s, b, h, q, k: (
        s + (3 * s).int() * 0.1 + q.float() * 0.1 + (s > 0).to(s.dtype) + (k > q).long()
    ),
    "rounding": lambda s, b, h, q, k: s + torch.floor(2 * s) + (2 * s).ceil() * 0.1 + s.trunc() + torch.sign(s) * 0.1,
    "conditions that count": lambda s, b, h, q, k: s + 0.5 * (q >= k) + (q > 3).int() + torch.ge(q, 2) * 1.0,
    # With 2 * s exponents pass 8: Triton's interpreter, without fused multiply-add, rounds them twice as coarsely as
    # PyTorch, and by the CPU's kernels was a little within or beyond the rule.
    "selections": lambda s, b, h, q, k: (
        s.masked_fill(q < k - 3, -1.0).where(q > -20, 1.25 * s) + torch.zeros_like(s) + torch.full_like(s, 0.5)
    ),
    "division by what varies": lambda s, b, h, q, k: s / (1.0 + 0.1 * (q - k).abs()) + 1.0 / (s.square() + 1),
    "a score of large slope": lambda s, b, h, q, k: 30 * torch.sigmoid(200 * s) + F.softplus(200 * s) * 0.1,
}  # fmt: skip

MASKS: dict[str, Function] = {
    "integers of 64 bits": lambda b, h, q, k: documents[b, k] == documents[b, k + 1],
    "floor of negative integers": lambda b, h, q, k: ((q - k) // 3) % 2 == 0,
    "product beyond int32": lambda b, h, q, k: ((q + 70000) * (k + 70000)) % 7 < 4,
    "floats": lambda b, h, q, k: 0.25 * k <= q.float().abs() * 0.5,
    "slopes in 16 bits": lambda b, h, q, k: slopes_16[h] * (k + 1000.5) > 500.0 + 2 * h - 0.25 * q,
    "logic": lambda b, h, q, k: torch.logical_xor(q > k, torch.logical_and(k > 3, torch.logical_not(q == 9))),
    "comparisons": lambda b, h, q, k: q.ge(k).logical_or(torch.lt(k, 3)) & torch.ne(k, 7) & (q.remainder(5) != 1),
    "exclusive or": lambda b, h, q, k: (q >= k) ^ (k % 3 == 0),
}  # fmt: skip
