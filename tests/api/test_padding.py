"""Padding: `key_padding_mask` of `attention`, and `unpad_input` and `pad_input`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.api.test_attention import message
from tileattn import Causal, KeyPadding, SlidingWindow, attention, pad_input, unpad_input, varlen_attention
from tileattn.testing import oracle_attention

BATCH, SEQLEN, HEADS, KV_HEADS, DIM = 4, 9, 4, 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(seqlen_q: int = SEQLEN) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(BATCH, seqlen_q, HEADS, DIM),
        random(BATCH, SEQLEN, KV_HEADS, DIM, seed=1),
        random(BATCH, SEQLEN, KV_HEADS, DIM, seed=2),
    )


# Padding on the right, on the left, between, and nothing else.
KEEP = torch.tensor([
    [1, 1, 1, 1, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 1, 1, 1, 1, 1],
    [1, 0, 0, 1, 1, 0, 1, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0],
]).bool()  # fmt: skip


# --- key_padding_mask ---


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (KEEP.int(), TypeError, ("must be a bool tensor (batch, seqlen_k)", "got torch.int32")),
        (KEEP.tolist(), TypeError, ("must be a bool tensor", "got list")),
        (KEEP[0], ValueError, ("must have shape (batch, seqlen_k), got (9,)",)),
        (KEEP[:, :8], ValueError, ("must have shape (batch, seqlen_k) = (4, 9)", "got (4, 8)")),
        (KEEP[:3], ValueError, ("must have shape (batch, seqlen_k) = (4, 9)", "got (3, 9)")),
        (KEEP.to("meta"), ValueError, ("must be on q's device cpu", "meta")),
    ],
)
def test_wrong_masks(mask: Any, error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        attention(*qkv(), key_padding_mask=mask)


def test_the_argument_is_named() -> None:
    with pytest.raises(TypeError, match="key_padding_mask must be a bool tensor"):
        attention(*qkv(), key_padding_mask=KEEP.float())
    with pytest.raises(TypeError, match="KeyPadding: keep must be a bool tensor"):
        KeyPadding(KEEP.float())


@pytest.mark.parametrize("seqlen_q", [SEQLEN, 3, 14])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(seqlen_q: int, causal: bool) -> None:
    """Compared with the oracle, in float64; the last sequence has no key at all."""
    leaves = [x.requires_grad_() for x in qkv(seqlen_q)]
    expected = oracle_attention(*leaves, SeesKept(causal))  # type: ignore[arg-type]
    got = attention(*leaves, causal=causal, key_padding_mask=KEEP, return_lse=True)
    torch.testing.assert_close(got, expected)
    assert not got[0][3].any()
    assert (got[1][3] == -torch.inf).all()
    do = random(*got[0].shape, seed=5)
    gradients, wanted = (torch.autograd.grad(o, leaves, do) for o in (got[0], expected[0]))
    torch.testing.assert_close(gradients, wanted)
    dk, dv = gradients[1:]
    assert not dk[~KEEP].any()
    assert not dv[~KEEP].any()


class SeesKept:
    """The mask written out, with nothing but `allows`, which is all that the oracle asks."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return KEEP[b, k] & ((k <= q) if self.causal else (k == k))


def test_it_joins_with_every_other_mask() -> None:
    q, k, v = qkv()
    window, every = SlidingWindow(3, 1), attention(*qkv(), mask=SlidingWindow(3, 1) & KeyPadding(KEEP))
    assert torch.equal(attention(q, k, v, mask=window, key_padding_mask=KEEP), every)
    function = attention(q, k, v, mask=lambda b, h, q, k: (q + k) % 2 == 0, key_padding_mask=KEEP)
    expected = attention(q, k, v, mask=lambda b, h, q, k: ((q + k) % 2 == 0) & KEEP[b, k])
    torch.testing.assert_close(function, expected)  # other keys are visited: another order of sums
    both = attention(q, k, v, mask=KeyPadding(KEEP), causal=True)
    assert torch.equal(both, attention(q, k, v, causal=True, key_padding_mask=KEEP))
    assert torch.equal(both, attention(q, k, v, mask=Causal() & KeyPadding(KEEP)))


