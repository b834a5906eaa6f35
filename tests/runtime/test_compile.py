"""torch.compile, torch.export and the operator that they see. Results equal eager's bit for bit: one backend runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import tileattn.math as tm
from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, SlidingWindow, SoftCap, attention, quantize_fp8
from tileattn.variant.key import encode

HEADS = 4
SLOPES, SINK = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([0.0, 1.0, -1.0, 2.0])
OUTSIDE = Documents(torch.tensor([0, 0, 0, 1, 1, 2, 2]))
# torch.compile specialises sizes 0 and 1, and takes sizes that are equal in the first call to be equal for ever: batch,
# heads and lengths all differ in it.
LENGTHS = [(5, 7), (9, 7), (3, 7)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def qkv(seqlen_q: int = 5, seqlen_k: int = 7, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, seqlen_q, HEADS, 8),
        random(batch, seqlen_k, 2, 8, seed=1),
        random(batch, seqlen_k, 2, 16, seed=2),
    )


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Compiled:
    """A function under torch.compile with dynamic shapes, that counts how often it is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.counter = CompileCounterWithBackend("aot_eager")
        self.compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=self.counter)

    @property
    def compilations(self) -> int:
        """Graphs that compute something; Dynamo also compiles an empty one."""
        return sum(any(node.op == "call_function" for node in graph.graph.nodes) for graph in self.counter.graphs)

    @property
    def operators(self) -> list[str]:
        nodes = [node for graph in self.counter.graphs for node in graph.graph.nodes]
        return [str(node.target) for node in nodes if "tileattn" in str(node.target)]

    def check(self, *arguments: Any) -> None:
        """Calls once more with these arguments; the result must equal eager's."""
        assert_same(self.compiled(*arguments), self.function(*arguments))


def user_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return tm.where(q > k, score * 0.5, score + h)


def user_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k + h) % 3 != 0


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, layout="bhsd", causal=True, return_lse=True)


@dataclass(frozen=True, eq=False)
class CompiledBand(Mask):
    """A user's mask, with a number and a tensor."""

    width: int
    heads: Tensor

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < self.width) | (tm.load(self.heads, h) == 0)


def shifted(by: float) -> Callable[..., Any]:
    return lambda score, b, h, q, k: score + by * k


SHIFTED = shifted(0.5)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "plain": attention,
    "lse": functools.partial(attention, return_lse=True),
    "causal": functools.partial(attention, causal=True),
    "bhsd": heads_first,
    "documents outside": lambda q, k, v: attention(q, k, v, mask=OUTSIDE),
    "mods and sink": lambda q, k, v: attention(q, k, v, score_mod=[ALiBi(SLOPES), SoftCap(5.0)], sink=SINK),
    "composition": lambda q, k, v: attention(q, k, v, mask=PrefixLM(3) | SlidingWindow(2, None), causal=True),
    "user score": lambda q, k, v: attention(q, k, v, score_mod=user_score),
    "captured number": lambda q, k, v: attention(q, k, v, score_mod=SHIFTED),
    "user mask": lambda q, k, v: attention(q, k, v, mask=user_mask, causal=True),
    "lambda": lambda q, k, v: attention(q, k, v, mask=lambda b, h, q, k: (k + h) % 2 == 0),
    "user class": lambda q, k, v: attention(q, k, v, mask=CompiledBand(3, SINK.int())),
    "scale": lambda q, k, v: attention(q, k, v, scale=0.3, backend="torch"),
}


@pytest.mark.slow_except("bhsd", "mods and sink", "composition", "user class", reason="1 s each, in Dynamo")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_all_lengths(name: str) -> None:
    compiled = Compiled(FUNCTIONS[name])
    for seqlen_q, seqlen_k in LENGTHS:
        compiled.check(*qkv(seqlen_q, seqlen_k))
    if name != "documents outside":  # whose length is that of its ids
        compiled.check(*qkv(6, 11, batch=5))
    assert compiled.compilations == 1
    assert compiled.operators == ["tileattn.forward.default"]


CHANGING: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "window": (lambda q, k, v, x: attention(q, k, v, mask=SlidingWindow(x, x + 1)), [3, 2, 4, 6]),
    "prefix": (lambda q, k, v, x: attention(q, k, v, mask=PrefixLM(x)), [3, 2, 4, 6]),
    "prefix tensor": (
        lambda q, k, v, x: attention(q, k, v, mask=PrefixLM(x)),
        [torch.tensor(p) for p in ([1, 5, 0], [3, 3, 2])],
    ),
    "user class": (lambda q, k, v, x: attention(q, k, v, mask=CompiledBand(x, SINK.int())), [3, 2, 4]),
    "documents": (
        lambda q, k, v, x: attention(q, k, v, mask=Documents(x) & Causal()),
        [torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 3, 5, 3, 3, 1, 1], [0] * 7]), torch.arange(21).view(3, 7) // 3],
    ),
    "slopes": (lambda q, k, v, x: attention(q, k, v, score_mod=ALiBi(x)), [SLOPES, SLOPES * 2]),
    "bias": (
        lambda q, k, v, x: attention(q, k, v, score_mod=Bias(x)),
        [random(1, 4, 5, 7), random(1, 4, 5, 7, seed=3)],
    ),
    "sink": (lambda q, k, v, x: attention(q, k, v, sink=x, return_lse=True), [SINK, -SINK]),
}  # fmt: skip


