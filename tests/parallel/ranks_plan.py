"""What ranks run for test_plan.py, test_windows.py and test_documents.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tileattn
from tests.parallel.ranks_conformance import on_cpu, poisoned_shard
from tileattn.parallel import Plan
from tileattn.testing import ConformanceCase, build, output_gradients, poisoned_memory


def drawn(seqlen: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """(1, seqlen, *shape), equal on all ranks."""
    return torch.randn(1, seqlen, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there_and_back(seqlen: int, layout: str) -> dict[str, Any]:
    """Shards, whole tensors again, and the gradient of that way."""
    plan = Plan(None, seqlen, layout=layout)
    x, positions = drawn(seqlen, 3).requires_grad_(), torch.arange(seqlen)
    shard, mine = plan.shard(x, positions)
    single = plan.shard(positions)
    whole, again = plan.unshard(shard * 2, mine)
    (whole * drawn(seqlen, 3, seed=1)).sum().backward()
    assert torch.equal(mine, plan.positions)
    assert torch.equal(mine, plan.tokens)
    assert torch.equal(single, mine)
    assert torch.equal(whole, 2 * x)
    assert torch.equal(again, positions)
    expected = torch.zeros_like(x)
    expected[:, mine] = 2 * drawn(seqlen, 3, seed=1)[:, mine]
    assert torch.equal(x.grad, expected)
    return {"positions": mine, "rows": plan.rows}


def bits(options: dict[str, Any], seqlen: int, dtype: torch.dtype, mask: Any) -> dict[str, Tensor]:
    """Outputs and gradients of this rank; and o and lse of one device, cut to this rank's rows."""
    plan = Plan(None, seqlen)
    whole = [drawn(seqlen, heads, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2)]
    sink = drawn(1, 4, seed=9)[0, 0].requires_grad_()
    rows = [plan.shard(x).requires_grad_() for x in whole]
    o, lse = plan.attention(*rows, mask=mask, sink=sink, return_lse=True, **options)
    (o * plan.shard(drawn(seqlen, 4, 16, seed=7, dtype=dtype))).sum().backward()
    names = ("o", "lse", "dq", "dk", "dv", "dsink")
    found = dict(zip(names, (o.detach(), lse.detach(), *(x.grad for x in rows), sink.grad)))
    o, lse = tileattn.attention(*whole, mask=mask, sink=sink.detach(), return_lse=True)
    return found | {"one_o": plan.shard(o), "one_lse": plan.shard(lse.transpose(1, 2)).transpose(1, 2)}


