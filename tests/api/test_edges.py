"""Unusual arguments: all public functions treat each in the same way, with a result or one clear error."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    KeyPadding,
    Mask,
    PrefixLM,
    ScoreMod,
    SlidingWindow,
    SoftCap,
    attention,
)
from tileattn.compat.flash_attn.flash_attn_interface import flash_attn_func

HUGE = 10**400
x = torch.randn(1, 16, 2, 16, generator=torch.Generator().manual_seed(0))
lengths = torch.tensor([0, 16], dtype=torch.int32)


def dense(**options: Any) -> Any:
    return attention(x, x, x, **options)


def masked(**options: Any) -> Any:
    return attention(x, x, x, mask=SlidingWindow(3), **options)


def packed(**options: Any) -> Any:
    return tileattn.varlen_attention(x[0], x[0], x[0], lengths, lengths, 16, 16, **options)


def packed_and_masked(**options: Any) -> Any:
    return packed(mask=SlidingWindow(3), **options)


def as_pytorch(**options: Any) -> Any:
    return tileattn.scaled_dot_product_attention(x, x, x, **options)


def as_flash(scale: Any = None, **options: Any) -> Any:
    return flash_attn_func(x, x, x, softmax_scale=scale, **options)


FUNCTIONS = [dense, masked, packed, packed_and_masked, as_pytorch, as_flash]
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
backends = pytest.mark.parametrize("backend", [None, "torch", "triton", "tilelang"])


@dataclass(frozen=True, eq=False)
class Thinned(Mask):
    step: int

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k % self.step == 0


@dataclass(frozen=True, eq=False)
class Weakened(ScoreMod):
    factor: float

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * self.factor


NUMBERS = [np.float32, np.float64, np.float16, torch.tensor, lambda value: torch.tensor(value).half()]


# --- Numbers ---


@functions
@pytest.mark.parametrize("value", [True, False], ids=str)
def test_a_bool_is_no_number(function: Callable[..., Any], value: bool) -> None:
    """A bool is refused also after a call with the equal number: 1.0 == True and 0.0 == False."""
    function(scale=float(value), dropout_p=0.0)
    with pytest.raises(TypeError, match=rf"scale must be a finite number or None, got {value}"):
        function(scale=value)
    with pytest.raises(TypeError, match=rf"dropout_p must be a probability, a number from 0 to 1, got {value}"):
        function(dropout_p=value)
    with pytest.raises(TypeError, match="scale must be a finite number or None, or a 0-dim tensor"):
        function(scale=torch.tensor(value))


@backends
def test_before_a_backend_is_asked(backend: str | None) -> None:
    for call in (dense, masked, packed):
        with pytest.raises(TypeError, match="scale must be a finite number"):
            call(scale=True, backend=backend)
        with pytest.raises(TypeError, match="dropout_p must be a probability"):
            call(dropout_p=False, backend=backend)
        with pytest.raises(ValueError, match="scale must be a finite number or None, got a number that is beyond"):
            call(scale=HUGE, backend=backend)


@functions
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, HUGE, -HUGE], ids=lambda value: str(value)[:9])
def test_numbers_are_finite(function: Callable[..., Any], value: Any) -> None:
    with pytest.raises(ValueError, match="scale must be a finite number or None"):
        function(scale=value)
    with pytest.raises(ValueError, match="dropout_p must be a probability"):
        function(dropout_p=value)


@functions
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_numpy_and_tensors_without_dimensions(function: Callable[..., Any], number: Any) -> None:
    assert torch.equal(function(scale=number(0.5), dropout_p=number(0.0)), function(scale=0.5))
    assert not function(dropout_p=number(1.0)).any()


@functions
def test_integers_are_numbers(function: Callable[..., Any]) -> None:
    for number in (1, np.int64(1), np.uint8(1), torch.tensor(1)):
        assert torch.equal(function(scale=number, dropout_p=0), function(scale=1.0))


def test_a_tensor_is_read_at_each_call() -> None:
    scale = torch.tensor(0.5)
    first = dense(scale=scale)
    scale.fill_(2.0)
    assert torch.equal(dense(scale=scale), dense(scale=2.0))
    assert not torch.equal(dense(scale=scale), first)


@functions
def test_a_scale_with_a_gradient_or_of_a_device_is_no_number(function: Callable[..., Any]) -> None:
    for scale in (torch.tensor(0.5, requires_grad=True), torch.tensor(0.5, device="meta"), torch.tensor([0.5])):
        with pytest.raises(TypeError, match="scale must be a finite number or None, or a 0-dim tensor on the CPU"):
            function(scale=scale)


@pytest.mark.parametrize("function", FUNCTIONS[:4], ids=lambda f: f.__name__)
def test_flags_of_numpy(function: Callable[..., Any]) -> None:
    for flag in (True, False):
        assert torch.equal(function(causal=np.bool_(flag)), function(causal=flag))
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        function(causal=1)
    o, _ = function(return_lse=np.bool_(True), deterministic=np.bool_(True))
    assert torch.equal(o, function())


def test_flags_of_numpy_elsewhere() -> None:
    assert torch.equal(as_pytorch(is_causal=np.bool_(True)), as_pytorch(is_causal=True))
    assert tileattn.nn.FlashAttentionV2(32, 2, causal=np.bool_(True)).causal is True


# --- Masks and modifications ---


def test_sizes_of_numpy() -> None:
    for size in (np.int64(3), np.int8(3), torch.tensor(3)):
        assert SlidingWindow(size, size).left == 3  # type: ignore[arg-type]
        assert type(SlidingWindow(size, size).right) is int  # type: ignore[arg-type]
        assert torch.equal(dense(mask=PrefixLM(size)), dense(mask=PrefixLM(3)))
        layer = tileattn.nn.SlidingWindowAttention(32, 2, window_size=size)  # type: ignore[arg-type]
        assert layer.window_size == 3
    for cap in (np.float32(2), torch.tensor(2.0), 2):
        assert SoftCap(cap).cap == 2.0  # type: ignore[arg-type]


def test_a_field_of_a_users_class_may_be_numpys() -> None:
    for step, factor in ((np.int64(3), np.float32(0.5)), (np.int8(3), np.float64(0.5))):
        mask, mod = Thinned(step), Weakened(factor)  # type: ignore[arg-type]
        assert torch.equal(dense(mask=mask, score_mod=mod), dense(mask=Thinned(3), score_mod=Weakened(0.5)))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: SlidingWindow(True, 0), TypeError, "SlidingWindow: left must be an int or None, got True"),
        (lambda: SlidingWindow(None, np.bool_(True)), TypeError, "SlidingWindow: right must be an int or None"),
        (lambda: SlidingWindow(torch.tensor([3]), 0), TypeError, "SlidingWindow: left must be an int or None"),
        (lambda: SlidingWindow(2**31), ValueError, "SlidingWindow: left must lie in 0 .. 2**30 - 1, got 2147483648"),
        (lambda: SlidingWindow(HUGE), ValueError, "SlidingWindow: left must lie in 0 .. 2**30 - 1"),
        (lambda: PrefixLM(True), TypeError, "PrefixLM: prefix must be an int or an integer tensor (batch,), got True"),
        (lambda: SoftCap(True), TypeError, "SoftCap: cap must be a positive finite number, got True"),
        (lambda: SoftCap(HUGE), ValueError, "SoftCap: cap must be a positive finite number"),
        (lambda: SoftCap(np.float32(-1)), ValueError, "SoftCap: cap must be a positive finite number, got -1.0"),
        (lambda: dense(mask=torch.ones(16, 16).bool()), TypeError, "scaled_dot_product_attention(attn_mask=)"),
        (lambda: dense(mask=torch.ones(16, 16).bool()), TypeError, "tileattn.KeyPadding"),
        (lambda: packed(mask=torch.ones(16, 16).bool()), TypeError, "scaled_dot_product_attention(attn_mask=)"),
        (lambda: tileattn.nn.MaskedAttention(32, 2, mask=torch.ones(2, 2)), TypeError, "(attn_mask=)"),  # type: ignore[arg-type]
        (lambda: dense(score_mod=torch.ones(16, 16)), TypeError, "is tileattn.Bias(tensor)"),
        (lambda: dense(key_padding_mask=torch.ones(1, 16).long()), TypeError, "pass mask.bool()"),
        (lambda: KeyPadding(torch.ones(1, 16).int()), TypeError, "pass mask.bool()"),
        (lambda: dense(is_causal=True), TypeError, "'is_causal'; use causal=, aligned bottom-right"),
        (lambda: dense(softmax_scale=1.0), TypeError, "'softmax_scale'; use scale="),
        (lambda: dense(scores_mod=None), TypeError, "'scores_mod'; use score_mod="),
        (lambda: dense(whatever=1), TypeError, "'whatever'; keyword arguments are mask, key_padding_mask, score_mod"),
        (lambda: packed(is_causal=True), TypeError, "'is_causal'; use causal="),
        (lambda: packed(key_padding=1), TypeError, "varlen_attention() got an unexpected keyword argument"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        make()


def test_a_window_of_one_number_is_causal() -> None:
    assert torch.equal(dense(mask=SlidingWindow(3)), dense(mask=SlidingWindow(3, 0)))
    assert torch.equal(dense(mask=SlidingWindow(3)), dense(mask=SlidingWindow(3, 3), causal=True))


def test_windows_beyond_all_keys() -> None:
    """flash-attn's, and a layer's, have no bound."""
    assert torch.equal(as_flash(window_size=(2**40, 2**40)), as_flash())
    assert torch.equal(as_flash(window_size=(2**40, 0)), as_flash(causal=True))
    layer = tileattn.nn.SlidingWindowAttention(32, 2, window_size=2**40, causal=True)
    unbounded = tileattn.nn.MaskedAttention(32, 2, mask=SlidingWindow(None, 0))
    unbounded.load_state_dict(layer.state_dict())
    hidden = torch.randn(1, 5, 32)
    torch.testing.assert_close(layer(hidden)[0], unbounded(hidden)[0])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"softcap": -1.0}, ValueError, "softcap must be a positive finite number, or 0 for no cap, got -1.0"),
        ({"softcap": math.nan}, ValueError, "softcap must be a positive finite number, or 0 for no cap, got nan"),
        ({"softcap": math.inf}, ValueError, "softcap must be a positive finite number, or 0 for no cap, got inf"),
        ({"softcap": True}, TypeError, "softcap must be a positive finite number, or 0 for no cap, got True"),
        ({"window_size": (True, 0)}, TypeError, "window_size must be two ints, (left, right), -1 for no bound"),
    ],
)
def test_flash_attns_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        as_flash(**options)


fp8 = torch.zeros(1, 1, 16, 16).to(torch.float8_e4m3fn)


@backends
def test_no_tensors_in_fp8(backend: str | None) -> None:
    for mod in (Bias(fp8), ALiBi(fp8.flatten()[:2])):
        for call in (dense, packed):
            with pytest.raises(TypeError, match=r"must be a floating-point tensor, got torch\.float8_e4m3fn; of 16"):
                call(score_mod=mod, backend=backend)
    with pytest.raises(TypeError, match=r"floats of 16 bits or more, got torch.float8_e4m3fn; .*\.float\(\)"):
        dense(score_mod=lambda s, b, h, q, k: s + fp8[0, 0, q, k], backend=backend)


# --- Tensors ---


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    def nested(*shape: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype"
            return torch.nested.nested_tensor([torch.zeros(4, *shape), torch.zeros(6, *shape)], layout=layout)

    n, hidden = nested(2, 16), nested(32)
    for options in ({}, {"mask": Causal()}):
        with pytest.raises(TypeError, match=r"q must be a dense tensor, got a nested one; tileattn\.varlen_attention"):
            attention(n, n, n, **options)
    with pytest.raises(TypeError, match="query must be a dense tensor, got a nested one"):
        tileattn.scaled_dot_product_attention(n, n, n)
    with pytest.raises(TypeError, match=r"q must be a dense tensor, got a nested one; .*q.values\(\)"):
        tileattn.varlen_attention(n, n, n, lengths, lengths, 6, 6)
    for layer in (tileattn.nn.FlashAttentionV2(32, 2), tileattn.nn.MaskedAttention(32, 2)):
        with pytest.raises(TypeError, match="x must be a dense tensor, got a nested one"):
            layer(hidden)


META: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": SlidingWindow(3)},
    "function": {"mask": lambda b, h, q, k: q >= k},
    "score": {"score_mod": [SoftCap(3.0), lambda s, b, h, q, k: s * 2]},
    "dropout": {"dropout_p": 0.5, "mask": Causal()},
    "padding": {"key_padding_mask": torch.ones(1, 16, dtype=torch.bool, device="meta")},
    "documents": {"mask": Documents(torch.zeros(1, 16, dtype=torch.int64, device="meta"))},
    "bias": {"score_mod": Bias(torch.zeros(1, 1, 16, 16, device="meta"))},
}


@pytest.mark.parametrize("name", META)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_meta_tensors_have_shapes(name: str, grad: bool, dtype: torch.dtype) -> None:
    q = torch.empty(1, 16, 4, 8, device="meta", dtype=dtype, requires_grad=grad)
    k, v = (torch.empty(1, 16, 2, size, device="meta", dtype=dtype, requires_grad=grad) for size in (8, 24))
    o, lse = attention(q, k, v, **META[name], return_lse=True)
    assert (o.shape, o.dtype, o.device.type) == ((1, 16, 4, 24), dtype, "meta")
    assert (lse.shape, lse.dtype) == ((1, 4, 16), torch.promote_types(dtype, torch.float32))
    if grad:
        o.sum().backward()
        assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]  # type: ignore[union-attr]


def test_meta_tensors_elsewhere() -> None:
    meta, cu_seqlens = x.to("meta"), lengths.to("meta")
    o = tileattn.varlen_attention(meta[0], meta[0], meta[0], cu_seqlens, cu_seqlens, 16, 16, mask=SlidingWindow(3))
    assert (o.shape, o.device.type) == ((16, 2, 16), "meta")
    o = tileattn.scaled_dot_product_attention(meta, meta, meta, is_causal=True)
    assert (o.shape, o.device.type) == (x.shape, "meta")
    layer = tileattn.nn.MaskedAttention(32, 2, mask=SlidingWindow(3), device="meta")
    assert layer(torch.empty(1, 5, 32, device="meta"))[0].shape == (1, 5, 32)
    assert flash_attn_func(meta, meta, meta, causal=True).shape == x.shape


def test_meta_tensors_do_not_hide_errors() -> None:
    meta = x.to("meta")
    with pytest.raises(ValueError, match="on q's device meta, got one with shape"):
        attention(meta, meta, meta, mask=Documents(torch.zeros(1, 16, dtype=torch.int64)))
    with pytest.raises(TypeError, match="scale must be"):
        attention(meta, meta, meta, scale=True)
