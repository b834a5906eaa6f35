"""User functions under torch.compile: what they capture may change, may be tensors, and may want gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tileattn.math as tm
from tileattn import ALiBi, Causal, FunctionMask, SlidingWindow, SoftCap, attention, nn, varlen_attention
from tileattn.variant.key import encode, normalize

HEADS, SEQLEN_K = 4, 7
BACKENDS = [
    pytest.param("eager", marks=pytest.mark.slow),
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.slow),
]
SLOPES, SHIFT = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor(0.3)
DOCUMENTS, TABLE = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.arange(28.0).view(HEADS, SEQLEN_K) / 28


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(seqlen_q: int = 5, seqlen_k: int = SEQLEN_K, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, seqlen_q, HEADS, 8), (3, seqlen_k, 2, 8), (3, seqlen_k, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes)
    return q, k, v


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compiled(function: Callable[..., Any], backend: Any = "eager", dynamic: bool | None = None) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


# --- What changes ---


class Captured:
    """An object that a function captures."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.sizes = {"width": width}


WIDTH = 3


def global_width(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < WIDTH


def within(width: int, b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < width


def of_default(width: int) -> Callable[..., Any]:
    def mask(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
        return q - k < width

    return mask


# Each returns a function that calls attention, and one that changes what its mask or score function captures.
def closure() -> tuple[Any, Any]:
    width = 3

    def change() -> None:
        nonlocal width
        width -= 1

    return lambda q, k, v: attention(q, k, v, mask=lambda b, h, i, j: i - j < width), change


def global_variable() -> tuple[Any, Any]:
    def change() -> None:
        global WIDTH
        WIDTH -= 1

    return lambda q, k, v: attention(q, k, v, mask=global_width), change


def attribute() -> tuple[Any, Any]:
    held = Captured(3)

    def change() -> None:
        held.width -= 1

    return lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s * held.width), change


def item() -> tuple[Any, Any]:
    held = Captured(3)

    def change() -> None:
        held.sizes["width"] -= 1

    return lambda q, k, v: attention(q, k, v, mask=lambda b, h, i, j: i - j < held.sizes["width"]), change


def partial() -> tuple[Any, Any]:
    held = {"mask": functools.partial(within, 3)}

    def change() -> None:
        held["mask"] = functools.partial(within, held["mask"].args[0] - 1)

    return lambda q, k, v: attention(q, k, v, mask=held["mask"]), change


def default() -> tuple[Any, Any]:
    held = Captured(3)
    mask = of_default(3)

    def change() -> None:
        nonlocal mask
        held.width -= 1
        mask = of_default(held.width)

    return lambda q, k, v: attention(q, k, v, mask=mask), change


def another_function() -> tuple[Any, Any]:
    functions = [lambda i, j: i - j < 3]

    def change() -> None:
        functions[0] = (lambda i, j: i - j < 2) if len(functions) == 1 else (lambda i, j: i - j < 1)
        functions.append(functions[0])

    return lambda q, k, v: attention(q, k, v, mask=lambda b, h, i, j: functions[0](i, j)), change


def a_list_of_functions() -> tuple[Any, Any]:
    mods: list[Any] = [SoftCap(5.0)]
    return (
        lambda q, k, v: attention(q, k, v, score_mod=mods),
        lambda: mods.append(lambda s, b, h, i, j: s * 2),
    )


def another_tensor() -> tuple[Any, Any]:
    slopes = SLOPES

    def change() -> None:
        nonlocal slopes
        slopes = slopes * 2

    return lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * j), change


def a_tensor_in_place() -> tuple[Any, Any]:
    slopes = SLOPES.clone()
    return (
        lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * j),
        lambda: slopes.mul_(2),
    )


CHANGES = [
    closure, global_variable, attribute, item, partial, default, another_function, a_list_of_functions, another_tensor,
    a_tensor_in_place,
]  # fmt: skip


def sees_defaults() -> bool:
    """Whether Dynamo guards the defaults of functions, which torch 2.11 does not."""

    def twice(x: Tensor, by: int = 2) -> Tensor:
        return x * by

    run = torch.compile(lambda x: twice(x), backend="eager")
    run(SHIFT)
    twice.__defaults__ = (3,)
    return bool(run(SHIFT) == 3 * SHIFT)


