"""tileattn.decode(backend="triton") as users call it, beside the reference of tests/tools/triton_kernels/decode.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import Bias, Causal, FixedSplit, SlidingWindow, SoftCap
from tileattn.call import cache_status
from tileattn.testing import assert_forward_accurate

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def no_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    yield
    tileattn.check_caches()


def decode(problem: Problem, page: int = 0, packed: bool = False, tail: int = 0, **given: Any) -> tuple[Tensor, Tensor]:
    """o and lse of a call of the user's; packed ones in the shapes of the reference."""
    inputs = problem.inputs(page, packed, tail)
    q = inputs.q[0] if packed else inputs.q
    ends = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(problem.q_lens)} if packed else {}
    o, lse = tileattn.decode(
        q, inputs.k_cache, inputs.v_cache, inputs.seqlens_k, page_table=inputs.page_table, sink=problem.sink,
        scale=problem.scale, return_lse=True, backend="triton", **ends, **given,
    )  # fmt: skip
    return (o[None], lse[None]) if packed else (o, lse)


@pytest.mark.slow_except("0-None", "16-FixedSplit(keys=128)", reason="0.5 s each in Triton's interpreter")
@pytest.mark.parametrize("splits", [None, 3, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_a_batch(page: int, splits: Any) -> None:
    problem = Problem([2] * 3, (200, 1, 63), mask=Causal() & SlidingWindow(90, 0), mods=(SoftCap(3.0),))
    got = decode(problem, page, splits=splits, mask=SlidingWindow(90, 0), score_mod=SoftCap(3.0))
    assert_forward_accurate("batch", got, *problem.expected())


@pytest.mark.slow_except("None", reason="0.5 s in Triton's interpreter")
@pytest.mark.parametrize("splits", [None, FixedSplit(128)], ids=str)
def test_packed(splits: Any) -> None:
    sink = torch.linspace(-1, 1, 6, device=DEVICE)
    problem = Problem((1, 9, 0, 20), (130, 9, 0, 65), mask=Causal(), sink=sink)
    got = decode(problem, 16, packed=True, tail=3, splits=splits)
    assert_forward_accurate("packed", got, *problem.expected(3, packed=True))


def test_a_tree_that_is_a_chain_equals_causal() -> None:
    problem = Problem([4] * 2, (130, 9), mask=Causal())
    chain = torch.ones(2, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    got = decode(problem, 16, tree_mask=chain, splits=2)
    assert_forward_accurate("chain", got, *problem.expected())


def test_a_tree() -> None:
    """Each row sees itself and the first of the call's own keys."""
    problem = Problem([3] * 2, (130, 9))
    tree = torch.eye(3, dtype=torch.bool, device=DEVICE)
    tree[:, 0] = True
    begin = torch.tensor([127, 6], device=DEVICE)

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= begin[b]) | (k == q)

    got = decode(problem, 16, tree_mask=tree.expand(2, 3, 3), splits=2)
    problem.mask = tileattn.FunctionMask(sees)
    assert_forward_accurate("tree", got, *problem.expected())


@pytest.mark.slow_except("True", reason="0.3 s in Triton's interpreter")
@pytest.mark.parametrize("packed", [False, True])
def test_a_bias_has_the_rows_of_the_call(packed: bool) -> None:
    """Row i of a bias is the call's row i, wherever that stands."""
    problem = Problem([3] * 2, (130, 9), mask=Causal())
    table = torch.randn(2, 6, 3, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    begin = torch.tensor([127, 6], device=DEVICE)
    got = decode(problem, 16, packed=packed, score_mod=Bias(table), splits=2)
    problem.mods = (lambda score, b, h, q, k: score + table[b, h, q - begin[b], k],)
    assert_forward_accurate("bias", got, *problem.expected(packed=packed))


def test_a_plan_holds_nothing_and_is_accepted() -> None:
    problem = Problem([1] * 2, (130, 9), mask=Causal())
    inputs = problem.inputs(16)
    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.seqlens_k)
    given = {"page_table": inputs.page_table, "scale": problem.scale, "backend": "triton"}
    plan = tileattn.decode_plan(*arguments, **given)
    assert plan.tensor is None
    out = torch.full((2, 1, 6, 12), torch.nan, dtype=torch.float16, device=DEVICE)
    o = tileattn.decode(*arguments, plan=plan, out=out, **given)
    assert o is out
    assert torch.equal(o, tileattn.decode(*arguments, **given))


def test_compiles_in_a_graph() -> None:
    """torch.compile sees one operator."""
    problem = Problem([1] * 2, (130, 9), mask=Causal())
    inputs = problem.inputs(16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q: Tensor, seqlens_k: Tensor) -> Tensor:
        return tileattn.decode(
            q, inputs.k_cache, inputs.v_cache, seqlens_k, page_table=inputs.page_table, backend="triton"
        )

    expected = tileattn.decode(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.seqlens_k, page_table=inputs.page_table, backend="triton"
    )
    assert torch.equal(step(inputs.q, inputs.seqlens_k), expected)


def test_what_it_does_not_run_is_an_error() -> None:
    problem = Problem([1] * 2, (130, 9))
    inputs = problem.inputs(16)
    q, k, v = (x.double() for x in inputs[:3])
    with pytest.raises(NotImplementedError, match=r"triton: dtype must be float16, bfloat16 or float32"):
        tileattn.decode(q, k, v, inputs.seqlens_k, page_table=inputs.page_table, backend="triton")
