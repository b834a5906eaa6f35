"""`flash_attn.layers.rotary` and `flash_attn.ops.triton.rotary`, compared with multiplication of complex numbers.

A pair (a, b) is a + bi. Position p multiplies it by cos[p] + i sin[p], in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn.compat.flash_attn.layers import rotary
from tileattn.compat.flash_attn.layers.rotary import RotaryEmbedding
from tileattn.compat.flash_attn.ops.triton.rotary import apply_rotary
from tileattn.testing import assert_accurate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, SEQLEN, HEADS, DIM, ROWS = 3, 7, 2, 12, 17


def as_pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """(..., rotary_dim / 2, 2)."""
    turning = x[..., :rotary_dim]
    return turning.unflatten(-1, (-1, 2)) if interleaved else turning.unflatten(-1, (2, -1)).transpose(-1, -2)


def from_pairs(pairs: Tensor, rest: Tensor, interleaved: bool) -> Tensor:
    flat = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((flat, rest), -1)


def oracle(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool, conjugate: bool = False) -> Tensor:
    """float64; positions, of x's rows, index the tables."""
    rotary_dim = 2 * cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions].unsqueeze(-2)
    turned = torch.view_as_complex(as_pairs(x.double(), rotary_dim, interleaved).contiguous())
    turned = turned * (turn.conj() if conjugate else turn)
    return from_pairs(torch.view_as_real(turned), x.double()[..., rotary_dim:], interleaved)


def eager(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool, conjugate: bool = False) -> Tensor:
    """The rotation in x's dtype."""
    rotary_dim = 2 * cos.shape[1]
    c, s = (table.to(x.dtype)[positions].unsqueeze(-2) for table in (cos, sin))
    s = -s if conjugate else s
    a, b = as_pairs(x, rotary_dim, interleaved).unbind(-1)
    return from_pairs(torch.stack((a * c - b * s, a * s + b * c), -1), x[..., rotary_dim:], interleaved)


def assert_rotated(name: str, got: Tensor, x: Tensor, *tables: Any, conjugate: bool = False) -> None:
    expected = oracle(x, *tables, conjugate=conjugate)
    assert got.dtype == x.dtype
    assert_accurate(name, got.detach(), expected, [eager(x, *tables, conjugate=conjugate)])


