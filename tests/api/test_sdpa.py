"""`tileattn.scaled_dot_product_attention` beside PyTorch's own, argument by argument: equal in float64 up to roundings.

PyTorch's is that of the MATH backend, its definition.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tileattn
from tileattn.call.head_dims import pad
from tileattn.testing import dropout_mask

Shape = tuple[int, ...]
TORCH = torch.nn.functional.scaled_dot_product_attention


class Case(NamedTuple):
    query: Shape
    key: Shape
    value: Shape
    mask: Shape | None = None
    boolean: bool = False
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


DENSE: tuple[Shape, Shape, Shape] = ((2, 3, 7, 16), (2, 3, 11, 16), (2, 3, 11, 8))
FIVE: tuple[Shape, Shape, Shape] = ((2, 4, 3, 7, 16), (2, 4, 3, 9, 16), (2, 4, 3, 9, 8))

CASES = {
    "4d": Case(*DENSE),
    "3d": Case((3, 7, 16), (3, 11, 16), (3, 11, 8)),
    "2d": Case((7, 16), (11, 16), (11, 8)),
    "5d": Case(*FIVE),
    "head-dims": Case((2, 3, 7, 5), (2, 3, 11, 5), (2, 3, 11, 3)),
    "broadcast-batch": Case((2, 3, 7, 16), (1, 3, 11, 16), (3, 11, 16)),
    "broadcast-leading": Case((2, 1, 3, 7, 16), (5, 3, 9, 16), (2, 5, 3, 9, 8)),
    "broadcast-kv-heads": Case((2, 6, 7, 16), (2, 1, 9, 16), (2, 1, 9, 16)),
    "broadcast-q-heads": Case((2, 1, 7, 16), (2, 6, 9, 16), (2, 6, 9, 16)),
    "broadcast-v-heads": Case((2, 6, 7, 16), (2, 6, 9, 16), (2, 1, 9, 16)),
    "scale": Case(*DENSE, scale=0.7),
    "negative-scale": Case(*DENSE, scale=-0.3),
    "causal": Case((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), is_causal=True),
    "causal-more-keys": Case(*DENSE, is_causal=True),
    "causal-more-queries": Case((2, 3, 11, 16), (2, 3, 5, 16), (2, 3, 5, 8), is_causal=True),
    "causal-one-query": Case((2, 3, 1, 16), (2, 3, 5, 16), (2, 3, 5, 8), is_causal=True),
    "causal-5d": Case((2, 4, 3, 9, 16), (4, 3, 7, 16), (2, 1, 3, 7, 16), is_causal=True),
    "gqa": Case((2, 6, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8), enable_gqa=True),
    "gqa-causal": Case((2, 6, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16), is_causal=True, enable_gqa=True),
    "gqa-other-value-heads": Case((2, 6, 7, 16), (2, 2, 9, 16), (2, 3, 9, 8), enable_gqa=True),
    "gqa-3d": Case((6, 7, 16), (2, 9, 16), (2, 9, 8), enable_gqa=True),
    "gqa-mask": Case((2, 6, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8), (2, 6, 7, 9), enable_gqa=True),
    "mask": Case(*DENSE, (2, 3, 7, 11)),
    "mask-of-all": Case(*DENSE, (7, 11)),
    "mask-of-keys": Case(*DENSE, (2, 1, 1, 11)),
    "mask-of-queries": Case(*DENSE, (7, 1)),
    "mask-of-heads": Case(*DENSE, (3, 7, 11)),
    "mask-5d": Case(*FIVE, (2, 1, 3, 7, 9)),
    "mask-5d-of-inner": Case(*FIVE, (4, 1, 7, 9)),
    "mask-5d-of-keys": Case(*FIVE, (2, 4, 1, 1, 9)),
    "mask-3d": Case((3, 7, 16), (3, 11, 16), (3, 11, 8), (3, 7, 11)),
    "mask-2d": Case((7, 16), (11, 16), (11, 8), (7, 11)),
    "boolean": Case(*DENSE, (2, 3, 7, 11), boolean=True),
    "boolean-of-all": Case(*DENSE, (7, 11), boolean=True),
    "boolean-of-keys": Case(*DENSE, (2, 1, 1, 11), boolean=True),
    "boolean-of-queries": Case(*DENSE, (1, 1, 7, 1), boolean=True),
    "boolean-5d": Case(*FIVE, (2, 4, 1, 7, 9), boolean=True),
    "no-keys": Case((2, 3, 7, 16), (2, 3, 0, 16), (2, 3, 0, 8)),
    "no-queries": Case((2, 3, 0, 16), (2, 3, 5, 16), (2, 3, 5, 8)),
    "no-batch": Case((0, 3, 4, 16), (0, 3, 5, 16), (0, 3, 5, 8)),
}


def leaves_and_arguments(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    torch.manual_seed(0)

    def leaf(shape: Shape) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    leaves, mask = [leaf(case.query), leaf(case.key), leaf(case.value)], None
    if case.mask is not None and case.boolean:
        mask = torch.rand(case.mask) > 0.6
        mask[..., :1, :] = False  # a query that sees nothing
    elif case.mask is not None:
        mask = leaf(case.mask)
        leaves.append(mask)
    rest = {"attn_mask": mask, "is_causal": case.is_causal, "scale": case.scale, "enable_gqa": case.enable_gqa}
    return leaves, {"query": leaves[0], "key": leaves[1], "value": leaves[2], **rest}


@pytest.mark.parametrize("name", CASES)
def test_as_pytorchs(name: str) -> None:
    leaves, arguments = leaves_and_arguments(CASES[name])
    with sdpa_kernel(SDPBackend.MATH):
        expected = TORCH(**arguments)
    o = tileattn.scaled_dot_product_attention(**arguments)
    assert o.shape == expected.shape
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    do = torch.randn_like(o)
    gradients, expected_gradients = torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, leaves, do)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-11)


def test_its_signature_is_pytorchs() -> None:
    """PyTorch's function is a builtin: names and defaults are read from the first line of its documentation."""
    parameters = inspect.signature(tileattn.scaled_dot_product_attention).parameters
    given = ", ".join(name if p.default is p.empty else f"{name}={p.default}" for name, p in parameters.items())
    documented = (TORCH.__doc__ or "").strip().partition(") ->")[0]
    assert f"scaled_dot_product_attention({given}" == " ".join(documented.split())
    keyword_only = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == ["scale", "enable_gqa"]
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(TypeError, match="positional"):
        TORCH(q, q, q, None, 0.0, False, 0.1)