@pytest.mark.slow_except("prefix tensor", "user class", "bias", reason="1 to 3 s each, in Dynamo")
@pytest.mark.parametrize("name", CHANGING)
def test_values_that_change_compile_nothing(name: str) -> None:
    function, values = CHANGING[name]
    compiled, results = Compiled(function), []
    for value in values:
        compiled.check(*qkv(), value)
        results.append(compiled.compiled(*qkv(), value))
    assert compiled.compilations == 1
    assert not all(str(results[0]) == str(result) for result in results[1:])


@pytest.mark.slow_except("softcap", reason="2 s in Dynamo")
@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, x: attention(q, k, v, score_mod=SoftCap(x)),
        lambda q, k, v, x: attention(q, k, v, scale=x, causal=True),
    ],
    ids=["softcap", "scale"],
)
def test_floats_may_change(function: Callable[..., Any]) -> None:
    """How often torch.compile compiles for floats is its own choice; what counts is the result."""
    compiled = Compiled(function)
    for value in (0.5, 2.0, 0.25, 1.5):
        compiled.check(*qkv(), value)


@pytest.mark.slow(reason="2 s in Dynamo; a bias of a changing length stays")
def test_documents_of_a_changing_length() -> None:
    compiled = Compiled(lambda q, k, v, ids: attention(q, k, v, mask=Documents(ids)))
    for seqlen in (7, 9, 12):
        compiled.check(*qkv(5, seqlen), torch.arange(seqlen) // 3)
    assert compiled.compilations == 1


def test_bias_of_a_changing_length() -> None:
    compiled = Compiled(lambda q, k, v, bias: attention(q, k, v, score_mod=Bias(bias)))
    for seqlen in (7, 9, 12):
        compiled.check(*qkv(5, seqlen), random(1, HEADS, 5, seqlen))
    assert compiled.compilations == 1


def test_attention_among_other_operations() -> None:
    linear = torch.nn.Linear(8, 24, bias=False)

    def block(x: Tensor, window: int) -> Tensor:
        q, k, v = linear(x).unflatten(-1, (3, 2, 4)).unbind(2)  # strided views
        return x + attention(q, k, v, mask=SlidingWindow(window, 0)).flatten(2)

    compiled = Compiled(block)
    with torch.no_grad():
        for seqlen in (6, 9, 4):
            compiled.check(random(2, seqlen, 8), seqlen // 2)
    assert compiled.compilations == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "x"}, "layout must be"),
        ({"mask": "causal"}, "mask must be a tileattn mask"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"sink": torch.zeros(3)}, "sink must have shape"),
    ],
    ids=str,
)
def test_bad_arguments_under_compile(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        torch.compile(lambda *x: attention(*x, **options), fullgraph=True, backend="eager")(*qkv())


def test_a_backend_that_refuses_under_compile() -> None:
    with pytest.raises(NotImplementedError, match="backend='tilelang' does not run this call"):
        torch.compile(lambda *x: attention(*x, backend="tilelang"), fullgraph=True, backend="eager")(*qkv())


def captures_a_global(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * SLOPES[h]


# --- fp8 ---


def fp8(seqlen_q: int = 5, seqlen_k: int = 7, batch: int = 3) -> tuple[Tensor, ...]:
    return quantize_fp8(*qkv(seqlen_q, seqlen_k, batch))


FP8_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v, *descales: attention(q, k, v, return_lse=True),
    "causal": lambda q, k, v, q_descale, k_descale, v_descale: attention(
        q, k, v, causal=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
    ),
    "one descale": lambda q, k, v, q_descale, *_: attention(
        q, k, v, mask=SlidingWindow(2, 0), score_mod=SoftCap(5.0), sink=SINK, v_descale=q_descale[0, 0]
    ),
    "quantised inside": lambda q, k, v, *_: attention(
        **quantize_fp8(q.float(), k.float(), v.float())._asdict(), return_lse=True
    ),
}


@pytest.mark.slow_except("one descale", reason="1 to 5 s each, in Dynamo")
@pytest.mark.parametrize("name", FP8_FUNCTIONS)
def test_fp8_is_one_graph_for_all_lengths(name: str) -> None:
    compiled = Compiled(FP8_FUNCTIONS[name])
    for lengths in LENGTHS:
        compiled.check(*fp8(*lengths))
    assert compiled.compilations == 1
    assert "tileattn.forward.default" in compiled.operators


def test_wrong_descales_under_compile() -> None:
    for tensors, says in ((fp8(), "v_descale must have shape"), (qkv(), "v_descale is for float8_e4m3fn inputs only")):
        with pytest.raises(Exception, match=says):
            torch.compile(lambda *x: attention(*x, v_descale=SINK), fullgraph=True, backend="eager")(*tensors[:3])


@pytest.mark.parametrize("given", [False, True], ids=["", "descales"])
def test_the_operator_keeps_the_rules_of_torch_library_in_fp8(given: bool) -> None:
    q, k, v, *descales = fp8()
    arguments = (q, k, v, SINK, "", [], [], [], 0.3, None, *(descales if given else ()))
    # Without test_schema, which multiplies its inputs to compare them; torch has no arithmetic on fp8.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    results = torch.library.opcheck(torch.ops.tileattn.forward, arguments, test_utils=utils)
    assert set(results.values()) == {"SUCCESS"}
    o, lse = torch.ops.tileattn.forward(*arguments)
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales if given else ()))
    assert_same((o, lse), attention(q, k, v, sink=SINK, scale=0.3, return_lse=True, **names))


