"""The backward pass of gathered keys: gradients of pieces, collected by groups of heads and sent to who holds the keys.

dk and dv of a group are summed over this rank's pieces in float32 (float64 for float64), sent while the next group
computes, and summed by the rank that holds the keys: its own pieces first, then those of all ranks in their order. So
bits are the same from run to run, and no more than two groups are in memory. Where each rank has one piece only, it is
sent as the kernel rounded it: a sum of one part needs no wider dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sharding.layout import Span
from ..transport.sums import Addend, write_sums
from ..transport.transfer import Summing, Transfer
from .call import Call, Outputs, PartGradients, Rows, cut, part_outputs
from .pieces import Piece


class Backward:
    """Collects the gradients of a rank.

    Args:
        call: of the plan.
        of_rows: which gradients of q, k and v are wanted.
        sums: those of sink and variant.
        rows: q of the rows that this rank computes; k and v that it holds.
        outputs: of the rows that this rank computes.
        single: whether all ranks have one piece at most for each group of heads.

    Attributes:
        dq: of the rows that this rank computes, or None.
    """

    def __init__(
        self,
        call: Call,
        of_rows: Sequence[bool],
        sums: PartGradients,
        rows: Rows,
        outputs: Outputs,
        single: bool,
    ) -> None:
        self.call, self.of_rows, self.sums = call, of_rows, sums
        self.rows, self.outputs = rows, outputs
        self.accumulator = torch.promote_types(rows.q.dtype, torch.float32)
        self.sent = rows.k.dtype if single else self.accumulator
        self.dq = torch.empty_like(rows.q, memory_format=torch.contiguous_format) if of_rows[0] else None
        self.written = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(rows[1:], of_rows[1:])
        ]
        self.own: list[list[Addend]] = [[] for need in of_rows[1:] if need]
        self.summing: tuple[Summing, Span] | None = None

    def add_own(self, piece: Piece) -> None:
        """Computes a piece whose keys this rank holds."""
        for found, gradient in zip(self.own, self._computed(piece, piece.of(*self.rows))):
            found.append(Addend(piece.keys, piece.kv_heads, gradient))

    def _computed(self, piece: Piece, rows: Rows) -> list[Tensor]:
        """dk and dv of a piece, those that are wanted; dq is written into its place."""
        of_piece = part_outputs(self.outputs, piece.rows, piece.heads)
        place = None if self.dq is None else cut(self.dq, piece.rows, piece.heads)
        _, *of_keys = self.sums.backward(self.call, piece.part, rows, self.of_rows, of_piece, place, piece.packed)
        return [x for x in of_keys if x is not None]

    def begin(self, transfer: Transfer, kv_heads: Span, keys: Tensor, values: Tensor) -> None:
        """Begins a group of heads. kv_heads: of the group; keys, values: what this rank has fetched of it."""
        self.transfer, self.kv_heads, self.keys, self.values = transfer, kv_heads, keys, values
        self.collected: list[Tensor] = []

    def add(self, piece: Piece) -> None:
        """Computes a piece of the group."""
        found = self._computed(piece, piece.of(self.rows.q, self.keys, self.values))
        if not self.collected:
            whole = piece.keys == (0, self.keys.shape[1]) and piece.kv_heads == (0, self.keys.shape[2])
            if whole:
                self.collected = [x.to(self.sent) for x in found]
                return
            self.collected = self._zeros()
        for total, part in zip(self.collected, found):
            place = cut(total, piece.keys, piece.kv_heads)
            place += part

    def _zeros(self) -> list[Tensor]:
        return [
            torch.zeros(x.shape, dtype=self.sent, device=x.device)
            for x, need in zip((self.keys, self.values), self.of_rows[1:])
            if need
        ]

    def send(self) -> None:
        """Sends dk and dv of the group, and writes the sums of the group before."""
        if not self.own:  # neither is wanted
            return
        summing = self.transfer.start_sum(self.call.link, self.collected or self._zeros())
        self._arrived()
        self.summing = summing, self.kv_heads

    def _arrived(self) -> None:
        if self.summing is None:
            return
        summing, kv_heads = self.summing
        wanted = [x for x in self.written if x is not None]
        of_ranks = summing.wait() or [[] for _ in wanted]
        for out, own, others in zip(wanted, self.own, of_ranks):
            write_sums(out, kv_heads, [*own, *others], self.accumulator)

    def finish(self) -> list[Tensor | None]:
        """dk and dv of the keys that this rank holds, or None."""
        self._arrived()
        return self.written
