"""The launch of the forward pass: the kernel for a call of known sizes, and its arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ....call.facts import CAUSAL, AttentionCall, BackwardCall
from ....call.fp8 import FP8
from ....call.inputs import Inputs
from ....tuner.space import Space
from ....variant.program import program
from ...kept_lists import arguments_of, lists_of
from ...scale import scaled_first
from ...tile_lists import Cut, Sizes, pays
from ..architecture import TRANSPOSED_KEYS
from ..behind import behind_forward, expected
from ..build.background import behind
from ..host import L2_BYTES, as_bytes, divisors, one_batch, pattern_arguments
from ..lists.bits import bits_pay
from ..lists.launch import make
from ..tuned import sizes_of
from .amd.config import AmdConfig
from .choice import MULTIPROCESSORS, chosen
from .config import HopperConfig
from .defaults import Config, default, with_lists
from .library import forward_function, transpose_function
from .packed import packed_forward
from .queue import multiprocessors, tickets
from .space import forward_space, tuned_config

ONE_AFTER_ANOTHER_BYTES = 2**20  # of keys and values: beyond it heads run one after another where tiles cost the same
USUAL_ROWS = 128  # of a tile of queries
FEWEST_CAUSAL = 4  # heads under a causal mask, whatever the L2 cache holds
FEWEST_KV_HEADS = 4  # the same of kv heads under other masks, whose rows see some of the keys only
ROUNDS_AHEAD = 2  # of all multiprocessors, in which all heads of a listed call begin with their longest rows
MAX_GRID = 65535  # blocks in the grid's second and third dimension


def prepare(
    call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """See :class:`tileattn.runtime.dispatch.Backend`."""
    batch, seqlen_q, heads, _ = q_shape
    seqlen_k = k_shape[1]
    if not call.packed and (batch == 0 or seqlen_q == 0 or seqlen_k == 0):
        return functools.partial(
            _without_keys, (batch, seqlen_q, heads, call.head_dim_v), (batch, heads, seqlen_q), call.out_dtype
        )
    backward = expected(call, scale)
    call = _specialised(call, scale)
    config = launched(_chosen(call, q_shape, k_shape), call, q_shape, k_shape)
    return prepare_with(config, call, q_shape, k_shape, scale, backward)


def _specialised(call: AttentionCall, scale: float) -> AttentionCall:
    """The call as its kernel is compiled for it."""
    return dataclasses.replace(scaled_first(call, scale), needs_grad=False)


def _chosen(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> Config:
    """The tuner's configuration for these sizes, else the default. Of packed sequences these are the longest."""
    if call.packed:
        return default(call, min(q_shape[1], k_shape[1]))
    return tuned_config(call, sizes_of(q_shape, k_shape)) or chosen(call, q_shape, k_shape)


