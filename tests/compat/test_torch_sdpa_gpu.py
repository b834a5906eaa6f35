"""tileattn's versions of PyTorch's attention, on a GPU: ``pytest -m gpu tests/compat/test_torch_sdpa_gpu.py``.

It tests `tileattn.scaled_dot_product_attention`, and PyTorch's own function while tileattn is its flash implementation,
by the tolerance rule of `tileattn.testing`. Counters in the operators' functions show which calls reach tileattn.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

import tileattn
from tileattn import Causal, Mask, SlidingWindow
from tileattn.call.dropout import draw_seed, weight_of_kept
from tileattn.compat import torch_sdpa
from tileattn.testing import assert_accurate, dropout_mask, eager_attention, oracle_attention

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
SEED = 5
Attend = Callable[..., Tensor]


class Case(NamedTuple):
    """A call of SDPA; mask is the shape of attn_mask."""

    lengths: tuple[int, int] = (300, 300)
    heads: tuple[int, int] = (4, 4)
    dim: int = 64
    dtype: torch.dtype = BF16
    options: dict[str, Any] = {}  # noqa: RUF012
    mask: tuple[int, ...] | None = None
    boolean: bool = False
    layout: str = "bshd"  # in memory


# What PyTorch sends to flash attention.
FLASH = {
    "full": Case(),
    "full-cross": Case((100, 411)),
    "full-128-fp16": Case((333, 260), dim=128, dtype=FP16),
    "causal": Case(options={"is_causal": True}),
    "causal-128": Case((520, 520), dim=128, options={"is_causal": True}),
    "causal-256": Case((300, 300), dim=256, options={"is_causal": True}),
    "gqa": Case((333, 333), (8, 2), options={"is_causal": True, "enable_gqa": True}),
    "dim-59": Case(dim=59),
    "bhsd": Case((300, 300), dim=128, options={"is_causal": True}, layout="bhsd"),
    "scale": Case(options={"scale": 0.3}),
    "dropout": Case((333, 300), options={"dropout_p": 0.2}),
    "dropout-causal-128": Case(dim=128, options={"dropout_p": 0.2, "is_causal": True}),
}
# ... and what it does not.
CASES = FLASH | {
    "causal-more-keys": Case((200, 333), options={"is_causal": True}),
    "causal-more-queries": Case((333, 200), dim=128, options={"is_causal": True}),
    "dim-8": Case(dim=8),
    "mask": Case((200, 304), mask=(2, 4, 200, 304)),
    "mask-of-odd-keys": Case((200, 301), dim=128, mask=(1, 4, 200, 301)),
    "mask-of-keys": Case((200, 304), mask=(2, 1, 1, 304)),
    "mask-gqa": Case((200, 304), (8, 2), mask=(200, 304), options={"enable_gqa": True}),
    "boolean": Case((200, 304), mask=(2, 1, 200, 304), boolean=True),
    "boolean-of-odd-keys": Case((200, 301), dim=128, mask=(200, 301), boolean=True),
    "boolean-of-keys": Case((200, 301), mask=(2, 1, 1, 301), boolean=True),
}


class Problem:
    """A case's tensors: q, k, v (batch, heads, seqlen, head_dim), a mask, and do."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        (seqlen_q, seqlen_k), (heads, kv_heads) = case.lengths, case.heads
        self.q, self.k, self.v = (self.rows(n, h) for n, h in
                                  ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)))  # fmt: skip
        self.do = torch.randn_like(self.q)
        self.mask: Tensor | None = None
        if case.mask is not None:
            self.mask = torch.randn(case.mask, dtype=case.dtype, device=DEVICE)
            if case.boolean:
                self.mask = self.mask > 0
                if case.mask[-2] > 1:
                    self.mask[..., 3, :] = False  # a query that sees nothing
            else:
                self.mask.requires_grad_()

    def rows(self, seqlen: int, heads: int) -> Tensor:
        x = torch.randn(2, seqlen, heads, self.case.dim, dtype=self.case.dtype, device=DEVICE).transpose(1, 2)
        return (x.contiguous() if self.case.layout == "bhsd" else x).requires_grad_()

    def leaves(self) -> dict[str, Tensor]:
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        return leaves if self.mask is None or self.case.boolean else leaves | {"mask": self.mask}

    def call(self, attend: Attend) -> Tensor:
        torch.manual_seed(SEED)
        return attend(self.q, self.k, self.v, attn_mask=self.mask, **self.case.options)

    def gradients(self, o: Tensor) -> dict[str, Tensor]:
        leaves = self.leaves()
        # Once for each o: what torch.compile has compiled gives its buffers away.
        grads = torch.autograd.grad(o, list(leaves.values()), self.do.to(o.dtype))
        return dict(zip(leaves, grads))

    def standard(self) -> dict[str, Any]:
        """The call as the oracle takes it."""
        (seqlen_q, seqlen_k), options = self.case.lengths, self.case.options
        shift = seqlen_k - seqlen_q
        top_left = tileattn.FunctionMask(lambda b, h, q, k: k <= q - shift)
        mods, p, dropout = [], options.get("dropout_p", 0.0), None
        if self.mask is not None:
            added = self.mask
            if self.case.boolean:
                added = torch.zeros_like(added, dtype=torch.float64).masked_fill_(~added, -torch.inf)
            full = torch.broadcast_to(added, (2, self.case.heads[0], seqlen_q, seqlen_k))
            mods.append(lambda score, b, h, q, k: score + full[b, h, q - shift, k].to(score.dtype))
        if p > 0:
            torch.manual_seed(SEED)
            kept = dropout_mask(draw_seed(DEVICE), p, 2, self.case.heads[0], seqlen_q, seqlen_k)
            dropout = kept.double() * weight_of_kept(p)
        tensors = dict(zip("qkv", (x.transpose(1, 2) for x in (self.q, self.k, self.v))))
        mask = top_left if options.get("is_causal") else None
        return {**tensors, "mask": mask, "score_mods": mods, "scale": options.get("scale"), "dropout": dropout}


