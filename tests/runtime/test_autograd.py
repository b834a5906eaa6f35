"""Gradients beyond the conformance suite: under autograd, torch.func, checkpointing, autocast and torch.compile.

Where two ways lead to the same kernels, gradients must be equal bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tileattn.math as tm
from tests.tools.compositions import Composition, compositions
from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, SlidingWindow, SoftCap, attention
from tileattn.call.facts import BackwardCall, Gradients, has_autocast
from tileattn.kernels.torch import backward as torch_backward
from tileattn.kernels.torch import fused
from tileattn.runtime import dispatch
from tileattn.runtime import operators as ops
from tileattn.testing import (
    Arguments,
    assert_gradients_accurate,
    eager_gradients,
    gradients,
    oracle_gradients,
)
from tileattn.variant.key import encode
from tileattn.variant.scores import ScoreMod

HEADS, KV_HEADS = 4, 2


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(seqlen_q: int = 9, seqlen_k: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(2, seqlen_q, HEADS, 8, seed=1, dtype=dtype),
        random(2, seqlen_k, KV_HEADS, 8, seed=2, dtype=dtype),
        random(2, seqlen_k, KV_HEADS, 6, seed=3, dtype=dtype),
    )


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@dataclass(frozen=True, eq=False)
class Gated(ScoreMod):
    """Reads a table by head and key, another by row and key, and one of them twice."""

    by_key: Tensor
    by_row: Tensor
    factor: float = 0.5

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        row = q - (self.by_row.shape[1] - self.by_row.shape[0])
        gate = tm.tanh(tm.load(self.by_key, h, k)) + tm.load(self.by_key, h, 0) * self.factor
        return score * gate + tm.load(self.by_row, row, k)


def model(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, slopes: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Everything that has a gradient, rows without keys included."""
    mods = [ALiBi(slopes), SoftCap(2.0), Bias(bias)]
    return attention(q, k, v, score_mod=mods, sink=sink, causal=True, return_lse=True)  # type: ignore[return-value]


def loss(*tensors: Tensor) -> Tensor:
    o, lse = model(*tensors)
    return o.square().sum() + lse.square().sum()


def model_leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return leaves_of(*qkv(dtype=dtype), random(HEADS), random(HEADS).abs() / 8, random(1, HEADS, 9, 7))


@functools.cache
def model_gradients() -> tuple[Tensor, ...]:
    leaves = model_leaves()
    return torch.autograd.grad(loss(*leaves), leaves)


def checked(arguments: Arguments, do: Tensor, dlse: Tensor | None = None, **options: Any) -> None:
    """Asserts the tolerance rule for the gradients of `attention`."""
    leaves, (exact, exact_leaves) = arguments.leaves(), arguments.double()
    q, k, v, mask, mods, sink, scale = arguments.positional[:7]
    got = gradients(
        attention(q, k, v, mask=mask, score_mod=mods, sink=sink, scale=scale, return_lse=True, **options),  # type: ignore[arg-type]
        leaves,
        do,
        dlse,
    )
    oracle, sizes = oracle_gradients(exact_leaves, do, dlse, *exact.positional[:7])
    eager = eager_gradients(leaves, do, dlse, *arguments.positional[:7])
    assert_gradients_accurate("it", got, oracle, eager, sizes, q.dtype)


@contextmanager
def small_tiles(block_M: int = 16, block_N: int = 8) -> Iterator[None]:
    with mock.patch.object(torch_backward, "BLOCK_M", block_M), mock.patch.object(torch_backward, "BLOCK_N", block_N):
        yield


# --- Right ---

MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(2, 1),
    "documents": Documents(torch.arange(7) // 3) & Causal(),
    "prefix": PrefixLM(torch.tensor([2, 5])),
}
MODS: dict[str, Callable[[list[Tensor]], list[Any]]] = {
    "none": lambda tensors: [],
    "bias": lambda tensors: [Bias(tensors[1])],
    "two biases": lambda tensors: [Bias(tensors[1]), Bias(tensors[2])],
    "alibi-softcap": lambda tensors: [ALiBi(tensors[0]), SoftCap(1.5)],
    "gated": lambda tensors: [Gated(tensors[3], tensors[1][0, 0])],
    "ignores the score": lambda tensors: [lambda score, b, h, q, k: 0.3 * (q - k)],
}


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(mask: str, mods: str) -> None:
    """Compared with finite differences, in float64 and in many small tiles."""
    made = [random(HEADS).abs() / 8, random(1, HEADS, 9, 7), random(2, 1, 1, 7, seed=5), random(HEADS, 7, seed=6)]
    leaves = leaves_of(*(x.double() for x in (*qkv(), random(HEADS), *made)))

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        score_mod = MODS[mods](list(tensors))
        o, lse = attention(q, k, v, mask=MASKS[mask], score_mod=score_mod, sink=sink, return_lse=True)
        return o, lse

    with small_tiles(4, 3):
        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize(("block_M", "block_N"), [(128, 256), (48, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [None, SlidingWindow(40, 7), PrefixLM(torch.tensor([10, 70]))], ids=str)
def test_blocks_of_any_size(mask: Mask | None, dtype: torch.dtype, block_M: int, block_N: int) -> None:
    mods = (ALiBi(random(HEADS).abs() / 8), Gated(random(HEADS, 150), random(161, 150)))
    arguments = Arguments(*qkv(161, 150, dtype), mask, mods, random(HEADS), 0.25, "bshd")
    with small_tiles(block_M, block_N):
        checked(arguments, random(2, 161, HEADS, 6, dtype=dtype), random(2, HEADS, 161))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(compositions())
def test_random_compositions(composition: Composition) -> None:
    q, k, v, mask, mods, sink, scale = composition.arguments()
    arguments = Arguments(q, k, v, mask, mods, sink, scale, "bshd")  # type: ignore[arg-type]
    do = random(2, composition.seqlen_q, HEADS, 8, seed=composition.seed, dtype=torch.float16)
    dlse = random(2, HEADS, composition.seqlen_q) if composition.seed % 2 else None
    with small_tiles():
        checked(arguments, do, dlse, backend="torch")


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (16, 24), (24, 16)], ids=str)
def test_the_loop_is_right_where_pytorchs_fused_backward_runs(mask: Mask | None, dims: tuple[int, int]) -> None:
    """It is what CUDA tensors get, and calls whose lse has a gradient."""
    shapes = ((2, 140, 4, dims[0]), (2, 140, 2, dims[0]), (2, 140, 2, dims[1]))
    q, k, v = (random(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(shapes))
    do = random(2, 140, 4, dims[1], dtype=torch.bfloat16)
    arguments = Arguments(q, k, v, mask, (), random(4), None, "bshd")
    with mock.patch.object(fused, "one_call_backward", wraps=fused.one_call_backward) as run:
        checked(arguments, do)
        assert run.call_count == 1
        checked(arguments, do, torch.zeros(2, 4, 140))
        with mock.patch.object(fused, "expresses", return_value=False):
            checked(arguments, do)
        assert run.call_count == 1


def test_a_modification_may_be_nan_where_the_mask_forbids() -> None:
    """What is forbidden has no gradient, whatever the slope there."""
    q, k, v = leaves_of(*qkv(7, 7))
    o = attention(q, k, v, causal=True, score_mod=lambda score, b, h, q, k: score * tm.sqrt(q - k + 1.0))
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    defined = attention(
        q, k, v, causal=True, score_mod=lambda score, b, h, q, k: score * tm.sqrt(tm.maximum(q - k, 0) + 1.0)
    )
    assert_same(grads, torch.autograd.grad(defined.sum(), (q, k, v)))


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 5, 1)])
def test_gradients_of_nothing_are_zero(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """Under SlidingWindow(0, 0) only the last row sees the only key, and its softmax is constant."""
    leaves = leaves_of(*(x[:batch] for x in qkv(seqlen_q, seqlen_k)), random(HEADS), random(1, HEADS, 1, seqlen_k))
    q, k, v, sink, bias = leaves
    o, lse = attention(q, k, v, mask=SlidingWindow(0, 0), score_mod=Bias(bias), return_lse=True)
    for x in torch.autograd.grad(o[:, :-1].sum() + lse[:, :, :-1].sum() * 3, [q, k, v, bias]):
        assert torch.equal(x, torch.zeros_like(x))
    o, lse = attention(q, k[:, :0], v[:, :0], sink=sink, return_lse=True)
    assert_same(torch.autograd.grad(o.sum() + lse.sum(), sink)[0], torch.full((HEADS,), 1.0 * batch * seqlen_q))


def test_a_sink_of_minus_infinity_has_no_gradient() -> None:
    q, k, v, sink = leaves_of(*qkv(), torch.full((HEADS,), -torch.inf))
    grads = torch.autograd.grad(attention(q, k, v, sink=sink, causal=True).sum(), (q, k, v, sink))
    plain = torch.autograd.grad(attention(q, k, v, score_mod=[], causal=True).sum(), (q, k, v))
    assert torch.equal(grads[3], torch.zeros(HEADS))
    assert_same(grads[:3], plain)


# --- What is asked for, and what is given ---


@pytest.mark.parametrize("dense", [False, True], ids=["sum", "dense"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_of_outputs_have_any_strides(layout: str, dense: bool) -> None:
    tensors = qkv() if layout == "bshd" else [x.transpose(1, 2).contiguous() for x in qkv()]
    leaves = leaves_of(*tensors)
    o = attention(*leaves, causal=True, score_mod=SoftCap(3.0), layout=layout)
    assert isinstance(o, Tensor)
    weights = torch.ones_like(o) if not dense else random(*o.shape)
    given = {
        "contiguous": weights.contiguous(),
        "transposed": weights.transpose(1, 3).contiguous().transpose(1, 3),
        "every second": torch.stack([weights, torch.full_like(weights, torch.nan)], dim=-1)[..., 0],
    }
    if not dense:
        given["expanded"] = torch.ones(()).expand_as(o)
    expected = torch.autograd.grad(o, leaves, given["contiguous"], retain_graph=True)
    for weights in given.values():
        assert_same(torch.autograd.grad(o, leaves, weights, retain_graph=True), expected)


@pytest.mark.parametrize("wanted", range(6))
def test_one_gradient_alone_is_the_same(wanted: int) -> None:
    leaves = [x.requires_grad_(i == wanted) for i, x in enumerate(x.detach() for x in model_leaves())]
    (gradient,) = torch.autograd.grad(loss(*leaves), leaves[wanted])
    assert_same(gradient, model_gradients()[wanted])


def test_only_wanted_gradients_are_computed() -> None:
    seen: list[tuple[BackwardCall, Gradients]] = []
    with recorded_backends(seen):
        leaves = [x.requires_grad_(i in (1, 4)) for i, x in enumerate(x.detach() for x in model_leaves())]
        loss(*leaves).backward()
    ((call, grads),) = seen
    assert call.needs == (False, True, False, False, True, False)
    assert [x is None for x in (*grads[:4], *grads.tensors)] == [True, False, True, True, False, True]


def test_lse_alone_has_gradients() -> None:
    leaves = model_leaves()
    grads = torch.autograd.grad(model(*leaves)[1].square().sum(), leaves, retain_graph=True)
    o, lse = model(*leaves)
    assert_same(grads, torch.autograd.grad((o, lse), leaves, (torch.zeros_like(o), 2 * lse.detach())))
    assert torch.equal(grads[2], torch.zeros_like(grads[2]))


def test_gradients_have_their_tensors_dtypes_and_shapes() -> None:
    mixed = model_leaves(torch.bfloat16)
    mixed[4], mixed[5] = (x.detach().half().requires_grad_() for x in (mixed[4], mixed[5]))
    expanded = mixed[5].detach()[:, :, :1].expand(1, HEADS, 9, 7).requires_grad_()
    for leaves in (mixed, [*mixed[:5], expanded]):
        for x, gradient in zip(leaves, torch.autograd.grad(loss(*leaves), leaves)):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


def test_saved_is_what_the_backward_pass_reads_and_nothing_quadratic() -> None:
    leaves = model_leaves()
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, lse = model(*leaves)
    places = [x.data_ptr() for x in (o, lse, *leaves)]
    assert sorted(x.data_ptr() for x in saved) == sorted(places)


def test_a_tensor_that_was_changed_in_between_is_noticed() -> None:
    q, k, v = leaves_of(*qkv())
    k = k * 1.0
    o = attention(q, k, v, causal=True)
    assert isinstance(o, Tensor)
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_modification_that_reads_more_than_elements_says_so() -> None:
    @dataclass(frozen=True, eq=False)
    class Whole(ScoreMod):
        table: Tensor

        def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score * self.table.mean()

    q, k, v, table = leaves_of(*qkv(), random(3))
    with pytest.raises(TypeError, match=r"must read its tensors element by element .* it asked for `tensor\.mean`"):
        torch.autograd.grad(attention(q, k, v, score_mod=Whole(table)).sum(), table)


def test_a_tensor_that_only_a_mask_reads_has_a_gradient_of_zero() -> None:
    @dataclass(frozen=True, eq=False)
    class Above(Mask):
        limit: Tensor

        def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return k * 1.0 > tm.load(self.limit, h)

    q, k, v, limit = leaves_of(*qkv(), random(HEADS))
    grads = torch.autograd.grad(attention(q, k, v, mask=Above(limit)).sum(), limit)
    assert torch.equal(grads[0], torch.zeros(HEADS))


# --- Which backend ---


@contextmanager
def recorded_backends(
    seen: list[tuple[BackwardCall, Gradients]], **refusals: Callable[[Any], str | None]
) -> Iterator[list[str]]:
    """Backends called by the keywords, and "last", run what the torch backend runs; notes which prepares what."""
    original, prepared = dispatch.BACKENDS[-1], []

    def backend(name: str, refusal: Callable[[Any], str | None]) -> dispatch.Backend:
        def prepare(call: Any, *arguments: Any) -> Any:
            prepared.append(f"{name} forward")
            return original.prepare(call, *arguments)

        def prepare_backward(call: Any, *arguments: Any) -> Any:
            prepared.append(f"{name} backward")
            run = original.prepare_backward(call, *arguments)

            def recorded(*tensors: Any) -> Gradients:
                seen.append((call, run(*tensors)))
                return seen[-1][1]

            return recorded

        return replace(original, name=name, refusal=refusal, prepare=prepare, prepare_backward=prepare_backward)

    table = tuple(backend(name, refusal) for name, refusal in {**refusals, "last": lambda call: None}.items())
    caches = (dispatch._select, dispatch._prepare, dispatch._prepare_backward)
    try:
        with mock.patch.object(dispatch, "BACKENDS", table), mock.patch("tileattn.runtime.prepared.FORWARDS", {}):
            for cache in caches:
                cache.cache_clear()
            yield prepared
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize(
    ("refusal", "runs"),
    [
        (lambda call: None, "first"),
        (lambda call: "no gradients" if call.needs_grad else None, "last"),
        (lambda call: "no lse" if call.return_lse else None, "last"),
    ],
)
def test_forward_and_backward_run_in_one_backend(refusal: Any, runs: str, compiled: bool) -> None:
    leaves = model_leaves()
    with recorded_backends([], first=refusal) as prepared:
        for function in (loss, lambda q, k, v, *_: attention(q, k, v, causal=True).sum()):
            total = (make_fx(function)(*leaves) if compiled else function)(*leaves)
            torch.autograd.grad(total, leaves, allow_unused=True)
    assert set(prepared) == {f"{runs} forward", f"{runs} backward"}


@pytest.mark.parametrize("plain", [False, True], ids=["mods", "plain"])
def test_deterministic_reaches_the_backward_pass(plain: bool) -> None:
    seen: list[tuple[BackwardCall, Gradients]] = []
    options: dict[str, Any] = {} if plain else {"score_mod": SoftCap(3.0)}
    leaves = leaves_of(*qkv())
    mode = torch.get_deterministic_debug_mode()
    try:
        with recorded_backends(seen):
            for of_torch, asked in (("default", False), ("default", True), ("warn", False), ("error", False)):
                torch.set_deterministic_debug_mode(of_torch)
                attention(*leaves, deterministic=asked, **options).sum().backward()  # type: ignore[union-attr]
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert [call.deterministic for call, _ in seen] == [False, True, False, True]


# --- Second derivatives, torch.func ---


def test_second_derivatives_are_refused_and_the_first_are_not() -> None:
    leaves = model_leaves()
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    assert_same([x.detach() for x in grads], list(model_gradients()))
    with pytest.raises(NotImplementedError, match=r"tileattn.attention has no second derivatives"):
        grads[0].sum().backward()


def test_torch_func() -> None:
    leaves = [x.detach() for x in model_leaves()]
    places = tuple(range(len(leaves)))
    assert_same(torch.func.grad(loss, argnums=places)(*leaves), model_gradients())
    assert_same(torch.func.vjp(loss, *leaves)[1](torch.ones(())), model_gradients())
    graph = make_fx(torch.func.grad(loss, argnums=places))(*leaves)
    assert [str(node.target) for node in graph.graph.nodes if "tileattn" in str(node.target)] == [
        "tileattn.forward.default",
        "tileattn.backward.default",
    ]
    assert_same(graph(*leaves), model_gradients())


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda f, q: torch.func.vmap(f)(q[None]), "not mapped by torch.func.vmap"),
        (lambda f, q: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(q[None]), "not mapped"),
        (lambda f, q: torch.func.jacrev(f)(q), "not mapped by torch.func.vmap"),
        (lambda f, q: torch.func.jvp(f, (q,), (q,)), "no forward-mode derivative"),
        (lambda f, q: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).sum())(q), "no second"),
    ],
    ids=["vmap", "vmap of grad", "jacrev", "jvp", "grad of grad"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_what_torch_func_cannot_do_is_refused(transform: Any, says: str, causal: bool) -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=says):
        transform(lambda q: attention(q, k, v, causal=causal), q)


