"""Attention with few queries and many keys, by the decode phase of the backend that runs the call.

A forward kernel gives each tile of queries to one block. With few queries there are too few tiles for a GPU, and each
of the query heads that share a key/value head reads its keys again. The decode phase splits the keys, and reads them
once for a whole group. :func:`tileattn.attention` takes it by itself, so nobody has to know.

This is the one place where sizes select a kernel. It adds one kernel for each variant: the forward kernel, for many
queries, and the decode kernel, for few. Only shapes decide, never values on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from ..call.facts import AttentionCall
from ..call.fp8 import FP8
from ..call.inputs import Inputs

MOST_QUERIES = 16  # of a sequence
MOST_ROWS = 64  # queries times the query heads of a key/value head: one tile of the decode kernels
LEAST_KEYS = 512  # with fewer, a forward kernel needs no splits


def are_few(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether the decode phase should run a call of these bshd shapes."""
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    if call.needs_grad or call.dropout or call.packed or call.dtype == FP8:
        return False
    if 0 in (batch, seqlen_q, heads) or seqlen_k < LEAST_KEYS:
        return False
    return seqlen_q <= MOST_QUERIES and seqlen_q * (heads // kv_heads) <= MOST_ROWS


def decode_facts(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> tuple[DecodeCall, DecodeSizes]:
    """The call as one on contiguous caches that are full."""
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    facts = DecodeCall(
        dtype=call.dtype,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        variant=call.variant,
        sink=call.sink,
        aligned=call.aligned,
        return_lse=call.return_lse,
        arch=call.arch,
    )
    return facts, DecodeSizes(batch, seqlen_q, batch * seqlen_q, heads, kv_heads, seqlen_k, 0)


class FewQueries:
    """A forward pass (:class:`tileattn.runtime.dispatch.Forward`) that a decode phase runs.

    Args:
        phase: the decode phase, prepared for these sizes.
        forward: makes the ordinary forward pass, for keys or values that are expanded over the batch: decode kernels
            read caches, whose rows are distinct.
        sizes: of the call.
    """

    def __init__(
        self, phase: Callable[..., Any], forward: Callable[[], Callable[[Inputs], Any]], sizes: DecodeSizes
    ) -> None:
        self.phase, self.sizes = phase, sizes
        self.forward = functools.cache(forward)
        self.lengths: dict[torch.device, torch.Tensor] = {}

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`tileattn.runtime.dispatch.Forward`."""
        q, k, v, sink, operands, *_ = inputs
        if k.stride(0) == 0 or v.stride(0) == 0:
            return self.forward()(inputs)
        decode_inputs = DecodeInputs(q, k, v, self._lengths(q.device), None, None, sink, operands)
        return self.phase(decode_inputs, None)

    def _lengths(self, device: torch.device) -> torch.Tensor:
        """The keys of each sequence: all. Kept, for making it is one more kernel."""
        lengths = self.lengths.get(device)
        if lengths is None:
            lengths = torch.full((self.sizes.batch,), self.sizes.capacity, dtype=torch.int32, device=device)
            # What is made during the capture of a CUDA graph lies in the graph's memory, and is for its replays only.
            if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self.lengths[device] = lengths
        return lengths
