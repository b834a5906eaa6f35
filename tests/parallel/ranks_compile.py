"""What ranks run for test_compile.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import tileattn
from tests.parallel.ranks_plan import drawn
from tileattn.parallel import Plan


class Block(nn.Module):
    """A transformer block; attention has a sink, a bias with a gradient, and a mask with numbers."""

    def __init__(self, plan: Plan, options: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.options = plan, options
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.sink, self.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1, 4, 1, plan.seqlen))
        self.window = tileattn.SlidingWindow(20)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).unbind(2)
        o, lse = self.plan.attention(
            q, k, v, causal=True, mask=self.window, score_mod=tileattn.Bias(self.bias), sink=self.sink, return_lse=True,
            **self.options,
        )  # fmt: skip
        x = x + self.out(o.flatten(2)) + lse.mean()
        return x + self.mlp(x)


def block(options: dict[str, Any]) -> None:
    """Compiled code has the bits of eager code: output and gradients, of two layers, with one graph."""
    plan = Plan(None, 45)
    torch.manual_seed(0)
    layers = nn.Sequential(Block(plan, options), Block(plan, options))
    x = plan.shard(drawn(45, 32)).requires_grad_()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    calls, results = plan._agreement.call, []
    for run in (layers, compiled, compiled):
        torch.manual_seed(3)
        y = run(x)
        leaves = [x, *layers.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert plan._agreement.call == calls + 6
    for result in results[1:]:
        for first, second in zip(results[0], result, strict=True):
            assert torch.equal(first, second)
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(compiled(x), results[0][0])


def tensors_of_a_mask() -> None:
    """Operands of the graph; only v requires a gradient, and only o has one."""
    plan = Plan(None, 45)
    mask = tileattn.Documents(torch.arange(45) // 7)
    q = plan.shard(drawn(45, 2, 8))
    v = q.clone().requires_grad_()

    def attend(v: Tensor) -> Tensor:
        return plan.attention(q, q, v, mask=mask, algorithm="ring", dropout_p=0.2)  # type: ignore[no-any-return]

    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(plan.rank)
        o = run(v)
        results.append((o, *torch.autograd.grad(o.sum(), v)))
    for first, second in zip(*results):
        assert torch.equal(first, second)


def wrong(rank: int) -> None:
    """In compiled code, too, the other ranks hear what one refuses. A shard of another length compiles new code."""
    plan = Plan(None, 40)
    x = torch.ones(1, plan.rows - (plan.rank == rank), 2, 8)
    torch.compile(lambda x: plan.attention(x, x, x), backend="aot_eager", fullgraph=True)(x)


def gone() -> None:
    plan = Plan(None, 40)
    x = torch.ones(1, plan.rows, 2, 8)
    number = plan._number
    del plan
    torch.ops.tileattn.parallel_forward(
        number, x, x, x, None, None, "", [], [], [], [], None, 0.0, False, False, None, "gather", None
    )


def captured(check: str) -> None:
    """A call in a capture, after the same one before it."""
    plan = Plan(None, 40, check=check)
    x = torch.ones(1, plan.rows, 2, 8)
    for name in ("before", "in the capture"):
        with patch("tileattn.parallel.plan.is_capturing", lambda x, name=name: name != "before"):
            plan.attention(x, x, x)
    with patch("tileattn.parallel.plan.is_capturing", lambda x: True):
        plan.attention(x, x, x, causal=True)


def captured_by_one(rank: int) -> None:
    """A new call, which one rank makes in a capture."""
    plan = Plan(None, 40)
    x = torch.ones(1, plan.rows, 2, 8)
    with patch("tileattn.parallel.plan.is_capturing", lambda x: plan.rank == rank):
        plan.attention(x, x, x)
