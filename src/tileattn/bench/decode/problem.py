"""The tensors of a row: the queries, and so many distinct caches that no call finds its own in the L2 cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tileattn.bench.decode.cases import Case

# K and V of the calls of one graph, together: far beyond the 50 MB of an H200's L2 cache, or a CPU's caches.
COLD_BYTES = {"cuda": 2**30, "cpu": 2**25}
FILLED_AT_ONCE = 2**28  # elements
# Of a GPU's memory, what two processes leave to contexts, workspaces and outputs when each keeps its pool. A larger
# pool is freed after its row, because the other process measures on the same GPU.
LEFT_BYTES = 10 * 2**30


@dataclass(frozen=True)
class Problem:
    """A row's tensors.

    Attributes:
        case: the row.
        q: (batch, 1, heads, head_dim).
        k: the distinct caches, each (batch, context, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim).
        v: the same.
        seqlens: int32 (batch,), all `context`.
        table: int32 (batch, context / page_size), a permutation of all pages; None for contiguous caches. One for all
            caches, as the layers of a model share one.
    """

    case: Case
    q: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    seqlens: Tensor
    table: Tensor | None

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.case.head_dim**-0.5

    def queries(self, q_len: int) -> Tensor:
        """(batch, q_len, heads, head_dim), of which `q` is the last row."""
        if q_len == 1:
            return self.q
        batch, _, heads, head_dim = self.q.shape
        return torch.cat([self.q.new_empty(batch, q_len - 1, heads, head_dim).normal_(), self.q], 1)

    def shortened(self, keys: int | None) -> Problem:
        """The same on the first keys of each sequence, and with caches for no more; None for all."""
        if keys is None:
            return self
        seqlens = torch.full_like(self.seqlens, keys)
        if self.table is not None:
            return replace(self, seqlens=seqlens, table=self.table[:, : -(-keys // self.case.page)])
        k, v = (tuple(x[:, :keys] for x in caches) for caches in (self.k, self.v))
        return replace(self, k=k, v=v, seqlens=seqlens)

    def keys_of(self, sequence: int, cache: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, (context, kv_heads, head_dim) each."""
        k, v = self.k[cache], self.v[cache]
        if self.table is None:
            return k[sequence], v[sequence]
        pages = self.table[sequence].long()
        return k[pages].flatten(0, 1), v[pages].flatten(0, 1)


class Pool:
    """Random numbers of which the caches of all rows are views, so that a row need not fill its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._held: tuple[Tensor, Tensor] | None = None

    def problem(self, case: Case, share: float = 1.0) -> Problem:
        """The tensors of a row, of whose K and V a call reads at least this share."""
        read = case.kv_bytes(self.dtype.itemsize) * share
        count = max(1, math.ceil(COLD_BYTES[self.device.type] / read))
        flat = self._hold(count * case.elements)
        tokens = (case.batch, case.context) if not case.page else (case.batch * case.context // case.page, case.page)
        shape = (*tokens, case.kv_heads, case.head_dim)
        k, v = (tuple(each.view(shape) for each in x[: count * case.elements].split(case.elements)) for x in flat)
        q = torch.randn(
            case.batch, 1, case.heads, case.head_dim, dtype=self.dtype, device=self.device, generator=self._generator
        )
        seqlens = torch.full((case.batch,), case.context, dtype=torch.int32, device=self.device)
        table = None
        if case.page:
            order = torch.randperm(tokens[0], device=self.device, generator=self._generator)
            table = order.to(torch.int32).view(case.batch, -1)
        return Problem(case, q, k, v, seqlens, table)

    def trim(self) -> None:
        """Frees a pool that leaves no room for another process's. Call it when no problem is used any more."""
        if self.device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if self._held is not None and 2 * sum(x.nbytes for x in self._held) + LEFT_BYTES > total:
            self.release()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Frees the pool: the next problem fills a new one."""
        self._held = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _hold(self, elements: int) -> tuple[Tensor, Tensor]:
        if self._held is None or self._held[0].numel() < elements:
            self._held = None  # before the new one is made: both may not fit
            self._held = self._filled(elements), self._filled(elements)
        return self._held

    def _filled(self, elements: int) -> Tensor:
        flat = torch.empty(elements, dtype=self.dtype, device=self.device)
        for part in flat.split(FILLED_AT_ONCE):
            part.normal_(generator=self._generator)
        return flat
