"""`merge`: attention over two parts of the keys is attention over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.api.test_attention import message
from tileattn import attention, merge
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def qkv(keys: int = 111, rows: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(2, rows, HEADS, DIM).to(dtype),
        random(2, keys, KV_HEADS, DIM, seed=1).to(dtype),
        random(2, keys, KV_HEADS, DIM_V, seed=2).to(dtype),
    )


def parts(cut: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first = attention(q, k[:, :cut], v[:, :cut], return_lse=True)
    return *first, *attention(q, k[:, cut:], v[:, cut:], return_lse=True, **options)


@pytest.mark.parametrize("cut", [0, 1, 63, 110, 111])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_parts_make_the_whole(dtype: torch.dtype, cut: int) -> None:
    """The parts are not rounded, so that the rule asks for the rounding of one result."""
    arguments = (*qkv(dtype=dtype), None, (), None, None)
    wide = [x.double() for x in arguments[:3]]
    o_a, lse_a, o_b, lse_b = parts(cut, *wide)
    assert lse_a.dtype == torch.float64
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    got = o.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))
    assert_forward_accurate("merged", got, oracle_attention(*arguments), eager_attention(*arguments))


def test_the_last_part_may_be_causal_and_have_the_sink() -> None:
    q, k, v = qkv()
    sink = random(HEADS)
    merged = merge(*parts(90, q, k, v, causal=True, sink=sink))
    torch.testing.assert_close(merged, attention(q, k, v, causal=True, sink=sink, return_lse=True))


def test_packed() -> None:
    q, k, v = (x[0] for x in qkv())
    whole = attention(q[None], k[None], v[None], return_lse=True)
    ends = [torch.tensor([0, x], dtype=torch.int32) for x in (7, 60, 51)]
    halves: list[Tensor] = []
    for keys, end in ((slice(0, 60), ends[1]), (slice(60, 111), ends[2])):
        halves += tileattn.varlen_attention(q, k[keys], v[keys], ends[0], end, 7, 60, return_lse=True)
    o, lse = merge(*halves)
    torch.testing.assert_close((o[None], lse[None]), whole)


def test_decode_over_a_shared_prefix() -> None:
    q, k, v = qkv()
    prefix = attention(q, k[:1, :50].expand(2, -1, -1, -1), v[:1, :50].expand(2, -1, -1, -1), return_lse=True)
    lengths = torch.tensor([61, 20], dtype=torch.int32)
    own = tileattn.decode(q, k[:, 50:], v[:, 50:], lengths, return_lse=True)
    o, lse = merge(*prefix, *own)
    for row, length in enumerate((61, 20)):
        keys, values = (torch.cat([x[:1, :50], x[row : row + 1, 50 : 50 + length]], 1) for x in (k, v))
        expected = attention(q[row : row + 1], keys, values, causal=True, return_lse=True)
        torch.testing.assert_close((o[row : row + 1], lse[row : row + 1]), expected)


def test_a_part_without_keys_has_weight_zero_whatever_it_holds() -> None:
    o_a, lse_a, o_b, lse_b = parts(60, *qkv())
    lse_b[:, 1, 2] = -torch.inf
    o_b[:, 2, 1] = torch.nan
    lse_a[0, 3], lse_b[0, 3] = -torch.inf, -torch.inf
    o_b[0, :, 3] = torch.nan
    for swapped in (False, True):
        o, lse = merge(o_b, lse_b, o_a, lse_a) if swapped else merge(o_a, lse_a, o_b, lse_b)
        assert torch.equal(o[:, 2, 1], o_a[:, 2, 1])
        assert torch.equal(lse[:, 1, 2], lse_a[:, 1, 2])
        assert not o[0, :, 3].any()
        assert (lse[0, 3] == -torch.inf).all()
        assert not o.isnan().any()


def test_nan_and_infinities_are_those_of_attention() -> None:
    """A score of +inf makes lse +inf and o NaN; a score of NaN makes both NaN."""
    for value in (torch.inf, torch.nan):
        q, k, v = qkv()
        q[..., 0], k[0, 5, 0, 0] = 1.0, value
        for cut in (3, 60):
            torch.testing.assert_close(merge(*parts(cut, q, k, v)), attention(q, k, v, return_lse=True), equal_nan=True)


def test_gradients_are_those_of_the_whole() -> None:
    leaves = [x.double().requires_grad_() for x in qkv(keys=13)]
    weights = random(2, 7, HEADS, DIM_V, seed=5).double(), random(2, HEADS, 7, seed=6).double()
    gradients = []
    for o, lse in (merge(*parts(5, *leaves)), attention(*leaves, return_lse=True)):
        gradients.append(torch.autograd.grad((o * weights[0]).sum() + (lse * weights[1]).sum(), leaves))
    torch.testing.assert_close(*gradients)


def test_gradients_of_rows_without_keys_are_zero() -> None:
    o_a, lse_a, o_b, lse_b = (x.double() for x in parts(60, *qkv()))
    lse_a[:, :, 0] = -torch.inf
    lse_a[:, :, 1], lse_b[:, :, 1] = -torch.inf, -torch.inf
    leaves = [x.requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    o, lse = merge(*leaves)
    of_o_a, of_lse_a, of_o_b, of_lse_b = torch.autograd.grad(o.sum() + lse.nan_to_num(neginf=0.0).sum(), leaves)
    assert not of_o_a[:, :2].any()
    assert not of_lse_a[:, :, :2].any()
    assert not of_o_b[:, 1].any()
    assert not of_lse_b[:, :, 1].any()
    assert (of_o_b[:, 0] == 1).all()


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    given = parts(60, *qkv())
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), merge(*given), rtol=0, atol=0)


O, LSE = random(2, 3, HEADS, DIM_V), random(2, HEADS, 3)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ((3.0, LSE, O, LSE), TypeError, ("o_a must be a tensor (batch, seqlen_q, heads, head_dim_v)", "got float")),
        ((O[0, 0], LSE, O, LSE), ValueError, ("o_a must be a tensor", "got (4, 24)")),
        ((O, LSE, O[0], LSE), ValueError, ("o_b must have o_a's dimensions", "(3, 4, 24)")),
        ((O, LSE, O[:, :2], LSE), ValueError, ("one shape and dtype", "(2, 3, 4, 24)", "(2, 2, 4, 24)")),
        ((O, LSE, O.half(), LSE), ValueError, ("one shape and dtype", "torch.float16")),
        ((O, LSE.half(), O, LSE), TypeError, ("lse_a must be a float32 or float64 tensor, got torch.float16",)),
        ((O.int(), LSE, O.int(), LSE), TypeError, ("o_a must be a floating-point tensor, got torch.int32",)),
        ((O, LSE, O, None), TypeError, ("lse_b must be", "got NoneType", "return_lse=True")),
        ((O, LSE, O, LSE.double()), TypeError, ("one dtype, got torch.float32 and torch.float64",)),
        ((O, LSE.mT, O, LSE), ValueError, ("lse_a must have shape (2, 4, 3)", "got (2, 3, 4)")),
        ((O[0], LSE[0], O[0], LSE[1:]), ValueError, ("lse_b must have shape (4, 3)", "got (1, 4, 3)")),
        ((O, LSE, O.to("meta"), LSE), ValueError, ("one device, got cpu, meta",)),
    ],
    ids=range(12),
)
def test_wrong_arguments(given: Any, error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        merge(*given)
