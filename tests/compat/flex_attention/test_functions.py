"""Mask and score functions that people write, by PyTorch's definition: out, lse and gradients, captured tensors' too.

The patterns are those of PyTorch's flex tests and of attention-gym; the code is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tests.tools.flex_oracle import assert_same, expected, inputs
from tileattn.compat import flex_attention as flex
from tileattn.compat.flex_attention import AuxRequest, create_block_mask, flex_attention
from tileattn.compat.flex_attention.tracing import mask_of_function, score_of_function
from tileattn.variant.key import encode

Function = Callable[..., Any]
LENGTHS = ((70, 70), (33, 90), (90, 33))
LSE = AuxRequest(lse=True)

DOCUMENT = torch.arange(90) // torch.tensor([13, 29])[:, None]  # by batch element
GLOBAL = torch.arange(90) % 17 == 0
STARTS = torch.tensor([0, 20, 47], dtype=torch.int32)
OF_TOKEN = (torch.arange(90)[:, None] >= STARTS).sum(1) - 1


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 9


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 12


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def within_documents(mask: Function) -> Function:
    """A mask of positions within packed documents."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = OF_TOKEN[q_idx] == OF_TOKEN[kv_idx]
        return same & mask(b, h, q_idx - STARTS[OF_TOKEN[q_idx]], kv_idx - STARTS[OF_TOKEN[kv_idx]])

    return mask_mod


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx - kv_idx) % 3 == 0) & (q_idx - kv_idx < 30)


