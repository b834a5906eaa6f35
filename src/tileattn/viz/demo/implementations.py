"""The implementations of attention that the page compares: what they take, and how they are called.

The two loops and the definition are `tileattn.reference`, which `FlashAttentionV1` and `FlashAttentionV2` of
`tileattn.nn` run. Grouped-query attention and windows are arguments of all of them, not implementations of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tileattn import ALiBi, Bias, attention
from tileattn.reference import flash_attention_1, flash_attention_2, standard_attention
from tileattn.viz.demo.call import Call, Tensors

# Each tile of the loops is a dozen PyTorch operations.
MOST_TILES, TILE = 1024, 64


class Refused(Exception):
    """The implementation does not run the call, for the reason in the message."""


@dataclass(frozen=True)
class Implementation:
    """label: on the page. prepare: a function that computes o, and the bytes that it holds; raises `Refused`."""

    label: str
    prepare: Callable[[Call, Tensors], tuple[Callable[[], Tensor], int]]


def _tileattn(call: Call, given: Tensors) -> tuple[Callable[[], Tensor], int]:
    causal = call.plain_causal

    def run() -> Tensor:
        o = attention(
            **given.inputs(),
            causal=causal,
            mask=None if causal else given.mask,
            score_mod=list(given.score_mods) or None,
            sink=given.sink,
        )
        assert isinstance(o, Tensor)
        return o

    return run, 0


def _reference(
    function: Callable[..., tuple[Tensor, Tensor]], tiled: bool = True
) -> Callable[[Call, Tensors], tuple[Callable[[], Tensor], int]]:
    def prepare(call: Call, given: Tensors) -> tuple[Callable[[], Tensor], int]:
        tiles = -(-call.seqlen_q // TILE) * -(-call.seqlen_k // TILE)
        if tiled and tiles > MOST_TILES:
            raise Refused(f"a loop over {tiles} tiles in Python takes too long here; at most {MOST_TILES}")
        return lambda: function(**given.inputs(), mask=given.mask, score_mods=given.score_mods, sink=given.sink)[0], 0

    return prepare


def _sdpa(call: Call, given: Tensors) -> tuple[Callable[[], Tensor], int]:
    if given.fp8 is not None or given.sink is not None:
        raise Refused("PyTorch's attention takes no fp8 and no sink")
    if not all(isinstance(mod, (ALiBi, Bias)) for mod in given.score_mods):
        raise Refused("PyTorch's attention takes a mask or a bias, and no other score function")
    causal = call.plain_causal and call.seqlen_q == call.seqlen_k and not given.score_mods
    mask = None if causal else _dense_mask(call, given)
    if mask is not None and (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1).logical_not().any():
        raise Refused("a query that sees no key has no result in PyTorch's attention")

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
        grouped = call.heads != call.kv_heads
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return run, 0 if mask is None else mask.numel() * mask.element_size()


def _dense_mask(call: Call, given: Tensors) -> Tensor | None:
    """Mask and biases as one tensor (batch or 1, heads or 1, seqlen_q, seqlen_k); None without them."""
    device = given.q.device
    b, h, q, k = (
        torch.arange(size, device=device).reshape([-1 if axis == place else 1 for axis in range(4)])
        for place, size in enumerate((call.batch, call.heads, call.seqlen_q, call.seqlen_k))
    )
    q = q + call.seqlen_k - call.seqlen_q
    pairs = torch.zeros(call.seqlen_q, call.seqlen_k, dtype=torch.bool, device=device)
    allowed = None if given.mask is None else given.mask.allows(b, h, q, k) | pairs
    if not given.score_mods:
        return allowed
    added: Tensor = pairs.to(torch.promote_types(call.value_dtype, torch.float32))
    for mod in given.score_mods:
        added = mod(added, b, h, q, k)
    if allowed is not None:
        added = added.masked_fill(~allowed, -torch.inf)
    return added.to(call.value_dtype)


OWN = "tileattn"
IMPLEMENTATIONS = {
    OWN: Implementation("tileattn.attention", _tileattn),
    "v1": Implementation("V1: FlashAttention's loop", _reference(flash_attention_1)),
    "v2": Implementation("V2: FlashAttention-2's loop", _reference(flash_attention_2)),
    "naive": Implementation("definition: all scores stored", _reference(standard_attention, tiled=False)),
    "sdpa": Implementation("PyTorch SDPA", _sdpa),
}
