"""Decode calls for tests of the kernels: caches with NaN in rows and pages that no sequence has.

Keys grow with their position, and sequences' pages are shuffled. Entries of the page table behind a sequence's last are
no pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn import Causal, Mask
from tileattn.call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit, Splits
from tileattn.kernels.tilelang.decode.launch import Decoding
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention, poisoned_memory
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import for_call

SCALE = 0.3


CAUSAL = Causal()


@dataclass
class Case:
    lengths: list[int]
    q_lens: list[int] | int
    group: int
    kv_heads: int
    page: int
    splits: Splits = None
    workers: int = 5
    mask: Mask | None = CAUSAL
    mods: tuple[object, ...] = ()
    sink: bool = False
    rest: int = 0
    dim: int = 16
    packed_keys: bool = False
    alone: Callable[[int], Mask] | None = None  # the mask of one sequence in a call of its own, if it is another one

    @property
    def each(self) -> list[int]:
        return [self.q_lens] * len(self.lengths) if isinstance(self.q_lens, int) else self.q_lens

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


class Tensors:
    """The inputs of a case, and each sequence's own keys and values."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.case, self.device = case, device

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).half()

        self.keys = [
            drawn(length, case.kv_heads, case.dim) * torch.linspace(0.1, 2, max(length, 1))[:length, None, None].half()
            for length in case.lengths
        ]
        self.values = [drawn(length, case.kv_heads, case.dim) for length in case.lengths]
        packed, batch = not isinstance(case.q_lens, int), len(case.lengths)
        self.ends = [0, *itertools.accumulate(case.each)]
        total = self.ends[-1] + case.rest
        rows = (1, total) if packed else (batch, case.each[0])
        self.q = drawn(*rows, case.heads, case.dim)
        self.bounds = torch.tensor(self.ends, dtype=torch.int32) if packed else None
        self.sink = torch.randn(case.heads, generator=generator) if case.sink else None
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32)
        self.table: Tensor | None = None
        self.capacity = max(case.lengths) + 5
        if case.packed_keys:
            self._packed(case)
        elif case.page:
            self._paged(case, generator)
        else:
            self.k, self.v = (
                torch.full((batch, self.capacity, case.kv_heads, case.dim), math.nan).half() for _ in "kv"
            )
            for b, length in enumerate(case.lengths):
                self.k[b, :length], self.v[b, :length] = self.keys[b], self.values[b]

    def _packed(self, case: Case) -> None:
        """Behind the last sequence lie rows of none. Of packed keys, the lengths are cumulative."""
        unused = torch.full((7, case.kv_heads, case.dim), math.nan).half()
        self.k, self.v = (torch.cat([*rows, unused])[None] for rows in (self.keys, self.values))
        self.lengths = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32)

    def _paged(self, case: Case, generator: torch.Generator) -> None:
        page, width = case.page, -(-self.capacity // case.page)
        self.capacity = width * page
        needed = [-(-length // page) for length in case.lengths]
        free = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        self.k, self.v = (torch.full((len(free), page, case.kv_heads, case.dim), math.nan).half() for _ in "kv")
        self.table = torch.full((len(needed), width), -1, dtype=torch.int32)
        self.table[:, 1::2] = 2**31 - 1
        for b, count in enumerate(needed):
            for i in range(count):
                self.table[b, i] = number = free.pop()
                own = self.keys[b][i * page : (i + 1) * page], self.values[b][i * page : (i + 1) * page]
                self.k[number, : len(own[0])], self.v[number, : len(own[1])] = own

    def erase(self, b: int, key: int, kv_head: int) -> None:
        """Writes NaN to a key of sequence b and to its value, in the caches alone."""
        row, token = (
            (b, key) if self.table is None else (int(self.table[b, key // self.case.page]), key % self.case.page)
        )
        if self.case.packed_keys:
            row, token = 0, int(self.lengths[b]) + key
        for cache in (self.k, self.v):
            cache[row, token, kv_head] = math.nan

    def queries(self, b: int) -> Tensor:
        """Of one sequence, as a batch of one."""
        return self.q[b : b + 1] if self.bounds is None else self.q[:, self.ends[b] : self.ends[b + 1]]

    def inputs(self) -> tuple[DecodeCall, DecodeSizes, DecodeInputs]:
        """The call on sm_80, or on the device's architecture."""
        case = self.case
        mask = self._in_call(case)
        variant, operands = encode(mask, case.mods)  # type: ignore[arg-type]
        operands.tensors = [tensor.to(self.device) for tensor in operands.tensors]
        fixed = case.splits.keys if isinstance(case.splits, FixedSplit) else 0
        call = DecodeCall(
            torch.float16, case.dim, case.dim, variant, case.sink, arch="sm_80", packed=self.bounds is not None,
            page_rows=math.gcd(case.page, 64) if case.page else 0, fixed=fixed, packed_keys=case.packed_keys,
        )  # fmt: skip
        total = self.q.shape[0] * self.q.shape[1]
        sizes = DecodeSizes(
            len(case.lengths), max(case.each), total, case.heads, case.kv_heads, self.capacity, case.page
        )
        tensors = (self.q, self.k, self.v, self.lengths, self.table, self.bounds, self.sink)
        on_device = (None if tensor is None else tensor.to(self.device) for tensor in tensors)
        return call, sizes, DecodeInputs(*on_device, operands)  # type: ignore[arg-type]

    def _in_call(self, case: Case) -> Mask | None:
        """The mask, whose blocks count rows and not positions."""
        sizes = len(case.lengths), case.heads, case.kv_heads, max(case.each), self.capacity
        return for_call(case.mask, lambda: sizes, lambda: self.lengths - torch.tensor(case.each))

    def check(self, o: Tensor, lse: Tensor | None) -> None:
        """Compares the results with the definition, sequence by sequence."""
        assert lse is not None
        case = self.case
        o, lse = o.cpu(), lse.cpu()
        for b, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if case.each[b] == 0:
                continue
            mask = case.mask if case.alone is None else case.alone(b)
            arguments = (self.queries(b), key[None], value[None], mask, case.mods, self.sink, SCALE)
            rows = slice(self.ends[b], self.ends[b + 1])
            got = (o[b : b + 1], lse[b : b + 1]) if self.bounds is None else (o[:, rows], lse[..., rows])
            assert_forward_accurate(f"sequence {b}", got, oracle_attention(*arguments), eager_attention(*arguments))
        if case.rest:
            assert (o[0, -case.rest :] == 0).all()
            assert (lse[..., -case.rest :] == -math.inf).all()


def check_calls(tensors: Tensors, decoding: Decoding, inputs: DecodeInputs, times: int, none: bool = False) -> Tensor:
    """Calls `times` times by one plan, and then, with `none`, without a plan: all have the bits of the first, which is
    right. Returns its o.

    Counters are back at 0 after a call: the plan serves the next layer.
    """
    plan = decoding.plan(inputs)
    with poisoned_memory():
        o, lse = decoding(inputs, plan)
    tensors.check(o, lse)
    for given in [plan] * (times - 1) + [None] * none:
        with poisoned_memory():
            again, _ = decoding(inputs, given)
        assert torch.equal(again, o)
    return o