def neighbourhood(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """NATTEN's in two dimensions, 7 columns wide."""
    centres = (q_idx // 7).clamp(1, 8), (q_idx % 7).clamp(1, 5)
    return ((centres[0] - kv_idx // 7).abs() <= 1) & ((centres[1] - kv_idx % 7).abs() <= 1)


def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(h % 2 == 0, q_idx >= kv_idx, kv_idx <= 20 + b)


def local_and_global(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (window(b, h, q_idx, kv_idx) | GLOBAL[kv_idx] | GLOBAL[q_idx]) & (q_idx >= kv_idx)


def of_first_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENT[h.new_zeros(h.shape), q_idx] == DOCUMENT[h.new_ones(()), kv_idx]


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 2 == 0) & (kv_idx >= 0)


# Only these differ by batch or head, and need planes of their own in a PyTorch BlockMask.
BY_PLANE = ("document", "of_heads")
MASKS: dict[str, Function] = {
    "causal": causal,
    "window": flex.and_masks(causal, window),
    "prefix": flex.or_masks(prefix, causal),
    "document": flex.and_masks(document, causal),
    "packed": within_documents(causal),
    "packed prefix": within_documents(torch_flex.or_masks(prefix, causal)),  # a library's, with PyTorch's function
    "dilated": dilated,
    "neighbourhood": neighbourhood,
    "of_heads": of_heads,
    "global": local_and_global,
    "torch and": torch_flex.and_masks(causal, torch_flex.noop_mask, window),
    "rows of none": nothing,
    "made of a position": of_first_head,
    "noop": flex.noop_mask,
    "torch noop": torch_flex.noop_mask,
    "no parts of and": flex.and_masks(),
    "no parts of or": flex.or_masks(),
}


@pytest.mark.parametrize(("lengths", "made_by"), list(zip(LENGTHS, ("here", "torch", "here"))))
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str, lengths: tuple[int, int], made_by: str) -> None:
    mask = MASKS[name]
    create: Any = create_block_mask if made_by == "here" else torch_flex.create_block_mask
    planes = (2, 4) if name in BY_PLANE else (None, None)
    block_mask = create(mask, *planes, *lengths, device="cpu", BLOCK_SIZE=(16, 32))
    q, k, v = leaves = inputs(lengths)
    out, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=LSE)
    assert_same((out, aux.lse), expected(q, k, v, None, mask), leaves)  # type: ignore[union-attr, arg-type]


def test_masks_are_not_evaluated_for_all_pairs() -> None:
    """A million queries and keys: PyTorch would need a terabyte."""
    block_mask = create_block_mask(causal, None, None, 2**20, 2**20, device="cpu")
    assert block_mask.shape == (1, 1, 2**20, 2**20)
    assert block_mask.numel() == 2**40
    cropped = block_mask._adjust(40, 40).to("cpu")
    q, k, v = leaves = inputs((40, 40))
    got = flex_attention(q, k, v, block_mask=cropped, return_lse=True)
    assert_same(got, expected(q, k, v, None, causal), leaves)  # type: ignore[arg-type]
    assert not any(mask.has_blocks for mask in (block_mask, cropped))  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", range(4))
def test_joined_masks(count: int) -> None:
    """As PyTorch's functions join them, none at all included."""
    parts = (causal, window, prefix)[:count]
    for name in ("and_masks", "or_masks"):
        mine, theirs = (
            flex.create_mask(getattr(module, name)(*parts), 1, 1, 40, 40, "cpu") for module in (flex, torch_flex)
        )
        assert torch.equal(mine, theirs)


def test_sizes_of_captured_tensors_are_run_time_values() -> None:
    """Another length, another table: the same kernel. Within functions that functions capture, too."""

    def key(length: int) -> str:
        ids = torch.arange(length) // 7

        def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return ids[q_idx.clamp(0, ids.shape[0] - 1)] == ids[kv_idx]

        def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + ids[kv_idx] / ids.shape[0]

        mask = mask_of_function(flex.and_masks(causal, within), 3)
        return encode(mask, [score_of_function(bias, 3)])[0]

    assert key(40) == key(50)
    assert key(40).count("size") == 2


def test_a_function_of_a_whole_tensor() -> None:
    """`(2 * table)[h]` is computed before it is read."""
    table = torch.rand(4, dtype=torch.float64, requires_grad=True)
    q, k, v = leaves = inputs((20, 30))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * (2 * table)[h]

    got = flex_attention(q, k, v, mod, return_lse=True)
    assert_same(got, expected(q, k, v, mod, None), [*leaves, table])  # type: ignore[arg-type]


# --- Score functions ---


class Captured:
    """Tensors with gradients, in the dtype of the call."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(2)
        self.slopes, self.distances, self.bias, self.cap = (
            torch.rand(size, generator=generator, dtype=dtype).requires_grad_()
            for size in ((4,), (4, 180), (2, 1, 90, 90), ())
        )

    def mods(self) -> dict[str, tuple[Function | None, list[Tensor]]]:
        """Functions by name, and the tensors that each captures."""
        slopes, distances, bias, cap = self.slopes, self.distances, self.bias, self.cap
        return {
            "alibi": (lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(), [slopes]),
            "relative": (lambda score, b, h, q, k: score + distances[h, q - k + 90], [distances]),
            "bias": (lambda score, b, h, q, k: score + bias[b, 0, q, k], [bias]),
            "factor": (lambda score, b, h, q, k: score * slopes[h] + torch.where(q >= k, 0.0, bias[b, 0, q, k]),
                       [slopes, bias]),
            "soft cap": (lambda score, b, h, q, k: 2 * torch.tanh(score / 2), []),
            "learnt cap": (lambda score, b, h, q, k: (2 + cap) * torch.tanh(score / (2 + cap)), [cap]),
            "causal": (lambda score, b, h, q, k: torch.where(q >= k, score + (q - k) * 0.125, -float("inf")), []),
            "squared": (lambda score, b, h, q, k: score * score, []),
            "trig": (lambda score, b, h, q, k: torch.sin(torch.cos(score)) + b, []),
            "identity": (lambda score, b, h, q, k: score, []),
            "none": (None, []),
        }  # fmt: skip


NAMES = tuple(Captured(torch.float64).mods())


@pytest.mark.parametrize(
    ("name", "lengths", "dtype"),
    [*((name, lengths, torch.float64) for name in NAMES for lengths in LENGTHS),
     *((name, (33, 90), torch.float32) for name in ("alibi", "bias", "soft cap"))],
)  # fmt: skip
def test_score(name: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    mod, tensors = Captured(dtype).mods()[name]
    q, k, v = qkv = inputs(lengths, dtype=dtype)
    got = flex_attention(q, k, v, mod, scale=0.7, return_lse=True)
    assert_same(got, expected(q, k, v, mod, None, 0.7), [*qkv, *tensors])  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kv_heads: int, lengths: tuple[int, int]) -> None:
    """h is the query head, in both functions. Scale, then score_mod, then the mask."""
    mod, tensors = Captured(torch.float64).mods()["alibi"]
    block_mask = create_block_mask(of_heads, 2, 4, *lengths, device="cpu")
    q, k, v = qkv = inputs(lengths, (4, kv_heads))
    got = flex_attention(q, k, v, mod, block_mask, 3.0, True, return_lse=True)
    assert_same(got, expected(q, k, v, mod, of_heads, 3.0), [*qkv, *tensors])  # type: ignore[arg-type]


def test_head_dims_that_differ() -> None:
    q, k, v = inputs((40, 50))
    wide = torch.cat([v, v], -1)[..., :13].detach().requires_grad_()
    got = flex_attention(q, k, wide, return_lse=True)
    assert_same(got, expected(q, k, wide, None, None), [q, k, wide])  # type: ignore[arg-type]


def test_one_batch_of_keys_for_all_queries() -> None:
    q, _, _ = inputs((40, 50), batch=3)
    _, k, v = inputs((40, 50), batch=1)
    block_mask = create_block_mask(causal, 3, None, 40, 50, device="cpu")
    got = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    assert_same(got, expected(q, k, v, None, causal), [q, k, v])  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(1, 600), (3, 600), (1, 1), (600, 1)])
def test_decoding(lengths: tuple[int, int]) -> None:
    """Few queries over many keys take tileattn's kernels for decoding, where no gradient is needed."""
    mod, _ = Captured(torch.float64).mods()["alibi"]
    q, k, v = (x.detach() for x in inputs(lengths))
    block_mask = create_block_mask(local_window, None, None, *lengths, device="cpu")
    with torch.no_grad():
        got = flex_attention(q, k, v, mod, block_mask, return_lse=True)
        torch.testing.assert_close(got, expected(q, k, v, mod, local_window))


def local_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 5) & (kv_idx < 77 + q_idx)


@pytest.mark.parametrize("name", ["causal", "document", "rows of none"])
def test_pytorchs_own_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the other tests is what PyTorch's function calls in eager mode: here is the function itself."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = (x.detach() for x in inputs((33, 90), (4, 2)))
    mod, _ = Captured(torch.float64).mods()["alibi"]
    with torch.no_grad():
        answers = [
            function(q, k, v, mod, create(MASKS[name], 2, 4, 33, 90, device="cpu"), 0.3, True, return_aux=LSE)
            for function, create in (
                (flex_attention, create_block_mask),
                (torch_flex.flex_attention, torch_flex.create_block_mask),
            )
        ]
    torch.testing.assert_close(*answers)