def test_one_row_for_all_sequences() -> None:
    one = attention(*qkv(), key_padding_mask=KEEP[:1])
    assert torch.equal(one, attention(*qkv(), key_padding_mask=KEEP[:1].expand(BATCH, SEQLEN)))


def test_heads_first() -> None:
    q, k, v = qkv()
    bhsd = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", key_padding_mask=KEEP)
    assert torch.equal(bhsd.transpose(1, 2), attention(q, k, v, key_padding_mask=KEEP))


def test_the_meaning_is_the_opposite_of_multihead_attention() -> None:
    module = torch.nn.MultiheadAttention(HEADS * DIM, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    x, keep = random(3, SEQLEN, HEADS * DIM), KEEP[:3]
    expected, _ = module(x, x, x, key_padding_mask=~keep)
    q, k, v = (y.unflatten(2, (HEADS, DIM)) for y in (x @ module.in_proj_weight.mT).chunk(3, dim=2))
    got = attention(q, k, v, key_padding_mask=keep).flatten(2) @ module.out_proj.weight.mT
    torch.testing.assert_close(got, expected)


def test_no_keys() -> None:
    q, k, v = qkv()
    o = attention(q, k[:, :0], v[:, :0], key_padding_mask=KEEP[:, :0])
    assert not o.any()


def test_compiled() -> None:
    compiled = torch.compile(
        lambda q, k, v, keep: attention(q, k, v, key_padding_mask=keep, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(*qkv(), KEEP), attention(*qkv(), key_padding_mask=KEEP, causal=True))


# --- unpad_input, pad_input ---

LENGTHS = [6, 6, 5, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
def test_unpad_and_pad(dtype: torch.dtype) -> None:
    x = random(BATCH, SEQLEN, 3, 2)
    unpadded = unpad_input(x, KEEP.to(dtype))
    assert torch.equal(unpadded.x, x[KEEP])
    assert unpadded.cu_seqlens.tolist() == [0, 6, 12, 17, 17]
    assert unpadded.cu_seqlens.dtype == unpadded.seqused.dtype == torch.int32
    assert (unpadded.max_seqlen, type(unpadded.max_seqlen)) == (6, int)
    assert unpadded.seqused.tolist() == LENGTHS
    assert torch.equal(unpadded.indices, KEEP.flatten().nonzero().flatten())
    padded = pad_input(unpadded.x, unpadded.indices, BATCH, SEQLEN)
    assert torch.equal(padded, torch.where(KEEP[..., None, None], x, 0.0))


def test_unused_tokens_get_room() -> None:
    """As in flash-attn, unused tokens are in the packed tensor and in cu_seqlens, not in seqused."""
    unused = torch.zeros_like(KEEP)
    unused[0, 6:8] = unused[3, 0] = True
    x = random(BATCH, SEQLEN)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, KEEP, unused)
    assert torch.equal(packed, x[KEEP | unused])
    assert torch.equal(x.flatten()[indices], packed)
    assert cu_seqlens.tolist() == [0, 8, 14, 19, 20]
    assert max_seqlen == 8
    assert seqused.tolist() == LENGTHS


def test_gradients_go_there_and_back() -> None:
    x = random(BATCH, SEQLEN, 3).requires_grad_()
    unpadded = unpad_input(x, KEEP)
    (gradient,) = torch.autograd.grad(unpadded.x.sum(), x)
    assert torch.equal(gradient, KEEP[..., None].double().expand_as(x))
    weights = random(BATCH, SEQLEN, 3, seed=1)
    y = unpadded.x.detach().requires_grad_()
    (back,) = torch.autograd.grad((pad_input(y, unpadded.indices, BATCH, SEQLEN) * weights).sum(), y)
    assert torch.equal(back, weights[KEEP])


def test_packed_attention_is_attention_with_padding() -> None:
    """Queries and keys are padded alike. Without a mask the rows are the same wherever the padding is."""
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = attention(q, k, v, key_padding_mask=KEEP)[KEEP]
    of_q, of_k, of_v = (unpad_input(x, KEEP) for x in (q, k, v))
    sizes = (of_q.cu_seqlens, of_k.cu_seqlens, of_q.max_seqlen, of_k.max_seqlen)
    got = varlen_attention(of_q.x, of_k.x, of_v.x, *sizes)
    torch.testing.assert_close(got, expected)
    do = random(*got.shape, seed=7)
    gradients, wanted = (torch.autograd.grad(o, (q, k, v), do) for o in (got, expected))
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("batch", [0, 2])
def test_only_padding(batch: int) -> None:
    x = random(batch, 3, 2)
    unpadded = unpad_input(x, torch.zeros(batch, 3, dtype=torch.bool))
    assert unpadded.x.shape == (0, 2)
    assert unpadded.cu_seqlens.tolist() == [0] * (batch + 1)
    assert unpadded.max_seqlen == 0
    assert torch.equal(pad_input(unpadded.x, unpadded.indices, batch, 3), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("x", "mask", "error", "says"),
    [
        (random(3), KEEP, ValueError, ("x must have shape (batch, seqlen, ...), got (3,)",)),
        ([1], KEEP, TypeError, ("x must be a torch.Tensor, got list",)),
        (random(4, 9), KEEP.float(), TypeError, ("mask must be a tensor of bool or integers", "got torch.float32")),
        (random(4, 9), None, TypeError, ("mask must be a tensor of bool or integers", "got NoneType")),
        (random(4, 8), KEEP, ValueError, ("mask must have shape (batch, seqlen) = (4, 8), got (4, 9)",)),
        (random(4, 9), KEEP.to("meta"), ValueError, ("mask must be on x's device cpu, got meta",)),
    ],
)
def test_wrong_arguments(x: Tensor, mask: Any, error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        unpad_input(x, mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pad_takes_indices_and_sizes_of_other_types(dtype: torch.dtype) -> None:
    padded = pad_input(torch.tensor([1.0, 2.0]), torch.tensor([3, 0], dtype=dtype), np.int64(2), torch.tensor(3))
    assert padded.tolist() == [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            (random(4, 2), torch.arange(3), 2, 3),
            ValueError,
            ("x and indices must have shapes", "(3,)"),
        ),
        (([1], torch.arange(1), 2, 3), TypeError, ("x must be a torch.Tensor, got list",)),
        ((random(1), [1], 3, 5), TypeError, ("indices must be a torch.Tensor, got list",)),
        ((random(3), torch.arange(3.0), 2, 3), TypeError, ("indices must be int64 or int32, got torch.float32",)),
        ((random(3), torch.arange(3).to("meta"), 2, 3), ValueError, ("indices must be on x's device cpu, got meta",)),
        ((random(3), torch.arange(3), -2, 3), ValueError, ("batch must be at least 0, got -2",)),
        ((random(3), torch.arange(3), 2, 3.0), TypeError, ("seqlen must be an int, got 3.0",)),
        ((random(3), torch.arange(3), 2, 1), ValueError, ("indices must lie in 0 ..", "= 1, got others", "index 2")),
        (
            (random(3), torch.arange(3) + 4, 2, 3),
            ValueError,
            ("indices must lie in 0 ..", "= 5, got others", "index 6"),
        ),
        ((random(3), torch.arange(3) - 1, 2, 3), ValueError, ("indices must lie in 0 ..", "got others", "index -1")),
    ],
)
def test_wrong_arguments_of_pad(arguments: tuple[Any, ...], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        pad_input(*arguments)