def made_tables(
    rotary_dim: int = DIM, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    angles = torch.rand(ROWS, rotary_dim // 2, device=device, dtype=torch.float64) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


OFFSETS: dict[str, Callable[[str], Any]] = {
    "none": lambda device: 0,
    "int": lambda device: ROWS - SEQLEN,
    "of-each": lambda device: torch.tensor([4, 0, ROWS - SEQLEN], dtype=torch.int32, device=device),
}


def positions_of(offsets: Any) -> Tensor:
    rows = torch.arange(SEQLEN)
    shift = offsets.cpu()[:, None] if isinstance(offsets, Tensor) else torch.full((BATCH, 1), offsets)
    return shift + rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("rotary_dim", [DIM, 8, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_padded_batches(
    dtype: torch.dtype, interleaved: bool, rotary_dim: int, offsets: str, inplace: bool, device: str
) -> None:
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM, dtype=dtype, device=device, requires_grad=True)  # a leaf, also in place
    before = x.detach().clone()
    cos, sin = made_tables(rotary_dim, device, dtype)
    shift = OFFSETS[offsets](device)
    rotated = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, shift)
    of_rows = (cos, sin, positions_of(shift).to(device), interleaved)
    assert_rotated("x", rotated, before, *of_rows)
    assert torch.equal(x, rotated if inplace else before)
    assert (rotated.data_ptr() == x.data_ptr()) == inplace
    do = torch.randn_like(rotated)
    given = do.clone()
    (dx,) = torch.autograd.grad(rotated, x, do)
    assert_rotated("dx", dx, given, *of_rows, conjugate=True)
    assert torch.equal(do, given), "the gradient that was given belongs to the caller"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_sequences(interleaved: bool, offsets: str, device: str) -> None:
    torch.manual_seed(2)
    lengths, total = (4, 0, SEQLEN), 4 + SEQLEN + 3  # the last three rows belong to no sequence
    cu_seqlens = torch.tensor([0, 4, 4, 4 + SEQLEN], dtype=torch.int32, device=device)
    x = torch.randn(total, HEADS, DIM, device=device, requires_grad=True)
    cos, sin = made_tables(8, device)
    shift = OFFSETS[offsets](device)
    rotated = rotary.apply_rotary_emb(
        x, cos, sin, interleaved, seqlen_offsets=shift, cu_seqlens=cu_seqlens, max_seqlen=SEQLEN
    )
    positions = [positions_of(shift)[b, :length] for b, length in enumerate(lengths)]
    of_rows = (cos, sin, torch.cat(positions).to(device), interleaved)
    used = sum(lengths)
    assert_rotated("x", rotated[:used], x.detach()[:used], *of_rows)
    assert torch.equal(rotated[used:], x[used:])
    do = torch.randn_like(rotated)
    (dx,) = torch.autograd.grad(rotated, x, do)
    assert_rotated("dx", dx[:used], do[:used], *of_rows, conjugate=True)
    assert torch.equal(dx[used:], do[used:])


def test_no_sequences() -> None:
    cos, sin = made_tables()
    cu_seqlens, none = torch.zeros(1, dtype=torch.int32), torch.randn(0, HEADS, DIM)
    assert rotary.apply_rotary_emb(none, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=0).shape == none.shape
    assert rotary.apply_rotary_emb(torch.randn(0, SEQLEN, HEADS, DIM), cos, sin).shape == (0, SEQLEN, HEADS, DIM)
    assert rotary.apply_rotary_emb(torch.randn(2, 0, HEADS, DIM), cos[:0], sin[:0]).shape == (2, 0, HEADS, DIM)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("form", ["qkv", "gqa", "kv"])
def test_packed_tensors(form: str, own_k: bool, offsets: str, device: str) -> None:
    """Values are not rotated, queries and keys are, in place."""
    torch.manual_seed(3)
    shape = {"qkv": (3, HEADS), "gqa": (8,), "kv": (2, HEADS)}[form]
    x = torch.randn(BATCH, SEQLEN, *shape, DIM, device=device, requires_grad=True)
    before = x.detach().clone()
    shift = OFFSETS[offsets](device)
    tables, of_k = made_tables(8, device), made_tables(8, device)
    if form == "kv":
        tables = of_k
        rotated = rotary.apply_rotary_emb_kv_(x, *of_k, seqlen_offsets=shift)
    else:
        keywords: dict[str, Any] = {"num_heads_q": 4} if form == "gqa" else {}
        keywords |= dict(zip(("cos_k", "sin_k"), of_k)) if own_k else {}
        rotated = rotary.apply_rotary_emb_qkv_(x, *tables, seqlen_offsets=shift, **keywords)
    of_k = of_k if own_k or form == "kv" else tables
    do = torch.randn_like(rotated)
    (dx,) = torch.autograd.grad(rotated, x, do)
    assert torch.equal(x, rotated)
    places = {
        "qkv": {"q": (0, 1), "k": (1, 2), "v": (2, 3)},
        "gqa": {"q": (0, 4), "k": (4, 6), "v": (6, 8)},
        "kv": {"k": (0, 1), "v": (1, 2)},
    }[form]
    positions = positions_of(shift).to(device)
    for name, (start, stop) in places.items():
        parts = [tensor[:, :, start:stop].detach() for tensor in (rotated, before, dx, do)]
        if name == "v":
            assert torch.equal(parts[0], parts[1])
            assert torch.equal(parts[2], parts[3])
            continue
        of_rows = (*(tables if name == "q" else of_k), positions, False)
        after, given, gradient, given_gradient = (p.flatten(2, -2) for p in parts)
        assert_rotated(name, after, given, *of_rows)
        assert_rotated(f"d{name}", gradient, given_gradient, *of_rows, conjugate=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_without_a_row_in_the_tables_are_left_alone(interleaved: bool, device: str) -> None:
    """The host does not read offsets in a tensor; flash-attn does the same."""
    x = torch.randn(2, SEQLEN, HEADS, DIM, device=device)
    cos, sin = made_tables(8, device)
    shift = torch.tensor([ROWS - 2, -3], device=device)
    rotated = apply_rotary(x, cos, sin, shift, interleaved=interleaved)
    turned = [(0, slice(0, 2), slice(ROWS - 2, ROWS)), (1, slice(3, SEQLEN), slice(0, SEQLEN - 3))]
    for b, rows, positions in turned:
        assert_rotated("x", rotated[b, rows], x[b, rows], cos, sin, positions, interleaved)
    assert torch.equal(rotated[0, 2:], x[0, 2:])
    assert torch.equal(rotated[1, :3], x[1, :3])


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    x = torch.randn(2, SEQLEN, 3, HEADS, DIM, device="cuda", requires_grad=True)
    tables = made_tables(8, "cuda")
    shift, cu_seqlens = torch.tensor([1, 2], device="cuda"), torch.tensor([0, 3, 9], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotary.apply_rotary_emb_qkv_(x, *tables, seqlen_offsets=shift).sum().backward()
        packed = x.detach()[:, :, 0].flatten(0, 1)
        rotary.apply_rotary_emb(packed, *tables, seqlen_offsets=shift, cu_seqlens=cu_seqlens, max_seqlen=6)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autograd_notices_that_what_it_saved_is_overwritten() -> None:
    x = torch.randn(2, SEQLEN, HEADS, DIM, requires_grad=True).tanh()  # whose derivative is computed from x
    rotated = rotary.apply_rotary_emb(x, *made_tables(8), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotated.sum().backward()


def test_there_and_back() -> None:
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM, dtype=torch.float64)
    tables = made_tables(8, dtype=torch.float64)
    there = apply_rotary(x, *tables, 2)
    assert not torch.equal(there, x)
    back = apply_rotary(there, *tables, 2, inplace=True, conjugate=True)
    assert back is there
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_function_for_tests(interleaved: bool) -> None:
    """flash-attn's own tests compare with it; it takes tables of each sequence as well."""
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM, dtype=torch.float64)
    cos, sin = made_tables(8, dtype=torch.float64)
    positions = positions_of(torch.tensor([4, 0, 9]))
    rotated = rotary.apply_rotary_emb_torch(x, cos[positions], sin[positions], interleaved)
    torch.testing.assert_close(rotated, oracle(x, cos, sin, positions, interleaved))
    alike = rotary.apply_rotary_emb_torch(x, cos[:SEQLEN], sin[:SEQLEN], interleaved)
    torch.testing.assert_close(alike, oracle(x, cos, sin, positions_of(0), interleaved))
    quarter = torch.zeros(SEQLEN, DIM // 2, dtype=torch.float64), torch.ones(SEQLEN, DIM // 2, dtype=torch.float64)
    assert torch.equal(rotary.rotate_half(x, interleaved), apply_rotary(x, *quarter, interleaved=interleaved))


def test_gradients_and_theirs() -> None:
    x = torch.randn(2, 3, 1, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = made_tables(4, dtype=torch.float64)

    def rotated(x: Tensor) -> Tensor:
        return rotary.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=torch.tensor([1, 3])).square()

    assert torch.autograd.gradcheck(rotated, x)
    assert torch.autograd.gradgradcheck(rotated, x)


def test_views_and_any_strides() -> None:
    leaf = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM, requires_grad=True)
    tables = made_tables(8)
    qkv = leaf * 2
    q, k, v = qkv.unbind(2)
    rotated = [rotary.apply_rotary_emb(x, *tables, inplace=True) for x in (q, k)]
    stacked = torch.stack((*rotated, v), 2)
    assert torch.equal(qkv, stacked)
    (d_views,) = torch.autograd.grad(stacked.square().sum(), leaf)
    expected = rotary.apply_rotary_emb_qkv_(leaf * 2, *tables)
    (d_whole,) = torch.autograd.grad(expected.square().sum(), leaf)
    assert torch.equal(stacked, expected)
    assert torch.equal(d_views, d_whole)
    x = torch.randn(HEADS, SEQLEN, DIM, BATCH).permute(3, 1, 0, 2)
    alike = rotary.apply_rotary_emb(x, *tables)
    assert alike.stride() == x.stride()
    assert torch.equal(alike, rotary.apply_rotary_emb(x.contiguous(), *tables))


def test_tables_in_another_dtype() -> None:
    x, tables = torch.randn(BATCH, SEQLEN, HEADS, DIM, dtype=torch.bfloat16), made_tables(8)
    assert_rotated("x", rotary.apply_rotary_emb(x, *tables), x, *tables, positions_of(0), False)


@pytest.mark.slow_cases("apply_rotary_emb", reason="3 s in Dynamo")
@pytest.mark.parametrize("name", ["apply_rotary_emb", "apply_rotary_emb_qkv_"])
def test_under_torch_compile(name: str) -> None:
    function = getattr(rotary, name)
    shape = (3, HEADS, DIM) if name.endswith("qkv_") else (HEADS, DIM)
    results = []
    for attend in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(4)
        x = torch.randn(BATCH, SEQLEN, *shape, requires_grad=True)
        out = attend(x, *made_tables(8), seqlen_offsets=torch.tensor([0, 2, 4]))
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(*results)


X, TABLE = torch.randn(2, SEQLEN, HEADS, DIM), torch.randn(ROWS, 4)
CU = torch.tensor([0, 3], dtype=torch.int32)
QKV, KV = rotary.apply_rotary_emb_qkv_, rotary.apply_rotary_emb_kv_


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apply_rotary(3, TABLE, TABLE), TypeError, "x must be a torch.Tensor, got int"),  # type: ignore[arg-type]
        (lambda: apply_rotary(X[0], TABLE, TABLE), ValueError, r"x must have 4 dimensions, \(batch, seqlen, heads"),
        (lambda: apply_rotary(X, TABLE, TABLE, cu_seqlens=CU), ValueError, r"x must have 3 dimensions, \(total, heads"),
        (lambda: apply_rotary(X, TABLE, None), TypeError, "sin must be a torch.Tensor, got NoneType"),  # type: ignore[arg-type]
        (lambda: apply_rotary(X, TABLE, TABLE[1:]), ValueError, r"cos and sin must both .* \(17, 4\) and \(16, 4\)"),
        (lambda: apply_rotary(X, TABLE[None], TABLE[None]), ValueError, r"must both have shape \(rows, rotary_dim / 2"),
        (lambda: apply_rotary(X[..., :6], TABLE, TABLE), ValueError, "must be at most x's head_dim 6, got 8"),
        (lambda: apply_rotary(X, TABLE, TABLE, 11), ValueError, "a row for each of 18 positions, got 17 rows"),
        (lambda: apply_rotary(X, TABLE, TABLE, -1), ValueError, "seqlen_offsets must be at least 0, got -1"),
        (lambda: apply_rotary(X, TABLE, TABLE, 0.5), TypeError, "seqlen_offsets must be an int or"),  # type: ignore[arg-type]
        (lambda: apply_rotary(X, TABLE, TABLE, CU[:1]), ValueError, r"\(2,\), got shape \(1,\) in torch.int32"),
        (lambda: apply_rotary(X, TABLE, TABLE, CU.float()), ValueError, r"got shape \(2,\) in torch.float32"),
        (lambda: apply_rotary(X[0], TABLE, TABLE, 0, CU, 18), ValueError, "each of 18 positions, got 17 rows"),
        (lambda: apply_rotary(X[0], TABLE, TABLE, 0, CU.bool()), ValueError, r"cu_seqlens must be an int32 tensor"),
        (lambda: rotary.apply_rotary_emb(X[0], TABLE, TABLE), ValueError, r"x must have shape \(batch, seqlen, heads"),
        (lambda: QKV(X, TABLE, TABLE), ValueError, r"qkv must have shape \(batch, seqlen, 3, heads, head_dim\), got"),
        (lambda: QKV(X, TABLE, TABLE, num_heads_q=1), ValueError, r"qkv must .* \(2, 7, 2, 12\) with num_heads_q 1"),
        (lambda: KV(X, TABLE, TABLE), ValueError, r"kv must have shape \(batch, seqlen, 2, heads, head_dim\), got"),
        (lambda: RotaryEmbedding(8)(X[:, :, None], seqlen_offset=CU), ValueError, "max_seqlen must be given"),
    ],
)  # fmt: skip
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --- RotaryEmbedding ---


