"""Dropout: which probabilities are dropped, as a function of the seed and the element's indices alone.

The dropout pattern is not stored. It does not depend on how the matrix of probabilities is cut into tiles, so the
forward pass, the backward pass and every backend compute the same pattern. The generator is Philox with 10 rounds,
which turns a counter into random bits under a key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    words of a head:   k0, x0, x1, _ = philox4x32(counter=(b * heads + h, 0, 0, 0), key=seed)
    words of a group:  w0, w1        = philox2x32(counter=(i ^ x0, j ^ x1), key=k0)

A group is the four elements at rows {q, q + 8} and keys {k, k + 8}, where ``q % 16 < 8`` and ``k % 16 < 8``. Its row
index is ``i = q // 16 * 8 + q % 8``; its key index ``j`` is computed likewise from k. (Rows are counted from 0, not by
position. A call that is a part of another counts heads, rows and keys as the whole does: see :class:`Place`.) The two
words of a group hold four 16-bit numbers, one for each element. w0 holds those of the first row, w1 those of the
second; the lower half belongs to the first key. An element is kept if its number is at least ``threshold(p)``.

The groups match the register layout of NVIDIA's tensor cores: one thread holds rows r, r + 8 and columns c, c + 1,
c + 8, c + 9, ... of a result. This holds both if rows are queries, as in the forward pass, and if they are keys, as in
the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 16  # rows, and keys, in which groups lie side by side
NUMBERS = 2**16  # how many values an element's random number can take

# Constants of Philox.
ROUNDS = 10
_WORD = 2**32 - 1
M2 = 0xD256D193
M4 = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


class Place(NamedTuple):
    """Where the probabilities of a call are among those of a whole call that it is a part of.

    Attributes:
        heads: the query heads of the whole call.
        head: which of its heads is the part's first one, counted over all batch elements: ``b * heads + h``.
        row, key: its row and its key that are the part's first ones. Multiples of 16: no group is cut.
    """

    heads: int
    head: int = 0
    row: int = 0
    key: int = 0


class Dropout(NamedTuple):
    """The dropout of one call."""

    p: float
    """The probability with which an element is dropped."""
    seed: Tensor
    """(1,), int64, on the device of q."""
    place: Place | None = None
    """None for a call that is no part of another."""

    def of_heads(self, heads: int) -> Place:
        """The place of a call with these query heads."""
        return Place(heads) if self.place is None else self.place


def threshold(p: float) -> int:
    """``p`` in steps of 2**-16. An element is dropped if its number is below the threshold."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: the probability must lie in 0 .. 1, got {p}")
    return round(p * NUMBERS)


def weight_of_kept(p: float) -> float:
    """The factor of kept probabilities, which preserves the expectation of their sum; 0 if all are dropped."""
    kept = NUMBERS - threshold(p)
    return NUMBERS / kept if kept else 0.0


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed (1,), int64, from the default generator of the device.

    The seed stays on the device, so no host-device synchronisation is needed. A CUDA graph draws another seed at each
    replay. Activation checkpointing restores the generator, so recomputation draws the same seed.
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor, p: float, batch: int | slice, heads: int, rows: slice, keys: slice, place: Place | None = None
) -> Tensor:
    """The mask of a tile of probabilities that is True where an element is kept.

    Args:
        seed: (1,), int64.
        p: the probability with which an element is dropped.
        batch: the batch size, or a slice with start and stop for some batch elements.
        heads: the number of query heads.
        rows, keys: the tile's rows of the queries, counted from 0, and its keys, as slices with start and stop.
        place: where the call is in another, of which it is a part.

    Returns:
        (batch, heads, rows, keys), bool, on the seed's device.
    """
    elements = batch if isinstance(batch, slice) else slice(0, batch)
    place = Place(heads) if place is None else place
    assert place.row % GROUP == place.key % GROUP == 0  # other backends could not do it
    rows, keys = (slice(x.start + first, x.stop + first) for x, first in ((rows, place.row), (keys, place.key)))
    key, x0, x1 = (word.view(-1, heads, 1, 1) for word in _words_of_heads(seed, elements, heads, place))
    i, j = (_groups(side, seed.device) for side in (rows, keys))
    words = philox2x32((i[:, None] ^ x0, j ^ x1), key)
    halves = torch.stack([torch.stack([word & 0xFFFF, word >> 16]) for word in words])
    # (row's half, key's half, batch, heads, i, j) -> (batch, heads, rows, keys) of whole groups
    keep = (halves >= threshold(p)).unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8))
    keep = keep.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5, 7).flatten(2, 4)
    first_row, first_key = (side.start // 16 * 16 for side in (rows, keys))
    return keep[:, :, rows.start - first_row : rows.stop - first_row, keys.start - first_key : keys.stop - first_key]


def _groups(side: slice, device: torch.device) -> Tensor:
    """The group indices of a tile's rows or keys."""
    return torch.arange(side.start // 16 * 8, (side.stop + 15) // 16 * 8, device=device)


def _words_of_heads(seed: Tensor, batch: slice, heads: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """k0, x0 and x1, each (batch * heads,), for the heads of these batch elements."""
    b, h = (torch.arange(size.start, size.stop, device=seed.device) for size in (batch, slice(0, heads)))
    head = (b[:, None] * place.heads + (place.head + h)).flatten()
    zero = torch.zeros_like(head)
    return philox4x32((head, zero, zero, zero), (seed & _WORD, (seed >> 32) & _WORD))[:3]


# --- Philox: words of 32 bits in int64 tensors ---


def philox2x32(counter: tuple[Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words from a counter of two words, under a key of one word."""
    x, y = counter
    for index in range(ROUNDS):
        high, low = _product(x, M2)
        x, y = high ^ _round_key(key, index, 0) ^ y, low
    return x, y


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words from a counter of four words, under a key of two words."""
    x, y, z, w = counter
    for index in range(ROUNDS):
        (x_high, x_low), (z_high, z_low) = _product(x, M4[0]), _product(z, M4[1])
        x, z = z_high ^ y ^ _round_key(key[0], index, 0), x_high ^ w ^ _round_key(key[1], index, 1)
        y, w = z_low, x_low
    return x, y, z, w


def _round_key(key: Tensor, index: int, which: int) -> Tensor:
    return (key + index * WEYL[which]) & _WORD


def _product(x: Tensor, odd: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``x * odd``, a product of two words that may not fit into int64.

    ``(x - 2**31) * odd`` fits. The difference, ``2**31 * odd``, equals ``odd // 2 * 2**32 + 2**31``, because odd is
    odd.
    """
    rest = (x - 2**31) * odd + 2**31
    return (rest >> 32) + odd // 2, rest & _WORD