@pytest.mark.slow_except(
    "closure",
    "attribute",
    "another_tensor",
    "a_tensor_in_place",
    "a_list_of_functions",
    reason="0.6 to 1.3 s each, in Dynamo",
)
@pytest.mark.parametrize("make", CHANGES)
def test_a_change_of_what_is_captured_is_seen(make: Callable[[], Any]) -> None:
    if make is default and not sees_defaults():
        pytest.skip("this torch does not see a change of defaults in any function")
    function, change = make()
    run, results = compiled(function), []
    for _ in range(3):
        results.append(run(*qkv()))
        assert_same(results[-1], function(*qkv()))
        change()
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_modules_that_are_compiled_one_by_one() -> None:
    def factory(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: (q - k < width) & (k <= q)

    x, results = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0)), []
    for width in (3, 9):
        torch.manual_seed(1)
        module = nn.MaskedAttention(16, 2, mask=factory(width))
        results.append(compiled(module)(x)[0])
        assert_same(results[-1], module(x)[0])
    assert not torch.equal(*results)


def test_a_mask_of_a_module_that_is_replaced() -> None:
    module = nn.MaskedAttention(16, 2, mask=lambda b, h, q, k: q - k < 3)
    x, run = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0)), compiled(module)
    before = run(x)[0]
    module.mask = FunctionMask(lambda b, h, q, k: q - k < 2)
    assert_same(run(x)[0], module(x)[0])
    assert not torch.equal(run(x)[0], before)


# --- What is captured ---


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(SLOPES.clone())

    def forward(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.slopes[h] * (k - q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, score_mod=self.forward)


def with_default(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Tensor = SLOPES, *, by: Tensor = SHIFT) -> Any:
    return score * slopes[h] + by


def with_extra(slopes: Tensor, score: Any, b: Any, h: Any, q: Any, k: Any, by: Tensor) -> Any:
    return score * slopes[h] + by


def inner(h: Any) -> Any:
    return SLOPES[h] * 2


same_document = FunctionMask(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k])

CAPTURES: dict[str, Callable[..., Any]] = {
    "closure": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i)),
    "mask": lambda q, k, v: attention(q, k, v, mask=lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]),
    "0-dim": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: SHIFT * s - s / SHIFT + (SHIFT - j)),
    "two dimensions": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE[h, j] * TABLE[0, j]),
    "load": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + tm.load(TABLE, h, j)),
    "computed": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (2 * SLOPES)[h] * SLOPES.sum()),
    "defaults": lambda q, k, v: attention(q, k, v, score_mod=with_default),
    "partial": lambda *x: attention(*x, score_mod=functools.partial(with_extra, SLOPES, by=SHIFT)),
    "another function": lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + inner(h)),
    "method": Scores().attend,
    "module": lambda q, k, v, mod=Scores(): attention(q, k, v, score_mod=mod),  # noqa: B008
    "composed": lambda q, k, v: attention(
        q, k, v, mask=Causal() & (same_document | SlidingWindow(1, None)),
        score_mod=[lambda s, b, h, i, j: s * SLOPES[h], SoftCap(3.0), ALiBi(SLOPES), with_default],
    ),
}  # fmt: skip


@pytest.mark.slow_except("mask", "module", "composed", reason="0.5 to 1 s each, in Dynamo")
@pytest.mark.parametrize("name", CAPTURES)
def test_captured_tensors_of_all_lengths_in_one_graph(name: str) -> None:
    counter = CompileCounterWithBackend("eager")
    run = compiled(CAPTURES[name], counter, dynamic=True)
    for seqlen_q in (5, 6, 3):
        with torch.no_grad():
            assert_same(run(*qkv(seqlen_q)), CAPTURES[name](*qkv(seqlen_q)))
    graphs = [graph for graph in counter.graphs if "tileattn" in str(graph.graph)]
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_captured_tensors(backend: str) -> None:
    slopes, shift = SLOPES.clone().requires_grad_(), SHIFT.clone().requires_grad_()
    scores = Scores()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mods = [lambda s, b, h, i, j: s * shift + (3 * slopes)[h] * j, scores]
        return attention(q, k, v, mask=same_document & Causal(), score_mod=mods).square().sum()

    run = compiled(function, backend, dynamic=True)
    for seqlen_q in (5, 6):
        inputs = (*qkv(seqlen_q, requires_grad=True), slopes, shift, scores.slopes)
        gradients, expected = (torch.autograd.grad(f(*inputs[:3]), inputs) for f in (run, function))
        torch.testing.assert_close(gradients, expected)  # Inductor adds in another order
        assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_a_gradient_of_a_captured_tensor_alone() -> None:
    slopes = SLOPES.clone().requires_grad_()
    mod = lambda s, b, h, i, j: s + slopes[h] * j  # noqa: E731
    run = compiled(lambda q, k, v: attention(q, k, v, score_mod=mod), "aot_eager")
    gradients, expected = (
        torch.autograd.grad(o.square().sum(), slopes) for o in (run(*qkv()), attention(*qkv(), score_mod=mod))
    )
    assert_same(gradients, expected)


