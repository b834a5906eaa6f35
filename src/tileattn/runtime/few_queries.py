"""Attention with few queries and many keys, by the decode phase of the backend that runs the call.

A forward kernel gives each tile of queries to one block. With few queries there are too few tiles for a GPU, and each
of the query heads that share a key/value head reads its keys again. The decode phase splits the keys, and reads them
once for a whole group. :func:`tileattn.attention` and :func:`tileattn.varlen_attention` take it by themselves.

This is the one place where sizes select a kernel. It adds one kernel for each variant: the forward kernel, for many
queries, and the decode kernel, for few. Only shapes decide, never values on the device. Calls that need gradients or
have dropout keep the forward kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.decoding import DecodeCall, DecodeInputs, DecodeSizes
from ..call.facts import AttentionCall
from ..call.fp8 import FP8
from ..call.graph_memory import warms_up
from ..call.inputs import Inputs

MOST_QUERIES = 16  # of a sequence
MOST_ROWS = 64  # queries times the query heads of a key/value head: one tile of the decode kernels
LEAST_KEYS = 512  # with fewer, a forward kernel needs no splits
MOST_KEYS = 2**31 - 1  # lengths of sequences are int32


def are_few(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether the decode phase should run a call.

    Args:
        call: the static facts.
        q_shape: (batch, seqlen_q, heads, head_dim); of a packed call (sequences, max_seqlen_q, heads, head_dim).
        k_shape: the same of the keys.
    """
    batch, seqlen_q, heads, _ = q_shape
    _, seqlen_k, kv_heads, _ = k_shape
    if call.needs_grad or call.dropout or call.dtype == FP8:
        return False
    if 0 in (batch, seqlen_q, heads) or not LEAST_KEYS <= seqlen_k <= MOST_KEYS:
        return False
    return fit_in_a_tile(seqlen_q, heads, kv_heads)


def fit_in_a_tile(seqlen_q: int, heads: int, kv_heads: int) -> bool:
    """Whether so many queries of a sequence fit in one tile of the decode kernels."""
    return seqlen_q <= MOST_QUERIES and seqlen_q * (heads // kv_heads) <= MOST_ROWS


def decode_facts(call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size) -> tuple[DecodeCall, DecodeSizes]:
    """The call as one on contiguous caches that are full, or on packed keys. `total_q` of a packed call is unknown."""
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
        packed=call.packed,
        packed_keys=call.packed,
    )
    return facts, DecodeSizes(batch, seqlen_q, batch * seqlen_q, heads, kv_heads, seqlen_k, 0)


def repeat_of(phase: Any) -> Callable[[DecodeInputs, Tensor | None], Callable[..., Tensor] | None] | None:
    """What makes the launch of a decode phase for the layers of a step, where the backend has it.

    It takes the inputs of one layer and the plan, and returns ``launch(q, k, v, sink) -> o`` for layers whose tensors
    have the same metadata, on the stream that is current now; or None where each layer must make an ordinary call.
    """
    return getattr(phase, "repeat", None)


class FewQueries:
    """A forward pass (:class:`tileattn.runtime.dispatch.Forward`) that a decode phase runs.

    Args:
        prepare: prepares the decode phase for sizes.
        forward: makes the ordinary forward pass. It runs calls without keys, and those whose keys or values are
            expanded over the batch: decode kernels read caches, whose rows are distinct.
        sizes: of the call.
    """

    def __init__(
        self,
        prepare: Callable[[DecodeSizes], Callable[..., Any]],
        forward: Callable[[], Callable[[Inputs], Any]],
        sizes: DecodeSizes,
    ) -> None:
        self.phase = functools.lru_cache(maxsize=256)(prepare)
        self.forward = functools.cache(forward)
        self.sizes = sizes
        self.lengths: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """See :class:`tileattn.runtime.dispatch.Forward`."""
        return self.run(inputs, None)

    def run(self, inputs: Inputs, plan: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same with the plan of :meth:`plan`, of a call of the same sizes; None: the phase makes its own."""
        phase, of_phase = self._decoding(inputs)
        return self.forward()(inputs) if of_phase is None else phase(of_phase, plan)

    def plan(self, inputs: Inputs) -> Tensor | None:
        """The plan of the decode phase for these inputs; None if the phase needs none, or does not run the call."""
        phase, of_phase = self._decoding(inputs)
        return None if of_phase is None else phase.plan(of_phase)

    def repeat(self, inputs: Inputs, plan: Tensor | None) -> Callable[..., Tensor] | None:
        """The launch of these inputs' call for other q, k, v and sink; see :func:`repeat_of`."""
        phase, of_phase = self._decoding(inputs)
        if of_phase is None:
            return None
        repeat = repeat_of(phase)
        return None if repeat is None else repeat(of_phase, plan)

    def _decoding(self, inputs: Inputs) -> tuple[Any, DecodeInputs | None]:
        """The decode phase and its inputs; no inputs for a call of the ordinary forward pass."""
        q, k, v, sink, operands, _, packed, *_ = inputs
        if packed is None:
            if 0 in (k.stride(0), v.stride(0)):
                return None, None
            lengths, bounds, sizes = self._lengths(q.device), None, self.sizes
        else:
            if k.shape[1] == 0:
                return None, None
            lengths, bounds, sizes = packed.cu_seqlens_k, packed.cu_seqlens_q, self.sizes._replace(total_q=q.shape[1])
        return self.phase(sizes), DecodeInputs(q, k, v, lengths, None, bounds, sink, operands)

    def _lengths(self, device: torch.device) -> Tensor:
        """The keys of each sequence: all.

        The tensor is kept, because filling it is one more kernel: for each stream, as a stream does not wait for
        another's. A CUDA graph fills one of its own, since it may outlive this object.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self._filled(device)
        key = device, torch.cuda.current_stream(device).cuda_stream
        lengths = self.lengths.get(key)
        if lengths is None:
            lengths = self._filled(device)
            if not warms_up(device):
                self.lengths[key] = lengths
        return lengths

    def _filled(self, device: torch.device) -> Tensor:
        return torch.full((self.sizes.batch,), self.sizes.capacity, dtype=torch.int32, device=device)
