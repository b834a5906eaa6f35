"""The torch backend beyond the conformance suite: tiles, memory, layouts, and the choice of fused attention or loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow, SoftCap, attention
from tileattn.call.inputs import Inputs
from tileattn.kernels.torch import fused, loop
from tileattn.kernels.torch.backward import MAX_TILE, Needs, backward
from tileattn.kernels.torch.forward import forward
from tileattn.kernels.torch.mask import KeyRange, ScoreMatrix, key_ranges
from tileattn.kernels.torch.score_gradient import Watched
from tileattn.math import load
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.variant.scores import ScoreMod

SCALE = 0.25
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(
    seqlen_q: int, seqlen_k: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, head_dim_v: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(2, seqlen_q, heads, head_dim),
        random(2, seqlen_k, kv_heads, head_dim),
        random(2, seqlen_k, kv_heads, head_dim_v),
    )


class Operators(TorchDispatchMode):
    """Notes the operators that run, and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                # The memory behind it: an expanded tensor costs nothing.
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@contextmanager
def recorded() -> Iterator[Operators]:
    with torch.no_grad(), Operators() as operators:
        yield operators


def user_score(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score * 0.5 + h


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(40, 7),
    "documents": Documents(torch.arange(150) // 40) & Causal(),
    "prefix": PrefixLM(torch.tensor([10, 70])),
    "function": FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
}


# --- Which way it goes ---


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("mods", [(), (ALiBi(random(4)),), (Bias(random(1, 4, 150, 150)),)], ids=["", "alibi", "bias"])
def test_pytorchs_fused_attention_runs_what_it_can_express(mask: Mask | None, mods: tuple[object, ...]) -> None:
    with recorded() as operators:
        forward(*qkv(150, 150), mask, mods, None, SCALE)
    assert FUSED in operators.names


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_plain_attention_is_one_fused_call_without_a_mask(mask: Mask | None) -> None:
    with recorded() as operators:
        forward(*qkv(1025, 1025), mask, (), None, SCALE)
    assert operators.names.count(FUSED) == 1
    assert not any("masked_fill" in name for name in operators.names)


@pytest.mark.parametrize("mods", [(SoftCap(5.0),), (user_score,), (ALiBi(random(4)), SoftCap(5.0))])
def test_other_score_modifications_run_in_the_loop(mods: tuple[object, ...]) -> None:
    with recorded() as operators:
        forward(*qkv(150, 150), None, mods, None, SCALE)
    assert FUSED not in operators.names


@pytest.mark.parametrize(("block_M", "block_N"), [(256, 512), (48, 40)])
def test_the_loop_is_right_where_the_fused_attention_would_run(
    block_M: int, block_N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what CUDA tensors get."""
    monkeypatch.setattr(fused, "expresses", lambda matrix: False)
    monkeypatch.setattr(loop, "BLOCK_M", block_M)
    monkeypatch.setattr(loop, "BLOCK_N", block_N)
    for mask in MASKS.values():
        q, k, v = qkv(150, 150)
        slopes = random(4).abs() / 8
        arguments = (q, k, v, mask, (ALiBi(slopes),), None, SCALE)
        with recorded() as operators:
            got = forward(*arguments)
        assert FUSED not in operators.names
        assert_forward_accurate("loop", got, oracle_attention(*arguments), eager_attention(*arguments))  # type: ignore[arg-type]


# --- Memory ---


@pytest.mark.slow_cases("alibi-mask3", "softcap-mask1", "softcap-None", reason="0.3 to 0.5 s each")
@pytest.mark.parametrize("mask", [None, Causal(), SlidingWindow(100, 0), Causal() & PrefixLM(50)])
@pytest.mark.parametrize("mods", [(), (ALiBi(random(2).abs()),), (SoftCap(5.0),)], ids=["", "alibi", "softcap"])
def test_no_tensor_grows_with_both_lengths(mask: Mask | None, mods: tuple[object, ...]) -> None:
    seqlen, heads = 4096, 2
    q, k, v = (random(1, seqlen, heads, 16) for _ in range(3))
    with recorded() as operators:
        forward(q, k, v, mask, mods, None, SCALE)
    # A tile of all keys for the largest block of rows, and no more.
    assert operators.largest <= max(fused.BLOCKS_M) * seqlen * heads < seqlen * seqlen


@pytest.mark.slow_cases("alibi-None", "softcap-None", reason="0.5 s each")
@pytest.mark.parametrize("mask", [None, SlidingWindow(100, 0), Causal() & PrefixLM(50)])
@pytest.mark.parametrize("mod", [None, ALiBi(random(2).abs()), SoftCap(5.0)], ids=["", "alibi", "softcap"])
def test_nor_does_one_in_the_backward_pass(mask: Mask | None, mod: ScoreMod | None) -> None:
    """Gradients of slopes and of a bias that is the same for all queries included; that of lse keeps it in the loop."""
    seqlen, heads = 2048, 2
    q, k, v, o, do = (random(1, seqlen, heads, 16) for _ in range(5))
    lse, dlse = (random(1, heads, seqlen) for _ in range(2))
    slopes, keys = (Watched(x, torch.float32) for x in (random(2).abs(), random(1, 1, 1, seqlen)))
    mods = [ALiBi(slopes) if isinstance(mod, ALiBi) else mod] * (mod is not None) + [Bias(keys)]  # type: ignore[arg-type]
    with recorded() as operators:
        gradients = backward(
            Inputs(q, k, v), o, lse, do, dlse, mask, mods, [slopes, keys], Needs(True, True, True, False), 0.1
        )  # type: ignore[arg-type]
    assert all(x is not None for x in (*gradients[:3], *gradients.tensors))
    # A tile, and no more.
    assert operators.largest <= MAX_TILE < seqlen * seqlen


def test_masks_that_differ_by_head_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random(1, 3000, 2, 8) for _ in range(3))
    arguments = (q, k, v, FunctionMask(lambda b, h, q, k: (k + h) % 2 == 0), (), None, SCALE)
    monkeypatch.setattr(fused, "MAX_MASK", 2**18)
    with recorded() as operators:
        got = forward(*arguments)
    assert operators.largest <= 2 * max(fused.BLOCKS_M) * 1024
    assert_forward_accurate("parts", got, oracle_attention(*arguments), eager_attention(*arguments))


@pytest.mark.parametrize("seqlen_q", [1, 200])
def test_grouped_queries_do_not_expand_keys_and_values(seqlen_q: int) -> None:
    q, k, v = qkv(seqlen_q, 2000, heads=16, kv_heads=1, head_dim=32, head_dim_v=32)
    with recorded() as operators:
        forward(q, k, v, None, (), None, SCALE)
    assert operators.largest <= max(q.numel(), k.numel())


# --- Tiles ---


def matrix(mask: Mask | None, seqlen_q: int, seqlen_k: int) -> ScoreMatrix:
    return ScoreMatrix(mask, (), slice(0, 2), 3, seqlen_q, seqlen_k, torch.float32, torch.device("cpu"))


def test_key_ranges() -> None:
    full = KeyRange(0, 100, 0, 100)
    assert key_ranges(matrix(None, 64, 100), 32) == [[full, full]]
    # Rows 0..31 stand at positions 36..67.
    assert key_ranges(matrix(Causal(), 64, 100), 32) == [[KeyRange(0, 68, 0, 37), KeyRange(0, 100, 0, 69)]]
    # The first 36 rows stand before the first key.
    assert key_ranges(matrix(Causal(), 100, 64), 36)[0][0] == KeyRange(0, 0, 0, 0)
    # No key is seen by all rows of a block that is longer than the window.
    assert key_ranges(matrix(SlidingWindow(4, 0), 64, 64), 32) == [[KeyRange(0, 32, 32, 32), KeyRange(28, 64, 64, 64)]]


def test_key_ranges_of_batch_elements_that_differ() -> None:
    first, second = key_ranges(matrix(PrefixLM(torch.tensor([10, 50])), 64, 64), 64)
    assert (first, second) == ([KeyRange(0, 64, 0, 10)], [KeyRange(0, 64, 0, 50)])
    assert len(key_ranges(matrix(PrefixLM(torch.tensor([10, 10])), 64, 64), 64)) == 1


def test_a_window_visits_few_keys() -> None:
    block_M, (ranges,) = fused.cheapest_blocks(matrix(SlidingWindow(100, 0), 8192, 8192), head_dim=64)
    assert sum((seen.hi - seen.lo) * block_M for seen in ranges) < 8192 * 8192 / 10


def test_results_are_contiguous() -> None:
    for mask in (None, Causal(), SlidingWindow(5, 0)):
        for q, k, v in (qkv(63, 63), qkv(63, 63, head_dim_v=8), qkv(1, 63)):
            o, lse = forward(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mask, (), None, SCALE)
            assert o.is_contiguous()
            assert lse.is_contiguous()


def test_inputs_are_left_alone() -> None:
    tensors = qkv(63, 63)
    copies = [x.clone() for x in tensors]
    forward(*tensors, Causal(), (SoftCap(3.0),), random(4), SCALE)
    for x, copy in zip(tensors, copies):
        assert torch.equal(x, copy)


def test_a_sink_of_minus_infinity_is_none() -> None:
    arguments = (*qkv(63, 31), Causal(), (), None, SCALE)
    got = forward(*arguments[:5], torch.full((4,), -torch.inf), SCALE)
    assert_forward_accurate("sink", got, oracle_attention(*arguments), eager_attention(*arguments))  # type: ignore[arg-type]


def test_what_a_mask_hides_may_be_read_beyond_a_tensor() -> None:
    """As `table[q - k]` is: neither an error nor, of negative indices, elements from the end."""
    x, table = torch.randn(1, 20, 1, 4, dtype=torch.float64), torch.randn(9, dtype=torch.float64, requires_grad=True)
    o = attention(x, x, x, mask=SlidingWindow(8, 0), score_mod=lambda score, b, h, q, k: score + table[q - k])
    distance = torch.arange(20)[:, None] - torch.arange(20)
    bias = torch.where((distance >= 0) & (distance < 9), table[distance.clamp(0, 8)], -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(*[x.squeeze(2)] * 3, bias)
    torch.testing.assert_close(o.squeeze(2), expected)
    gradient, wanted = (torch.autograd.grad(each.square().sum(), table)[0] for each in (o, expected))
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    "mod",
    [
        lambda warmth: lambda score, b, h, q, k: score * warmth,
        lambda warmth: lambda score, b, h, q, k: warmth[()] * score,
        lambda warmth: lambda score, b, h, q, k: score * load(warmth),
    ],
)
def test_a_learned_number_is_computed_with_as_it_is(mod: Callable[[Tensor], Callable[..., object]]) -> None:
    x, warmth = torch.randn(1, 5, 1, 4, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    o = attention(x, x, x, score_mod=mod(warmth))
    torch.testing.assert_close(o, attention(x, x, x, scale=0.7 / 2))
    assert torch.autograd.grad(o.square().sum(), warmth)[0] != 0


def test_a_captured_tensor_must_be_indexed() -> None:
    x, slopes = torch.randn(1, 5, 1, 4), torch.ones(1)
    with pytest.raises(TypeError, match=r"captured tensor of 1 dimensions as a whole: index it"):
        attention(x, x, x, score_mod=lambda score, b, h, q, k: score * slopes)
