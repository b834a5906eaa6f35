"""Blocks that share the heads of a group, in the generic schedule: code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tvm import arith, tirx

from tileattn import Causal
from tileattn.call.facts import AttentionCall, BackwardCall, Packed, sizes
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch as backend
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.kernels import kernel_of
from tileattn.kernels.tilelang.backward.library import Kernels, kernel_names
from tileattn.kernels.tilelang.backward.places import heads_of_block
from tileattn.kernels.tilelang.backward.shares.add import add_kernel
from tileattn.kernels.tilelang.backward.shares.waves import heads_of_share
from tileattn.kernels.tilelang.packed import plan as packed_launch
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel
from tileattn.testing import poisoned_memory
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Heads, head dim, lengths of the sequences (one for a dense call), shares, causal, deterministic.
CASES = {
    "3/1-d16": ((3, 1), 16, [70], 2, True, False),
    "28/4-d64": ((28, 4), 64, [70], 3, False, False),
    "6/1-d128": ((6, 1), 128, [70], 3, True, False),
    "6/1-d64-packed": ((6, 1), 64, [70, 0, 13], 4, True, False),
    "6/2-d64-deterministic": ((6, 2), 64, [67], 3, False, True),
    "6/2-d16-packed-deterministic": ((6, 2), 16, [5, 66], 2, False, True),
}


def _emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    @functools.cache
    def kernels(call: BackwardCall, config: Any) -> Kernels:
        own = Path(tempfile.mkdtemp(dir=folder))  # two main kernels have one name
        by_name = {name: Kernel(kernel_of(call, name, config or default(call)), own) for name in kernel_names(call)}
        return Kernels(by_name["prepare"], by_name["main"], by_name.get("finish"), by_name.get("queries"))

    monkeypatch.setattr(backend, "backward_kernels", kernels)
    monkeypatch.setattr(backend, "main_kernel", lambda call, config: kernels(call, config).main)
    monkeypatch.setattr(
        backend, "add_shares", functools.cache(lambda call: Kernel(add_kernel(call.forward.dtype), folder))
    )


def _gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) of one sequence, (rows, heads, head_dim), in float64 from the formulas."""
    group = q.shape[1] // k.shape[1]
    q, k, v, do = (x.double().transpose(0, 1) for x in (q, k, v, do))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[2])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(s.shape[2] - s.shape[1] + 1), -math.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    ds = p * (do @ v.mT - (do * (p @ v)).sum(-1, keepdim=True)) / math.sqrt(q.shape[2])
    dk, dv = ((x.mT @ y).unflatten(0, (-1, group)).sum(1) for x, y in ((ds, q), (p, do)))
    o, dq, dk, dv = (x.transpose(0, 1) for x in (p @ v, ds @ k, dk, dv))
    return o, lse, dq, dk, dv


@pytest.mark.slow  # of each case four kernels are generated and compiled, in 10 seconds and more
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (heads, kv_heads), dim, lengths, shares, causal, deterministic = CASES[name]
    _emulated(monkeypatch, tmp_path)
    torch.manual_seed(0)
    total = sum(lengths)
    q, do = (torch.randn(total, heads, dim).bfloat16() for _ in range(2))
    k, v = (torch.randn(total, kv_heads, dim).bfloat16() for _ in range(2))
    cut = [x.split(lengths) for x in (q, k, v, do)]
    parts = [_gradients(*its, causal) for its in zip(*cut, strict=True)]
    o, lse, *expected = (torch.cat(x, 1 if number == 1 else 0) for number, x in enumerate(zip(*parts)))

    packed, shapes = None, (q[None].shape, k[None].shape)
    if len(lengths) > 1:
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = Packed(bounds, bounds, max(lengths), max(lengths))
        shapes = sizes(q[None], k[None], packed)
        plan = Kernel(plan_kernel(ARCH), tmp_path)
        monkeypatch.setattr(packed_launch, "plan_function", lambda arch: plan)
    variant, _ = encode(Causal() if causal else None, ())
    forward = AttentionCall(torch.bfloat16, dim, dim, variant, needs_grad=True, arch=ARCH, packed=packed is not None)
    call = BackwardCall(forward, (True, True, True, False), False, deterministic)
    run: Callable[..., Any] = backend.prepare_backward_with(None, call, *shapes, dim**-0.5, shares)
    given = Inputs(q[None], k[None], v[None], None, Operands([], [], []), None, packed)
    with poisoned_memory():
        got = run(given, o.bfloat16()[None].contiguous(), lse.float()[None].contiguous(), do[None], None)
        again = run(given, o.bfloat16()[None].contiguous(), lse.float()[None].contiguous(), do[None], None)
    for index, gradient in enumerate(expected):
        error = (got[index][0].double() - gradient).norm() / gradient.norm()
        assert error < 0.01, (index, error)  # 16-bit P, dS and results: 0.003; a head left out: 0.1 and more
        assert torch.equal(got[index], again[index])


