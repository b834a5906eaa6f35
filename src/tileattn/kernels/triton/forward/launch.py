"""The launch of the forward pass: outputs, and the kernel's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....call.facts import AttentionCall
from ....call.inputs import Inputs
from ...scale import scaled_first
from ..arguments import described, dimensions, of_operands, strides
from ..defaults import default
from ..grid import Sizes
from ..launch_cache import Launch, LaunchCache, on_device
from ..lists import cut_of, of_lists, pays
from ..plan import make_plan
from .kernel import forward_kernel


class Forward:
    """The forward pass for tensors of one shape; see :class:`tileattn.runtime.dispatch.Forward`."""

    def __init__(self, call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> None:
        self.call, self.scale = scaled_first(call, scale), scale
        self.sizes = Sizes.of(q_shape, k_shape)
        self.config = default("forward", self.call, self.sizes.seqlen_k)
        self.cut = cut_of("forward", self.config) if pays(self.call, q_shape, k_shape) else None
        self.launch = LaunchCache()

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        q, k, v, sink, operands, *_ = inputs
        batch, seqlen_q, heads, _ = q.shape
        o = q.new_empty(batch, seqlen_q, heads, self.call.head_dim_v)
        lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32) if self.call.return_lse else None
        tensors, numbers = of_operands(operands)
        with on_device(q.device):
            lists = of_lists(self.call.variant, operands, self.sizes, self.cut, q.device)
            self.launch(self._work_out, q, k, v, o, lse, sink, *lists, tensors, numbers=numbers)
        return o, lse

    def _work_out(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *_: Any) -> Launch:
        config = self.config
        plan = make_plan(
            self.call, config, "forward", dimensions(q, k, v) if config.tma else 0, listed=self.cut is not None
        )
        as_tma = {1: described(k, config.block_N, plan), 2: described(v, config.block_N, plan)} if plan.tma else {}
        if plan.tma_q:
            as_tma |= {0: described(q, config.block_M, plan), 3: described(o, config.block_M, plan)}
        programs = self.sizes.over_keys(self.call, config.block_M)
        constants = (self.scale, *programs.arguments, *strides(q, k, v), plan)
        return Launch(forward_kernel, programs.grid, config, constants, as_tma)
