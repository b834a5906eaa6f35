"""fp8 inputs: quantisation, descales, and what is refused. Values: see the conformance suite."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Causal, SlidingWindow, attention, quantize_fp8
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8, Descales, QuantizedFP8, complete, dequantize
from tileattn.call.inputs import Inputs
from tileattn.kernels.torch import backend as torch_backend
from tileattn.runtime import prepared
from tileattn.testing import assert_forward_accurate, eager_attention, oracle, oracle_attention
from tileattn.testing.standard import fp8_product, multiplies_fp8

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, KV_HEADS, DIM, DIM_V = 2, 5, 7, 4, 2, 16, 32
LIMIT = torch.finfo(FP8).max
NAMES = ("q_descale", "k_descale", "v_descale")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(BATCH, SEQLEN_Q, HEADS, DIM),
        random(BATCH, SEQLEN_K, KV_HEADS, DIM),
        random(BATCH, SEQLEN_K, KV_HEADS, DIM_V),
    )


def quantized() -> QuantizedFP8:
    return quantize_fp8(*qkv())


def same(x: Any, y: Any) -> bool:
    """Equal bit for bit; torch.equal does not know fp8."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.float(), y.float())


def says(*parts: object) -> str:
    return ".*".join(re.escape(str(part)) for part in parts)


# --- Quantisation ---


@pytest.mark.parametrize("size", [1e-40, 1e-6, 1.0, 3e4, 1e37])
def test_quantisation_is_within_half_a_step(size: float) -> None:
    for x, x8, descale in zip(qkv(), *split(quantize_fp8(*(x * size for x in qkv())))):
        exact = (x * size).double()
        error = (dequantize(x8, descale, torch.float64) - exact).abs()
        by_head = exact.abs().unflatten(2, (KV_HEADS, -1)).amax((1, 3, 4)).repeat_interleave(x.shape[2] // KV_HEADS, 1)
        # A descale is at least the smallest normal float32, 2^-126; half a step of fp8 is 2^-10 or more.
        assert (error <= exact.abs() / 16 + (by_head[:, None, :, None] * 2**-18).clamp(min=2**-136)).all()


def split(result: QuantizedFP8) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return result[:3], result[3:]


def test_quantisation_uses_the_whole_range_of_every_group_of_heads() -> None:
    result = quantized()
    for x8, x in zip(result[:3], qkv()):
        assert (x8.dtype, x8.shape, x8.is_contiguous()) == (FP8, x.shape, True)
        largest = x8.float().abs().unflatten(2, (KV_HEADS, -1)).amax((1, 3, 4))
        assert torch.equal(largest, torch.full((BATCH, KV_HEADS), LIMIT))
    assert all(descale.shape == (BATCH, KV_HEADS) and descale.dtype == torch.float32 for descale in result[3:])


def test_quantisation_of_zeros_and_of_nothing() -> None:
    q, k, v = qkv()
    k[1, :, 0] = 0
    result = quantize_fp8(q, k, v * 0)
    assert result.k_descale[1, 0] == 1
    assert torch.equal(result.v_descale, torch.ones(BATCH, KV_HEADS))
    assert not any(x.float().isnan().any() for x in result)
    assert torch.equal(attention(**result._asdict()), torch.zeros(BATCH, SEQLEN_Q, HEADS, DIM_V).bfloat16())
    empty = quantize_fp8(q[:, :0], k[:, :0], v[:, :0])
    assert [x.shape[1] for x in empty[:3]] == [0, 0, 0]
    assert torch.equal(empty.q_descale, torch.ones(BATCH, KV_HEADS))
    assert quantize_fp8(q[:0], k[:0], v[:0]).q_descale.shape == (0, KV_HEADS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_quantisation_of_other_dtypes_and_layouts(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in qkv()]
    expected = quantize_fp8(*(x.float() for x in tensors))
    heads_first = quantize_fp8(*(x.transpose(1, 2) for x in tensors), layout="bhsd")
    expanded = quantize_fp8(*(x[:1].expand_as(x) for x in tensors))
    for got, x in zip(quantize_fp8(*tensors), expected):
        assert same(got, x)
    for got, x in zip(heads_first, expected):
        assert same(got.transpose(1, 2) if got.ndim == 4 else got, x)
        assert got.is_contiguous()
    assert same(expanded.q[1], expected.q[0])


def test_quantisation_carries_no_gradient() -> None:
    q, k, v = qkv()
    assert not any(x.requires_grad for x in quantize_fp8(q.requires_grad_(), k, v))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"layout": "x"}, ValueError, ("layout must be", "'x'")),
        ({"q": torch.zeros(2, 5, 4, 16).int()}, TypeError, ("q must be float16", "int32")),
        ({"k": torch.zeros(2, 7, 2, 16).to(FP8)}, TypeError, ("k must be float16", "float8_e4m3fn")),
        ({"v": torch.zeros(7, 2, 16)}, ValueError, ("v must have 4 dimensions", (7, 2, 16))),
        ({"q": torch.zeros(2, 5, 3, 16)}, ValueError, ("heads of q must be a multiple", "got 3, 2 and 2")),
    ],
    ids=str,
)
def test_quantisation_refuses(change: dict[str, Any], error: type[Exception], text: tuple[object, ...]) -> None:
    arguments = dict(zip("qkv", qkv())) | change
    with pytest.raises(error, match=says(*text)):
        quantize_fp8(**arguments)