def check(name: str, problem: Problem, o: Tensor) -> None:
    """o and all gradients."""
    exact = oracle_attention(**problem.standard())[0].transpose(1, 2)
    eager = [run.transpose(1, 2) for run in eager_attention(**problem.standard())[0]]
    assert o.dtype == problem.case.dtype
    assert_accurate(f"o of {name}", o.detach(), exact.detach(), [run.detach() for run in eager])
    got, of_exact, of_eager = problem.gradients(o), problem.gradients(exact), [problem.gradients(run) for run in eager]
    for leaf, gradient in got.items():
        theirs = [run[leaf] for run in of_eager]
        assert_accurate(f"d{leaf} of {name}", gradient, of_exact[leaf].double(), theirs, gradient=True)


@pytest.mark.parametrize("name", CASES)
def test_tileattns_function(name: str) -> None:
    problem = Problem(CASES[name])
    check(name, problem, problem.call(tileattn.scaled_dot_product_attention))


def compiled_calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py; PyTorch's function needs no others."""
    yield from (functools.partial(with_gradients, case) for case in CASES.values())
    yield from (functools.partial(packed_with_gradients, mask) for mask in (None, Causal(), SlidingWindow(50, 0)))


def with_gradients(case: Case) -> None:
    problem = Problem(case)
    problem.gradients(problem.call(tileattn.scaled_dot_product_attention))


