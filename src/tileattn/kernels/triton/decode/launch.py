"""The launches of the decode phase: outputs, the workspace of parts, and the kernels' arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ....call import cache_status
from ....call.decoding import DecodeCall, DecodeInputs, DecodeSizes, Splits
from ...scale import scaled_first
from ..arguments import of_operands, strides
from ..interpreter import interpreted
from ..launch_cache import Launch, LaunchCache, on_device
from ..shared_memory import padded
from ..tile_sizes import Config
from .defaults import default
from .kernel import decode_kernel
from .lists import lines_of, row_tiles
from .merge import merge_kernel
from .plan import make_decode_plan
from .splits import group_of, multiprocessors, number_of, split_rows

# Rows that one program merges, and its warps. Its loads of one part after another are what takes time.
MERGE = Config(1, 0, 1, 1)
MERGE_INTERPRETED = Config(64, 0, 1, 1)


class Decode:
    """The decode phase for calls of known sizes; see :class:`tileattn.runtime.dispatch.Decode`."""

    def __init__(self, call: DecodeCall, sizes: DecodeSizes, scale: float, splits: Splits) -> None:
        self.call, self.scale = scaled_first(call, scale), scale
        self.sizes, self.splits = sizes, splits
        self.config = default(self.call, sizes.max_seqlen_q * group_of(sizes))
        self.lines = lines_of(self.call, sizes, self.config)
        if self.lines is not None:
            self.call = dataclasses.replace(self.call, listed=True)
        self.merge = MERGE_INTERPRETED if interpreted() else MERGE
        self.slot_rows = split_rows(sizes, call.packed, self.config)
        self.launch, self.launch_merge = LaunchCache(), LaunchCache()

    def plan(self, inputs: DecodeInputs) -> Tensor | None:
        """The lines of the call (lists.py), or None: else programs find their work by themselves."""
        if self.lines is None:
            return None
        with on_device(inputs.q.device):
            return self.lines.make(inputs)

    def __call__(self, inputs: DecodeInputs, plan: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q, _, _, seqlens_k, _, cu_seqlens_q, sink, operands, _ = inputs
        cache_status.raise_pending()
        o, lse = self._outputs(inputs)
        if o.numel() == 0 and (lse is None or lse.numel() == 0):
            return o, lse
        tensors, numbers = of_operands(operands)
        number = self._number_of_parts(q.device)
        parts, sums = self._workspace(number, q)
        lines = self.plan(inputs) if plan is None else plan
        arguments = (
            *inputs[:3], o, lse, sink, parts, sums, seqlens_k.contiguous(), inputs.page_table, cu_seqlens_q,
            cache_status.status_of(q.device), lines, tensors, inputs.k_cache.shape[0],
        )  # fmt: skip
        with on_device(q.device):
            self.launch(self._work_out, *arguments, numbers=numbers)
            if number > 1:
                self.launch_merge(self._work_out_merge, o, lse, sink, parts, sums, arguments[8], cu_seqlens_q)
            if q.is_cuda:
                cache_status.report(q.device)
        return o, lse

    def _outputs(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor | None]:
        q = inputs.q
        batch, rows, heads, _ = q.shape
        o = q.new_empty(batch, rows, heads, self.call.head_dim_v) if inputs.out is None else inputs.out
        lse = q.new_empty(batch, heads, rows, dtype=torch.float32) if self.call.return_lse else None
        return o, lse

    def _number_of_parts(self, device: torch.device) -> int:
        dims = self.call.head_dim_v, self.config, multiprocessors(device)
        return number_of(self.splits, self.sizes, self.slot_rows, *dims)

    def _workspace(self, number: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """O of the parts of all rows that may be split, and their m and l."""
        slots = self.sizes.batch * self.sizes.kv_heads * self.slot_rows * number if number > 1 else 0
        parts = q.new_empty(slots, self.call.head_dim_v, dtype=torch.float32)
        return parts, q.new_empty(2, slots, dtype=torch.float32)

    def _work_out(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *others: Any) -> Launch:
        sizes, group, page_table = self.sizes, group_of(self.sizes), others[5]
        number, block_M = self._number_of_parts(q.device), self.config.block_M
        q_rows = q.shape[1]
        tiles = -(-q_rows * group // block_M)
        all_tiles = row_tiles(sizes, self.call.packed, self.config)
        constants = (
            self.scale, sizes.batch, q_rows, sizes.kv_heads, group, self._capacity(k), sizes.page_size,
            0 if page_table is None else page_table.stride(0), tiles, number, self.slot_rows, sizes.max_seqlen_q,
            *((None,) * 3 if self.lines is None else self.lines.arguments),
            *strides(q, k, v, o), make_decode_plan(self.call, self.config),
        )  # fmt: skip
        return Launch(decode_kernel, (all_tiles * sizes.kv_heads * number, 1, 1), self.config, constants, {})

    def _work_out_merge(self, o: Tensor, *_: Any) -> Launch:
        sizes, config = self.sizes, self.merge
        columns = self.call.head_dim_v
        programs = -(-sizes.batch * sizes.kv_heads * self.slot_rows // config.block_M)
        constants = (
            sizes.batch, o.shape[1], sizes.kv_heads, group_of(sizes), sizes.capacity,
            self._number_of_parts(o.device), self.slot_rows, *strides(o),
            config.block_M, columns, padded(columns), self.call.fixed,
        )  # fmt: skip
        return Launch(merge_kernel, (programs, 1, 1), config, constants, {})

    def _capacity(self, k: Tensor) -> int:
        """Keys that a sequence may have; none in a cache without pages."""
        return self.sizes.capacity if k.shape[0] else 0
