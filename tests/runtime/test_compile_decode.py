"""`decode` under torch.compile and torch.export, and its operator. Results equal eager's bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.api.test_decode import BATCH, CALLS, CAPACITY, HEADS, MAX_Q, ROWS, contiguous, ints, paged, random
from tests.runtime.test_compile import Compiled, assert_same
from tileattn import Bias, DecodePlan, FixedSplit, SlidingWindow, SoftCap, decode, decode_plan

TREE = torch.ones(BATCH, MAX_Q, MAX_Q, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tree_of(rows: int) -> Tensor:
    return TREE[:, :rows, :rows]


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda rows: {},
    "lse": lambda rows: {"return_lse": True},
    "window and sink": lambda rows: {"mask": SlidingWindow(3, 0), "sink": torch.linspace(-1, 1, HEADS)},
    "bias": lambda rows: {"score_mod": [SoftCap(3.0), Bias(random(1, HEADS, rows, CAPACITY + 1))]},
    "tree": lambda rows: {"tree_mask": tree_of(rows), "return_lse": True},
    "splits": lambda rows: {"splits": 2},
    "fixed": lambda rows: {"splits": FixedSplit(128)},
}


@pytest.mark.slow_except(
    "contiguous-splits",
    "paged-window and sink",
    "packed-tree",
    "packed-fixed",
    reason="each way and each option is in one of the others; 0.5 to 1.5 s each, in Dynamo",
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_serves_all_lengths(name: str, options: str) -> None:
    call = CALLS[name]()
    longest = call.pop("max_seqlen_q", None)
    given = OPTIONS[options](longest or ROWS)
    names = list(call)

    def function(*tensors: Tensor) -> Any:
        return decode(**dict(zip(names, tensors)), max_seqlen_q=longest, **given)

    compiled = Compiled(function)
    for lengths in (ints(5, 0, 11, 2), ints(1, 3, 7, 2), ints(0, 0, 0, 0)):
        call["seqlens_k"] = torch.minimum(lengths, ints(5, 0, 11, 2))
        compiled.check(*call.values())
    assert compiled.compilations == 1
    assert compiled.operators == ["tileattn.decode.default"] or compiled.operators == ["tileattn.decode"]


def test_sizes_may_change() -> None:
    compiled = Compiled(lambda q, k, v, lengths: decode(q, k, v, lengths, return_lse=True))
    for batch, rows, tokens in ((3, 5, 7), (4, 2, 9), (2, 6, 30)):
        q, k = random(batch, rows, HEADS, 16), random(batch, tokens, 2, 16, seed=1)
        compiled.check(q, k, k + 1, torch.full((batch,), tokens - 1, dtype=torch.int32))
    assert compiled.compilations == 1


def test_what_a_users_function_captures_may_change() -> None:
    call = contiguous()
    table = random(HEADS, CAPACITY)

    def function(table: Tensor, first: Tensor, q: Tensor) -> Any:
        return decode(
            **(call | {"q": q}),
            mask=lambda b, h, q, k: (k >= first[b]) | (k == q),
            score_mod=lambda s, b, h, q, k: s + table[h, k],
        )

    compiled = Compiled(function)
    for shift in range(3):
        compiled.check(table * shift, ints(0, shift, 4, 1), call["q"])
    assert compiled.compilations == 1


def test_a_plan_made_outside_serves_a_graph() -> None:
    call = paged()
    plan = decode_plan(**call)

    def function(plan: DecodePlan, splits: int | None, *tensors: Tensor) -> Tensor:
        return decode(*tensors[:4], page_table=tensors[4], plan=plan, splits=splits)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(plan, None, *call.values()), decode(**call))
    with pytest.raises(ValueError, match="plan was made for another call"):
        compiled(plan, 3, *call.values())


def test_a_plan_is_not_made_in_a_graph() -> None:
    call = paged()
    for refused in (
        lambda: torch.compile(lambda **call: decode_plan(**call), fullgraph=True, backend="aot_eager")(**call),
        lambda: make_fx(lambda *tensors: decode_plan(*tensors[:4], page_table=tensors[4]))(*call.values()),
    ):
        with pytest.raises(Exception, match="decode_plan is not traced: make the plan outside"):
            refused()


def test_out_is_written_by_a_graph() -> None:
    call = contiguous()
    out = torch.full((BATCH, ROWS, HEADS, 24), torch.nan)
    compiled = torch.compile(lambda out, **call: decode(**call, out=out), fullgraph=True, backend="aot_eager")
    assert_same(compiled(out, **call), decode(**call))
    assert_same(out, decode(**call))


def test_a_cache_is_written_and_read_in_one_graph() -> None:
    """As a step of a model: the cache is changed in place before it is read."""

    def step(q: Tensor, k: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
        lengths.add_(1)
        cache[torch.arange(cache.shape[0]), lengths.long() - 1] = k
        return decode(q, cache, cache, lengths)

    caches = [torch.full((2, 9, 2, 16), torch.nan) for _ in range(2)]
    counts = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        q, k = random(2, 1, HEADS, 16, seed=seed), random(2, 2, 16, seed=seed + 9)
        assert_same(compiled(q, k, caches[0], counts[0]), step(q, k, caches[1], counts[1]))
    assert counts[0].tolist() == [4, 4]


def test_exported() -> None:
    call = paged()

    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Any:
            return decode(q, k, v, lengths, page_table=table, mask=SlidingWindow(4, 0), return_lse=True)

    program = torch.export.export(Step(), tuple(call.values()))
    assert_same(program.module()(*call.values()), Step()(*call.values()))


def test_make_fx_and_fake_tensors_see_the_operator() -> None:
    call = contiguous()
    graph = make_fx(lambda *tensors: decode(*tensors, return_lse=True))(*call.values())
    assert "tileattn.decode.default" in {str(node.target) for node in graph.graph.nodes}
    assert_same(graph(*call.values()), decode(**call, return_lse=True))
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in call.items()}
        o, lse = decode(**fakes, return_lse=True)
        assert o.shape == (BATCH, ROWS, HEADS, 24)
        assert lse.shape == (BATCH, HEADS, ROWS)
        assert decode(**fakes).dtype == torch.float32


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_is_one_that_torch_accepts(name: str) -> None:
    call = CALLS[name]()
    longest = call.pop("max_seqlen_q", ROWS)
    q = call["q"][None] if name == "packed" else call["q"]
    places = (q, call["k_cache"], call["v_cache"], call["seqlens_k"], call.get("page_table"), call.get("cu_seqlens_q"))
    for return_lse in (True, False):
        arguments = (*places, None, "Causal()", [], [], [], 0.25, longest, 0, 0, return_lse)
        torch.library.opcheck(
            torch.ops.tileattn.decode.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


def test_gradients_raise_while_tracing() -> None:
    call = contiguous()
    call["q"].requires_grad_()
    with pytest.raises(Exception, match="decode has no gradients"):
        torch.compile(lambda **call: decode(**call), fullgraph=True, backend="aot_eager")(**call)
