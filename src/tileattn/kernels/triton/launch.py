"""Launches: outputs, workspaces, descriptors, grids."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...call import AttentionCall, BackwardCall, Gradients
from ...variant import Operands
from .backward import keys_kernel, prepare_kernel, queries_kernel
from .config import Config, default
from .forward import forward_kernel
from .gradients import add_up, paths, workspace
from .plan import Plan
from .plans import make_plan, scaled_variant
from .shared import padded

PREPARED_ROWS = 64  # of a program of prepare_kernel


class Forward:
    """The forward pass for tensors of one shape; see :class:`tileattn.dispatch.Forward`."""

    def __init__(self, call: AttentionCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> None:
        self.call, self.scale = scaled_variant(call, scale), scale
        batch, self.seqlen_q, self.heads, _ = q_shape
        _, self.seqlen_k, kv_heads, _ = k_shape
        self.batch, self.group = batch, self.heads // kv_heads
        self.config = default("forward", self.call, self.seqlen_k)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, operands: Operands
    ) -> tuple[Tensor, Tensor | None]:
        call, config = self.call, self.config
        o = q.new_empty(self.batch, self.seqlen_q, self.heads, call.head_dim_v)
        lse = q.new_empty(self.batch, self.heads, self.seqlen_q, dtype=torch.float32) if call.return_lse else None
        plan = make_plan(call, config, "forward", _dimensions(q, k, v) if config.tma else 0)
        with _on(q.device):
            _launch(
                forward_kernel, self.batch * self.heads, self.seqlen_q, config.block_M, config,
                _passed(q, config.block_M, plan) if plan.tma_q else q.detach(),
                _passed(k, config.block_N, plan),
                _passed(v, config.block_N, plan),
                _passed(o, config.block_M, plan) if plan.tma_q else o,
                lse, None if sink is None else sink.detach(), *_operand_tuples(operands), self.scale,
                self.seqlen_q, self.seqlen_k, self.heads, self.group, *map(_strides, (q, k, v)), plan,
            )  # fmt: skip
        return o, lse


class Backward:
    """The backward pass for tensors of one shape; see :class:`tileattn.dispatch.Backward`."""

    def __init__(self, call: BackwardCall, q_shape: torch.Size, k_shape: torch.Size, scale: float) -> None:
        self.call, self.scale = call, scale
        self.forward = forward = scaled_variant(call.forward, scale)
        self.batch, self.seqlen_q, self.heads, _ = q_shape
        _, self.seqlen_k, self.kv_heads, _ = k_shape
        self.group = self.heads // self.kv_heads
        self.config = {kernel: default(kernel, forward) for kernel in ("keys", "queries")}
        self.paths = paths(forward.variant, call.needs[4:])
        self.wants_keys = call.needs[1] or call.needs[2] or bool(self.paths)
        # Atomic operations depend on the order of programs; and where only dq is asked for, it has a kernel of its own.
        fused = self.config["keys"].fused and call.needs[0] and self.wants_keys and not call.deterministic
        self.config["keys"] = self.config["keys"]._replace(fused=fused)

    def __call__(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        sink: Tensor | None,
        operands: Operands,
    ) -> Gradients:
        needs = self.call.needs
        with _on(q.device):
            lse2, delta = self._prepare(do, dlse, o, lse)
            inputs = (q, k, v, do, lse2, delta)
            dq, dk, dv, parts = self._keys(inputs, operands) if self.wants_keys else (None, None, None, ())
            if needs[0] and dq is None:
                dq = self._queries(inputs, operands)
        offset = self.seqlen_k - self.seqlen_q
        return Gradients(
            dq,
            dk if needs[1] else None,
            dv if needs[2] else None,
            _sink_gradient(sink, lse, delta) if sink is not None and needs[3] else None,
            tuple(
                add_up(index, self.paths, parts, operands, offset) if need else None
                for index, need in enumerate(needs[4:])
            ),
        )

    def _prepare(self, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        lse2, delta = torch.empty_like(lse, memory_format=torch.contiguous_format), torch.empty_like(lse)
        dv = self.forward.head_dim_v
        _launch(
            prepare_kernel, self.batch * self.heads, self.seqlen_q, PREPARED_ROWS, Config(0, 0, 4, 1),
            o, do, lse.contiguous(), None if dlse is None else dlse.contiguous(), lse2, delta,
            self.seqlen_q, self.heads, _strides(o), _strides(do), PREPARED_ROWS, dv, padded(dv),
        )  # fmt: skip
        return lse2, delta

    def _keys(
        self, inputs: tuple[Tensor, ...], operands: Operands
    ) -> tuple[Tensor | None, Tensor, Tensor, tuple[Tensor, ...]]:
        q, k, v, do, lse2, delta = inputs
        config = self.config["keys"]
        # Always of four dimensions: with three this kernel, which has no register to spare, spills.
        tma = 4 if config.tma and self.call.aligned and _can_describe(q, k, v, do) else 0
        plan = make_plan(self.forward, config, "keys", tma, self.call.needs[4:])
        dk, dv = (x.new_empty(x.shape) for x in (k, v))
        parts = tuple(workspace(path, q, k) for path in self.paths)
        dq_sum = self._dq_sum(q) if config.fused else None
        _launch(
            keys_kernel, self.batch * self.kv_heads, self.seqlen_k, config.block_N, config,
            _passed(q, config.block_M, plan), k.detach(), v.detach(), _passed(do, config.block_M, plan),
            lse2, delta, dk, dv, dq_sum if dq_sum is None else _passed_rows(dq_sum, config.block_M, plan), parts,
            *_operand_tuples(operands), self.scale,
            self.seqlen_q, self.seqlen_k, self.heads, self.kv_heads, self.group,
            *map(_strides, (q, k, v, do)), plan,
        )  # fmt: skip
        return None if dq_sum is None else self._scaled(q, dq_sum), dk, dv, parts

    def _dq_sum(self, q: Tensor) -> Tensor:
        """Where the kernel adds up dq: whole tiles of each head, one after another."""
        rows = self.config["keys"].block_M
        tiles = self.batch * self.heads * -(-self.seqlen_q // rows)
        return q.new_zeros(tiles * rows, padded(q.shape[3]), dtype=torch.float32)

    def _scaled(self, q: Tensor, dq_sum: Tensor) -> Tensor:
        rows = dq_sum.view(self.batch, self.heads, -1, dq_sum.shape[1])[:, :, : self.seqlen_q, : q.shape[3]]
        return torch.mul(rows.transpose(1, 2), self.scale, out=q.new_empty(q.shape))

    def _queries(self, inputs: tuple[Tensor, ...], operands: Operands) -> Tensor:
        q, k, v, do, lse2, delta = inputs
        config = self.config["queries"]
        tma = _dimensions(q, k, v, do) if config.tma and self.call.aligned else 0
        plan = make_plan(self.forward, config, "queries", tma)
        dq = q.new_empty(q.shape)
        _launch(
            queries_kernel, self.batch * self.heads, self.seqlen_q, config.block_M, config,
            q.detach(), _passed(k, config.block_N, plan), _passed(v, config.block_N, plan), do.detach(),
            lse2, delta, dq, *_operand_tuples(operands), self.scale,
            self.seqlen_q, self.seqlen_k, self.heads, self.group, *map(_strides, (q, k, v, do)), plan,
        )  # fmt: skip
        return dq


def _launch(kernel: Any, heads: int, seqlen: int, rows: int, config: Config, *arguments: Any) -> None:
    """One program for each tile of `rows` of each head; nothing where there is none."""
    programs = -(-seqlen // rows) * heads
    if programs:
        kernel[(programs,)](*arguments, num_warps=config.num_warps, num_stages=config.num_stages)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _passed(x: Tensor, rows: int, plan: Plan) -> Any:
    """A tensor as the kernels take it, which read it in tiles of `rows`."""
    x = x.detach()
    if not plan.tma:
        return x
    batch, seqlen, heads, head_dim = x.shape
    if plan.tma == 3:
        return TensorDescriptor(x, [batch, seqlen, heads * head_dim], [*x.stride()[:2], 1], [1, rows, head_dim])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, padded(head_dim)])


def _passed_rows(x: Tensor, rows: int, plan: Plan) -> Any:
    """A matrix, likewise."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]]) if plan.tma else x