def angles(rows: int, dim: int, base: float) -> Tensor:
    """The paper's angles, in float64."""
    return torch.arange(rows, dtype=torch.float64)[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_embedding(interleaved: bool, dtype: torch.dtype) -> None:
    module = RotaryEmbedding(8, base=500.0, interleaved=interleaved)
    qkv = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM, dtype=dtype)
    before = qkv.clone()
    rotated = module(qkv, seqlen_offset=4)
    assert torch.equal(rotated, qkv)
    exact = angles(SEQLEN + 4, 8, 500.0)
    assert module._cos_cached is not None
    assert module._sin_cached is not None
    tables = module._cos_cached, module._sin_cached
    assert_accurate("cos", tables[0], exact.cos(), [exact.float().cos().to(dtype)])
    assert_accurate("sin", tables[1], exact.sin(), [exact.float().sin().to(dtype)])
    of_rows = (*tables, positions_of(4), interleaved)
    for part in (0, 1):
        assert_rotated("qk"[part], rotated[:, :, part], before[:, :, part], *of_rows)
    assert torch.equal(rotated[:, :, 2], before[:, :, 2])


def test_its_other_forms() -> None:
    module = RotaryEmbedding(8)
    qkv = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM)
    q, kv, grouped = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), qkv.flatten(2, 3).clone()
    expected = module(qkv, seqlen_offset=2)
    found_q, found_kv = module(q, kv, seqlen_offset=2)
    assert torch.equal(torch.cat((found_q[:, :, None], found_kv), 2), expected)
    assert torch.equal(module(grouped, seqlen_offset=2, num_heads_q=HEADS).unflatten(2, (3, HEADS)), expected)
    again = torch.cat((q[:, :, None], kv), 2)
    shift = torch.full((BATCH,), 2)
    conjugate = apply_rotary(again[:, :, 0], module._cos_cached, module._sin_cached, 2, conjugate=True)
    again[:, :, 0] = conjugate
    again[:, :, 1] = apply_rotary(again[:, :, 1], module._cos_cached, module._sin_cached, 2, conjugate=True)
    torch.testing.assert_close(RotaryEmbedding(8)(again, seqlen_offset=shift, max_seqlen=ROWS), expected)


