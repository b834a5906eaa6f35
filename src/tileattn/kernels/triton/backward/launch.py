"""The launch of the backward pass: outputs, workspaces, and the kernels' arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....call.facts import BackwardCall, Gradients
from ....call.inputs import Inputs, Operands
from ...scale import scaled_first
from ...sink import sink_gradient
from ..arguments import described, dimensions, of_operands, strides
from ..defaults import default
from ..grid import Sizes
from ..launch_cache import Launch, LaunchCache, on_device
from ..lists import cut_of, of_lists, pays
from ..plan import make_plan
from ..shared_memory import padded
from ..tile.paths import paths
from ..tile_sizes import Config
from .kernels import keys_kernel, prepare_kernel, queries_kernel
from .operand_gradients import add_up, workspace

PREPARED_ROWS = 64  # of a program of prepare_kernel


class Backward:
    """The backward pass for tensors of one shape; see :class:`tileattn.runtime.dispatch.Backward`."""

    def __init__(self, call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> None:
        self.call, self.scale = call, scale
        self.forward = forward = scaled_first(call.forward, scale)
        self.sizes = Sizes.of(q_shape, k_shape)
        self.config = {kernel: default(kernel, forward) for kernel in ("keys", "queries")}
        self.listed = pays(forward, q_shape, k_shape)
        self.cuts = {kernel: cut_of(kernel, config) if self.listed else None for kernel, config in self.config.items()}
        self.paths = paths(forward.variant, call.needs[4:])
        # Whether the kernel for dq prepares what the other one needs (backward/kernels.py).
        self.prepares = call.needs[0] and forward.dtype.itemsize == 2
        self.wants_keys = call.needs[1] or call.needs[2] or bool(self.paths)
        self.launch = LaunchCache()

    def __call__(self, inputs: Inputs, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, operands, *_ = inputs
        needs = self.call.needs
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        tensors, numbers = of_operands(operands)
        dq = dk = dv = None
        parts: tuple[Tensor, ...] = ()
        with on_device(q.device):
            if not self.prepares:
                self.launch(self._work_out_prepare, o, do, lse, dlse, lse2, delta)
            if needs[0]:
                dq = q.new_empty(q.shape)
                forward = (o, lse, dlse) if self.prepares else (None, None, None)
                rows = (*forward, lse2, delta, dq, *self._lists("queries", operands, q.device))
                self.launch(self._work_out_queries, q, k, v, do, *rows, tensors, numbers=numbers)
            if self.wants_keys:
                dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
                parts = tuple(workspace(path, q, k) for path in self.paths)
                rows = (lse2, delta, dk, dv, parts, *self._lists("keys", operands, q.device))
                self.launch(self._work_out_keys, q, k, v, do, *rows, tensors, numbers=numbers)
        offset = self.sizes.seqlen_k - self.sizes.seqlen_q
        return Gradients(
            dq,
            dk if needs[1] else None,
            dv if needs[2] else None,
            sink_gradient(sink, lse, delta) if sink is not None and needs[3] else None,
            tuple(
                add_up(index, self.paths, parts, operands, offset) if need else None
                for index, need in enumerate(needs[4:])
            ),
        )

    def _lists(self, kernel: str, operands: Operands, device: torch.device) -> tuple[Any, ...]:
        return of_lists(self.forward.variant, operands, self.sizes, self.cuts[kernel], device)

    def _work_out_queries(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor | None, *_: Any) -> Launch:
        config = self.config["queries"]
        tma = dimensions(k, v) if config.tma and self.call.aligned else 0
        plan = make_plan(self.forward, config, "queries", tma, listed=self.listed)
        as_tma = {1: described(k, config.block_N, plan), 2: described(v, config.block_N, plan)} if plan.tma else {}
        programs = self.sizes.over_keys(self.forward, config.block_M)
        of_inputs = strides(q, k, v, do, do if o is None else o)
        constants = (self.scale, *programs.arguments, *of_inputs, plan)
        return Launch(queries_kernel, programs.grid, config, constants, as_tma)

    def _work_out_prepare(self, o: Tensor, do: Tensor, *_: Any) -> Launch:
        dv = self.forward.head_dim_v
        programs = self.sizes.of_queries(PREPARED_ROWS)
        natural = self.forward.dtype.itemsize == 4  # as TritonPlan.natural
        constants = *programs.arguments, *strides(o, do), PREPARED_ROWS, dv, padded(dv), natural
        return Launch(prepare_kernel, programs.grid, Config(0, 0, 4, 1), constants, {})

    def _work_out_keys(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *_: Any) -> Launch:
        config = self.config["keys"]
        # Always of four dimensions: with three this kernel, which has no register to spare, spills.
        tma = 4 if config.tma and self.call.aligned and dimensions(q, do) else 0
        plan = make_plan(self.forward, config, "keys", tma, self.call.needs[4:], listed=self.listed)
        as_tma = {0: described(q, config.block_M, plan), 3: described(do, config.block_M, plan)} if plan.tma else {}
        programs = self.sizes.over_queries(self.forward, config.block_N)
        constants = (self.scale, *programs.arguments, *strides(q, k, v, do), plan)
        return Launch(keys_kernel, programs.grid, config, constants, as_tma)