def test_in_a_checkpoint() -> None:
    slopes = SLOPES.clone().requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * abs(i - j))

    run = compiled(lambda *x: checkpoint(function, *x, use_reentrant=False), "aot_eager")
    gradients, expected = (torch.autograd.grad(f(*qkv()).square().sum(), slopes) for f in (run, function))
    assert_same(gradients, expected)


def test_packed_sequences() -> None:
    cu_seqlens, (q, k, v) = torch.tensor([0, 2, 5], dtype=torch.int32), (x[0] for x in qkv(5, 5))

    def function(q: Tensor, k: Tensor, v: Tensor, width: int) -> Any:
        options = {
            "mask": lambda b, h, i, j: i - j < width,
            "score_mod": lambda s, b, h, i, j: s + SLOPES[h] * b,
        }
        return varlen_attention(q, k, v, cu_seqlens, cu_seqlens, 3, 3, **options)  # type: ignore[arg-type]

    run = compiled(function, dynamic=True)
    for width in (2, 3):
        assert_same(run(q, k, v, width), function(q, k, v, width))


# --- Functions made inside of what is compiled ---


OF_ARGUMENTS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "int": (
        lambda q, k, v, x: attention(q, k, v, mask=lambda b, h, i, j: (i - j < x) & (x >= j - i) | (i == x) | (x == j)),
        [3, 2, 4],
    ),
    "arithmetic of ints": (
        lambda q, k, v, x: attention(
            q, k, v,
            score_mod=lambda s, b, h, i, j: tm.minimum(x + s * x, 3.0) - x / (j + x) + (i + 9) % x + x // (h + 1),
        ),
        [3, 2, 4],
    ),
    "tensor": (
        lambda q, k, v, x: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + x[h] * j),
        [SLOPES, 2 * SLOPES],
    ),
    "length": (
        lambda q, k, v, x: attention(q, k, v, mask=lambda b, h, i, j: j < x.shape[0] - 5),
        [torch.ones(9), torch.ones(10)],
    ),
    "int and tensor, two functions": (
        lambda q, k, v, x: attention(
            q, k, v, mask=FunctionMask(lambda b, h, i, j: i - j < x) & SlidingWindow(x + 1, None),
            score_mod=[lambda s, b, h, i, j: s + SLOPES[h] * x, lambda s, b, h, i, j: s * (x + 1) * SLOPES[h]],
        ),
        [3, 2, 4],
    ),
}  # fmt: skip


@pytest.mark.slow_except("tensor", "int and tensor, two functions", reason="0.5 to 1 s each, in Dynamo")
@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_functions_of_arguments_compile_once(name: str) -> None:
    function, values = OF_ARGUMENTS[name]
    counter, results = CompileCounterWithBackend("eager"), []
    run = compiled(function, counter, dynamic=True)
    for value in values:
        results.append(run(*qkv(), value))
        assert_same(results[-1], function(*qkv(), value))
    assert len([graph for graph in counter.graphs if "tileattn" in str(graph.graph)]) == 1
    assert not torch.equal(results[0], results[1])


def test_functions_of_floats() -> None:
    """How often torch.compile compiles for floats is its own choice; what counts is the result."""

    def function(q: Tensor, k: Tensor, v: Tensor, x: float) -> Any:
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: tm.where(s < x, s * x, x) - x * j)

    run = compiled(function, dynamic=True)
    for value in (0.5, 2.0, 0.25):
        assert_same(run(*qkv(), value), function(*qkv(), value))


# --- The text ---