# --- Activation checkpointing, autocast ---


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    leaves = model_leaves()
    checkpoint(loss, *leaves, use_reentrant=reentrant).backward()
    assert_same(tuple(x.grad for x in leaves), model_gradients())


def test_selective_checkpointing_sees_the_operator() -> None:
    """If the policy keeps what attention returned, the forward pass is not computed twice."""
    leaves = model_leaves()
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.tileattn.forward.default])
    with mock.patch("tileattn.runtime.dispatch._prepare", wraps=dispatch._prepare) as prepare:
        total = checkpoint(loss, *leaves, use_reentrant=False, context_fn=policy)
        assert_same(torch.autograd.grad(total, leaves), model_gradients())
    assert prepare.call_count == 1


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"score_mod": SoftCap(3.0)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_casts_as_for_pytorchs_attention(dtype: torch.dtype, options: dict[str, Any]) -> None:
    leaves = leaves_of(*qkv(dtype=dtype))
    expected_dtype = dtype if dtype == torch.float64 else torch.bfloat16
    cast = [x.to(expected_dtype) for x in leaves]
    expected = attention(*cast, return_lse=True, **options)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x[:, :5, :2, :6] for x in leaves))
        got = attention(*leaves, return_lse=True, **options)
        with torch.no_grad():
            assert_same(attention(*leaves, return_lse=True, **options), expected)
        with torch.autocast("cpu", enabled=False):
            assert attention(*leaves)[0].dtype == dtype
    assert got[0].dtype == theirs.dtype == expected_dtype
    assert_same(got, expected)
    assert_same(torch.autograd.grad(got[0].sum(), leaves), torch.autograd.grad(expected[0].sum(), leaves))


