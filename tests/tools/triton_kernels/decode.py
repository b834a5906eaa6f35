"""Decode calls for the tests of the Triton kernels: poisoned caches, and the definition of what they must give.

A :class:`Problem` has the keys of each sequence by themselves. :meth:`Problem.inputs` puts them into a cache in which
all else is NaN. :meth:`Problem.expected` computes each sequence by itself, in float64 and three times in the call's
dtype, for the tolerance rule. It shares masks' `allows` and the modifications with the package, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit, Splits
from tileattn.call.facts import device_arch
from tileattn.kernels.triton.decode import backend
from tileattn.testing import assert_forward_accurate
from tileattn.variant.key import encode, normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = math.nan
GARBAGE = (-1, 2**31 - 1, 10**6, -(2**31))  # entries of a page table that nothing may follow


def arch() -> str:
    """As calls name this machine's device."""
    return device_arch(torch.device(DEVICE))


@dataclass
class Problem:
    """Queries and keys of some sequences, and the variant.

    Attributes:
        q_lens, k_lens: of each sequence; keys include those of the queries.
        heads, kv_heads, head_dim, head_dim_v, dtype, scale: of the call.
        mask, mods, sink: the variant. mask has Causal in it where that is wanted.
        seed: of all values.
        q, k, v: of each sequence, (length, heads, head_dim).
    """

    q_lens: Sequence[int]
    k_lens: Sequence[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 20
    head_dim_v: int = 12
    dtype: torch.dtype = torch.float16
    scale: float = 0.2
    mask: Any = None
    mods: tuple[Any, ...] = ()
    sink: Tensor | None = None
    seed: int = 0
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask = normalize(self.mask, None, causal=False)[0]
        generator = torch.Generator().manual_seed(self.seed)
        for rows, keys in zip(self.q_lens, self.k_lens, strict=True):
            for each, shape in (
                (self.q, (rows, self.heads, self.head_dim)),
                (self.k, (keys, self.kv_heads, self.head_dim)),
                (self.v, (keys, self.kv_heads, self.head_dim_v)),
            ):
                each.append(torch.randn(shape, generator=generator).to(DEVICE, self.dtype))

    # --- The call ---

    def inputs(
        self, page: int = 0, packed: bool = False, tail: int = 0, seen_from: Sequence[int] | None = None, more: int = 7
    ) -> DecodeInputs:
        """The tensors of a call.

        Args:
            page: tokens of a page; 0 for a contiguous cache.
            packed: whether queries are packed; else all q_lens are equal.
            tail: rows of q behind the last sequence.
            seen_from: the first key of each sequence that may be read; pages (or rows) before hold NaN, and their
                entries of the table anything.
            more: tokens of a contiguous cache, or pages, that no sequence has.
        """
        seen_from = seen_from or [0] * len(self.k_lens)
        k_cache, v_cache, table = self._paged(page, seen_from, more) if page else self._contiguous(seen_from, more)
        cu_seqlens_q = None
        if packed:
            rows = torch.full((tail, self.heads, self.head_dim), NAN, dtype=self.dtype, device=DEVICE)
            q = torch.cat([*self.q, rows])[None]
            cu_seqlens_q = torch.tensor([0, *self.q_lens], device=DEVICE).cumsum(0).int()
        else:
            q = torch.stack(self.q)
        q = torch.cat([q, torch.full_like(q, NAN)], dim=2)[:, :, : self.heads]
        _, operands = encode(self.mask, self.mods)
        out = torch.full((*q.shape[:2], 2 * self.heads, self.head_dim_v), NAN, dtype=self.dtype, device=DEVICE)
        return DecodeInputs(
            q, k_cache, v_cache, torch.tensor(self.k_lens, dtype=torch.int32, device=DEVICE), table, cu_seqlens_q,
            self.sink, operands, out[:, :, : self.heads],
        )  # fmt: skip

    def _contiguous(self, seen_from: Sequence[int], more: int) -> tuple[Tensor, Tensor, None]:
        capacity = max(self.k_lens, default=0) + more
        both = self._nothing(len(self.k_lens), capacity)
        for b, keys in enumerate(self.k_lens):
            self._fill(both[b], b, seen_from[b], keys, seen_from[b])
        return both[..., : self.head_dim], both[..., self.head_dim :], None

    def _paged(self, page: int, seen_from: Sequence[int], more: int) -> tuple[Tensor, Tensor, Tensor]:
        counts = [-(-keys // page) for keys in self.k_lens]
        pages = sum(counts) + more
        both = self._nothing(pages, page)
        free = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(self.seed)).tolist())
        width = max(counts, default=0) + 2
        table = torch.tensor([GARBAGE[i % len(GARBAGE)] for i in range(len(counts) * width)], dtype=torch.int32)
        table = table.view(len(counts), width).to(DEVICE)
        for b, keys in enumerate(self.k_lens):
            for number in range(seen_from[b] // page, counts[b]):
                table[b, number] = at = next(free)
                self._fill(both[at], b, number * page, min(keys, (number + 1) * page), 0)
        wide = torch.full((len(counts), width + 3), -1, dtype=torch.int32, device=DEVICE)
        wide[:, :width] = table
        return both[..., : self.head_dim], both[..., self.head_dim :], wide[:, :width]

    def _nothing(self, rows: int, tokens: int) -> Tensor:
        """A cache of NaN for keys and values side by side, whose first token and head have neighbours of NaN."""
        shape = (rows, tokens + 1, self.kv_heads + 1, self.head_dim + self.head_dim_v)
        return torch.full(shape, NAN, dtype=self.dtype, device=DEVICE)[:, 1:, 1:]

    def _fill(self, row: Tensor, b: int, begin: int, end: int, token: int) -> None:
        """Keys begin to end of a sequence, from a token of a cache's row on."""
        row[token : token + end - begin, :, : self.head_dim] = self.k[b][begin:end]
        row[token : token + end - begin, :, self.head_dim :] = self.v[b][begin:end]

    def facts(self, inputs: DecodeInputs, page: int, splits: Splits) -> tuple[DecodeCall, DecodeSizes]:
        """The static facts of a call, and its sizes."""
        key, _ = encode(self.mask, self.mods)
        packed, paged = inputs.cu_seqlens_q is not None, inputs.page_table is not None
        call = DecodeCall(
            self.dtype, self.head_dim, self.head_dim_v, key, self.sink is not None, aligned=False, arch=arch(),
            packed=packed, page_rows=min(page & -page, 64), fixed=splits.keys if isinstance(splits, FixedSplit) else 0,
        )  # fmt: skip
        capacity = inputs.page_table.shape[1] * page if paged else inputs.k_cache.shape[1]
        most, total = max(self.q_lens, default=0), inputs.q.shape[0] * inputs.q.shape[1]
        return call, DecodeSizes(len(self.k_lens), most, total, self.heads, self.kv_heads, capacity, page)

    def run(self, page: int = 0, splits: Splits = None, **given: Any) -> tuple[Tensor, Tensor]:
        """o and lse of the call that :meth:`inputs` describes; each row is of the first of its sequences."""
        inputs = self.inputs(page, **given)
        decode = backend.prepare(*self.facts(inputs, page, splits), self.scale, splits)
        o, lse = decode(inputs, decode.plan(inputs))
        assert o is inputs.out
        assert lse is not None
        return o, lse

    # --- What it must give ---

    def expected(self, tail: int = 0, packed: bool = False) -> tuple[Any, Any]:
        """(o, lse) in float64, and the lists of three of the call's dtype, in the shapes of the call."""
        of_sequences = []
        for order in (None, self.dtype, self.dtype, self.dtype):
            turn = len(of_sequences)
            parts = [self._attend(b, order or torch.float64, turn) for b in range(len(self.k_lens))]
            o, lse = [part[0] for part in parts], [part[1] for part in parts]
            if packed:
                rest = self.heads, tail
                o.append(o[0].new_zeros(tail, self.heads, self.head_dim_v))
                lse.append(torch.full(rest, -math.inf, dtype=lse[0].dtype, device=DEVICE))
                of_sequences.append((torch.cat(o)[None], torch.cat(lse, dim=1)[None]))
            else:
                of_sequences.append((torch.stack(o), torch.stack(lse)))
        exact, *eager = of_sequences
        return exact, ([each[0] for each in eager], [each[1] for each in eager])

    def _attend(self, b: int, dtype: torch.dtype, turn: int) -> tuple[Tensor, Tensor]:
        """o (q_len, heads, head_dim_v) and lse (heads, q_len) of one sequence; sums in an order that `turn` decides."""
        rows, keys, group = self.q_lens[b], self.k_lens[b], self.heads // self.kv_heads
        dims, order = (_order(size, turn) for size in (self.head_dim, keys))
        q = self.q[b].to(dtype).transpose(0, 1)
        k, v = (x[b].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for x in (self.k, self.v))
        # (heads, rows, keys)
        scores = (q[..., dims] @ k[..., dims].mT) * self.scale
        at = [torch.tensor(b), torch.arange(self.heads)[:, None, None]]
        at += [(torch.arange(rows) + keys - rows)[:, None], torch.arange(keys)]
        at = [x.to(DEVICE) for x in at]
        if keys:  # a modification may read tensors at these positions
            for mod in self.mods:
                scores = mod(scores, *at).to(dtype)
        seen = torch.ones_like(scores, dtype=torch.bool)
        if self.mask is not None and keys:
            seen = seen & self.mask.allows(*at)
        scores = scores.masked_fill(~seen, -math.inf)
        wide = scores.double() if dtype == torch.float64 else scores.float()
        if self.sink is not None:
            wide = torch.cat([wide, self.sink.to(wide)[:, None, None].expand(-1, rows, 1)], dim=-1)
        if wide.shape[-1] == 0:
            return q.new_zeros(rows, self.heads, self.head_dim_v), wide.new_full((self.heads, rows), -math.inf)
        lse = torch.logsumexp(wide, dim=-1)
        p = torch.exp(wide[..., :keys] - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).to(dtype)
        return (p[..., order] @ v[:, order]).transpose(0, 1), lse

    def check(self, name: str, page: int = 0, splits: Splits = None, tail: int = 0, **given: Any) -> None:
        """Runs the call and asserts the rule."""
        got = self.run(page, splits, tail=tail, **given)
        assert_forward_accurate(name, got, *self.expected(tail, given.get("packed", False)))


def _order(size: int, turn: int) -> Tensor:
    """An order of summation: the natural one, reversed, or shuffled."""
    natural = torch.arange(size, device=DEVICE)
    if turn == 3:
        return torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return natural if turn == 1 else natural.flip(0)