def arithmetic(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    total = 3 - s * 2 / 4 + (2 / (s + 5)) - q // 2 + 7 // (k + 8) + q % 3 - (9 % (k + 8))
    total += -s + s**3
    total *= 1.5
    return total - abs(q - k) * 0.1


def comparisons(b: Any, h: Any, q: Any, k: Any) -> Any:
    some = (q < k) | (q <= 3) | (2 > k) | (q >= k + 1) | (5 == q) | (q != h)  # noqa: SIM300
    return some & ~(k > 4) & (True | (b == 0))


def functions_of_torch(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    near = torch.logical_and(torch.abs(q - k) < 3, torch.logical_not(q == k))
    capped = torch.tanh(s / 3.0) * 3.0 + torch.exp(-torch.maximum(s, s * 0.5)) + torch.sqrt(torch.exp2(s))
    capped += s.where(q > k, 2.0) + (q - k).abs().clamp(min=1, max=3) + s.clamp(max=3.0).sigmoid() + q.float()
    return torch.where(near, capped, 0.5) + torch.sin(s) * torch.cos(s) + torch.log(torch.exp(s)) + torch.add(s, 1)


def functions_of_tileattn(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    capped = tm.minimum(tm.maximum(s, -1), 2.0) + tm.tanh(s) + tm.exp(s) + tm.abs(s)
    return tm.where(q > k, capped, -1.0) + tm.load(TABLE, h, k) * tm.load(SLOPES[None], 0, h)


def captures(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * SHIFT + TABLE[h, k] - SLOPES[h] * DOCUMENTS[k] + (TABLE[h, 0] - SLOPES[h])


@pytest.mark.slow_except("functions_of_tileattn", "captures", reason="1 s each, in Dynamo")
@pytest.mark.parametrize(
    "function", [arithmetic, comparisons, functions_of_torch, functions_of_tileattn, captures], ids=lambda f: f.__name__
)
def test_the_key_is_that_of_an_eager_call(function: Callable[..., Any]) -> None:
    option = "mask" if function is comparisons else "score_mod"
    counter = CompileCounterWithBackend("eager")
    compiled(lambda *x: attention(*x, **{option: function}), counter)(*qkv())
    (node,) = (node for graph in counter.graphs for node in graph.graph.nodes if "tileattn" in str(node.target))
    arguments = {"mask": None, "score_mod": None} | {option: function}
    assert node.args[4] == encode(*normalize(**arguments, causal=False))[0]


# --- What cannot be traced ---


def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q if q > 3 else k == q


def rounds(b: Any, h: Any, q: Any, k: Any) -> Any:
    return int(q) == k


UNTRACEABLE: list[tuple[str, Callable[..., Any], str]] = [
    ("mask", branches, "[Dd]ata-dependent"),
    ("mask", rounds, "(?s).+"),
    ("score_mod", lambda s, b, h, q, k: torch.erf(s), "torch.erf cannot be traced"),
    ("score_mod", lambda s, b, h, q, k: s * SLOPES, "as a whole: index it"),
    ("score_mod", lambda s, b, h, q, k: s * TABLE[h], "must be indexed with 2 integer positions"),
    ("score_mod", lambda s, b, h, q, k: s[0], "is one number"),
    ("score_mod", lambda s, b, h, q, k: q > k, "a score_mod must return a number"),
    ("mask", lambda b, h, q, k: q - k, "a mask must return a condition"),
    ("mask", lambda q, k: q >= k, "bind arguments|positional argument"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "function", "says"), UNTRACEABLE)
def test_what_cannot_be_traced_is_an_error(option: str, function: Callable[..., Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        compiled(lambda *x: attention(*x, **{option: function}))(*qkv())


def test_what_dynamo_cannot_trace_runs_without_a_full_graph() -> None:
    calls = []

    @torch.compiler.disable
    def width() -> int:
        calls.append(1)
        return 1 + len(calls) % 2

    run = torch.compile(lambda *x: attention(*x, mask=lambda b, h, q, k: q - k < width()), backend="eager")
    results = [run(*qkv()) for _ in range(3)]
    for at, result in enumerate(results):
        by = 1 + (at + 1) % 2
        assert_same(result, attention(*qkv(), mask=lambda b, h, q, k, by=by: q - k < by))


# --- torch.export ---


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(SLOPES.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.slopes[h] * (j - i) / 2 - (9 - i) % 2

        return attention(q, k, v, score_mod=mod, mask=lambda b, h, i, j: (i - j < k.shape[1] - 3) | ~(j > i))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export(strict: bool) -> None:
    layer, seqlen_q, seqlen_k = Layer(), torch.export.Dim("seqlen_q"), torch.export.Dim("seqlen_k")
    shapes = {"q": {1: seqlen_q}, "k": {1: seqlen_k}, "v": {1: seqlen_k}}
    exported = torch.export.export(layer, qkv(), dynamic_shapes=shapes, strict=strict).module()
    for lengths in ((5, 7), (3, 9)):
        assert_same(exported(*qkv(*lengths)), layer(*qkv(*lengths)))