@pytest.mark.slow  # as above
@pytest.mark.parametrize(("whole_keys", "causal"), [(64, False), (50, False), (64, True)])
def test_gradients_where_the_last_keys_alone_are_shared(
    whole_keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """37 queries of 6 heads, 110 keys of 2."""
    _emulated(monkeypatch, tmp_path)
    torch.manual_seed(0)
    q, do = (torch.randn(37, 6, 64).bfloat16() for _ in range(2))
    k, v = (torch.randn(110, 2, 64).bfloat16() for _ in range(2))
    o, lse, *expected = _gradients(q, k, v, do, causal)
    variant, _ = encode(Causal() if causal else None, ())
    call = BackwardCall(
        AttentionCall(torch.bfloat16, 64, 64, variant, needs_grad=True, arch=ARCH), (True, True, True, False)
    )
    run = backend.prepare_backward_with(None, call, q[None].shape, k[None].shape, 0.125, 3, whole_keys)
    given = Inputs(q[None], k[None], v[None], None, Operands([], [], []), None, None)
    with poisoned_memory():
        got = run(given, o.bfloat16()[None].contiguous(), lse.float()[None].contiguous(), do[None], None)
    for index, gradient in enumerate(expected):
        error = (got[index][0].double() - gradient).norm() / gradient.norm()
        assert error < 0.01, (index, error)


def test_parts_are_added_up_in_float32(tmp_path: Path) -> None:
    """Two blocks have elements of dk, and one of dv; their last threads have none."""
    torch.manual_seed(0)
    parts = torch.randn(2, 11, 3, 24, 8), torch.randn(2, 11, 3, 5, 8)
    sums = torch.zeros(2, 14, 24, 8, dtype=torch.bfloat16), torch.zeros(2, 14, 5, 8, dtype=torch.bfloat16)
    with poisoned_memory():
        Kernel(add_kernel(torch.bfloat16), tmp_path)(*parts, *sums, 3)
    for x, total in zip(parts, sums, strict=True):
        assert torch.equal(total[:, 3:], (x[:, :, 0] + x[:, :, 1] + x[:, :, 2]).bfloat16())
        assert not total[:, :3].any()  # keys without parts stay as they were


def _value(expression: Any) -> int:
    return int(arith.Analyzer().simplify(expression))


@pytest.mark.parametrize(("group", "shares"), [(7, 3), (8, 3), (6, 2), (5, 5)])
def test_each_head_has_one_block(group: int, shares: int) -> None:
    kv_heads = 2
    arg = SimpleNamespace(
        kv_heads=tirx.IntImm("int32", kv_heads),
        share_heads=tirx.IntImm("int32", shares * kv_heads),
        heads_per_kv_head=tirx.IntImm("int32", group),
    )
    of_kv_head: list[list[int]] = [[] for _ in range(kv_heads)]
    counts = []
    for number in range(shares * kv_heads):
        its = heads_of_block(arg, tirx.IntImm("int32", number))
        first, count = _value(its.first_head), _value(its.heads)
        of_kv_head[_value(its.kv_head)] += range(first, first + count)
        counts.append(count)
    assert of_kv_head == [list(range(h * group, (h + 1) * group)) for h in range(kv_heads)]
    assert counts == [heads_of_share(group, shares, number // kv_heads) for number in range(shares * kv_heads)]
