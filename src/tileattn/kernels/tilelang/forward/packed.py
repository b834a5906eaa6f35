"""The launch of the forward pass on packed sequences: the work list, then the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....call import packed_status
from ....call.facts import AttentionCall, Packed
from ....call.inputs import Inputs
from ....variant.program import program
from ...kept_lists import arguments_of, packed_lists_of
from ...tile_lists import Cut
from ..host import as_bytes, pattern_arguments
from ..lists.launch import make_packed
from ..packed.plan import work_list
from ..packed_lists import PackedSizes, may_be_listed, packed_pays
from .config import HopperConfig
from .defaults import Config, for_skewed_lengths, with_lists
from .queue import multiprocessors, tickets


def packed_forward(
    load: Callable[[Config], Callable[..., Any]],
    config: Config,
    call: AttentionCall,
    heads: int,
    scalars: tuple[float, int, int],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The forward pass with a given configuration, for any number of sequences of any lengths.

    Args:
        load: returns the call's kernel of a configuration.
        config: of the kernel, where sequences are of similar lengths.
        call: what the kernel is compiled for.
        heads: of queries.
        scalars: the scale, query heads per kv head, and how many heads run side by side.
    """
    kernels: dict[tuple[bool, bool], Kernel] = {}
    may_list = isinstance(config, HopperConfig) and may_be_listed(call)
    has_arguments = bool(may_list or call.sink or call.dropout or program(call.variant).operands)

    def kernel_for(skewed: bool, sizes: PackedSizes | None) -> Kernel:
        chosen = for_skewed_lengths(config) if skewed else config
        launched = chosen if sizes is None else launched_packed(chosen, call, sizes)
        key = skewed, launched is not chosen
        if key not in kernels:
            kernels[key] = Kernel(load(launched), launched)
        return kernels[key]

    def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, sink, operands, dropout, packed, _, out = inputs
        assert packed is not None
        packed_status.raise_pending()
        total_q, total_k = q.shape[1], k.shape[1]
        if 0 in (packed.cu_seqlens_q.numel() - 1, total_q, total_k):
            return _without_keys(call, q, sink, packed)
        o = q.new_empty(1, total_q, heads, call.head_dim_v) if out is None else out
        lse = q.new_empty(1, heads, total_q, dtype=torch.float32) if call.return_lse else None
        sizes = PackedSizes.of(packed, total_q, total_k, heads) if may_list else None
        kernel = kernel_for(_is_skewed(packed, total_q), sizes)
        work = work_list(call.arch, packed, total_q, total_k, kernel.rows)
        outputs = (o,) if lse is None else (o, lse)
        queue = kernel.queue(q.device, (work.shape[0] - 1) * heads)
        if has_arguments:
            lists = None
            if kernel.cut is not None:
                assert sizes is not None
                lists = packed_lists_of(make_packed, call.variant, operands, packed, sizes, kernel.cut, work)
            of_lists, steps = arguments_of(lists)
            seeds, of_pattern = pattern_arguments(dropout, heads)
            kernel.function(
                q,
                k,
                v,
                *outputs,
                *(() if sink is None else (sink.detach().float(),)),
                *seeds,
                work,
                *of_lists,
                *(as_bytes(tensor) for tensor in operands.tensors),
                *scalars,
                *steps,
                *of_pattern,
                *queue,
                *operands.ints,
                *operands.floats,
            )
        else:
            kernel.function(q, k, v, *outputs, work, *scalars, *queue)
        packed_status.report(q.device)
        return o, lse

    return forward


class Kernel:
    """A loaded kernel and what its configuration says about a launch.

    Attributes:
        rows: queries of a task.
        cut: how it cuts the scores for lists of tiles; None if it walks over ranges.
    """

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self.function = function
        self.persistent = isinstance(config, HopperConfig)
        self.cluster = config.cluster if isinstance(config, HopperConfig) else 1
        self.rows = self.cluster * config.block_M
        self.cut = cut_of(config) if isinstance(config, HopperConfig) and config.listed else None

    def queue(self, device: torch.device, tasks: int) -> tuple[Any, ...]:
        """A persistent kernel's ticket counter and number of blocks, for at most this many tasks; else empty."""
        if not self.persistent:
            return ()
        return tickets(device), min(tasks, max(multiprocessors(device) // self.cluster, 1)) * self.cluster


def launched_packed(config: Config, call: AttentionCall, sizes: PackedSizes) -> Config:
    """The configuration as it is launched: whether tiles are taken from lists depends on the sizes."""
    if not isinstance(config, HopperConfig) or not packed_pays(call, sizes, (cut_of(config),)):
        return config
    return with_lists(config, call)


def cut_of(config: HopperConfig) -> Cut:
    """How a kernel cuts the scores for lists of tiles."""
    return Cut(config.cluster * config.block_M, config.block_N, longest_first=True)


def _is_skewed(packed: Packed, total_q: int) -> bool:
    """Whether sequences are, on average, less than half as long as the longest may be."""
    return 2 * total_q < (packed.cu_seqlens_q.numel() - 1) * packed.max_seqlen_q


def _without_keys(
    call: AttentionCall, q: torch.Tensor, sink: torch.Tensor | None, packed: Packed
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to compute: no rows, no keys, or no sequences."""
    _, total_q, heads, _ = q.shape
    o = q.new_zeros(1, total_q, heads, call.head_dim_v)
    lse = q.new_full((1, heads, total_q), -torch.inf, dtype=torch.float32)
    if sink is not None:
        row = torch.arange(total_q, device=q.device)
        lse = torch.where(row < packed.cu_seqlens_q[-1], sink.detach().float()[None, :, None], lse)
    return o, lse