def test_scores_depend_on_distances_only() -> None:
    """Also with xPos, whose scores decay with the distance."""
    for scale_base in (None, 16.0):
        module = RotaryEmbedding(8, scale_base=scale_base)
        qkv = torch.ones(1, 12, 3, 1, 8, dtype=torch.float64)
        q, k, _ = module(qkv).unbind(2)
        scores = (q[0, :, 0] @ k[0, :, 0].mT).double()
        for distance in range(12):
            diagonal = scores.diagonal(-distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), **FLOAT32)
    decay = ((torch.arange(4).double() / 4 + 0.4) / 1.4) ** (5 / 16.0)
    expected = (2 * decay * angles(6, 8, 10000.0)[5].cos()).sum()
    torch.testing.assert_close(scores[7, 2], expected, **FLOAT32)


# The tables are float32, also for float64 tensors: what torch.testing allows float32.
FLOAT32 = dict(zip(("rtol", "atol"), torch.testing._comparison.default_tolerances(torch.float32)))


def test_its_tables_are_kept_and_grow() -> None:
    module = RotaryEmbedding(8)
    module(torch.randn(1, 5, 3, 1, 8))
    first = module._cos_cached
    module(torch.randn(1, 3, 3, 1, 8), seqlen_offset=2)
    assert module._cos_cached is first
    module(torch.randn(1, 3, 3, 1, 8), seqlen_offset=3)
    assert module._cos_cached is not None
    assert module._cos_cached.shape == (6, 4)
    module(torch.randn(1, 3, 3, 1, 8, dtype=torch.float16))
    assert module._cos_cached.dtype == torch.float16
    assert not module.state_dict()


