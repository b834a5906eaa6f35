"""What a decode call is: few queries per sequence, and a cache of keys and values.

:class:`DecodeCall` has the static facts, which kernels are specialised on. :class:`DecodeSizes` has the sizes that the
host knows. :class:`DecodeInputs` has the tensors and numbers that a kernel is launched on.

A cache is a tensor (rows, tokens, kv_heads, head_dim). A contiguous cache has one row per sequence. In a paged cache a
row is a page, and the page table names the pages of each sequence. How many keys of its row or pages a sequence has,
only the device knows (`seqlens_k`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .inputs import NO_OPERANDS, Operands
from .scalars import as_int

MOST_FIXED = 2**30  # kernels count keys in int32


@dataclass(frozen=True)
class FixedSplit:
    """Splits the keys of every sequence at the multiples of `keys`: the bits of a result are batch-invariant.

    A row of o depends on its own query, keys, values and length alone. It does not depend on the other sequences of the
    call, on how many queries there are, on the page size or on the number of multiprocessors.

    Attributes:
        keys: a positive multiple of 128, at most 2^30.
    """

    keys: int

    def __post_init__(self) -> None:
        keys = as_int(self.keys)
        if not isinstance(keys, int) or isinstance(keys, bool):
            raise TypeError(f"FixedSplit: keys must be an int, a positive multiple of 128, got {self.keys!r}")
        if keys <= 0 or keys % 128 or keys > MOST_FIXED:
            raise ValueError(f"FixedSplit: keys must be a positive multiple of 128, at most 2^30, got {keys}")
        object.__setattr__(self, "keys", keys)


Splits: TypeAlias = int | FixedSplit | None  # a number of parts for each sequence; at fixed keys; or None, for speed


@dataclass(frozen=True)
class DecodeCall:
    """The static facts of a decode call. All sizes, strides and scalars are run-time values of a kernel.

    Attributes:
        dtype: the dtype of q and of both caches.
        head_dim: elements per head of q and the key cache.
        head_dim_v: elements per head of the value cache and o.
        variant: the key of the mask and the score modifications (:mod:`tileattn.variant.key`), ``""`` for none.
        sink: whether a sink logit per head joins the softmax.
        aligned: whether the addresses and strides of q and the caches are multiples of 16 bytes.
        return_lse: whether lse is written.
        arch: as in :class:`tileattn.call.facts.AttentionCall`.
        packed: whether q is packed, with cu_seqlens_q.
        page_rows: 0 for contiguous caches; else the largest power of two, at most 64, that divides the page size.
        fixed: the keys of a :class:`FixedSplit`, or 0. With it, no other size may decide the order of a sum.
        packed_keys: whether keys and values are packed as well, with cu_seqlens_k, as in calls of
            :func:`tileattn.varlen_attention` with few queries; only with `packed`, and not with pages.
        listed: whether kernels visit only the tiles of keys that lists name. A backend sets it, by the sizes.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    variant: str = ""
    sink: bool = False
    aligned: bool = True
    return_lse: bool = True
    arch: str = "cpu"
    packed: bool = False
    page_rows: int = 0
    fixed: int = 0
    packed_keys: bool = False
    listed: bool = False

    @property
    def paged(self) -> bool:
        """Whether caches are paged."""
        return self.page_rows > 0

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        pages = f"pages of {self.page_rows}s" if self.paged else "contiguous"
        flags = ["sink"] * self.sink + ["lse"] * self.return_lse + ["packed"] * self.packed
        flags += ["packed_keys"] * self.packed_keys + ["listed"] * self.listed
        flags += [f"fixed={self.fixed}"] * (self.fixed > 0) + ["unaligned"] * (not self.aligned)
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join(["decode", dtype, f"d{dims}", pages, self.variant or "full", *flags, self.arch])


class DecodeSizes(NamedTuple):
    """The sizes of a decode call that the host knows.

    Attributes:
        batch: the number of sequences.
        max_seqlen_q: q_len; for packed queries an upper bound of the lengths.
        total_q: rows of q in all: batch * q_len; for packed queries the rows of the tensor.
        heads, kv_heads: of the queries, and of the caches.
        capacity: the most keys that a sequence can have: tokens of a contiguous cache, the page table's width times the
            page size, or max_seqlen_k of packed keys.
        page_size: tokens of a page; 0 for contiguous caches.
    """

    batch: int
    max_seqlen_q: int
    total_q: int
    heads: int
    kv_heads: int
    capacity: int
    page_size: int


class DecodeInputs(NamedTuple):
    """The tensors and numbers of one decode call.

    Attributes:
        q: (batch, q_len, heads, head_dim); packed: (1, total_q, heads, head_dim). Any strides with a contiguous last
            dimension, as the caches.
        k_cache: (batch, capacity, kv_heads, head_dim), or pages (pages, page_size, kv_heads, head_dim).
        v_cache: the same with head_dim_v. Rows of a cache that no sequence has may hold anything, also NaN.
        seqlens_k: int32 (batch,), on q's device: the keys of each sequence, with those of the call's own queries. The
            queries of a sequence stand at its last positions: row i of q_len at position seqlen_k - q_len + i. Of a
            call with `packed_keys` it is cu_seqlens_k instead, int32 (batch + 1,), and the caches are (1, total_k,
            kv_heads, head_dim).
        page_table: int32 (batch, pages_per_sequence), any row stride; None for contiguous caches. Key j of sequence b
            is token ``j % page_size`` of page ``page_table[b, j // page_size]``. Entries that a sequence's keys do not
            reach may hold anything, such as -1.
        cu_seqlens_q: int32 (batch + 1,), the cumulative lengths of packed queries, or None.
        sink: (heads,), one logit per head, or None.
        operands: the numbers and tensors of the mask and the score modifications.
        out: where o is to be written, of o's shape and dtype, any strides with a contiguous last dimension; or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens_k: Tensor
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    sink: Tensor | None = None
    operands: Operands = NO_OPERANDS
    out: Tensor | None = None


@dataclass(frozen=True)
class DecodePlan:
    """How the work of a decode call is dealt to the GPU's blocks; made by :func:`tileattn.decode_plan`.

    A plan holds for all calls of one step that agree in `made_for`: of all layers of a model whose lengths, sizes and
    mask are the same. It must be made again when `seqlens_k` or `cu_seqlens_q` change.

    Attributes:
        tensor: what the planning kernel wrote; None for a backend that needs no plan.
        made_for: the backend's name, the call's facts, its sizes and splits, as one text; compared with that of the
            call.
    """

    tensor: Tensor | None
    made_for: str
