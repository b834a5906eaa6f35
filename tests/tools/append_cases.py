"""Cases of append_kv that all backends run, and what must be in the caches afterwards, by plain loops in float64.

Caches are filled with NaN, so that what is written elsewhere, or not written, is seen.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tileattn.call.appending import AppendInputs
from tileattn.testing import assert_accurate

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class AppendCase:
    """One call. `seqlens` count the new tokens; `new` is a number for each sequence of a packed call, else one number.

    `memory` is how the caches lie: "own" tensors, views of "one buffer" (rows, 2, tokens, heads, head_dim), with
    "heads first" (rows, heads, tokens, head_dim), or "odd": nothing is aligned.
    """

    id: str
    seqlens: tuple[int, ...]
    new: int | tuple[int, ...] = 1
    dtype: torch.dtype = BF16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    rotary_dim: int = 0
    interleaved: bool = False
    table_dtype: torch.dtype = FP32
    page: int = 0
    q_len: int | None = None
    with_q: bool = True
    positions: bool = False
    q_positions: bool = False
    memory: str = "own"
    unused: int = 0

    @property
    def packed(self) -> bool:
        return isinstance(self.new, tuple)

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each sequence."""
        return self.new if isinstance(self.new, tuple) else (self.new,) * len(self.seqlens)


CASES = [
    AppendCase("plain", (1, 63, 111), head_dim_v=128),
    AppendCase("plain-pages", (1, 17, 0, 48), page=16, memory="one buffer"),
    AppendCase("plain-equal", (1, 63, 111), kv_heads=1, head_dim=8),
    AppendCase("halves", (1, 63, 111), head_dim=128, rotary_dim=128),
    AppendCase("halves-pages", (5, 64, 33), 4, head_dim=128, rotary_dim=128, page=16, heads=8, memory="one buffer"),
    AppendCase("interleaved", (9, 2), 2, FP16, head_dim=64, rotary_dim=64, interleaved=True),
    AppendCase("partial", (3, 17), 2, head_dim=96, rotary_dim=32, page=3, memory="heads first"),
    AppendCase("partial-interleaved", (3, 17), 2, FP32, head_dim=80, rotary_dim=32, interleaved=True, page=3),
    AppendCase("odd-partial", (3, 17), 3, FP16, head_dim=40, head_dim_v=24, rotary_dim=20, page=1),
    AppendCase("odd-interleaved", (5, 1), head_dim=24, head_dim_v=40, rotary_dim=6, interleaved=True, page=1),
    AppendCase("odd-dims", (5, 9), 2, FP32, head_dim=17, head_dim_v=5, rotary_dim=10, heads=3, kv_heads=1),
    AppendCase("smallest", (1, 2), head_dim=2, head_dim_v=1, rotary_dim=2, heads=1, kv_heads=1, page=1),
    AppendCase("unaligned", (7, 31), 2, head_dim=64, rotary_dim=64, page=16, memory="odd"),
    AppendCase("unaligned-interleaved", (7, 31), 2, rotary_dim=16, interleaved=True, memory="odd"),
    AppendCase("tables-bf16", (40, 3), head_dim=64, rotary_dim=48, table_dtype=BF16, page=64),
    AppendCase("tables-fp16", (40, 3), dtype=FP32, head_dim=64, rotary_dim=48, table_dtype=FP16, interleaved=True),
    AppendCase("short", (0, 1, 2, 3, 63), 3, rotary_dim=64, page=3),
    AppendCase("nothing-new", (4, 0), 0, rotary_dim=64, page=3, q_len=2),
    AppendCase("more-queries", (7, 2, 0), 1, rotary_dim=64, q_len=5, page=16),
    AppendCase("fewer-queries", (7, 2), 5, rotary_dim=64, q_len=1),
    AppendCase("without-q", (7, 2), 2, rotary_dim=64, with_q=False, page=3),
    AppendCase("positions", (7, 12), 3, rotary_dim=64, page=3, positions=True),
    AppendCase("q-positions", (7, 12), 1, rotary_dim=32, page=3, q_len=4, q_positions=True, positions=True),
    AppendCase("many-heads", (33,), heads=65, kv_heads=13, head_dim=128, rotary_dim=64, page=16),
    AppendCase("packed", (5, 70, 1, 9), (5, 63, 0, 1), rotary_dim=64, page=16, memory="one buffer"),
    AppendCase("packed-plain", (5, 3), (2, 1), with_q=False, unused=3),
    AppendCase("packed-short", (1, 0, 8), (3, 2, 8), FP16, rotary_dim=16, interleaved=True, page=3, unused=2),
    AppendCase("packed-positions", (5, 3), (2, 1), rotary_dim=64, positions=True, q_positions=True, unused=1, page=1),
    AppendCase("packed-many", tuple(range(130)), (1,) * 130, head_dim=16, rotary_dim=16, kv_heads=1, page=3),
]
# What GPU kernels do not take.
FLOAT64 = replace(CASES[2], id="float64", dtype=FP64, table_dtype=FP64)