def test_moving_it_to_16_bits_rounds_no_angle() -> None:
    module = RotaryEmbedding(8).to(torch.bfloat16)
    assert module.inv_freq.dtype == torch.bfloat16
    module._update_cos_sin_cache(50, torch.device("cpu"), torch.float32)
    assert module._cos_cached is not None
    exact = angles(50, 8, 10000.0)
    assert_accurate("cos", module._cos_cached, exact.cos(), [exact.float().cos()])


def test_tables_made_in_inference_are_made_anew_for_training() -> None:
    module = RotaryEmbedding(8)
    with torch.inference_mode():
        module(torch.randn(1, 5, 3, 1, 8))
    qkv = torch.randn(1, 5, 3, 1, 8, requires_grad=True)
    module(qkv).sum().backward()
    assert qkv.grad is not None


def test_a_subclass_as_modernbert_has_it() -> None:
    """transformers' ModernBERT took the tables out of the module and called the kernel on packed sequences."""

    class Unpadded(RotaryEmbedding):
        def forward(self, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:  # type: ignore[override]
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
            assert self._cos_cached is not None
            assert self._sin_cached is not None
            apply_rotary(
                qkv[:, :2].flatten(1, 2),
                self._cos_cached,
                self._sin_cached,
                seqlen_offsets=0,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                interleaved=False,
                inplace=True,
            )
            return qkv

    packed = torch.randn(7, 3, HEADS, DIM)
    expected = torch.cat([RotaryEmbedding(DIM)(part[None].clone())[0] for part in packed.split([4, 3])])
    rotated = Unpadded(dim=DIM, base=10000.0, device="cpu", interleaved=False)(
        packed, torch.tensor([0, 4, 7], dtype=torch.int32), 4
    )
    torch.testing.assert_close(rotated, expected)