def test_any_strides() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 9, dtype=torch.float64).mT for _ in range(3))
    assert q.stride(-1) != 1
    torch.testing.assert_close(tileattn.scaled_dot_product_attention(q, k, v), TORCH(q, k, v))


def test_a_mask_in_float32_beside_16_bits() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.randn(9, 9)
    got = tileattn.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, TORCH(q, k, v, mask), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_mask_under_autocast(dtype: torch.dtype) -> None:
    """The mask may have query's dtype after the cast, or the one before it."""
    torch.manual_seed(0)
    q, mask = torch.randn(2, 3, 9, 16), torch.randn(9, 9)
    mask = mask > 0 if dtype == torch.bool else mask.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = tileattn.scaled_dot_product_attention(q, q, q, mask), TORCH(q, q, q, mask)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_head_dims_are_padded_for_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []

    def padded(*tensors: Tensor) -> tuple[Tensor, ...]:
        dtypes.extend(x.dtype for x in tensors)
        return tensors

    monkeypatch.setattr(tileattn.api.sdpa, "padded", padded)
    q = torch.randn(2, 3, 9, 17)
    with torch.autocast("cpu", torch.bfloat16):
        tileattn.scaled_dot_product_attention(q, q, q)
    assert dtypes == [torch.bfloat16] * 3


