"""Dropout in `attention`: the pattern of `tileattn.call.dropout`, in forward and backward pass, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tileattn import ALiBi, Bias, Causal, FunctionMask, Mask, PrefixLM, SlidingWindow, SoftCap, attention, quantize_fp8
from tileattn.call.dropout import draw_seed, weight_of_kept
from tileattn.kernels.torch import backward, loop
from tileattn.reference import standard_attention
from tileattn.testing import dropout_mask

HEADS, P = 4, 0.3
LENGTHS = (61, 53)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves() -> list[Tensor]:
    """q, k, v, sink, slopes, bias."""
    seqlen_q, seqlen_k = LENGTHS
    shapes = (
        (2, seqlen_q, HEADS, 8),
        (2, seqlen_k, 2, 8),
        (2, seqlen_k, 2, 6),
        (HEADS,),
        (HEADS,),
        (1, 1, 1, seqlen_k),
    )
    return [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def mods_of(slopes: Tensor, bias: Tensor) -> list[Any]:
    return [ALiBi(slopes), SoftCap(3.0), Bias(bias)]


def pattern(seed: int, p: float = P) -> Tensor:
    """What `attention` multiplies probabilities by after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return dropout_mask(draw_seed("cpu"), p, 2, HEADS, *LENGTHS).double() * weight_of_kept(p)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(9, 3),
    "prefixes": PrefixLM(torch.tensor([7, 40])),
    "function": FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
}


@pytest.mark.parametrize("tiles", [(128, 256), (24, 20)], ids=str)
@pytest.mark.parametrize("p", [P, 1.0])
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_pattern_of_the_seed(mask: str, p: float, tiles: tuple[int, int]) -> None:
    """Against the matrix, in float64; the pattern is the same in tiles of any size."""
    q, k, v, sink, slopes, bias = given = leaves()
    o, lse = standard_attention(q, k, v, MASKS[mask], mods_of(slopes, bias), sink, dropout=pattern(1, p))
    do, dlse = random(*o.shape), random(*lse.shape)
    expected = torch.autograd.grad((o, lse), given, (do, dlse))
    torch.manual_seed(1)
    with ExitStack() as stack:
        for module in (loop, backward):
            for name, size in zip(("BLOCK_M", "BLOCK_N"), tiles):
                stack.enter_context(mock.patch.object(module, name, size))
        got = attention(
            q, k, v, mask=MASKS[mask], score_mod=mods_of(slopes, bias), sink=sink, dropout_p=p, return_lse=True
        )
        grads = torch.autograd.grad(got, given, (do, dlse))  # type: ignore[arg-type]
    torch.testing.assert_close(got, (o, lse))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"score_mod": SoftCap(2.0)}], ids=str)
def test_with_and_without_gradients_and_layouts_are_the_same(options: dict[str, Any]) -> None:
    tensors = leaves()[:3]

    def run(*tensors: Tensor, **more: Any) -> Tensor:
        torch.manual_seed(3)
        o = attention(*tensors, dropout_p=P, **options, **more)
        assert isinstance(o, Tensor)
        return o.detach()

    expected = run(*tensors)
    with torch.no_grad():
        assert torch.equal(run(*tensors), expected)
        heads_first = run(*(x.transpose(1, 2) for x in tensors), layout="bhsd")
    assert torch.equal(heads_first.transpose(1, 2), expected)


def test_lse_does_not_see_it_and_no_probability_drops_nothing() -> None:
    q, k, v = leaves()[:3]
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(attention(q, k, v, causal=True, dropout_p=0.0), o)  # type: ignore[arg-type]
    assert torch.equal(attention(q, k, v, causal=True, dropout_p=0), o)  # type: ignore[arg-type]
    torch.testing.assert_close(attention(q, k, v, causal=True, dropout_p=P, return_lse=True)[1], lse)


def test_calls_draw_different_seeds_and_their_mean_is_attention() -> None:
    q, k, v = (x.detach() for x in leaves()[:3])
    torch.manual_seed(0)
    drawn = torch.stack([attention(q, k, v, dropout_p=0.5) for _ in range(300)])  # type: ignore[arg-type]
    assert not torch.equal(drawn[0], drawn[1])
    error = (drawn.mean(0) - attention(q, k, v)) / (drawn.std(0) / drawn.shape[0] ** 0.5)  # type: ignore[operator]
    # Of several thousand values that are nearly normal.
    assert float(error.abs().max()) < 6
    assert 0.9 < float(error.std()) < 1.1


def test_nothing_to_drop() -> None:
    q, k, v = leaves()[:3]
    for tensors in ((q[:0], k[:0], v[:0]), (q[:, :0], k, v), (q, k[:, :0], v[:, :0])):
        o = attention(*tensors, dropout_p=P)
        assert isinstance(o, Tensor)
        assert torch.equal(o, torch.zeros_like(o))
        assert all(not x.any() for x in torch.autograd.grad(o.sum(), tensors))


def test_fp8() -> None:
    quantized = quantize_fp8(*(x.detach() for x in leaves()[:3]))._asdict()
    q, k, v, *descales = quantized.values()
    torch.manual_seed(5)
    got = attention(**quantized, dropout_p=P, return_lse=True)
    expected = standard_attention(
        q, k, v, dropout=pattern(5), **dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    )
    torch.testing.assert_close(got, expected)


# --- Seeds are drawn once and for all ---


def training_step(*tensors: Tensor) -> Tensor:
    q, k, v, sink, slopes, bias = tensors
    o = attention(q, k, v, mask=SlidingWindow(20, 5), score_mod=mods_of(slopes, bias), sink=sink, dropout_p=P)
    assert isinstance(o, Tensor)
    return o.sin().sum()


def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    given = leaves()
    torch.manual_seed(7)
    function(*given).backward()
    return tuple(x.grad for x in given)  # type: ignore[misc]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_again(reentrant: bool) -> None:
    got = gradients(lambda *tensors: checkpoint(training_step, *tensors, use_reentrant=reentrant))
    torch.testing.assert_close(got, gradients(training_step), rtol=0, atol=0)


def test_torch_func() -> None:
    torch.manual_seed(7)
    got = torch.func.grad(training_step, argnums=tuple(range(6)))(*(x.detach() for x in leaves()))
    torch.testing.assert_close(got, gradients(training_step), rtol=0, atol=0)


def test_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(training_step, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(training_step), rtol=0, atol=0)
    torch._dynamo.reset()


def test_the_operators_keep_the_rules_of_torch_library() -> None:
    q, k, v = leaves()[:3]
    arguments = (q, k, v, None, "", [], [], [], 0.3, None)
    options = {"needs_grad": True, "dropout_p": P, "seed": draw_seed("cpu")}
    assert set(torch.library.opcheck(torch.ops.tileattn.forward, arguments, options).values()) == {"SUCCESS"}
    o, lse = (x.detach() for x in torch.ops.tileattn.forward(*arguments, **options))
    tensors = [x.detach() for x in (o, q, k, v, o, lse)]
    given = (tensors[0], None, *tensors[1:], None, "", [], [], [], 0.3, None, False, [True] * 3 + [False])
    del options["needs_grad"]
    assert set(torch.library.opcheck(torch.ops.tileattn.backward, given, options).values()) == {"SUCCESS"}