def packed_with_gradients(mask: Mask | None) -> None:
    leaves = [torch.empty(530, 4, 128, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.empty(5, dtype=torch.int32, device=DEVICE)
    o = tileattn.varlen_attention(*leaves, cu_seqlens, cu_seqlens, 313, 313, mask=mask)
    torch.autograd.grad(o, leaves, leaves[0])


# --- PyTorch's own function ---


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that arrive at tileattn."""
    names: list[str] = []
    for name in ("run_forward", "run_backward"):
        run = getattr(torch_sdpa.ops, name)

        def counted(*arguments: Any, _name: str = name, _run: Any = run, **options: Any) -> Any:
            names.append(_name)
            return _run(*arguments, **options)

        monkeypatch.setattr(torch_sdpa.ops, name, counted)
    return names


@pytest.fixture
def active() -> Iterator[None]:
    activate_flash_attention_impl("tileattn")
    yield
    restore_flash_attention_impl()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("name", FLASH)
def test_pytorchs_function(name: str, calls: list[str]) -> None:
    problem = Problem(FLASH[name])
    o = problem.call(torch.nn.functional.scaled_dot_product_attention)
    check(name, problem, o)
    assert calls == ["run_forward", "run_backward"]


@pytest.mark.usefixtures("active")
def test_what_flash_attention_does_not_take_goes_where_it_went(calls: list[str]) -> None:
    for name in ("mask", "boolean", "causal-more-keys"):
        problem = Problem(CASES[name])
        problem.gradients(problem.call(torch.nn.functional.scaled_dot_product_attention))
    assert calls == []


def test_restoring_undoes_it(calls: list[str]) -> None:
    problem, order = Problem(FLASH["causal-128"]), list(torch._C._get_sdp_priority_order())
    expected = problem.call(torch.nn.functional.scaled_dot_product_attention)
    order = list(torch._C._get_sdp_priority_order())  # PyTorch sets it with its first call
    activate_flash_attention_impl("tileattn")
    mine = problem.call(torch.nn.functional.scaled_dot_product_attention)
    assert calls == ["run_forward"]
    restore_flash_attention_impl()
    assert torch.equal(problem.call(torch.nn.functional.scaled_dot_product_attention), expected)
    assert calls == ["run_forward"]
    assert list(torch._C._get_sdp_priority_order()) == order
    torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)


def test_in_a_fresh_process() -> None:
    """PyTorch sets its order of backends, cuDNN first on some GPUs, with the first call: activation comes before it."""
    code = """
import torch, tileattn
from torch.nn.attention import activate_flash_attention_impl
from tileattn.compat import torch_sdpa
activate_flash_attention_impl("tileattn")
run, calls = torch_sdpa.ops.run_forward, []
torch_sdpa.ops.run_forward = lambda *x, **y: calls.append(1) or run(*x, **y)
q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
print(len(calls), "arrived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert "1 arrived" in done.stdout, done.stderr


@pytest.mark.usefixtures("active")
def test_under_torch_compile(calls: list[str]) -> None:
    for name in ("causal-128", "bhsd", "gqa"):
        problem = Problem(FLASH[name])
        compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention, fullgraph=True)
        check(name, problem, problem.call(compiled))
    assert calls.count("run_forward") == 3


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (50, 0)])
def test_pytorchs_packed_sequences(window_size: tuple[int, int], calls: list[str]) -> None:
    """As each sequence by itself."""
    torch.manual_seed(0)
    ends = [0, 200, 200, 217, 530]
    leaves = [torch.randn(ends[-1], 4, 128, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    got = varlen_attn(*leaves, cu_seqlens, cu_seqlens, 313, 313, window_size=window_size)
    do = torch.randn_like(got)
    of_got = torch.autograd.grad(got, leaves, do)
    assert calls == ["run_forward", "run_backward"]
    left, right = (None if size == -1 else size for size in window_size)
    parts = zip(*(x.split([200, 0, 17, 313]) for x in leaves))
    each = [tileattn.attention(*(x[None] for x in part), mask=SlidingWindow(left, right)) for part in parts]
    expected = torch.cat([o[0] for o in each])
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(of_got, torch.autograd.grad(expected, leaves, do), rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("active")
def test_nested_tensors(calls: list[str]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(530, 4, 128, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 200, 217, 530], device=DEVICE)
    nested = (torch.nested.nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in leaves)
    o = torch.nn.functional.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, do)
    assert calls == ["run_forward", "run_backward"]
    expected = tileattn.varlen_attention(*leaves, ends.int(), ends.int(), 313, 313, causal=True)
    torch.testing.assert_close(o, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, do), rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("active")
def test_in_a_cuda_graph() -> None:
    problem = Problem(FLASH["causal-128"])
    expected = problem.call(torch.nn.functional.scaled_dot_product_attention)
    gradients = problem.gradients(expected)
    static = Problem(FLASH["causal-128"])  # leaves that no graph of another stream holds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = torch.nn.functional.scaled_dot_product_attention(static.q, static.k, static.v, is_causal=True)
        again = dict(zip("qkv", torch.autograd.grad(o, (static.q, static.k, static.v), static.do)))
    graph.replay()
    assert torch.equal(o, expected)
    torch.testing.assert_close(again, gradients, rtol=0.02, atol=0.02)
