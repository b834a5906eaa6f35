"""What the kernels work in, and what of it belongs to whom: of a batch, or of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.facts import BackwardCall, Packed
from ....call.inputs import Operands
from ..packed.plan import work_lists
from ..packed.work_list import ALIGNMENT, PADDING, padded_rows
from .config import ROWS
from .defaults import MainConfig
from .operand_gradients import BY_KEY, SPREAD, Path, add_anywhere, add_up, symbols_of, values_of


class OfBatch:
    """Of a dense call.

    Attributes:
        q_rows: (batch, heads, padded_q), of lse2 and delta, and of dq's sums without the last dimension.
        gradients: the shapes of dq, dk and dv.
    """

    def __init__(self, call: BackwardCall, config: MainConfig, q_shape: torch.Size, k_shape: torch.Size) -> None:
        batch, self.seqlen_q, heads, _ = q_shape
        self.seqlen_k = k_shape[1]
        self.q_rows = (batch, heads, _padded_rows(self.seqlen_q, config))
        padded_k = -(-self.seqlen_k // config.block_N) * config.block_N
        self.shapes = {BY_KEY: (batch, heads, padded_k), SPREAD: (batch, heads, self.seqlen_q, self.seqlen_k)}
        self.gradients = (q_shape, k_shape, (*k_shape[:3], call.forward.head_dim_v))

    def work(self, tile: int, *, of_keys: bool = False) -> tuple[Tensor, ...]:
        """The work list that a kernel takes: none."""
        return ()

    def by_row(self, delta: Tensor) -> Tensor:
        """Delta as lse is, (batch, heads, seqlen_q)."""
        return delta[:, :, : self.seqlen_q]

    def add_up(self, gradient: Tensor, path: Path, parts: Tensor, operands: Operands) -> None:
        """Adds what the main kernel left for a path to a tensor's gradient."""
        parts = parts[..., : self.seqlen_k] if path.way == BY_KEY else parts
        add_up(gradient, path, parts, operands, self.seqlen_k - self.seqlen_q, self.seqlen_k)


class OfSequences:
    """The same of packed sequences: one batch element, in which each sequence has whole tiles of q_rows.

    Args:
        cuts: of the work lists that will be asked for, the tile and whether it is of keys.
    """

    def __init__(
        self, call: BackwardCall, q: Tensor, k: Tensor, packed: Packed, cuts: tuple[tuple[int, bool], ...] = ()
    ) -> None:
        self.packed = packed
        self.sequences = packed.cu_seqlens_q.shape[0] - 1
        _, self.total_q, heads, _ = q.shape
        self.total_k = k.shape[1]
        self.q_rows = (1, heads, padded_rows(self.total_q, self.sequences))
        self.shapes = {BY_KEY: (1, heads, self.total_k), SPREAD: (1, heads, self.total_q, packed.max_seqlen_k)}
        self.gradients = (q.shape, k.shape, (*k.shape[:3], call.forward.head_dim_v))
        lists = work_lists(call.forward.arch, packed, self.total_q, self.total_k, cuts) if cuts else ()
        self._lists = dict(zip(cuts, lists))

    def work(self, tile: int, *, of_keys: bool = False) -> tuple[Tensor, ...]:
        return (self._lists[tile, of_keys],)

    def by_row(self, delta: Tensor) -> Tensor:
        number, position = self._places(self.packed.cu_seqlens_q, self.total_q)
        first = self.packed.cu_seqlens_q[:-1] // ALIGNMENT * ALIGNMENT
        first = first + PADDING * torch.arange(self.sequences, device=delta.device)
        return delta.index_select(2, (first[number] + position).clamp(0, delta.shape[2] - 1))

    def add_up(self, gradient: Tensor, path: Path, parts: Tensor, operands: Operands) -> None:
        used, tiled = symbols_of(path.load.args[1:]), "k" if path.way == BY_KEY else "q"
        of_keys = tiled == "k"
        axes = (set(), {"h"}, {"b", tiled}, {"k"})  # the symbols that change along each dimension
        summed = [dim for dim in range(1, parts.ndim) if not axes[dim] & used]
        parts = parts.sum(summed, keepdim=True) if summed else parts

        total, longest = (
            (self.total_k, self.packed.max_seqlen_k) if of_keys else (self.total_q, self.packed.max_seqlen_q)
        )
        number, position = self._places(self.packed[of_keys], total)
        position = position.clamp(0, longest - 1)  # nobody's rows have no gradient, wherever they are thought to be
        if of_keys:
            values = {"b": number, "k": position}
        else:
            first = self.packed.cu_seqlens_k.diff() - self.packed.cu_seqlens_q.diff()
            values = {"b": number[:, None], "q": (position + first[number])[:, None]}
            values["k"] = torch.arange(self.packed.max_seqlen_k, device=parts.device)
        values["h"] = torch.arange(parts.shape[1], device=parts.device).view(-1, *[1] * (parts.ndim - 2))
        add_anywhere(gradient, path, parts, values_of(operands) | values)

    @staticmethod
    def _places(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Of each row the number of its sequence and its position there; nobody's rows count as the last sequence's."""
        rows = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
        number = torch.searchsorted(bounds[1:-1], rows, right=True)
        return number, (rows - bounds[number]).long()


def _padded_rows(seqlen_q: int, config: MainConfig) -> int:
    """Rows of the workspaces: whole tiles of the main kernel, and of the kernels before and after it."""
    rows = -(-seqlen_q // config.block_M) * config.block_M
    return -(-rows // ROWS) * ROWS