def launched(config: Config, call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> Config:
    """The configuration as it is launched: whether tiles are taken from lists, with bits, depends on the sizes."""
    if not isinstance(config, HopperConfig) or not pays(call, q_shape, k_shape):
        return config
    return with_lists(config, call, bits_pay(call, q_shape))


def space(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> Space | None:
    """See :class:`tileattn.runtime.dispatch.Backend`. Packed calls take their defaults."""
    if call.packed or q_shape[0] == 0 or q_shape[1] == 0 or k_shape[1] == 0:
        return None
    call, sizes = _specialised(call, scale), sizes_of(q_shape, k_shape)
    return forward_space(
        call,
        sizes,
        chosen(call, q_shape, k_shape),
        lambda config: prepare_with(launched(config, call, q_shape, k_shape), call, q_shape, k_shape, scale),
        lambda config: launched(config, call, q_shape, k_shape),
    )


def prepare_with(
    config: Config,
    call: AttentionCall,
    q_shape: torch.Size,
    k_shape: torch.Size,
    scale: float,
    backward: BackwardCall | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The forward pass with a given configuration; `call` is what its kernel is compiled for.

    backward: the backward pass whose kernels may be compiled behind this one's.
    """
    load = _loader(call, backward, q_shape, k_shape)
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    if call.packed:
        side = _heads_side_by_side(call, torch.Size((1, *q_shape[1:])), seqlen_k, kv_heads)
        scalars = (scale, heads // kv_heads, side)
        return packed_forward(load, config, call, heads, scalars)
    o_shape, lse_shape = (batch, seqlen_q, heads, call.head_dim_v), (batch, heads, seqlen_q)
    kernel = load(config)
    transpose = transpose_function(call) if call.dtype == FP8 else None
    padded_k = -(-seqlen_k // TRANSPOSED_KEYS) * TRANSPOSED_KEYS
    side, splits = _side_and_splits(config, call, q_shape, seqlen_k, kv_heads)
    scalars = (scale, heads // kv_heads, side)
    persistent = isinstance(config, HopperConfig)
    cluster = config.cluster if isinstance(config, HopperConfig) else 1
    tasks = -(-seqlen_q // (cluster * config.block_M)) * batch * heads
    listed, bits = _lists_and_bits(config)
    cut = Cut(cluster * config.block_M, config.block_N, longest_first=True, bits=bits)
    sizes = Sizes(batch, heads, seqlen_q, seqlen_k)
    ahead = (lines_ahead(batch * heads, -(-seqlen_q // cut.block_M)),) if listed else ()
    has_arguments = listed or _has_arguments(call)
    out_dtype = call.out_dtype

    def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, sink, operands, dropout, _, descales, out = inputs
        # A size is passed number by number: PyTorch takes a tuple apart in three times as long.
        o = q.new_empty(*o_shape, dtype=out_dtype) if out is None else out
        lse = q.new_empty(*lse_shape, dtype=torch.float32) if call.return_lse else None
        if not (q.stride(0) and k.stride(0) and v.stride(0)):
            q, k, v = one_batch(q), one_batch(k), one_batch(v)
        outputs = (o,) if lse is None else (o, lse)
        queue: tuple[torch.Tensor | int, ...] = ()
        if persistent:
            queue = (tickets(q.device), min(tasks, max(multiprocessors(q.device) // cluster, 1)) * cluster)
        if transpose is not None:
            transposed = v.new_empty(v.shape[0], kv_heads, call.head_dim_v, padded_k)
            transpose(v, transposed)
            v = transposed
        if has_arguments:
            tensors = [as_bytes(tensor) for tensor in operands.tensors]
            sinks = () if sink is None else (sink.detach().float(),)
            seeds, of_pattern = pattern_arguments(dropout, heads)
            lists, steps = arguments_of(
                lists_of(make, call.variant, operands, sizes, cut, q.device) if listed else None
            )
            kernel(
                q,
                k,
                v,
                *outputs,
                *(descales or ()),
                *sinks,
                *seeds,
                *lists,
                *tensors,
                *scalars,
                *steps,
                *ahead,
                *of_pattern,
                *queue,
                *operands.ints,
                *operands.floats,
                *splits,
            )
        else:
            kernel(q, k, v, *outputs, *scalars, *queue, *splits)
        return o, lse

    return forward


def _loader(
    call: AttentionCall, backward: BackwardCall | None, q_shape: torch.Size, k_shape: torch.Size
) -> Callable[[Config], Callable[..., Any]]:
    """What loads a call's kernel of a configuration. If it is compiled, those that come next are compiled behind it."""

    def load(config: Config) -> Callable[..., Any]:
        with behind(lambda: behind_forward(call, backward, *_lists_and_bits(config), q_shape, k_shape)):
            return forward_function(call, config)

    return load


def _lists_and_bits(config: Config) -> tuple[bool, bool]:
    """Whether a kernel takes its tiles from lists, and loads bits of mixed ones."""
    return (config.listed, config.bits) if isinstance(config, HopperConfig) else (False, False)


def _side_and_splits(
    config: Config, call: AttentionCall, q_shape: torch.Size, seqlen_k: int, kv_heads: int
) -> tuple[int, tuple[int, ...]]:
    """The heads that run side by side, and, of AMD's kernel, the parts that queries are split into."""
    batch, seqlen_q, heads, _ = q_shape
    if isinstance(config, AmdConfig):
        return max(d for d in divisors(batch * heads) if d <= MAX_GRID), (config.splits(seqlen_q),)
    return _heads_side_by_side(call, q_shape, seqlen_k, kv_heads), ()


def _has_arguments(call: AttentionCall) -> bool:
    """Whether a kernel takes more of a call than q, k, v and scalars."""
    return bool(call.dtype == FP8 or call.sink or call.dropout or (call.variant and program(call.variant).operands))


def _without_keys(
    o_shape: tuple[int, ...], lse_shape: tuple[int, ...], out_dtype: torch.dtype, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to compute: no rows, or rows that see no key."""
    q, sink = inputs.q, inputs.sink
    o, lse = q.new_zeros(o_shape, dtype=out_dtype), q.new_full(lse_shape, -torch.inf, dtype=torch.float32)
    if sink is not None:
        lse.copy_(sink[None, :, None].expand_as(lse))
    return o, lse


def _heads_side_by_side(call: AttentionCall, q_shape: torch.Size, seqlen_k: int, kv_heads: int) -> int:
    """How many (batch, head) pairs to run side by side.

    Tiles of equal cost run best one head after another, as far as there are enough tiles to fill the GPU: what runs
    together reads the same keys. Under a mask tiles differ; several heads then give a choice of long tiles to begin
    with, but their keys and values should stay in the L2 cache (measured on an H200: docs/design/lessons.md). So do
    several heads that share a bias too large for it: what one reads is then there for the others. Where a causal mask
    is all and one kv head's keys do not fit, its group alone has enough tiles.

    A divisor of all pairs, so that the grid has no gaps, and large enough for the grid's limit in the other direction.
    Under a causal mask it also gives the last heads as many tiles as blocks need while the longest one runs. With 14
    heads of 9600 tokens at head dim 256, of which 3 fit, 7 side by side ran at 712 TFLOPS on an H200, and 2 at 668.
    """
    batch, seqlen_q, heads, _ = q_shape
    pairs, group = batch * heads, heads // kv_heads
    bytes_per_kv_head = call.dtype.itemsize * max(seqlen_k, 1) * (call.head_dim + call.head_dim_v)
    if program(call.variant).allows is None and _shared_bytes_per_score(call) * seqlen_q * seqlen_k <= L2_BYTES:
        fitting = max(ONE_AFTER_ANOTHER_BYTES // bytes_per_kv_head, 1)
    else:
        least = -(-FEWEST_CAUSAL // group) if call.variant == CAUSAL else FEWEST_KV_HEADS  # of kv heads
        fitting = min(max(L2_BYTES // bytes_per_kv_head, least), 16)
    allowed = [d for d in divisors(pairs) if pairs // d <= MAX_GRID]
    side = max((d for d in allowed if d <= fitting * group), default=allowed[0])
    if call.variant == CAUSAL and seqlen_k < 2 * seqlen_q:
        fewest = _heads_for_an_even_end(seqlen_q)
        return side if side >= fewest else min((d for d in allowed if d >= fewest), default=allowed[-1])
    return side


def lines_ahead(pairs: int, lines: int) -> int:
    """How many of each (batch, head) pair's lines of tiles, the longest, come before all others; at least 1.

    Of heads that follow one another the last ones' long rows would begin late. So all heads begin with as many rows as
    multiprocessors take two of each, after which no row is longer than what is left to do, unless one alone is longer
    than a share of the call. More would read keys of too many heads at once for the L2 cache.
    """
    return min(-(-ROUNDS_AHEAD * MULTIPROCESSORS // pairs), lines)


def _heads_for_an_even_end(seqlen_q: int) -> int:
    """How many heads have as much work as the blocks have while the longest tile of queries runs."""
    tiles = -(-seqlen_q // USUAL_ROWS)
    return -(-2 * MULTIPROCESSORS // (tiles + 1))  # a head's tiles take (tiles + 1) / 2 times as long as its longest


def _shared_bytes_per_score(call: AttentionCall) -> int:
    """Of a bias of which heads or batch elements read the same tiles; else 0."""
    copied = program(call.variant).copied_tile
    if copied is None or (copied[0].differs_by("b") and copied[0].differs_by("h")):
        return 0
    return copied[1].itemsize