def test_minus_infinity_in_a_float_mask_hides() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 16, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(7, 7, dtype=torch.float64).masked_fill_(torch.rand(7, 7) > 0.5, -torch.inf)
    mask[2] = -torch.inf
    got = tileattn.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(got, TORCH(q, k, v, mask))
    assert (got[:, :, 2] == 0).all()


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_pytorchs_causal_bias(bias: Any, lengths: tuple[int, int]) -> None:
    """A causal bias is a tensor whose memory is not written; it stands for the mask that its attributes name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, lengths[place], 16, dtype=torch.float64) for place in (0, 1, 1))
    mask = bias(*lengths)
    got = tileattn.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, tileattn.scaled_dot_product_attention(q, k, v, mask._materialize()))


def test_pytorchs_causal_bias_under_torch_compile() -> None:
    q, k = torch.randn(2, 3, 3, 16), torch.randn(2, 3, 5, 16)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return tileattn.scaled_dot_product_attention(q, k, k, causal_lower_right(3, 5))

    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(q, k), call(q, k))


def test_a_mask_may_be_a_parameter() -> None:
    q, mask = torch.randn(2, 3, 5, 16), torch.nn.Parameter(torch.randn(5, 5))
    got = tileattn.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(got, tileattn.scaled_dot_product_attention(q, q, q, mask.detach()))
    got.sum().backward()
    assert mask.grad is not None


def test_dropout_is_that_of_the_seed() -> None:
    q = torch.zeros(2, 3, 40, 16, dtype=torch.float64)
    eye = torch.eye(40, dtype=torch.float64).expand(2, 3, 40, 40)
    torch.manual_seed(5)
    kept = tileattn.scaled_dot_product_attention(q, q, eye, dropout_p=0.25) != 0
    torch.manual_seed(5)
    seed = tileattn.call.dropout.draw_seed("cpu")
    assert torch.equal(kept, dropout_mask(seed, 0.25, 2, 3, 40, 40))


def test_under_torch_compile() -> None:
    leaves, arguments = leaves_and_arguments(CASES["gqa-mask"])
    compiled = torch.compile(tileattn.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    o, eager = compiled(**arguments), tileattn.scaled_dot_product_attention(**arguments)
    torch.testing.assert_close(o, eager)
    do = torch.randn_like(o)
    torch.testing.assert_close(torch.autograd.grad(o, leaves, do), torch.autograd.grad(eager, leaves, do))


@pytest.mark.parametrize(("size", "expected"), [(1, 16), (16, 16), (17, 24), (59, 64), (96, 96), (111, 112)])
def test_head_dims_are_padded_to_what_kernels_take(size: int, expected: int) -> None:
    x = torch.randn(2, 3, size, requires_grad=True)
    y = pad(x)
    assert y.shape == (2, 3, expected)
    assert torch.equal(y[..., :size], x)
    assert (y[..., size:] == 0).all()
    assert (y is x) == (size == expected)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.ones_like(x))


Q = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Q, Q, Q, torch.zeros(5, 5), 0.0, True), RuntimeError, "attn_mask should not be set when is_causal=True"),
        ((Q, Q, Q, causal_upper_left(5, 5), 0.0, True), RuntimeError, "should not be set when is_causal=True"),
        ((Q, Q, Q, causal_upper_left(5, 6)), ValueError, "a CausalBias, must be for the L = 5 and S = 5.*for 5 and 6"),
        ((Q[0, 0, 0], Q, Q), ValueError, r"query must have at least 2 dimensions.*got \(8,\)"),
        ((Q, Q.tolist(), Q), TypeError, "key must be a torch.Tensor, got list"),
        (
            (Q, torch.zeros(3, 4, 5, 8), Q),
            ValueError,
            r"leading dimensions.*must broadcast, got \(2,\), \(3,\), \(2,\)",
        ),
        ((Q, Q[:, :2], Q[:, :2]), ValueError, r"heads of query, key and value \(without enable_gqa\) must broadcast"),
        ((Q, Q, Q, torch.zeros(4, 5)), ValueError, r"attn_mask must broadcast to .* = \(2, 4, 5, 5\), got \(4, 5\)"),
        ((Q, Q, Q, torch.zeros(3, 2, 4, 5, 5)), ValueError, "attn_mask must broadcast to"),
        ((Q, Q, Q, torch.zeros(5, 5, dtype=torch.int32)), TypeError, "attn_mask must be .*got torch.int32"),
        ((Q, Q, Q, torch.zeros(5, 5, dtype=torch.float64)), TypeError, "attn_mask must be .*got torch.float64"),
        ((Q, Q, Q, [[0.0]]), TypeError, "attn_mask must be .*got list"),
        ((Q, Q.double(), Q), TypeError, "one dtype"),
        ((Q[..., :0], Q[..., :0], Q), ValueError, "query: head dims must be at least 1"),
        ((Q, Q[..., :4], Q), ValueError, "one head_dim, got 8 and 4"),
        ((Q, Q[:, :, :3], Q), ValueError, "one seqlen"),
        ((Q, Q, Q, None, 0.0, 1), TypeError, "is_causal must be True or False, got 1"),
        ((Q, Q, Q, None, 1.5), ValueError, "dropout_p must be a probability"),
        ((torch.nested.nested_tensor([Q[0]], layout=torch.jagged), Q, Q), TypeError, "query must be a dense tensor"),
    ],
)
def test_errors(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tileattn.scaled_dot_product_attention(*arguments)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.int64(2), torch.tensor(0.5), torch.tensor(2)], ids=repr)
def test_scales_as_pytorch_takes_them(scale: Any) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, 5, 8)
    got = tileattn.scaled_dot_product_attention(q, q, q, scale=scale)
    torch.testing.assert_close(got, TORCH(q, q, q, scale=scale))


@pytest.mark.parametrize(
    ("scale", "got"),
    [
        ("1", "'1'"),
        (True, "True"),
        (torch.ones(1), r"tensor of shape \(1,\) in torch.float32 on cpu"),
        (torch.tensor(1.0, requires_grad=True), "with a gradient"),
        (torch.tensor(1.0, device="meta"), "on meta"),
        (torch.tensor(True), "in torch.bool"),
    ],
)
def test_scales_that_are_no_numbers(scale: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"scale must be a finite number or None.* got .*{got}"):
        tileattn.scaled_dot_product_attention(Q, Q, Q, scale=scale)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="must divide those of query, got 3 and 3 for 4"):
        tileattn.scaled_dot_product_attention(Q, Q[:, :3], Q[:, :3], enable_gqa=True)