def test_autocast_makes_one_dtype_of_several_and_leaves_the_backward_pass_alone() -> None:
    q, k, v = leaves_of(*qkv())
    expected = torch.autograd.grad(attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True).sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k.bfloat16(), v.half(), causal=True)
        assert o.dtype == torch.bfloat16
        o = attention(q, k.bfloat16(), v, causal=True)
        # A backward pass under autocast, which PyTorch advises against.
        assert_same(torch.autograd.grad(o.sum(), (q, k, v)), expected)


# --- torch.compile and the operators ---


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, *_: attention(q, k, v, causal=True).sin().sum(),
    "model": lambda q, k, v, sink, slopes, bias, *_: loss(q, k, v, sink, slopes, bias),
    "masks": lambda q, k, v, *_: attention(q, k, v, mask=PrefixLM(3) | SlidingWindow(2, None)).sin().sum(),
    "documents": lambda q, k, v, *_: attention(q, k, v, mask=Documents(torch.arange(7) // 3)).sin().sum(),
    "lse": lambda q, k, v, sink, *_: attention(q, k, v, sink=sink, return_lse=True)[1].sin().sum(),
    "class": lambda q, k, v, sink, slopes, bias, table: attention(
        q, k, v, score_mod=Gated(table, bias[0, 0]), mask=SlidingWindow(4, 1)
    ).sin().sum(),
    "function": lambda q, k, v, *_: attention(
        q, k, v, score_mod=lambda score, b, h, q, k: tm.where(q > k, score * 0.5, score), deterministic=True
    ).sin().sum(),
    "bhsd": lambda q, k, v, *_: attention(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", score_mod=SoftCap(3.0)
    ).sin().sum(),
}  # fmt: skip


@pytest.mark.slow_except("masks", "class", reason="2 s each, in Dynamo")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COMPILED)
def test_training_compiles_once_for_all_lengths(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(COMPILED[name], fullgraph=True, dynamic=True, backend=counter)
    for seqlen_q in (9, 5, 12):
        # Sizes that are equal in the first call are taken to be equal for ever; so batch, heads and lengths differ.
        q = random(2, seqlen_q, HEADS, 8, seed=1)
        tensors = (q, *qkv()[1:], random(HEADS), random(HEADS).abs() / 8)
        leaves = leaves_of(*tensors, random(1, HEADS, seqlen_q, 7), random(HEADS, 7))
        grads, expected = (
            torch.autograd.grad(function(*leaves), leaves, allow_unused=True) for function in (compiled, COMPILED[name])
        )
        assert_same(grads, expected)
    # Dynamo also compiles an empty graph.
    assert sum(any(node.op == "call_function" for node in graph.graph.nodes) for graph in counter.graphs) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_second_derivatives_are_refused_under_compile() -> None:
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = model_leaves()
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(torch.autograd.grad(compiled(*leaves), leaves, create_graph=True)[0].sum(), leaves)


def test_which_devices_have_autocast() -> None:
    assert has_autocast("cpu")
    assert not has_autocast("meta")
    asked = torch.compile(lambda x: x + has_autocast("cpu") + 2 * has_autocast("meta"), fullgraph=True, backend="eager")
    assert asked(torch.zeros(())) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_autocast_under_compile() -> None:
    leaves = leaves_of(*qkv())
    compiled = torch.compile(
        lambda *x: attention(*x, causal=True, score_mod=SoftCap(2.0)), fullgraph=True, backend="aot_eager"
    )
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(*leaves), attention(*leaves, causal=True, score_mod=SoftCap(2.0))
    assert got.dtype == torch.bfloat16
    assert_same(got, expected)
    assert_same(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))  # type: ignore[union-attr]