# --- Descales ---


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "negative scale": {"scale": -0.3},
    "variant": {"mask": SlidingWindow(3, 0), "score_mod": ALiBi(random(HEADS)), "sink": random(HEADS)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_an_element_stands_for_itself_times_its_descale(options: dict[str, Any]) -> None:
    x = quantized()
    tensors = [dequantize(tensor, descale) for tensor, descale in zip(*split(x))]
    o, lse = attention(**x._asdict(), **options, return_lse=True)
    expected_o, expected_lse = attention(*tensors, **options, return_lse=True)
    assert same(o, expected_o.bfloat16())
    assert same(lse, expected_lse)
    assert same(o, attention(**x._asdict(), **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", [(), (1,), (KV_HEADS,), (1, KV_HEADS), (BATCH, 1), (BATCH, KV_HEADS)], ids=str)
def test_descales_broadcast(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    x = quantized()._asdict()
    for name in NAMES:
        descale = random(*shape).abs() / 100
        got = attention(**x | {name: descale}, **options)
        assert same(got, attention(**x | {name: descale.expand(BATCH, KV_HEADS).contiguous()}, **options))
        assert not same(got, attention(**x, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_without_descales_they_are_one(options: dict[str, Any]) -> None:
    q, k, v = (x.to(FP8) for x in qkv())
    ones = torch.ones(BATCH, KV_HEADS)
    assert same(attention(q, k, v, **options), attention(q, k, v, **dict.fromkeys(NAMES, ones), **options))


def test_complete_descales_are_not_copied() -> None:
    k = quantized().k
    given = [random(BATCH, KV_HEADS) for _ in range(2)]
    got = complete(given[0], None, given[1], k)
    assert (got.q.data_ptr(), got.v.data_ptr()) == (given[0].data_ptr(), given[1].data_ptr())
    assert torch.equal(got.k, torch.ones(BATCH, KV_HEADS))
    assert all(x.is_contiguous() for x in complete(random(), random(KV_HEADS), random(BATCH, 1), k))


def test_backends_get_descales_for_fp8_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(prepared, "FORWARDS", {})

    def prepare(call: AttentionCall, backend: Any, q_shape: Any, k_shape: Any, scale: float) -> Any:
        def forward(inputs: Inputs) -> Any:
            seen.append(inputs.descales)
            return torch_backend.prepare(call, q_shape, k_shape, scale)(inputs)

        return forward

    for module in ("tileattn.runtime.prepared", "tileattn.runtime.run"):
        monkeypatch.setattr(f"{module}.prepare_forward", prepare)
    x = quantized()
    for options in ({}, {"mask": SlidingWindow(3, 0)}):
        attention(*qkv(), **options)
        assert seen.pop() is None
        for given in ({}, {"v_descale": x.v_descale}, dict(zip(NAMES, x[3:]))):
            attention(*x[:3], **given, **options)
            descales = seen.pop()
            assert isinstance(descales, Descales)
            assert all(d.shape == (BATCH, KV_HEADS) and d.is_contiguous() for d in descales)


def test_descales_that_change_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FORWARDS", {})
    q, k, v = quantized()[:3]
    for value in (0.5, 0.25):
        for descale in (torch.full((BATCH, KV_HEADS), value), torch.tensor(value)):
            one = attention(q, k, v, v_descale=torch.ones(BATCH, KV_HEADS))
            assert same(attention(q, k, v, v_descale=descale), one * value)
    assert len(prepared.FORWARDS) == 2


def test_plain_calls_of_each_kind_have_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with descales never uses the plan of a call without, which would ignore them."""
    monkeypatch.setattr(prepared, "FORWARDS", {})
    x = quantized()
    half = [tensor.half() for tensor in qkv()]
    for _ in range(2):
        attention(*half)
        with pytest.raises(TypeError, match="v_descale is for float8_e4m3fn inputs only"):
            attention(*half, v_descale=x.v_descale)
        without, given = attention(*x[:3]), attention(**x._asdict())
        assert not same(without, given)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layouts(layout: str) -> None:
    x = quantized()
    tensors = [t if layout == "bshd" else t.transpose(1, 2) for t in x[:3]]
    o, lse = attention(*tensors, **dict(zip(NAMES, x[3:])), layout=layout, return_lse=True)
    assert same(o if layout == "bshd" else o.transpose(1, 2), attention(**x._asdict()))
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


# --- Refused ---


@pytest.mark.parametrize("options", [{}, {"mask": Causal()}], ids=["plain", "mask"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("descale", "error", "text"),
    [
        (0.5, TypeError, ("must be a float32 tensor or None, got float",)),
        ([0.5], TypeError, ("must be a float32 tensor or None, got list",)),
        (torch.ones(2, 2).half(), TypeError, ("must be a float32 tensor or None, got torch.float16",)),
        (torch.ones(2, 4), ValueError, ("must have shape (batch, kv_heads) = (2, 2)", "got (2, 4)")),
        (torch.ones(3), ValueError, ("must have shape (batch, kv_heads) = (2, 2)", "got (3,)")),
        (torch.ones(1, 2, 2), ValueError, ("must have shape (batch, kv_heads) = (2, 2)", "got (1, 2, 2)")),
        (torch.ones(2, 2, device="meta"), ValueError, ("must be on q's device cpu, got meta",)),
    ],
    ids=lambda value: "" if isinstance(value, (type, tuple)) else str(getattr(value, "shape", value)),
)
def test_wrong_descales(
    name: str, descale: Any, error: type[Exception], text: tuple[object, ...], options: dict[str, Any]
) -> None:
    x = quantized()
    attention(**x._asdict(), **options)  # a call that is right leaves nothing that hides the error
    with pytest.raises(error, match=says(name, *text)):
        attention(**x._asdict() | {name: descale}, **options)


@pytest.mark.parametrize("options", [{}, {"mask": Causal()}], ids=["plain", "mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_descales_of_other_dtypes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for name in NAMES:
        with pytest.raises(TypeError, match=says(f"{name} is for float8_e4m3fn inputs only", dtype)):
            attention(*(x.to(dtype) for x in qkv()), **{name: torch.ones(())}, **options)


def test_e5m2_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=says("float8_e5m2", "mantissa", "use torch.float8_e4m3fn")):
        attention(*(x.to(torch.float8_e5m2) for x in qkv()))


def test_mixed_dtypes() -> None:
    with pytest.raises(TypeError, match=says("one dtype", "float32", "float8_e4m3fn")):
        attention(qkv()[0], *quantized()[1:3])


@pytest.mark.parametrize("options", [{}, {"mask": SlidingWindow(2, 0)}], ids=["plain", "mask"])
@pytest.mark.parametrize("name", ["q", "v", "k_descale"])
def test_gradients_are_refused_and_no_grad_is_not(name: str, options: dict[str, Any]) -> None:
    arguments = quantized()._asdict()
    arguments[name] = arguments[name].clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert attention(**arguments, **options).dtype == torch.bfloat16
        with pytest.raises(NotImplementedError, match="torch: float8_e4m3fn has no backward pass"):
            attention(**arguments, **options)


def test_a_named_backend_that_refuses_says_why() -> None:
    with pytest.raises(NotImplementedError, match=says("backend='tilelang'", "float8_e4m3fn d16/32")):
        attention(**quantized()._asdict(), backend="tilelang")


# --- The tolerance rule ---


def in_fp8(seqlen: int = 111) -> tuple[Any, ...]:
    """Arguments of the oracle and of eager."""
    x = quantize_fp8(random(2, 63, 4, 32), random(2, seqlen, 2, 32, seed=1), random(2, seqlen, 2, 32, seed=2))
    return (*x[:3], None, (), None, None, *x[3:])


def test_the_oracle_takes_what_was_quantised() -> None:
    q, k, v, *_, q_descale, k_descale, v_descale = in_fp8()
    o, lse = oracle_attention(*in_fp8())
    tensors = [dequantize(x, d, torch.float64) for x, d in ((q, q_descale), (k, k_descale), (v, v_descale))]
    for got, expected in zip((o, lse), oracle_attention(*tensors)):
        torch.testing.assert_close(got, expected)


def test_eager_in_fp8_rounds_the_probabilities_and_no_more() -> None:
    """The tolerance is that of probabilities in fp8: more than of a bfloat16 output, less than of fp8 scores."""
    arguments = in_fp8()
    (o, lse), ((eager_o, *_), (eager_lse, *_)) = oracle_attention(*arguments), eager_attention(*arguments)
    assert (eager_o.dtype, eager_lse.dtype) == (torch.bfloat16, torch.float32)
    error = float((eager_o.double() - o).norm() / o.norm())
    assert torch.finfo(torch.bfloat16).eps < error < torch.finfo(FP8).eps / 2
    assert float((eager_lse.double() - lse).abs().max()) < torch.finfo(torch.bfloat16).eps / 8


def strict_scaled_mm(calls: list[tuple[int, ...]], precision: torch.dtype) -> Any:
    """A stand-in for `torch._scaled_mm` on a GPU: what it asks of its arguments, and the product in some precision."""

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: Any, use_fast_accum: bool
    ) -> Any:
        assert a.dtype == b.dtype == FP8
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert a.stride() == (a.shape[1], 1), "rows must be contiguous"
        assert b.stride() == (1, b.shape[0]), "columns must be contiguous"
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert all(scale.dtype == torch.float32 and scale.numel() == 1 for scale in (scale_a, scale_b))
        assert use_fast_accum
        calls.append((*a.shape, b.shape[1]))
        return (a.float() @ b.float()).to(precision).to(out_dtype)

    return scaled_mm


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "dim"), [(5, 7, 40), (64, 48, 64), (1, 33, 16)])
def test_the_product_pads_and_lays_out(monkeypatch: pytest.MonkeyPatch, seqlen_q: int, seqlen_k: int, dim: int) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch, "_scaled_mm", strict_scaled_mm(calls, torch.float32))
    q = random(2, seqlen_q, 4, dim).to(FP8).transpose(1, 2)
    k = random(2, seqlen_k, 1, dim, seed=1).to(FP8).transpose(1, 2).expand(-1, 4, -1, -1)
    got = fp8_product(q, k)
    torch.testing.assert_close(got, q.float() @ k.float().mT)
    assert calls == 8 * [tuple(-(-size // 16) * 16 for size in (seqlen_q, dim, seqlen_k))]


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16)])
def test_the_product_of_nothing(shape: tuple[int, ...]) -> None:
    q, k = torch.empty(shape).to(FP8), torch.empty(*shape[:2], 7, 16).to(FP8)
    assert fp8_product(q, k).shape == (*shape[:3], 7)
    assert fp8_product(k, q).shape == (*shape[:2], 7, shape[2])


def test_eager_on_a_gpu_multiplies_as_the_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's scores are those of `torch._scaled_mm`, with the error of a matrix unit with few bits."""
    arguments = in_fp8()
    (o, lse), (exact_o, exact_lse) = oracle_attention(*arguments), eager_attention(*arguments)
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(oracle, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", strict_scaled_mm(calls, torch.float32))
    same_o, same_lse = eager_attention(*arguments)
    assert len(calls) == 3 * 2 * 4  # runs, batch elements, heads
    assert max(float((x - y).abs().max()) for x, y in zip(same_lse, exact_lse)) < 1e-5
    assert_forward_accurate("x", (same_o[0], same_lse[0]), (o, lse), (exact_o, exact_lse))

    monkeypatch.setattr(torch, "_scaled_mm", strict_scaled_mm(calls, torch.bfloat16))
    coarse = eager_attention(*arguments)
    assert float((coarse[1][0].double() - lse).abs().max()) > torch.finfo(torch.bfloat16).eps / 8
    with pytest.raises(AssertionError, match="lse of x"):
        assert_forward_accurate("x", (coarse[0][0], coarse[1][0]), (o, lse), (exact_o, exact_lse))
    assert_forward_accurate("x", (coarse[0][0], coarse[1][0]), (o, lse), coarse)


def test_a_cpu_multiplies_exactly() -> None:
    assert not multiplies_fp8(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 40, 64])
def test_the_product_on_a_gpu(dim: int) -> None:
    """The product keeps some 13 bits below the largest term of a step."""
    device = torch.device("cuda")
    if not multiplies_fp8(device):
        pytest.skip("its matrix units do not multiply fp8")
    q = random(2, 63, 4, dim).to(FP8).to(device).transpose(1, 2)
    k = random(2, 111, 4, dim, seed=1).to(FP8).to(device).transpose(1, 2)
    exact = q.double() @ k.double().mT
    error = (fp8_product(q, k).double() - exact).abs().amax(-1)
    assert bool((error <= 2**-10 * exact.abs().amax(-1)).all())


def test_a_wrong_descale_is_seen() -> None:
    arguments = in_fp8()
    expected, eager = oracle_attention(*arguments), eager_attention(*arguments)
    for i in (7, 8, 9):
        wrong = list(arguments)
        wrong[i] = wrong[i].flip(1) * math.sqrt(1.5)
        o, lse = oracle_attention(*wrong)
        with pytest.raises(AssertionError, match="error"):
            assert_forward_accurate("x", (o.bfloat16(), lse.float()), expected, eager)


def test_the_public_names() -> None:
    assert {"quantize_fp8", "QuantizedFP8"} <= set(tileattn.__all__)
