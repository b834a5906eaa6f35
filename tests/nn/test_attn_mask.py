"""Mask tensors of the modules, what is said of their memory, and the names that `get_attention` understands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileattn.measure.memory import peak_bytes
from tileattn.nn import (
    FlashAttentionV2,
    GroupedQueryAttention,
    MaskedAttention,
    NaiveAttention,
    SelfAttention,
    create_causal_mask,
    create_padding_mask,
    get_attention,
)

EMBED, HEADS, BATCH, SEQLEN = 32, 4, 2, 21
NAMES = ["naive", "flash_v1", "flash_v2", "sliding_window", "gqa", "mqa", "masked"]
SHAPES = {"2d": (SEQLEN, SEQLEN), "3d": (BATCH, SEQLEN, SEQLEN), "4d": (BATCH, HEADS, SEQLEN, SEQLEN)}
SHAPES |= {"rows": (BATCH, 1, SEQLEN), "keys": (BATCH, 1, 1, SEQLEN)}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def by_hand(module: SelfAttention, x: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim) + bias) v with the module's projections; rows of -inf give 0."""
    q, k, v = (heads.transpose(1, 2) for heads in module._heads(x))
    k, v = (heads.repeat_interleave(HEADS // heads.shape[1], dim=1) for heads in (k, v))
    scores = q @ k.mT / math.sqrt(module.head_dim) + bias
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return module.out_proj((weights @ v).transpose(1, 2).flatten(2))


def added(mask: Tensor) -> Tensor:
    """The mask as numbers, with four dimensions."""
    mask = mask[:, None] if mask.ndim == 3 else mask
    return mask if mask.is_floating_point() else torch.zeros(mask.shape).double().masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_true_hides_a_key(name: str, shape: str) -> None:
    module = get_attention(name, EMBED, HEADS, causal=True, dtype=torch.float64)
    x, hidden = random(BATCH, SEQLEN, EMBED), random(*SHAPES[shape], seed=1) > 0.5
    expected = by_hand(module, x, added(hidden) + added(create_causal_mask(SEQLEN)))
    close(module(x, attn_mask=hidden)[0], expected)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_added_to_the_scores_and_have_a_gradient(name: str) -> None:
    module = get_attention(name, EMBED, HEADS, dtype=torch.float64)
    x, weight = random(BATCH, SEQLEN, EMBED), random(BATCH, SEQLEN, EMBED, seed=2)
    mask = random(BATCH, SEQLEN, SEQLEN, seed=1).masked_fill(random(BATCH, SEQLEN, SEQLEN, seed=3) > 1, -torch.inf)
    given, same = mask.clone().requires_grad_(), mask.clone().requires_grad_()
    got, expected = module(x, attn_mask=given)[0], by_hand(module, x, added(same))
    close(got, expected)
    close(
        torch.autograd.grad((got * weight).sum(), [given, *module.parameters()]),
        torch.autograd.grad((expected * weight).sum(), [same, *module.parameters()]),
    )


def test_a_row_that_sees_nothing_is_zero() -> None:
    hidden = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool)
    hidden[3] = True
    for name in ("naive", "flash_v2", "masked"):
        module = get_attention(name, EMBED, HEADS, dtype=torch.float64)
        close(module(random(1, SEQLEN, EMBED), attn_mask=hidden)[0][:, 3], module.out_proj.bias[None])


def test_the_masks_that_are_made() -> None:
    assert create_causal_mask(3).tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    padding = create_padding_mask(torch.tensor([2, 0, 3]), 3)
    assert padding.shape == (3, 1, 1, 3)
    assert padding[:, 0, 0].tolist() == [[False, False, True], [True, True, True], [False, False, False]]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("chunk_size", [1, 8, 100])
def test_chunks_change_nothing(causal: bool, chunk_size: int) -> None:
    whole = MaskedAttention(EMBED, HEADS, causal=causal, dtype=torch.float64)
    chunked = MaskedAttention(EMBED, HEADS, causal=causal, chunk_size=chunk_size, dtype=torch.float64)
    chunked.load_state_dict(whole.state_dict())
    x = random(BATCH, SEQLEN, EMBED)
    for mask in (random(BATCH, SEQLEN, SEQLEN, seed=1) > 0.5, random(1, 1, seed=1), create_causal_mask(SEQLEN)):
        close(chunked(x, attn_mask=mask)[0], whole(x, attn_mask=mask)[0])


@pytest.mark.slow  # three times through the tracer
def test_the_loops_under_torch_compile() -> None:
    module, x, mask = FlashAttentionV2(EMBED, HEADS, causal=True), torch.randn(1, 9, EMBED), torch.rand(9, 9) > 0.5
    expected, _ = module(x, attn_mask=mask)
    whole = torch.compile(module, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attn_mask are not traced: leave fullgraph=True out"):
        whole(x, attn_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(whole(x, attn_mask=mask)[0], expected, rtol=0, atol=0)
    broken, _ = torch.compile(module, backend="eager")(x, attn_mask=mask)
    torch.testing.assert_close(broken, expected, rtol=0, atol=0)
    broken.sum().backward()
    assert module.qkv_proj.weight.grad is not None


def test_chunks_save_memory() -> None:
    def peak(chunk_size: int | None) -> int:
        module, x = MaskedAttention(16, 1, chunk_size=chunk_size), torch.randn(1, 1024, 16)
        mask = torch.randn(1024, 1024) > 0
        with torch.no_grad():
            module(x, attn_mask=mask)
            return peak_bytes(lambda: module(x, attn_mask=mask), torch.device("cpu"))

    assert peak(64) < peak(None) / 4


@pytest.mark.parametrize("name", ["naive", "flash_v2"])
def test_memory_usage_is_what_autograd_keeps(name: str) -> None:
    module = get_attention(name, EMBED, HEADS)
    q, k, v = module._heads(torch.randn(BATCH, SEQLEN, EMBED))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o, _ = module.attend(q, k, v, None)
    usage = module.get_memory_usage(BATCH, SEQLEN)
    kept[o.data_ptr()] = o.nbytes
    assert sum(kept.values()) == usage.qkv + usage.o + usage.weights + usage.lse
    assert usage.naive == get_attention("naive", EMBED, HEADS).get_memory_usage(BATCH, SEQLEN).total
    assert usage.reduction == usage.naive / usage.total


def test_memory_usage_of_every_module() -> None:
    for name in NAMES:
        usage = get_attention(name, 512, 8, dtype=torch.bfloat16).get_memory_usage(2, 8192)
        assert usage.reduction == 1 if name == "naive" else usage.reduction > 30, name
    tiles = FlashAttentionV2(512, 8, block_size=64).get_memory_usage(2, 8192).tiles
    assert tiles == 2 * 8 * 64 * 64 * 4


def test_memory_usage_by_the_names_of_flashtile() -> None:
    module = GroupedQueryAttention(EMBED, HEADS, 2)
    usage = module.get_memory_usage(batch_size=2, seq_len=64)
    assert usage == module.get_memory_usage(2, 64)
    assert (usage[0], usage["qkv_mb"], usage["total_gb"]) == (usage.qkv, usage.qkv / 1e6, usage.total / 1e9)
    assert (usage["output_mb"], usage["kv_savings_ratio"], usage["complexity"]) == (usage.o / 1e6, 2, "O(N)")
    assert NaiveAttention(EMBED, HEADS).get_memory_usage(2, 64)["complexity"] == "O(N²)"
    assert usage["comparison_with_naive"] == {"naive_mb": usage.naive / 1e6, "reduction_ratio": usage.reduction}
    assert "statistics_mb" in usage
    assert "mask_mb" not in usage  # no module has such a matrix
    assert usage.lse in usage
    assert dict(usage)["block_attention_mb"] == usage.tiles / 1e6
    with pytest.raises(KeyError, match="'mask_mb' is not a figure of memory; accepted: qkv_mb, qkv_gb"):
        usage["mask_mb"]


def test_names_are_folded_and_arguments_may_be_left_out() -> None:
    assert isinstance(get_attention("Flash-V2", EMBED, HEADS), FlashAttentionV2)
    assert isinstance(get_attention("GROUPED query", EMBED, HEADS), GroupedQueryAttention)
    assert get_attention("gqa", EMBED, HEADS).num_kv_heads == 1
    assert "window_size=4096" in get_attention("Sliding-Window", EMBED, HEADS).extra_repr()
    assert get_attention("masked", EMBED, HEADS, chunk_size=8).extra_repr() == "32, 4, chunk_size=8"


def test_projections_are_joined_and_split_inside_a_model() -> None:
    equal = [GroupedQueryAttention(EMBED, HEADS, HEADS), NaiveAttention(EMBED, HEADS)]
    models = [torch.nn.Sequential(torch.nn.Linear(EMBED, EMBED), module) for module in equal]
    x = torch.randn(1, 5, EMBED)
    for giver, taker in [(0, 1), (1, 0)]:
        torch.nn.init.normal_(next(models[giver].parameters()))
        models[taker].load_state_dict(models[giver].state_dict())
        torch.testing.assert_close(models[taker](x)[0], models[giver](x)[0])
    state = models[0].state_dict()
    del state["1.k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.qkv_proj\.weight"):
        models[1].load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda x: NaiveAttention(32, 4)(x, attn_mask=[1]), TypeError, "attn_mask must be a tensor in bool, .* list"),
        (lambda x: NaiveAttention(32, 4)(x, attn_mask=torch.zeros(8, 8).long()), TypeError, "got torch.int64"),
        (lambda x: NaiveAttention(32, 4)(x, attn_mask=torch.zeros(8)), ValueError, r"attn_mask must have .*\(8,\)"),
        (lambda x: MaskedAttention(32, 4)(x, attn_mask=torch.zeros(7, 8)), ValueError, r"\(1, 4, 8, 8\) or 1, got"),
        (lambda x: MaskedAttention(32, 4)(x, attn_mask=torch.zeros(8, 8, device="meta")), ValueError, "device cpu"),
        (lambda x: MaskedAttention(32, 4, chunk_size=0), ValueError, "chunk_size must be a positive int, got 0"),
        (lambda x: get_attention("naive", 32, 4, chunk_size=8), TypeError, "'naive' takes no chunk_size, got 8"),
        (lambda x: NaiveAttention(32, 4).get_memory_usage(1, 8, seq_len=8), TypeError, "seqlen and seq_len are the"),
        (lambda x: NaiveAttention(32, 4).get_memory_usage(seq_len=8), TypeError, "batch must be .*, got None"),
        (lambda x: create_causal_mask(-1), ValueError, "seqlen must be an int of at least 0, got -1"),
        (lambda x: create_padding_mask(torch.ones(2), 4), TypeError, "lengths must be an int tensor, got torch.float"),
        (lambda x: create_padding_mask(torch.ones(2, 2).int(), 4), ValueError, r"lengths must have shape \(batch,\)"),
        (lambda x: create_padding_mask(torch.ones(2).int(), 4.0), TypeError, "max_len must be an int .*, got 4.0"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[Tensor], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(torch.zeros(1, 8, 32))
