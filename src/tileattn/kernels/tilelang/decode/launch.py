"""The launch of the decode phase: the plan and the attention kernel of a call of known sizes, and their arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....call import cache_status, packed_status
from ....call.decoding import DecodeCall, DecodeInputs, DecodeSizes, FixedSplit, Splits
from ....call.facts import SMALLEST_SCALE
from ....variant.program import program
from ..forward.queue import multiprocessors
from ..host import as_bytes
from . import records
from .config import LEAST_KEYS, TILES_OF_FEW, Config, default
from .hopper.config import HopperDecodeConfig
from .library import decode_function, packed_keys_function, plan_function
from .lines import visits
from .lines.launch import write
from .ranges import names_in_range, numbers_in_range
from .records import Deal


def prepare(call: DecodeCall, sizes: DecodeSizes, scale: float, splits: Splits) -> Decoding:
    """See :class:`tileattn.runtime.dispatch.DecodePhase`."""
    if scale < SMALLEST_SCALE and program(call.variant).score is None:
        # As kernels/scale.py: with a score modification (the identity) kernels scale first.
        call = dataclasses.replace(call, variant=call.variant + "+{score}")
    return Decoding(call, sizes, scale, splits)


def deal_of(call: DecodeCall, config: Config, sizes: DecodeSizes, splits: Splits, multiprocessors: int) -> Deal:
    """How the work of a call is dealt."""
    group = sizes.heads // sizes.kv_heads
    items = records.dense_items(sizes.batch, sizes.max_seqlen_q * group, config.block_M)
    jobs = items * sizes.kv_heads
    known = not call.packed or group * sizes.max_seqlen_q <= config.block_M  # else it depends on lengths
    if call.packed:
        items = records.packed_items(sizes.batch, sizes.total_q * group, config.block_M)
        jobs = min(jobs, items * sizes.kv_heads)
    tiles = max(-(-sizes.capacity // config.block_N), 1)
    rule = rule_of(splits, config.block_N)
    most_parts = min(records.most_parts(rule, sizes.capacity, config.block_N), tiles) if rule else 2
    blocks = multiprocessors * config.blocks_per_sm(call)
    most = items * sizes.kv_heads * (most_parts if rule else tiles)
    workers, few = (
        min(records.even_workers(jobs, number) if known else number, most) for number in (blocks, multiprocessors)
    )
    # Blocks that gather rows are bound by their threads: all of them work.
    alone = isinstance(config, HopperDecodeConfig) and not config.gather
    few_tiles = TILES_OF_FEW * multiprocessors if alone else 0
    if jobs * tiles <= few_tiles:
        workers = few
    return Deal(
        config.block_M, config.block_N, workers, rule, items, most_parts,
        records.most_groups(rule, workers, most_parts),
        min(config.block_M, group * sizes.max_seqlen_q),
        # The first workers have the work, so that it is spread over all multiprocessors: no more of them than parts.
        max(LEAST_KEYS // config.block_N, rule, 1),
        jobs,
        few,
        few_tiles,
        records.coarse(items * sizes.kv_heads, tiles),
    )  # fmt: skip


def rule_of(splits: Splits, block_N: int) -> int:
    """The rule of parts; see records.py."""
    if splits is None:
        return records.FREE
    return splits.keys // block_N if isinstance(splits, FixedSplit) else -splits


class Decoding:
    """The decode phase, prepared for a call of known sizes; see :class:`tileattn.runtime.dispatch.Decode`."""

    def __init__(self, call: DecodeCall, sizes: DecodeSizes, scale: float, splits: Splits) -> None:
        self.call, self.sizes, self.scale, self.splits = call, sizes, scale, splits
        self.config = default(call, sizes.heads // max(sizes.kv_heads, 1) * sizes.max_seqlen_q)
        self.empty = 0 in (sizes.batch, sizes.total_q, sizes.heads, sizes.max_seqlen_q)
        if not self.empty and visits.is_listed(call, sizes, self.config.block_M, self.config.block_N):
            self.call = dataclasses.replace(call, listed=True)
        traced = program(call.variant)
        names = names_in_range(traced)
        self.tensors_of_range = [i for i, tensor in enumerate(traced.tensors) if tensor.name in names]
        self.numbers_of_range = [(name[0], int(name[1:])) for name, _ in numbers_in_range(traced)]

    @functools.cached_property
    def multiprocessors(self) -> int:
        """Of the current device."""
        return multiprocessors(torch.device("cuda", torch.cuda.current_device()))

    @functools.cached_property
    def deal(self) -> Deal:
        """How the work is dealt."""
        return deal_of(self.call, self.config, self.sizes, self.splits, self.multiprocessors)

    @functools.cached_property
    def counter_rows(self) -> int:
        return records.counter_rows(self.deal, self.sizes.kv_heads)

    @functools.cached_property
    def plan_rows(self) -> int:
        return self.first_line + (self.lines.rows if self.lines else 0)

    @functools.cached_property
    def first_line(self) -> int:
        """The row of the plan behind the sequence records."""
        return records.plan_rows(self.deal, self.sizes.kv_heads, self.sizes.batch)

    @functools.cached_property
    def lines(self) -> visits.Lines | None:
        """The lines of tiles that are visited, where the call goes by them."""
        if not self.call.listed:
            return None
        return visits.lines_of(self.call, self.sizes, self.config.block_M, self.config.block_N)

    @property
    def of_lines(self) -> tuple[int, ...]:
        """The arguments of kernels that go by lines (entries.LISTED)."""
        return (self.first_line, self.lines.rows_of_each, self.lines.tiles) if self.lines else ()

    @functools.cached_property
    def slots(self) -> tuple[int, int, int]:
        """The shape of the workspace for parts."""
        slots = max(records.slots(self.deal, self.sizes.kv_heads), 1)
        return slots, self.deal.slot_rows, self.call.head_dim_v + records.STATE_COLUMNS

    def plan(self, inputs: DecodeInputs) -> Tensor | None:
        """See :class:`tileattn.runtime.dispatch.Decode`."""
        if self.empty:
            return None
        cache_status.raise_pending()
        plan = self._planned(self._located(inputs) if self.call.packed_keys else inputs)
        cache_status.report(plan.device)
        return plan

    def _planned(self, inputs: DecodeInputs) -> Tensor:
        call, sizes, deal = self.call, self.sizes, self.deal
        lengths, bounds, operands = inputs.seqlens_k, inputs.cu_seqlens_q, inputs.operands
        plan = lengths.new_empty(self.plan_rows, records.WIDTH)
        if self.lines is not None:
            write(call, self.lines, inputs, plan, self.first_line)
        numbers = {"i": operands.ints, "f": operands.floats}
        plan_function(call.arch, call.packed, call.variant, call.listed)(
            lengths,
            *(() if bounds is None else (bounds,)),
            plan,
            cache_status.status_of(plan.device),
            *(as_bytes(operands.tensors[i]) for i in self.tensors_of_range),
            sizes.max_seqlen_q,
            sizes.total_q,
            sizes.heads // sizes.kv_heads,
            sizes.kv_heads,
            sizes.capacity if inputs.k_cache.shape[0] else 0,
            deal.block_M,
            deal.block_N,
            deal.workers,
            deal.rule,
            deal.items,
            self.counter_rows,
            deal.least,
            deal.jobs,
            deal.few,
            deal.few_tiles,
            deal.coarse,
            *self.of_lines,
            *(numbers[kind][i] for kind, i in self.numbers_of_range),
        )
        return plan

    def _located(self, inputs: DecodeInputs) -> DecodeInputs:
        """The inputs of a call on packed keys, with the lengths, and with the places of the keys as a page table.

        The cumulative lengths are checked on the device, as of all packed calls (call/packed_status.py); sequences are
        without queries and keys then.
        """
        bounds, sizes = inputs.cu_seqlens_q, self.sizes
        assert bounds is not None
        packed_status.raise_pending()
        found = bounds.new_empty(records.KEYS_FIELDS, -(-(sizes.batch + 1) // 4) * 4)  # rows of 16 bytes
        packed_keys_function(self.call.arch)(
            bounds, inputs.seqlens_k, found, packed_status.status_of(bounds.device), sizes.total_q,
            inputs.k_cache.shape[1], sizes.max_seqlen_q, sizes.capacity,
        )  # fmt: skip
        packed_status.report(bounds.device)
        return inputs._replace(
            seqlens_k=found[records.KEYS_LENGTH, : sizes.batch],
            page_table=found[records.KEYS_START, : sizes.batch, None],
            cu_seqlens_q=found[records.KEYS_BOUND, : sizes.batch + 1],
        )

    def __call__(self, inputs: DecodeInputs, plan: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :class:`tileattn.runtime.dispatch.Decode`."""
        if self.call.packed_keys and not self.empty:
            inputs = self._located(inputs)
        q, k, v, _, _, _, sink, _, out = inputs
        call, sizes = self.call, self.sizes
        q_batch, total_q = q.shape[:2]
        lse = q.new_empty(q_batch, sizes.heads, total_q, dtype=torch.float32) if call.return_lse else None
        own = out is None or not _is_aligned(out)
        o = q.new_empty(q_batch, total_q, sizes.heads, call.head_dim_v) if own else out
        if self.empty or 0 in (k.shape[0], sizes.capacity):
            self.plan(inputs)  # reports lengths that there is no room for
            return _without_keys(o if out is None else out, lse, sink, inputs.cu_seqlens_q)
        cache_status.raise_pending()
        if plan is None:
            plan = self._planned(inputs)
        before, after = self._arguments(inputs, plan)
        kernel = decode_function(call, self.config)
        kernel(q, k, v, o, *(() if lse is None else (lse,)), *before, *_as_sinks(sink), *after)
        cache_status.report(plan.device)
        if out is not None and own:
            out.copy_(o)
        return o if out is None else out, lse

    def _arguments(self, inputs: DecodeInputs, plan: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The kernel's arguments between o (or lse) and the sinks, with a new workspace, and those behind them."""
        table, operands, sizes, deal = inputs.page_table, inputs.operands, self.sizes, self.deal
        parts = inputs.q.new_empty(self.slots, dtype=torch.float32)
        before = (*(() if table is None else (table,)), plan, parts, cache_status.status_of(plan.device))
        return before, (
            *(as_bytes(tensor) for tensor in operands.tensors),
            self.scale,
            sizes.heads // sizes.kv_heads,
            sizes.page_size,
            deal.rule,
            records.jobs(deal, sizes.kv_heads),
            deal.most_parts,
            deal.most_groups,
            deal.workers,
            deal.workers + 1 + self.counter_rows,
            sizes.batch,
            *self.of_lines,
            *operands.ints,
            *operands.floats,
        )

    def repeat(self, inputs: DecodeInputs, plan: Tensor | None) -> Callable[..., Tensor] | None:
        """See :func:`tileattn.runtime.few_queries.repeat_of`.

        One workspace serves all layers, which a stream runs one after another. Errors of the lengths are found and
        reported by the plan; a page table is read in each layer, so such calls are not repeated.
        """
        call, sizes = self.call, self.sizes
        special = call.packed_keys or call.return_lse or inputs.out is not None or inputs.page_table is not None
        if plan is None or special or 0 in (inputs.k_cache.shape[0], sizes.capacity):
            return None
        kernel, (before, after) = decode_function(call, self.config), self._arguments(inputs, plan)
        shape = (*inputs.q.shape[:2], sizes.heads, call.head_dim_v)

        def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
            o = q.new_empty(shape)
            kernel(q, k, v, o, *before, *_as_sinks(sink), *after)
            return o

        return launch


def _as_sinks(sink: Tensor | None) -> tuple[Tensor, ...]:
    return () if sink is None else (sink.detach().float(),)


def _is_aligned(out: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as the kernels store them."""
    return out.data_ptr() % 16 == 0 and all(stride % (16 // out.element_size()) == 0 for stride in out.stride()[:-1])


def _without_keys(
    o: Tensor, lse: Tensor | None, sink: Tensor | None, bounds: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Nothing to compute: no rows, or a cache without tokens. Unused rows of packed queries have no sink."""
    o.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
        if sink is not None:
            used = True if bounds is None else torch.arange(lse.shape[2], device=lse.device) < bounds[-1]
            lse.copy_(torch.where(torch.as_tensor(used, device=lse.device), sink[:, None], lse))
    return o, lse
