"""A paged cache of keys and values for a model and a fixed number of sequences: :class:`PagedKVCache`.

It is an owner of tensors, not a server's allocator: pages are counted on the device, by tensor operations without a
synchronisation, so that a step of a model can be captured in a CUDA graph. A page is free if no entry of the page table
refers to it. Sequences may share pages: those of a common prefix, which are full and never written again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .append import append_kv
from .cache_arguments import Sequences, as_size, numbers_of, rows_of
from .cache_step import CacheStep


class PagedKVCache:
    """Pages of keys and values of all layers of a model, and the page table and lengths of its sequences.

        cache = tileattn.PagedKVCache(batch, max_seqlen, kv_heads, head_dim, layers=layers, device="cuda")
        step = cache.step(q.shape[1])  # once per step: the lengths count the new tokens, and have their pages
        for layer in range(layers):
            o = step.layer(layer).attend(q, k, v)

    A layer's `attend` is :meth:`append`, then :func:`tileattn.decode` with a plan that all layers share.

    Every method works on the device and waits for nothing. What would need the values of device tensors is checked at
    once on a CPU; on a GPU :meth:`check` waits and raises. Tensors are changed in place, so graphs keep them.

    Attributes:
        page_table: int32 (batch, pages_per_sequence): the pages of each sequence, -1 behind the last one.
        seqlens: int32 (batch,): the tokens of each sequence, 0 for one that is empty.
        max_seqlen: the most tokens of a sequence.
        page_size: tokens of a page.
        pages: the number of pages, in each layer.
        max_seqlen: the most tokens of a sequence.
    """

    def __init__(
        self,
        batch: int,
        max_seqlen: int,
        kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        page_size: int = 64,
        pages: int | None = None,
        layers: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes an empty cache.

        Args:
            batch: the number of sequences.
            max_seqlen: the most tokens of a sequence.
            kv_heads: heads of keys and values.
            head_dim: elements per head of a key.
            head_dim_v: elements per head of a value; None for head_dim.
            page_size: tokens of a page.
            pages: the number of pages that all sequences share; None for as many as they can ever need. With fewer, or
                with shared prefixes, more sequences fit.
            layers: the number of layers, which share the page table and the lengths.
            dtype: of keys and values; None for torch's default.
            device: where the tensors are; None for torch's default.
        """
        sizes = {
            "batch": batch, "max_seqlen": max_seqlen, "kv_heads": kv_heads, "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v, "page_size": page_size, "layers": layers,
        }  # fmt: skip
        for name, size in sizes.items():
            sizes[name] = as_size(name, size)
        self.page_size = sizes["page_size"]
        width = -(-sizes["max_seqlen"] // self.page_size)
        self.pages = sizes["batch"] * width if pages is None else as_size("pages", pages)
        self.max_seqlen = sizes["max_seqlen"]
        # One page more, which is no sequence's: copies that are not needed go there. No row is read before it is
        # written, so the memory is not cleared.
        shape = (sizes["layers"], self.pages + 1, self.page_size, sizes["kv_heads"])
        self._k = torch.empty(*shape, sizes["head_dim"], dtype=dtype, device=device)
        self._v = torch.empty(*shape, sizes["head_dim_v"], dtype=dtype, device=device)
        integers = torch.empty(0, dtype=torch.int32, device=self._k.device)
        self.page_table = integers.new_empty(sizes["batch"], width)
        self.seqlens = integers.new_empty(sizes["batch"])
        # The number of table entries that refer to each page; the page more is never free.
        self._references = integers.new_empty(self.pages + 1)
        # Pages that were lacking, and sequences that were too long, since the last reset or check.
        self._errors = integers.new_empty(2)
        self._is_read_at_once = self.device.type == "cpu"  # elsewhere, reading a value would wait for the device
        self.reset()

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self._k.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._k.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The pages of a layer: k_cache (pages, page_size, kv_heads, head_dim) and v_cache, as `decode` takes them."""
        return self._k[index, : self.pages], self._v[index, : self.pages]

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.seqlens.shape[0]} sequences of up to {self.max_seqlen} tokens, {self.layers} layers, "
            f"{self.pages} pages of {self.page_size}, {self._k.shape[3]} heads, {self._k.dtype}, {self.device})"
        )

    def reset(self) -> None:
        """Empties all sequences."""
        self.page_table.fill_(-1)
        self.seqlens.zero_()
        self._references.zero_()
        self._references[self.pages :].fill_(1)
        self._errors.zero_()

    def step(
        self, tokens: int | None = None, *, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None
    ) -> CacheStep:
        """Begins a step of a model: all sequences get new tokens, as by :meth:`extend`.

        Args:
            tokens: the new tokens of each sequence, where all have as many: of a prompt, or 1.
            cu_seqlens_q: instead, where they differ and are packed: int32 (batch + 1,) on the device, 0 and then the
                cumulative numbers of new tokens.
            max_seqlen_q: with cu_seqlens_q, the most new tokens of a sequence or any upper bound.

        Returns:
            The step. Modules of :mod:`tileattn.nn` take its ``layer(i)`` as ``cache=``. Its layers share one plan.

        Raises:
            TypeError, ValueError: the arguments are neither of the two kinds; or as :meth:`extend`.
        """
        if (tokens is None) == (cu_seqlens_q is None) or (cu_seqlens_q is None) != (max_seqlen_q is None):
            raise TypeError("step needs either tokens, or cu_seqlens_q and max_seqlen_q")
        if cu_seqlens_q is None:
            tokens = as_size("tokens", tokens, at_least=0)
        self.extend(tokens if cu_seqlens_q is None else cu_seqlens_q.diff())  # type: ignore[arg-type]
        return CacheStep(self, tokens, cu_seqlens_q, max_seqlen_q)

    def extend(self, tokens: int | Tensor) -> None:
        """Makes all sequences longer by so many tokens, and takes pages for them.

        It comes before :meth:`append`, once for all layers.

        Args:
            tokens: an int for all sequences, or an integer tensor (batch,) on the device, 0 for a sequence that stays.

        Raises:
            ValueError: on a CPU, a sequence would be longer than max_seqlen, or the free pages do not suffice.
        """
        lengths = self.seqlens + self._of_sequences("tokens", tokens)
        self.reserve(lengths)
        self.seqlens.copy_(lengths)

    def reserve(self, seqlens: int | Tensor) -> None:
        """Takes pages so that the sequences can have these lengths, which they do not have yet.

        Args:
            seqlens: an int for all sequences, or an integer tensor (batch,) on the device.

        Raises:
            ValueError: as :meth:`extend`.
        """
        lengths = self._of_sequences("seqlens", seqlens)
        too_long = lengths > self.max_seqlen
        if self._is_read_at_once and bool(too_long.any()):
            raise ValueError(
                f"a sequence must have at most max_seqlen = {self.max_seqlen} tokens, got lengths {lengths.tolist()}"
            )
        self._errors[1:] += too_long.sum()
        place = torch.arange(self.page_table.shape[1], device=self.device)
        held = (self.page_table >= 0).sum(1, keepdim=True)
        wanted = (place >= held) & (place < self._pages_of(lengths)[:, None])
        self.page_table.copy_(torch.where(wanted, self._take(wanted), self.page_table))

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        layer: int = 0,
        cu_seqlens_q: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        positions: Tensor | None = None,
        q: Tensor | None = None,
        q_positions: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor | None:
        """Writes the new tokens' keys and values of a layer: the last positions of each sequence, after :meth:`extend`.

        Args:
            k: (batch, new, kv_heads, head_dim), or packed with cu_seqlens_q. All arguments but layer are those of
                :func:`tileattn.append_kv`.
            v: the same with head_dim_v.
            layer: which layer's pages.
            cu_seqlens_q: see :func:`tileattn.append_kv`.
            cos: see :func:`tileattn.append_kv`.
            sin: see :func:`tileattn.append_kv`.
            interleaved: see :func:`tileattn.append_kv`.
            positions: see :func:`tileattn.append_kv`.
            q: see :func:`tileattn.append_kv`.
            q_positions: see :func:`tileattn.append_kv`.
            backend: see :func:`tileattn.append_kv`.

        Returns:
            The rotated q, or None without q.
        """
        return append_kv(
            k, v, *self.layer(layer), self.seqlens, page_table=self.page_table, cu_seqlens_q=cu_seqlens_q, cos=cos,
            sin=sin, interleaved=interleaved, positions=positions, q=q, q_positions=q_positions, backend=backend,
        )  # fmt: skip

    def free(self, sequences: Sequences) -> None:
        """Empties sequences. Pages that no other sequence shares are free again.

        Args:
            sequences: a number, several numbers, or a bool tensor (batch,) on the device.
        """
        rows = rows_of(sequences, self.seqlens)
        self._drop(rows[:, None].expand_as(self.page_table))
        self.seqlens.masked_fill_(rows, 0)

    def truncate(self, seqlens: int | Tensor) -> None:
        """Makes sequences that are longer as short as this, as when drafts of speculative decoding are rejected.

        A page that is cut and that another sequence shares is copied first, so that it can be written to. Pages behind
        the new lengths are free again, also those that :meth:`reserve` took.

        Args:
            seqlens: an int for all sequences, or an integer tensor (batch,) on the device.

        Raises:
            ValueError: on a CPU, there is no free page for a copy; nothing has changed then.
        """
        lengths = torch.minimum(self.seqlens, self._of_sequences("seqlens", seqlens))
        place = torch.arange(self.page_table.shape[1], device=self.device)
        with self._all_or_nothing():
            self._drop(place >= self._pages_of(lengths)[:, None])
            self.seqlens.copy_(lengths)
            self._own_last_pages(torch.ones_like(lengths, dtype=torch.bool))

    def fork(self, source: int, targets: Sequences, length: int | None = None) -> None:
        """Makes sequences that begin as another one: they share its full pages; a last page that is not full is copied.

        Args:
            source: the number of the sequence whose tokens are shared.
            targets: the sequences that get them, without the source: as the argument of :meth:`free`. What they held is
                dropped.
            length: how many of the source's tokens, at most; None for all.

        Raises:
            ValueError: a target is the source; or, on a CPU, no page is free for a copy. Nothing has changed then.
        """
        source = as_size("source", source, at_least=0)
        targets = targets if isinstance(targets, Tensor) else numbers_of(targets)
        rows = rows_of(targets, self.seqlens)
        if source >= rows.shape[0]:
            raise ValueError(f"source must lie in 0 .. {rows.shape[0] - 1}, got {source}")
        if bool(rows[source]) if self._is_read_at_once else not isinstance(targets, Tensor) and source in targets:
            raise ValueError(f"targets must not contain the source, sequence {source}")
        of_source = self.seqlens[source].clone()
        if length is not None:
            of_source = of_source.clamp(max=as_size("length", length, at_least=0))
        place = torch.arange(self.page_table.shape[1], device=self.device)
        shared = rows[:, None] & (place < self._pages_of(of_source))
        with self._all_or_nothing():
            self.free(rows)
            pages = self.page_table[source].expand_as(self.page_table)
            self.page_table.copy_(torch.where(shared, pages, self.page_table))
            self._count(self.page_table, shared, 1)
            self.seqlens.copy_(torch.where(rows, of_source, self.seqlens))
            self._own_last_pages(rows)

    def check(self) -> None:
        """Waits for the device, and raises if there were too few pages since the last :meth:`reset` or check.

        Raises:
            ValueError: sequences lack pages, or are longer than max_seqlen. The entries of pages that lack are -1;
                :meth:`reset` the cache or :meth:`free` the sequences.
        """
        lacking, too_long = self._errors.tolist()
        self._errors.zero_()
        if too_long:
            raise ValueError(f"a sequence must have at most max_seqlen = {self.max_seqlen} tokens, {too_long} had more")
        if lacking:
            raise ValueError(
                f"{lacking} pages were lacking: the cache has {self.pages} pages of {self.page_size} tokens"
            )

    # --- Pages ---

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restores the table, the lengths and the references if there are too few pages."""
        counted = (self.page_table, self.seqlens, self._references) if self._is_read_at_once else ()
        before = [x.clone() for x in counted]
        try:
            yield
        except ValueError:
            for x, old in zip(counted, before):
                x.copy_(old)
            raise

    def _pages_of(self, lengths: Tensor) -> Tensor:
        return torch.div(lengths + (self.page_size - 1), self.page_size, rounding_mode="floor")

    def _take(self, wanted: Tensor) -> Tensor:
        """Takes a free page for each place that is True, (batch, n): int32 pages, -1 elsewhere or if none is left."""
        free = self._references == 0
        if self._is_read_at_once and int(wanted.sum()) > int(free.sum()):
            raise ValueError(
                f"{int(wanted.sum())} pages are needed and {int(free.sum())} are free, of {self.pages} pages of "
                f"{self.page_size} tokens"
            )
        # The free pages in order, then -1. The page more is where the pages go that are not free.
        rank = torch.where(free, free.cumsum(0) - 1, self.pages)
        page = torch.arange(self.pages + 1, dtype=torch.int32, device=self.device)
        order = torch.full_like(page, -1).scatter_(0, rank, torch.where(free, page, -1))
        place = (wanted.flatten().cumsum(0) - 1).view_as(wanted).clamp(0, self.pages)
        taken = torch.where(wanted, order[place], -1)
        self._count(taken, wanted, 1)
        self._errors[:1] += (wanted & (taken < 0)).sum()
        return taken

    def _drop(self, places: Tensor) -> None:
        """Forgets the table's entries at places that are True, (batch, pages_per_sequence)."""
        self._count(self.page_table, places, -1)
        self.page_table.masked_fill_(places, -1)

    def _count(self, pages: Tensor, places: Tensor, by: int) -> None:
        """Adds `by` to the references of the pages at places that are True; of a page several times if it occurs so."""
        counted = places & (pages >= 0)
        index = torch.where(counted, pages, self.pages).flatten().long()
        self._references.scatter_add_(0, index, (counted * by).to(torch.int32).flatten())

    def _own_last_pages(self, rows: Tensor) -> None:
        """Copies the last page of each of these sequences, bool (batch,), that is shared and not full."""
        # Lengths beyond max_seqlen, which only a check finds, have no last page; an index must lie in the table.
        last = self._pages_of(self.seqlens).sub(1).clamp(0, self.page_table.shape[1] - 1).long()[:, None]
        page = self.page_table.gather(1, last)
        partial = rows & (self.seqlens % self.page_size != 0)
        shared = partial[:, None] & (page >= 0) & (self._references[page.clamp(min=0).long()] > 1)
        own = self._take(shared)
        self._count(page, shared, -1)
        source, target = (torch.where(shared & (x >= 0), x, self.pages)[:, 0].long() for x in (page, own))
        for cache in (self._k, self._v):
            cache[:, target] = cache[:, source]
        self.page_table.scatter_(1, last, torch.where(shared, own, page))

    # --- Arguments ---

    def _of_sequences(self, name: str, value: Any) -> Tensor:
        """A number or a tensor (batch,) as int32 (batch,)."""
        batch = self.seqlens.shape
        if isinstance(value, Tensor) and value.ndim:
            dtype = value.dtype
            if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or value.shape != batch:
                raise ValueError(
                    f"{name} must be an int or an integer tensor (batch,) = {tuple(batch)}, got {dtype} of shape "
                    f"{tuple(value.shape)}"
                )
            if value.device != self.device:
                raise ValueError(f"{name} must be on the cache's device {self.device}, got {value.device}")
            if self._is_read_at_once and bool((value < 0).any()):
                raise ValueError(f"{name} must be at least 0, got {value.tolist()}")
            return value.long().clamp(0, self.max_seqlen + 1).int()  # a number that is too large must not wrap around
        return torch.full_like(self.seqlens, min(as_size(name, value, at_least=0), self.max_seqlen + 1))