def traffic(seqlen: int, layout: str, mask: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank received in a forward pass, and in both."""
    plan = Plan(None, seqlen, layout=layout)
    rows = [torch.ones(1, plan.rows, 2, 8, requires_grad=True) for _ in range(3)]
    o = plan.attention(*rows, mask=mask, **options)
    forward = plan.traffic.received
    o.sum().backward()
    return forward, plan.traffic.received


def documents(case: ConformanceCase, options: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A packed case by a plan with documents."""
    arguments = build(case, device)
    do, dlse = output_gradients(case, arguments)
    assert arguments.packed is not None
    plan = Plan(None, arguments.q.shape[1], documents=arguments.packed.cu_seqlens_q, mask=arguments.mask)
    rows = [poisoned_shard(plan, x.detach()).requires_grad_() for x in (arguments.q, arguments.k, arguments.v)]
    others = {name: x for name, x in arguments.leaves().items() if name not in ("dq", "dk", "dv")}
    with poisoned_memory():
        o, lse = plan.attention(
            *rows, mask=arguments.mask, score_mod=arguments.score_mods or None, sink=arguments.sink,
            scale=arguments.scale, return_lse=True, **options,
        )  # fmt: skip
        gradients = [poisoned_shard(plan, do)]
        if dlse is not None:
            gradients.append(poisoned_shard(plan, dlse, 2))
        torch.autograd.backward([o, lse][: len(gradients)], gradients)
    found = dict(zip(("dq", "dk", "dv"), (x.grad for x in rows))) | {name: x.grad for name, x in others.items()}
    return on_cpu({"tokens": plan.tokens, "positions": plan.positions, "o": o, "lse": lse, "gradients": found})


def local_bias(seqlen: int, algorithm: str) -> None:
    """A bias of local rows gives what the whole bias gives, and its gradient is that one's rows."""
    plan = Plan(None, seqlen)
    q, k, v = (plan.shard(drawn(seqlen, heads, 8, seed=heads)) for heads in (4, 2, 2))
    bias = drawn(4, seqlen, seqlen, seed=3).requires_grad_()
    local = bias.detach()[:, :, plan.tokens].requires_grad_()
    outputs = [
        plan.attention(q, k, v, causal=True, score_mod=tileattn.Bias(x), algorithm=algorithm) for x in (bias, local)
    ]
    for o in outputs:
        (o * plan.shard(drawn(seqlen, 4, 8, seed=5))).sum().backward()
    assert bias.grad is not None
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(local.grad, bias.grad[:, :, plan.tokens])


def raised(make: Callable[..., Any] | str, *arguments: Any) -> str:
    """The text of what a function of this module raises."""
    try:
        globals()[make](*arguments) if isinstance(make, str) else make(*arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_plan(arguments: Sequence[Any], options: dict[str, Any]) -> None:
    Plan(*arguments, **options)


def bad_call(
    options: dict[str, Any], rows: int | None = None, heads: int = 4, dtype: torch.dtype = torch.float32
) -> None:
    plan = Plan(None, 37, node=options.pop("node", None))
    q, k = (torch.ones(1, plan.rows if rows is None else rows, each, 8, dtype=dtype) for each in (heads, 2))
    plan.attention(q, k, k, **options)


def bad_shard(what: str) -> None:
    plan = Plan(None, 37)
    {
        "none": lambda: plan.shard(),
        "list": lambda: plan.shard([1, 2]),
        "length": lambda: plan.shard(torch.ones(2, 36)),
        "unshard": lambda: plan.unshard(torch.ones(2, 37)),
        "scalar": lambda: plan.shard(torch.ones(())),
    }[what]()


def meshes(seqlen: int) -> tuple[str, list[Tensor]]:
    """Two groups of two ranks at once, each with a sequence of its own; the text of the error of a mesh of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    mine = mesh.get_local_rank("data")
    plan = Plan(mesh["context"], seqlen)
    assert (plan.ranks, plan.rank) == (2, mesh.get_local_rank("context"))
    x = drawn(seqlen, 4, 16, seed=20 + mine, dtype=torch.float64)
    shard = plan.shard(x).requires_grad_()
    # Ulysses: o has the bits of one device at any length.
    o = plan.attention(shard, shard, shard, causal=True, algorithm="ulysses")
    (gradient,) = torch.autograd.grad(o.square().sum(), shard)
    x.requires_grad_()
    whole = tileattn.attention(x, x, x, causal=True)
    (expected,) = torch.autograd.grad(whole.square().sum(), x)
    same = Plan(mesh["context"].get_group(), seqlen)
    assert torch.equal(same.attention(shard, shard, shard, causal=True, algorithm="ulysses"), o)
    return raised(Plan, mesh, seqlen), [o.detach(), plan.shard(whole.detach()), gradient, plan.shard(expected)]


def beside_one_device(options: dict[str, Any], seqlen: int, mask: Any) -> dict[str, list[Tensor]]:
    """For each output and gradient: this rank's, and one device's rows of it in float64 and in float32."""
    plan = Plan(None, seqlen, node=2)
    found: list[list[Tensor]] = []
    for dtype, on_one in ((torch.float32, False), (torch.float64, True), (torch.float32, True)):
        whole = [drawn(seqlen, heads, 16, seed=heads + 1).to(dtype).requires_grad_() for heads in (4, 2, 2)]
        do = drawn(seqlen, 4, 16, seed=7).to(dtype)
        if not on_one:
            rows = [poisoned_shard(plan, x.detach()).requires_grad_() for x in whole]
            with poisoned_memory():
                o = plan.attention(*rows, mask=mask, **options)
                o.backward(plan.shard(do))
            found.append([o.detach(), *(x.grad for x in rows if x.grad is not None)])
        else:
            o = tileattn.attention(*whole, mask=mask)
            o.backward(do)
            found.append([plan.shard(x) for x in (o.detach(), *(x.grad for x in whole if x.grad is not None))])
    return dict(zip(("o", "dq", "dk", "dv"), ([*each] for each in zip(*found))))
