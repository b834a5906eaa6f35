"""What an append call is: new keys and values that are written into a cache, rotated by their positions.

:class:`AppendCall` has the static facts, which kernels are specialised on. :class:`AppendInputs` has the tensors that a
kernel is launched on. Caches, pages and lengths are those of :mod:`tileattn.call.decoding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .facts import device_arch, is_aligned

LARGEST = 2**31 - 1  # int32


@dataclass(frozen=True)
class AppendCall:
    """The static facts of an append call. All sizes and strides are run-time values of a kernel.

    Attributes:
        dtype: the dtype of k, v, q and both caches.
        head_dim: elements per head of k, q and the key cache.
        head_dim_v: elements per head of v and the value cache.
        rotary_dim: elements of a head that are rotated, from the first on; 0 without rotation.
        interleaved: whether the elements of a pair are neighbours; else they are the same places of two halves.
        table_dtype: the dtype of cos and sin, or None.
        with_q: whether queries are rotated, too.
        aligned: whether the addresses and strides of k, v, q and the caches are multiples of 16 bytes.
        aligned_tables: the same for cos and sin.
        packed: whether k, v and q are packed, with cu_seqlens_q.
        paged: whether there is a page table.
        positions: whether the rotary positions of the new tokens are given.
        q_positions: whether those of the queries are given.
        arch: as in :class:`tileattn.call.facts.AttentionCall`.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    rotary_dim: int = 0
    interleaved: bool = False
    table_dtype: torch.dtype | None = None
    with_q: bool = False
    aligned: bool = True
    aligned_tables: bool = True
    packed: bool = False
    paged: bool = False
    positions: bool = False
    q_positions: bool = False
    arch: str = "cpu"

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        flags = []
        if self.rotary_dim:
            pairs = "interleaved" if self.interleaved else "halves"
            flags.append(f"rotary{self.rotary_dim} {pairs} {str(self.table_dtype).removeprefix('torch.')}")
        flags += ["q"] * self.with_q + ["packed"] * self.packed + ["paged"] * self.paged
        flags += ["positions"] * self.positions + ["q_positions"] * self.q_positions
        flags += ["unaligned"] * (not self.aligned) + ["unaligned_tables"] * (not self.aligned_tables)
        return " ".join(["append", str(self.dtype).removeprefix("torch."), f"d{dims}", *flags, self.arch])


class AppendInputs(NamedTuple):
    """The tensors of one append call, all on one device.

    Attributes:
        k: the new keys (batch, new, kv_heads, head_dim); packed: (1, total, kv_heads, head_dim). Any strides with a
            contiguous last dimension, as v, q, the caches, cos and sin.
        v: the new values, the same with head_dim_v.
        k_cache: (batch, capacity, kv_heads, head_dim), or pages (pages, page_size, kv_heads, head_dim).
        v_cache: the same with head_dim_v.
        seqlens_k: int32 (batch,): the keys of each sequence, the new ones included. New token i of n is written at
            position seqlen_k - n + i, unless that is negative.
        page_table: int32 (batch, width), any strides, or None.
        cu_seqlens_q: int32 (batch + 1,): the cumulative numbers of new tokens of packed sequences, or None.
        cos: (rows, rotary_dim / 2): row p has the cosines at position p. None: nothing is rotated.
        sin: the sines.
        positions: int32 (batch, new), packed (1, total), any strides: the rotary positions of the new tokens, where
            these are not their positions in the cache. A negative one leaves the row as it is.
        q: (batch, q_len, heads, head_dim), packed (1, total, heads, head_dim), or None.
        q_positions: int32 (batch, q_len), packed (1, total): the rotary positions of the queries. None: those given
            for the new tokens; without these, seqlen_k - q_len + i.
    """

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens_k: Tensor
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None
    q: Tensor | None = None
    q_positions: Tensor | None = None

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        tokens = self.k_cache.shape[1]
        return min(tokens if self.page_table is None else self.page_table.shape[1] * tokens, LARGEST)


def make_append_call(inputs: AppendInputs, interleaved: bool, on_gpu: bool | None = None) -> AppendCall:
    """The static facts of a call with these inputs.

    Args:
        inputs: the tensors.
        interleaved: as in :class:`AppendCall`.
        on_gpu: whether alignment matters, as it does to GPU kernels; None asks k.
    """
    k, cos, q = inputs.k, inputs.cos, inputs.q
    on_gpu = k.is_cuda if on_gpu is None else on_gpu
    rows = [x for x in (k, inputs.v, inputs.k_cache, inputs.v_cache, q) if x is not None]
    tables = [x for x in (cos, inputs.sin) if x is not None]
    return AppendCall(
        dtype=k.dtype,
        head_dim=k.shape[3],
        head_dim_v=inputs.v.shape[3],
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        interleaved=interleaved and cos is not None,
        table_dtype=None if cos is None else cos.dtype,
        with_q=q is not None,
        aligned=not on_gpu or all(map(is_aligned, rows)),
        aligned_tables=not on_gpu or all(map(_is_aligned_table, tables)),
        packed=inputs.cu_seqlens_q is not None,
        paged=inputs.page_table is not None,
        positions=inputs.positions is not None,
        q_positions=inputs.q_positions is not None,
        arch=device_arch(k.device),
    )


def _is_aligned_table(table: Tensor) -> bool:
    return table.data_ptr() % 16 == 0 and table.stride(0) * table.element_size() % 16 == 0