class Built:
    """The tensors of a case, and its caches as they were."""

    def __init__(self, case: AppendCase, device: str = "cpu", seed: int = 0) -> None:
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(seed)
        counts, dtype = case.counts, case.dtype
        dim, dim_v = case.head_dim, case.head_dim_v or case.head_dim
        leading = (sum(counts) + case.unused,) if case.packed else (len(counts), counts[0])
        q_leading = leading if case.q_len is None else (len(counts), case.q_len)
        self.k = self.values((*leading, case.kv_heads, dim), dtype)
        self.v = self.values((*leading, case.kv_heads, dim_v), dtype)
        self.q = self.values((*q_leading, case.heads, dim), dtype) if case.with_q and case.rotary_dim else None
        self.seqlens_k = self.ints(case.seqlens)
        self.table = self.page_table() if case.page else None
        rows = len(counts) if self.table is None else self.pages
        self.k_cache, self.v_cache = self.caches(rows, case.page or max(case.seqlens) + 2, dim, dim_v)
        self.k_before, self.v_before = self.k_cache.clone(), self.v_cache.clone()
        angles = self.values((max(*case.seqlens, 1) + 9, max(case.rotary_dim // 2, 1)), FP64) * 3
        self.cos, self.sin = (
            f(angles).to(case.table_dtype) if case.rotary_dim else None for f in (torch.cos, torch.sin)
        )
        self.positions = self.chosen(leading) if case.positions else None
        # All queries of a sequence at one position, as flash-attn rotates them without a mask: stride 0.
        self.q_positions = None
        if case.q_positions:
            self.q_positions = (
                self.chosen(leading) if case.packed else self.chosen((len(counts), 1)).expand(-1, q_leading[1])
            )
        self.cu_seqlens_q = self.ints((0, *torch.tensor(counts).cumsum(0).tolist())) if case.packed else None

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=self.random, dtype=FP64).to(self.device, dtype)
        return self.moved(x) if self.case.memory == "odd" else x

    def moved(self, x: Tensor) -> Tensor:
        """The same values at an odd address and with odd strides."""
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def chosen(self, shape: tuple[int, ...]) -> Tensor:
        """Rotary positions, of which some are negative."""
        most = max(self.case.seqlens)
        return torch.randint(-2, most, shape, generator=self.random, dtype=torch.int32).to(self.device)

    def page_table(self) -> Tensor:
        """Shuffled pages; entries beyond a sequence's length are garbage. Columns have a stride."""
        page, seqlens = self.case.page, self.case.seqlens
        needed = [-(-seqlen // page) for seqlen in seqlens]
        table = torch.full((max(needed) + 1, len(seqlens)), -1, dtype=torch.int32).T
        table[:, -1] = 2**31 - 1
        self.pages = sum(needed) + 6
        pages = torch.randperm(self.pages - 1, generator=self.random)[: sum(needed)].tolist()
        for b, count in enumerate(needed):
            table[b, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
        return table.to(self.device)

    def caches(self, rows: int, tokens: int, dim: int, dim_v: int) -> tuple[Tensor, Tensor]:
        case, heads = self.case, self.case.kv_heads
        options: dict[str, Any] = {"dtype": case.dtype, "device": self.device}
        if case.memory == "one buffer":
            assert dim == dim_v
            buffer = torch.full((rows, 2, tokens, heads, dim), math.nan, **options)
            return buffer[:, 0], buffer[:, 1]
        if case.memory == "heads first":
            k, v = (torch.full((rows, heads, tokens, d), math.nan, **options) for d in (dim, dim_v))
            return k.transpose(1, 2), v.transpose(1, 2)
        k, v = (torch.full((rows, tokens, heads, d), math.nan, **options) for d in (dim, dim_v))
        return (self.moved(k), self.moved(v)) if case.memory == "odd" else (k, v)

    @property
    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Those of append_kv, by place and by name."""
        options = {
            "page_table": self.table,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cos": self.cos,
            "sin": self.sin,
            "interleaved": self.case.interleaved,
            "positions": self.positions,
            "q": self.q,
            "q_positions": self.q_positions,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return (self.k, self.v, self.k_cache, self.v_cache, self.seqlens_k), given


def inputs_of(built: Built) -> tuple[AppendInputs, bool]:
    """The inputs as backends get them, packed ones with a batch element; and whether pairs are interleaved."""
    places, options = built.arguments
    interleaved = options.pop("interleaved")
    inputs = AppendInputs(*places, **options)
    if built.case.packed:
        rows = {name: getattr(inputs, name) for name in ("k", "v", "q", "positions", "q_positions")}
        inputs = inputs._replace(**{name: x[None] for name, x in rows.items() if x is not None})
    return inputs, interleaved


def check(built: Built, rotated: Tensor | None) -> None:
    """The caches and the rotated queries are what they must be, and all else is untouched."""
    case = built.case
    rows, places = _rows_of_new(built), _places(built)
    written = [(row, place) for row, place in zip(rows, places) if place is not None]
    of_k = [_rotary_position(built, row, seq, at, False) for row, (seq, at) in zip(rows, _sequence_positions(built))]
    keep = [place is not None for place in places]
    _check_rotated("k", built, built.k, rows, of_k, built.k_cache, places, keep)
    for row, place in written:
        assert torch.equal(built.v_cache[place], built.v[row]), f"v at {place}"
    for name in ("k", "v"):
        cache, before = getattr(built, f"{name}_cache").clone(), getattr(built, f"{name}_before")
        for _, place in written:
            cache[place] = math.nan
        assert bool(cache.isnan().all()), f"{name} elsewhere"
        assert bool(before.isnan().all())
    if built.q is None:
        assert rotated is None
        return
    assert rotated is not None
    assert rotated.shape == built.q.shape
    assert rotated.dtype == case.dtype
    assert rotated.is_contiguous()
    q_rows = _rows(built.q)
    of_q = [
        _rotary_position(built, row, seq, at, True) for row, (seq, at) in zip(q_rows, _sequence_positions(built, True))
    ]
    _check_rotated("q", built, built.q, q_rows, of_q, rotated, q_rows, [True] * len(q_rows))


def _check_rotated(name, built, source, rows, positions, result, places, keep) -> None:  # type: ignore[no-untyped-def]
    """Rows that are rotated are accurate; the others are equal bit by bit."""
    got, oracle, eager = [], [], []
    for row, position, place, kept in zip(rows, positions, places, keep):
        if not kept:
            continue
        if position is None:
            assert torch.equal(result[place], source[row]), f"{name} at {row}"
            continue
        got.append(result[place])
        oracle.append(_turned(source[row].double(), built, position))
        eager.append(_turned(source[row], built, position))
    if got:
        stacked = [torch.stack([x.cpu() for x in xs]) for xs in (got, oracle, eager)]
        assert_accurate(name, stacked[0], stacked[1], [stacked[2]])


def _turned(x: Tensor, built: Built, position: int) -> Tensor:
    """A row (heads, head_dim), each pair multiplied by a rotation matrix, in x's dtype."""
    case, result = built.case, x.clone()
    half = case.rotary_dim // 2
    cos, sin = (table[position].to(x.dtype) for table in (built.cos, built.sin))
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if case.interleaved else (i, i + half)
        result[:, a] = x[:, a] * cos[i] - x[:, b] * sin[i]
        result[:, b] = x[:, b] * cos[i] + x[:, a] * sin[i]
    return result


def _rows(x: Tensor) -> list[tuple[int, ...]]:
    """The indices of all rows (heads, head_dim)."""
    return list(itertools.product(*map(range, x.shape[:-2])))


def _rows_of_new(built: Built) -> list[tuple[int, ...]]:
    return _rows(built.k)


def _sequence_positions(built: Built, of_q: bool = False) -> list[tuple[int | None, int | None]]:
    """The sequence and the position of each row; None for a row of no sequence."""
    case, found = built.case, []
    for b, (seqlen, count) in enumerate(zip(case.seqlens, case.counts)):
        rows = case.q_len if of_q and case.q_len is not None else count
        found += [(b, seqlen - rows + i) for i in range(rows)]
    return found + [(None, None)] * case.unused


def _places(built: Built) -> list[tuple[int, int] | None]:
    """Where each new token belongs: the row of the cache and the token there."""
    page, found = built.case.page, []
    for b, at in _sequence_positions(built):
        if b is None or at is None or at < 0:
            found.append(None)
        elif page:
            assert built.table is not None
            found.append((int(built.table[b, at // page]), at % page))
        else:
            found.append((b, at))
    return found


def _rotary_position(built: Built, row: Any, b: int | None, at: int | None, of_q: bool) -> int | None:
    """The rotary position of a row, or None if it stays."""
    if built.cos is None:
        return None
    given = built.q_positions if of_q and built.q_positions is not None else built.positions
    position = at if given is None else int(given[row])
    return None if position is None or position < 0 else position
