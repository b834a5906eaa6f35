"""Blocks that share the heads of a group, on a GPU: the same bits in every run, and the gradients of one block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tileattn import Causal, Documents, Mask, SlidingWindow, attention, varlen_attention
from tileattn.call.facts import AttentionCall, BackwardCall, Packed, sizes
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch
from tileattn.kernels.tilelang.backward.launch import prepare_backward_with
from tileattn.kernels.tilelang.backward.shares.last_wave import Dealt
from tileattn.testing import assert_accurate, eager_attention, oracle_attention
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

pytestmark = pytest.mark.gpu

RUNS = 100
LENGTHS = (333, 0, 1000, 77)


def _backward(
    tensors: list[Tensor], causal: bool, shares: int, deterministic: bool, packed: Packed | None
) -> list[Tensor]:
    """dq, dk and dv; the last two equal in all runs, and dq as well where it is deterministic."""
    q, k, v, do = tensors
    variant, _ = encode(Causal() if causal else None, ())
    dim = q.shape[3]
    if packed is None:
        o, lse = attention(q, k, v, causal=causal, return_lse=True)
    else:
        o, lse = varlen_attention(
            q[0], k[0], v[0], packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k,
            causal=causal, return_lse=True,
        )  # fmt: skip
        o, lse = o[None], lse.reshape(1, q.shape[2], -1)
    arch = "sm_90a" if torch.cuda.get_device_capability() == (9, 0) else "sm_80"
    forward = AttentionCall(q.dtype, dim, dim, variant, needs_grad=True, arch=arch, packed=packed is not None)
    call = BackwardCall(forward, (True, True, True, False), False, deterministic)
    shapes = (q.shape, k.shape) if packed is None else sizes(q, k, packed)
    run = prepare_backward_with(None, call, *shapes, dim**-0.5, shares)
    first, *others = [
        run(Inputs(q, k, v, None, Operands([], [], []), None, packed), o, lse, do, None)[:3] for _ in range(RUNS)
    ]
    for other in others:
        for index in range(0 if deterministic else 1, 3):
            assert torch.equal(first[index], other[index])
    return list(first)


def _assert_gradients(got: Sequence[Tensor], leaves: list[Tensor], do: Tensor, mask: Mask | None) -> None:
    """dq, dk and dv beside those of the oracle and of eager attention."""
    expected = torch.autograd.grad((oracle_attention(*leaves, mask)[0] * do.double()).sum(), leaves)
    runs = eager_attention(*leaves, mask)[0]
    eager = [torch.autograd.grad((run.float() * do.float()).sum(), leaves, retain_graph=True) for run in runs]
    for index, name in enumerate("qkv"):
        oracle = expected[index].double()
        assert_accurate(f"d{name}", got[index], oracle, [run[index] for run in eager], gradient=True)


def _drawn(total: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, total, count, dim, device="cuda", dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 160, 192, 224, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "shares"), [(28, 4, 3), (6, 1, 3), (6, 1, 4)])
def test_dense(heads: int, kv_heads: int, shares: int, dim: int, causal: bool, deterministic: bool) -> None:
    tensors = _drawn(1025, heads, kv_heads, dim)
    got = _backward(tensors, causal, shares, deterministic, None)
    *leaves, do = tensors
    leaves = [x.requires_grad_() for x in leaves]
    mask = Causal() if causal else None
    _assert_gradients(got, leaves, do, mask)


@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize("dim", [64, 112, 128])
@pytest.mark.parametrize("name", ["window", "documents", "causal documents"])
def test_masks_that_are_hidden_by_bits(name: str, dim: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function, as a longer call would be launched."""
    monkeypatch.setattr(launch, "dealt", lambda *_: Dealt(shares))
    forget_prepared()
    *leaves, do = _drawn(1025, 14, 2, dim)
    leaves = [x.requires_grad_() for x in leaves]
    documents = Documents(torch.arange(1025, dtype=torch.int32, device="cuda") // 170)
    mask = {"window": SlidingWindow(200, 0), "documents": documents, "causal documents": documents & Causal()}[name]
    o = attention(*leaves, mask=mask, backend="tilelang")
    got, again = (torch.autograd.grad(o, leaves, do, retain_graph=True) for _ in range(2))
    forget_prepared()
    assert torch.equal(got[1], again[1])
    assert torch.equal(got[2], again[2])
    _assert_gradients(got, leaves, do, mask)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 200, 256])
@pytest.mark.parametrize(("whole_keys", "shares"), [(640, 3), (128, 2), (700, 4)])
def test_the_last_wave_alone(
    whole_keys: int, shares: int, dim: int, causal: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batch elements, so that the keys' gradients are slices with gaps between them."""
    monkeypatch.setattr(launch, "dealt", lambda *_: Dealt(shares, whole_keys))
    forget_prepared()
    torch.manual_seed(0)
    q, do = (torch.randn(2, 301, 14, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 1001, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = Causal() if causal else None
    o = attention(*leaves, mask=mask, backend="tilelang", deterministic=deterministic)
    got, again = (torch.autograd.grad(o, leaves, do, retain_graph=True) for _ in range(2))
    forget_prepared()
    for index in range(0 if deterministic else 1, 3):
        assert torch.equal(got[index], again[index])
    _assert_gradients(got, leaves, do, mask)


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (192, 184), (224, 200), (256, 208)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 389), (389, 389), (1, 65), (130, 257)])
def test_wide_heads_of_two_dims(
    seqlen_q: int, seqlen_k: int, causal: bool, dim: int, dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of keys that fill no tile, two batch elements and kv heads beside each other, and columns of padding."""
    monkeypatch.setattr(launch, "dealt", lambda *_: Dealt(3))
    forget_prepared()
    torch.manual_seed(0)
    sizes = ((seqlen_q, 10, dim), (seqlen_k, 2, dim), (seqlen_k, 2, dim_v), (seqlen_q, 10, dim_v))
    *leaves, do = (torch.randn(2, *size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    leaves = [x.requires_grad_() for x in leaves]
    mask = Causal() if causal else None
    o = attention(*leaves, mask=mask, backend="tilelang")
    got, again = (torch.autograd.grad(o, leaves, do, retain_graph=True) for _ in range(2))
    forget_prepared()
    for x, y in zip(got, again, strict=True):
        assert torch.equal(x, y)  # no head dim here has sums of dq that blocks add to
    _assert_gradients(got, leaves, do, mask)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 200, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (6, 1)])
def test_packed(heads: int, kv_heads: int, dim: int, deterministic: bool) -> None:
    """As one block for each group: both add the same products, in another order of heads."""
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    packed = Packed(bounds, bounds, max(LENGTHS), max(LENGTHS))
    tensors = _drawn(sum(LENGTHS), heads, kv_heads, dim)
    got = _backward(tensors, True, 3, deterministic, packed)
    whole = _backward(tensors, True, 1, deterministic, packed)
    for x, y in zip(got, whole, strict=True):
        assert (x.float() - y.float()).norm() <= 2**-8 * y.float().norm()  # a rounding of the results, in bf16
