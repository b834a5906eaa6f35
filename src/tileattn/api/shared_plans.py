"""The plans of the GPU's work in one step of a model: each is made by the first layer that needs it.

Layers share a plan if their tensors have equal sizes, strides and alignments and they compute the same kind of
attention, on one stream: another would not wait for the plan. In a CUDA graph the plan must be a part of the graph,
since it depends on the lengths: one that was made outside of a capture would not be made again by a replay. So it is
not used inside of one, nor the reverse. In graphs of torch.compile(mode="reduce-overhead") each layer makes its own:
nothing may be kept of their memory (call/graph_memory.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..call.decoding import DecodePlan
from ..call.graph_memory import warms_up
from .decode import decode_plan


class SharedPlans:
    """The plans of a step, whose lengths do not change."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, tuple[DecodePlan, Any]] = {}

    def plan(
        self,
        kind: Hashable,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seqlens_k: Tensor,
        options: dict[str, Any],
        kept: Any = None,
    ) -> DecodePlan:
        """The plan for these arguments of :func:`tileattn.decode`.

        Args:
            kind: equal for options that have one plan; page tables and cumulative lengths are those of the step.
            q: the queries.
            k_cache: the layer's keys.
            v_cache: the layer's values.
            seqlens_k: the lengths of the step.
            options: the other arguments.
            kept: lives as long as the plan, so that no other tensor gets an id that is in `kind`.
        """
        if q.is_cuda and warms_up(q.device):
            return decode_plan(q, k_cache, v_cache, seqlens_k, **options)
        captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        stream = torch._C._cuda_getCurrentRawStream(q.device.index) if q.is_cuda else 0
        tensors = (q, k_cache, v_cache)
        key = (captured, stream, kind, q.dtype, *((x.shape, x.stride(), x.data_ptr() % 16) for x in tensors))
        if key not in self._plans:
            self._plans[key] = decode_plan(*tensors, seqlens_k, **options), kept
        return self._plans[key][0]