def _can_describe(*tensors: Tensor) -> bool:
    """Whether tensors, which are aligned, have descriptors: these cannot step by 0, nor be empty."""
    return all(x.numel() and 0 not in x.stride() for x in tensors)


def _dimensions(*tensors: Tensor) -> int:
    """Of these tensors' descriptors: three where the heads of a position lie side by side, else four; 0 for none."""
    if not _can_describe(*tensors):
        return 0
    return 3 if all(x.stride(2) == x.shape[3] == padded(x.shape[3]) for x in tensors) else 4


def _operand_tuples(operands: Operands) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A variant's operands as expressions.py takes them: (pointer, sizes, strides) of each tensor, and numbers."""
    tensors: list[Any] = []
    for tensor in operands.tensors:
        tensors += [tensor.detach(), *tensor.shape, *tensor.stride()]
    return tuple(tensors), (*operands.ints, *operands.floats)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Its probability times (0 - delta), summed over batch and rows: its value is zero, and so is its dP.

    A sink of -inf has no probability, also in a row that sees no key, where lse is -inf as well.
    """
    p = torch.exp(sink.detach().float()[None, :, None] - lse)
    p = torch.where(lse == -torch.inf, 0.0, p)
    return -(p * delta).sum(dim=(0, 2)).to(sink.dtype)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