def test_fake_fp8_tensors_have_the_real_shapes_and_dtypes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
    real = attention(**dict(zip(names, fp8())), return_lse=True)
    with FakeTensorMode() as mode:
        fake = attention(**dict(zip(names, map(mode.from_tensor, fp8()))), return_lse=True)
    for x, y in zip(fake, real):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


# --- The operator ---

OPERATOR_CASES: dict[str, tuple[Mask | None, tuple[Any, ...], Tensor | None]] = {
    "plain": (None, (), None),
    "causal": (Causal(), (), None),
    "window": (SlidingWindow(2, None) | PrefixLM(torch.tensor([1, 3, 5])), (), SINK),
    "documents": (OUTSIDE, (SoftCap(3.0),), None),
    "bias": (None, (Bias(random(1, HEADS, 5, 7)), ALiBi(SLOPES)), SINK),
    "user": (None, (user_score, captures_a_global), None),
}


@pytest.mark.slow_cases("*-torch.float16", reason="0.3 s each")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPERATOR_CASES)
def test_the_operator_keeps_the_rules_of_torch_library(name: str, dtype: torch.dtype) -> None:
    mask, mods, sink = OPERATOR_CASES[name]
    variant, operands = encode(mask, mods)
    q, k, v = (x.to(dtype) for x in qkv())
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    arguments = (q, k, v, sink, variant, operands.tensors, operands.ints, operands.floats, 0.3, None)
    results = torch.library.opcheck(torch.ops.tileattn.forward, arguments)
    assert set(results.values()) == {"SUCCESS"}
    o, lse = torch.ops.tileattn.forward(*arguments)
    assert_same((o, lse), attention(q, k, v, mask=mask, score_mod=mods, sink=sink, scale=0.3, return_lse=True))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "batch"), [(0, 7, 3), (5, 0, 3), (5, 7, 0)])
def test_the_operator_on_nothing(seqlen_q: int, seqlen_k: int, batch: int) -> None:
    arguments = (*qkv(seqlen_q, seqlen_k, batch), None, "", [], [], [], 0.3, None)
    assert set(torch.library.opcheck(torch.ops.tileattn.forward, arguments).values()) == {"SUCCESS"}


def test_fake_tensors_have_the_real_shapes_and_strides() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for options in ({}, {"causal": True}, {"mask": SlidingWindow(2, 0), "layout": "bhsd"}):
        tensors = [x.half() for x in qkv()]
        if "layout" in options:
            tensors = [x.transpose(1, 2) for x in tensors]
        real = attention(*tensors, return_lse=True, **options)  # type: ignore[arg-type]
        with FakeTensorMode() as mode:
            fake = attention(*map(mode.from_tensor, tensors), return_lse=True, **options)  # type: ignore[arg-type]
        for x, y in zip(fake, real):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sink: Tensor) -> Any:
        mods = [ALiBi(slopes), SoftCap(5.0)]
        return attention(q, k, v, score_mod=mods, mask=SlidingWindow(3, 1), sink=sink, return_lse=True)

    graph = make_fx(function, tracing_mode=mode)(*qkv(), SLOPES, SINK)
    assert [str(node.target) for node in graph.graph.nodes].count("tileattn.forward.default") == 1
    other = (random(3, 5, HEADS, 8, seed=7), *qkv()[1:], SLOPES * 3, SINK)
    assert_same(graph(*other), function(*other))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", SLOPES)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mods = [ALiBi(self.slopes), SoftCap(3.0)]  # type: ignore[arg-type]
        return attention(q, k, v, causal=True, score_mod=mods, return_lse=True)


def test_export_with_dynamic_lengths() -> None:
    seqlen_q, seqlen_k = torch.export.Dim("seqlen_q"), torch.export.Dim("seqlen_k")
    shapes = {"q": {1: seqlen_q}, "k": {1: seqlen_k}, "v": {1: seqlen_k}}
    exported = torch.export.export(Layer(), qkv(), dynamic_shapes=shapes)
    assert "tileattn.forward" in str(exported.graph)
    for lengths in LENGTHS:
        assert_same(exported.module()(*qkv(*lengths)), Layer()(*qkv(*lengths)))
