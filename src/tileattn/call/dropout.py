"""Dropout: which probabilities are dropped, as a function of the seed and of the element's place alone.

The pattern is nowhere in memory, and does not depend on how the matrix of probabilities is cut into tiles: forward and
backward pass, and every backend, compute the same. The generator is Philox with 10 rounds, which turns a counter into
random bits under a key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    words of a head:   k0, x0, x1, _ = philox4x32(counter=(b * heads + h, 0, 0, 0), key=seed)
    words of a group:  w0, w1        = philox2x32(counter=(i ^ x0, j ^ x1), key=k0)

A group is the four elements at rows {q, q + 8} and keys {k, k + 8}, where ``q % 16 < 8`` and ``k % 16 < 8``. It is
group ``i = q // 16 * 8 + q % 8`` of the rows and ``j``, likewise, of the keys. (Rows are counted from 0, whatever their
position.) Its words are four numbers of 16 bits: w0 holds those of the first row, w1 those of the second, the lower
half that of the first key. An element is kept where its number is at least ``threshold(p)``.

Why these groups: the matrix units of NVIDIA leave rows r, r + 8 and columns c, c + 1, c + 8, c + 9, ... in one thread,
whether rows are queries, as in the forward pass, or keys, as in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 2**16  # the values that an element's number has

# Of Philox.
ROUNDS = 10
_WORD = 2**32 - 1
M2 = 0xD256D193
M4 = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


class Dropout(NamedTuple):
    """What is dropped in one call."""

    p: float
    """The probability of being dropped."""
    seed: Tensor
    """(1,), int64, on the device of q."""


def threshold(p: float) -> int:
    """Below which an element's number drops it: ``p`` in steps of 2**-16."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: the probability must lie in 0 .. 1, got {p}")
    return round(p * NUMBERS)


def weight_of_kept(p: float) -> float:
    """What kept probabilities are multiplied by, so that the expectation of the sum stays; 0 where all are dropped."""
    kept = NUMBERS - threshold(p)
    return NUMBERS / kept if kept else 0.0


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed (1,), int64, from the default generator of the device.

    It stays on the device: nothing waits for it, a CUDA graph draws another at each replay, and recomputation under
    activation checkpointing, which restores the generator, the same.
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def keep_mask(seed: Tensor, p: float, batch: int | slice, heads: int, rows: slice, keys: slice) -> Tensor:
    """Which elements of a tile of probabilities are kept.

    Args:
        seed: (1,), int64.
        p: the probability of being dropped.
        batch, heads: of the queries; a slice of the batch, from start to stop, for some of its elements.
        rows, keys: the tile's, from start to stop: rows of the queries, from 0, and keys.

    Returns:
        (batch, heads, rows, keys), bool, on the seed's device.
    """
    elements = batch if isinstance(batch, slice) else slice(0, batch)
    key, x0, x1 = (word.view(-1, heads, 1, 1) for word in _words_of_heads(seed, elements, heads))
    i, j = (_groups(side, seed.device) for side in (rows, keys))
    words = philox2x32((i[:, None] ^ x0, j ^ x1), key)
    halves = torch.stack([torch.stack([word & 0xFFFF, word >> 16]) for word in words])
    # (row's half, key's half, batch, heads, i, j) -> (batch, heads, rows, keys) of whole groups
    keep = (halves >= threshold(p)).unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8))
    keep = keep.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5, 7).flatten(2, 4)
    first_row, first_key = (side.start // 16 * 16 for side in (rows, keys))
    return keep[:, :, rows.start - first_row : rows.stop - first_row, keys.start - first_key : keys.stop - first_key]


def _groups(side: slice, device: torch.device) -> Tensor:
    """The groups that a tile's rows, or keys, lie in."""
    return torch.arange(side.start // 16 * 8, (side.stop + 15) // 16 * 8, device=device)


def _words_of_heads(seed: Tensor, batch: slice, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """k0, x0, x1 of each head of each of these batch elements, (batch * heads,)."""
    head = torch.arange(batch.start * heads, batch.stop * heads, device=seed.device)
    zero = torch.zeros_like(head)
    return philox4x32((head, zero, zero, zero), (seed & _WORD, (seed >> 32) & _WORD))[:3]


# --- Philox: words of 32 bits in int64 tensors ---


def philox2x32(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words from a counter of two words, under a key of one."""
    x, y = counter
    for index in range(ROUNDS):
        high, low = _product(x, M2)
        x, y = high ^ _round_key(key, index, 0) ^ y, low
    return x, y


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words from a counter of four words, under a key of two."""
    x, y, z, w = counter
    for index in range(ROUNDS):
        (x_high, x_low), (z_high, z_low) = _product(x, M4[0]), _product(z, M4[1])
        x, z = z_high ^ y ^ _round_key(key[0], index, 0), x_high ^ w ^ _round_key(key[1], index, 1)
        y, w = z_low, x_low
    return x, y, z, w


def _round_key(key: Tensor, index: int, which: int) -> Tensor:
    return (key + index * WEYL[which]) & _WORD


def _product(x: Tensor, odd: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``x * odd``, two words' product, which may not fit into int64.

    ``(x - 2**31) * odd`` does. What it lacks, ``2**31 * odd``, is ``odd // 2`` high words and 2**31, as odd is odd.
    """
    rest = (x - 2**31) * odd + 2**31
    return (rest >> 32) + odd // 2, rest & _WORD