def test_operators_keep_the_rules_of_torch_library() -> None:
    q, k, v, sink, slopes, bias = model_leaves()
    for mods, of_sink in (([], None), ([ALiBi(slopes), SoftCap(2.0), Bias(bias)], sink)):
        variant, operands = encode(Causal(), mods)
        constants = (operands.ints, operands.floats, 0.3, None)
        arguments = (q, k, v, of_sink, variant, operands.tensors, *constants)
        results = torch.library.opcheck(torch.ops.tileattn.forward, arguments, {"needs_grad": True})
        assert set(results.values()) == {"SUCCESS"}
        with torch.no_grad():
            o, lse = torch.ops.tileattn.forward(*arguments, needs_grad=True)
        tensors = [x if x is None else x.detach() for x in (q, k, v, o, lse, of_sink)]
        needs = [True, False, True, of_sink is not None, *(True for _ in operands.tensors)]
        for dlse in (None, torch.ones_like(lse)):
            given = (random(*o.shape), dlse, *tensors, variant, [x.detach() for x in operands.tensors], *constants)
            results = torch.library.opcheck(torch.ops.tileattn.backward, (*given, False, needs))
            assert set(results.values()) == {"SUCCESS"}


def test_the_operator_has_the_gradients_of_eager_calls() -> None:
    leaves = model_leaves()
    q, k, v, sink, slopes, bias = leaves
    variant, operands = encode(Causal(), [ALiBi(slopes), SoftCap(2.0), Bias(bias)])
    o, lse = ops.forward(
        q, k, v, sink, variant, operands.tensors, operands.ints, operands.floats, 8**-0.5, None, needs_grad=True
    )
    total = o.square().sum() + lse.square().sum()
    assert_same(torch.autograd.grad(total, leaves, retain_graph=True), model_gradients())
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()
