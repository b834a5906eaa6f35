"""Shapes of the backward pass's workspaces, and how their rows map to rows of the call: dense or packed."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ....call.facts import BackwardCall, Packed
from ....call.graph_memory import warms_up
from ....call.inputs import Operands
from ..packed.plan import work_lists
from ..packed.work_list import ALIGNMENT, PADDING, padded_rows
from .config import ROWS
from .defaults import MainConfig
from .hopper.dq_order import COLUMNS
from .operand_gradients import BY_KEY, SPREAD, Path, add_anywhere, add_up, symbols_of, values_of

MOST_KEPT = 2**23  # bytes of dq's sums: with more, the GPU takes longer than the host, which may then allocate them
PLACES = 16  # for which rows are kept


class Rows(NamedTuple):
    """What kernels leave for each other, float32.

    Attributes:
        lse2, delta: (batch, heads, padded_q).
        sums: of dq, (batch, heads, padded_q, head_dim), if the main kernel adds them up; else empty.
        ordered: the same as the main kernel and the last one take them.
    """

    lse2: Tensor
    delta: Tensor
    sums: tuple[Tensor, ...]
    ordered: tuple[Tensor, ...]


# The rows of the last small pass of each place, with what they were made for. The next pass there overwrites them.
_kept: dict[Hashable, tuple[Hashable, Rows]] = {}


def rows_of(q: Tensor, q_rows: tuple[int, int, int], dq_dim: int | None, own_order: bool) -> Rows:
    """The rows of one pass. For small passes the host would take longer to allocate them than for a launch.

    Args:
        q_rows: (batch, heads, padded_q).
        dq_dim: of dq's sums; None without.
        own_order: whether the main kernel takes the sums in rows of COLUMNS.
    """
    batch, heads, padded_q = q_rows
    place = _place(q.device) if 4 * batch * heads * padded_q * (dq_dim or 1) <= MOST_KEPT else None
    if place is None:
        return _new_rows(q, q_rows, dq_dim, own_order)
    made_for = (q_rows, dq_dim, own_order)
    found = _kept.get(place)
    if found is None or found[0] != made_for:
        if warms_up(q.device):
            return _new_rows(q, q_rows, dq_dim, own_order)
        if len(_kept) >= PLACES:
            _kept.clear()
        found = _kept[place] = made_for, _new_rows(q, q_rows, dq_dim, own_order)
    return found[1]


def _place(device: torch.device) -> Hashable | None:
    """Where passes follow each other: a thread's on a stream, since two threads' kernels may alternate on one.

    None on a CPU, and during the capture of a CUDA graph, which may be replayed on any stream.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index), threading.get_ident()


def _new_rows(q: Tensor, q_rows: tuple[int, int, int], dq_dim: int | None, own_order: bool) -> Rows:
    # A size is passed number by number: PyTorch takes a tuple apart in three times as long.
    lse2, delta = (q.new_empty(*q_rows, dtype=torch.float32) for _ in range(2))
    if dq_dim is None:
        return Rows(lse2, delta, (), ())
    sums = q.new_empty(*q_rows, dq_dim, dtype=torch.float32)
    return Rows(lse2, delta, (sums,), (sums.view(*q_rows[:2], -1, COLUMNS) if own_order else sums,))


class BatchWorkspaces:
    """The workspaces of a dense call.

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
        """The work list as a kernel's argument: none."""
        return ()

    def by_row(self, delta: Tensor) -> Tensor:
        """Delta in the shape of lse, (batch, heads, seqlen_q)."""
        return delta[:, :, : self.seqlen_q]

    def add_up(self, gradient: Tensor, path: Path, parts: Tensor, operands: Operands) -> None:
        """Adds what the main kernel left for a path to a tensor's gradient."""
        parts = parts[..., : self.seqlen_k] if path.way == BY_KEY else parts
        add_up(gradient, path, parts, operands, self.seqlen_k - self.seqlen_q, self.seqlen_k)


class PackedWorkspaces:
    """The workspaces of packed sequences: one batch element, in which each sequence has whole tiles of q_rows.

    Args:
        cuts: of the work lists that will be asked for, the tile and whether it is of keys.
    """

    def __init__(
        self, call: BackwardCall, q: Tensor, k: Tensor, packed: Packed, cuts: tuple[tuple[int, bool], ...] = ()
    ) -> None:
        self.packed = packed
        self.sequences = packed.cu_seqlens_q.shape[0] - 1
        _, self.total_q, self.heads, _ = q.shape
        self.total_k = k.shape[1]
        self.q_rows = (1, self.heads, padded_rows(self.total_q, self.sequences))
        self.gradients = (q.shape, k.shape, (*k.shape[:3], call.forward.head_dim_v))
        lists = work_lists(call.forward.arch, packed, self.total_q, self.total_k, cuts) if cuts else ()
        self._lists = dict(zip(cuts, lists))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what the main kernel leaves for the variant's tensors, by its way."""
        return {BY_KEY: (1, self.heads, self.total_k), SPREAD: (1, self.heads, self.total_q, self.packed.max_seqlen_k)}

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
        position = position.clamp(0, longest - 1)  # unused tail rows have no gradient, whatever their positions
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
        """For each row its sequence's number and its position there. Unused tail rows count as the last sequence's."""
        rows = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
        number = torch.searchsorted(bounds[1:-1], rows, right=True)
        return number, (rows - bounds[number]).long()


def _padded_rows(seqlen_q: int, config: MainConfig) -> int:
    """Rows of the workspaces: whole tiles of the main kernel, and of the kernels before and after it."""
    rows = -(-seqlen_q // config.block_M) * config.block_M
    return -(-rows // ROWS) * ROWS
