"""``S_dmask``, flash-attn's third result: the matrix of probabilities, negative where dropout dropped the weight.

It is for tests, as in flash-attn: its memory is proportional to seqlen_q * seqlen_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...call.dropout import draw_seed, keep_mask
from ...call.facts import Packed
from ...variant.masks import Mask

ScoreMods = Sequence[Callable[..., Tensor]]


def next_seed(device: torch.device) -> Tensor:
    """The seed that the next call with dropout on this device will draw; the generator's state does not change."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return draw_seed(device)


@torch.no_grad()
def signed_probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    packed: Packed | None,
    mask: Mask | None,
    mods: ScoreMods,
    scale: float,
    p: float,
    seed: Tensor,
) -> Tensor:
    """The softmax (batch, heads, seqlen_q, seqlen_k) in q's dtype, negative where the weight was dropped.

    For packed sequences (batch, heads, max_seqlen_q, max_seqlen_k): each sequence's matrix is in the upper left corner,
    and the rest is 0.
    """
    if packed is None and not len(q):  # torch.stack needs at least one tensor
        return q.new_empty(0, q.shape[2], q.shape[1], k.shape[1])
    if packed is None:
        elements = [_of_sequence(b, *each, mask, mods, scale, p, seed) for b, each in enumerate(zip(q, k, lse))]
        return torch.stack(elements)
    heads, batch = q.shape[1], packed.cu_seqlens_q.shape[0] - 1
    result = q.new_zeros(batch, heads, packed.max_seqlen_q, packed.max_seqlen_k)
    starts_q, starts_k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    for b in range(batch):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        of_sequence = _of_sequence(b, q[rows], k[keys], lse[:, rows], mask, mods, scale, p, seed)
        result[b, :, : of_sequence.shape[1], : of_sequence.shape[2]] = of_sequence
    return result


def _of_sequence(
    b: int, q: Tensor, k: Tensor, lse: Tensor, mask: Mask | None, mods: ScoreMods, scale: float, p: float, seed: Tensor
) -> Tensor:
    """One sequence's matrix (heads, seqlen_q, seqlen_k), from q and k (seqlen, heads, head_dim), lse (heads, seqlen_q).

    b: the number of the sequence or batch element.
    """
    seqlen_q, seqlen_k, heads = q.shape[0], k.shape[0], q.shape[1]
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(lse.dtype), k.to(lse.dtype)) * scale
    h, rows, keys = (torch.arange(size, device=q.device) for size in (heads, seqlen_q, seqlen_k))
    place = (torch.tensor(b, device=q.device), h[:, None, None], rows[:, None] + (seqlen_k - seqlen_q), keys)
    for mod in mods:
        scores = mod(scores, *place)
    if mask is not None:
        scores = scores.masked_fill(~mask.allows(*place), -torch.inf)
    empty = lse == -torch.inf
    probabilities = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    kept = keep_mask(seed, p, slice(b, b + 1), heads, slice(0, seqlen_q), slice(0, seqlen_k))[0]
    return torch.where(kept, probabilities, -probabilities).to(q.dtype)
