"""tileattn's versions of PyTorch's flash operators, registered for CPU tensors, where PyTorch has no such operators.

PyTorch's derivative formulas and its functions above the operators run unchanged. Only a GPU shows which backend SDPA
chooses (compat/test_torch_sdpa_gpu.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

import tileattn
from tileattn.call.dropout import draw_seed, weight_of_kept
from tileattn.compat import torch_sdpa
from tileattn.testing import dropout_mask

ATEN = torch.ops.aten
SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def on_cpu() -> Iterator[None]:
    library = torch_sdpa.register_kernels("CPU")
    yield
    del library


def inputs(lengths: tuple[int, int] = (9, 9), heads: tuple[int, int] = (4, 4), dim: int = 16) -> list[Tensor]:
    """q, k and v (batch, heads, seqlen, head_dim), views of (batch, seqlen, heads, head_dim), float32."""
    torch.manual_seed(0)
    sizes = ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))
    return [torch.randn(2, n, h, dim).transpose(1, 2).requires_grad_() for n, h in sizes]


def packed_inputs() -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(n, 4, 16, requires_grad=True) for n in (12, 15, 15)]
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 5, 12], [0, 6, 8, 15]))
    return tensors, cu_seqlens_q, cu_seqlens_k


def check(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Values, and gradients."""
    torch.testing.assert_close(got, expected)
    do = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, do), torch.autograd.grad(expected, leaves, do))


# --- The operators ---


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_sdpas_operator(heads: tuple[int, int], is_causal: bool, scale: float | None) -> None:
    q, k, v = inputs(heads=heads)
    o, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    check(o, SDPA(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True), [q, k, v])
    scores = q @ k.repeat_interleave(heads[0] // heads[1], dim=1).mT * (scale or 0.25)
    if is_causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1).detach())


@pytest.mark.usefixtures("on_cpu")
def test_sdpas_operator_with_dropout() -> None:
    """Forward and backward drop the same: both follow the seed that the forward pass drew."""
    q, k, v = inputs((40, 40))
    torch.manual_seed(3)
    o, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.3, True)
    torch.manual_seed(3)
    kept = dropout_mask(draw_seed("cpu"), 0.3, 2, 4, 40, 40)
    hidden = torch.ones(40, 40).triu(1).bool()
    p = torch.softmax((q @ k.mT / 4).masked_fill(hidden, -torch.inf), dim=-1)
    check(o, (p * kept * weight_of_kept(0.3)) @ v, [q, k, v])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("is_causal", "window"), [(False, (None, None)), (True, (-1, -1)), (False, (3, 0)), (False, (2, 4)), (True, (4, 4))]
)
def test_the_operator_below(is_causal: bool, window: tuple[int | None, int | None]) -> None:
    """Aligned bottom-right, as flash-attn's is."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in inputs((7, 11)))
    sizes = dict(zip(("window_size_left", "window_size_right"), window))
    o, lse, *_ = ATEN._flash_attention_forward(q, k, v, None, None, 7, 11, 0.0, is_causal, False, **sizes)
    left, right = (None if size in (None, -1) else size for size in window)
    mask = tileattn.SlidingWindow(left, 0 if is_causal else right)
    expected, expected_lse = tileattn.attention(q, k, v, mask=mask, return_lse=True)
    check(o, expected, [q, k, v])
    torch.testing.assert_close(lse, expected_lse.detach())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (3, 0)])
def test_pytorchs_packed_sequences(window_size: tuple[int, int]) -> None:
    leaves, *cu_seqlens = packed_inputs()
    q, k, v = leaves
    got = varlen_attn(q, k, v, *cu_seqlens, 7, 7, window_size=window_size)
    left, right = (None if size == -1 else size for size in window_size)
    expected = tileattn.varlen_attention(q, k, v, *cu_seqlens, 7, 7, mask=tileattn.SlidingWindow(left, right))
    assert isinstance(expected, Tensor)
    check(got, expected, leaves)


@pytest.mark.usefixtures("on_cpu")
def test_packed_sequences_with_dropout() -> None:
    leaves, *cu_seqlens = packed_inputs()
    torch.manual_seed(3)
    got, *_ = ATEN._flash_attention_forward(*leaves, *cu_seqlens, 7, 7, 0.3, True, False)
    torch.manual_seed(3)
    expected = tileattn.varlen_attention(*leaves, *cu_seqlens, 7, 7, causal=True, dropout_p=0.3)
    assert isinstance(expected, Tensor)
    check(got, expected, leaves)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jagged ones, which PyTorch sends to the operator of packed sequences, where it chooses flash."""
    choice = "torch.nested._internal.sdpa._select_sdp_backend"
    monkeypatch.setattr(choice, lambda *arguments, **options: SDPBackend.FLASH_ATTENTION)
    torch.manual_seed(0)
    leaves = [torch.randn(15, 4, 16, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 6, 8, 15])
    nested = (torch.nested.nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in leaves)
    got = SDPA(*nested, is_causal=is_causal).transpose(1, 2).values()
    expected = tileattn.varlen_attention(*leaves, ends.int(), ends.int(), 7, 7, causal=is_causal)
    assert isinstance(expected, Tensor)
    check(got, expected, leaves)


@pytest.mark.skipif(not hasattr(ATEN, "_flash_attention_forward_no_dropout_inplace"), reason="not in this PyTorch")
@pytest.mark.usefixtures("on_cpu")
def test_into_a_given_tensor() -> None:
    leaves, *cu_seqlens = packed_inputs()
    q, k, v = (x.detach() for x in leaves)
    out = torch.full_like(q, torch.nan)
    arguments = (q, k, v, *cu_seqlens, 7, 7, 0.0, True, False)
    lse = ATEN._flash_attention_forward_no_dropout_inplace(out, *arguments)
    expected = tileattn.varlen_attention(*arguments[:7], causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_outputs_are_what_pytorch_says_of_them(layout: str) -> None:
    """Sizes, strides and dtypes: graphs of torch.compile are made of those."""
    q, k, v = inputs()
    if layout == "bhsd":
        q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k, v))
    elif layout == "packed":
        q, k, v = torch.randn(2, 9, 3, 4, 16, requires_grad=True).permute(2, 0, 3, 1, 4)

    def run(*tensors: Tensor) -> list[Any]:
        outputs = list(ATEN._scaled_dot_product_flash_attention(*tensors, 0.2, True))
        return [*outputs, *torch.autograd.grad(outputs[0], tensors, torch.ones_like(outputs[0]))]

    outputs, expected = run(q, k, v), run(*(x.detach().to("meta").requires_grad_() for x in (q, k, v)))
    for mine, theirs in zip(outputs, expected, strict=True):
        assert isinstance(mine, Tensor) == isinstance(theirs, Tensor)
        if isinstance(mine, Tensor):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        else:
            assert mine == theirs


@pytest.mark.usefixtures("on_cpu")
def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    prepare = tileattn.runtime.operators.prepare_backward
    monkeypatch.setattr(
        tileattn.runtime.operators, "prepare_backward", lambda call, *rest: calls.append(call) or prepare(call, *rest)
    )
    leaves = inputs()
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            o, *_ = ATEN._scaled_dot_product_flash_attention(*leaves)
            torch.autograd.grad(o.sum(), leaves)
        finally:
            torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in calls] == [False, True]


@pytest.mark.parametrize("name", torch_sdpa.KERNELS)
def test_signatures_are_those_of_the_operators(name: str) -> None:
    """The operators are those of the running version of PyTorch; keywords of newer versions are allowed."""
    if not hasattr(ATEN, name):
        pytest.skip("not in this PyTorch")
    arguments = getattr(ATEN, name).default._schema.arguments
    parameters = inspect.signature(torch_sdpa.KERNELS[name]).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        named = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [argument.name for argument in arguments][: len(named)] == named
        return
    for keyword_only in (False, True):
        mine = [n for n, p in parameters.items() if (p.kind is p.KEYWORD_ONLY) == keyword_only]
        theirs = [argument.name for argument in arguments if argument.kwarg_only == keyword_only]
        assert theirs == mine[: len(theirs)]
        assert keyword_only or len(mine) == len(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": torch.ones(4)}, r"does not take alibi_slopes: use tileattn.attention with score_mod=ALiBi"),
    ],
)
def test_refusals(options: dict[str, Tensor], message: str) -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in inputs())
    with pytest.raises(NotImplementedError, match=message):
        torch_sdpa.flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, False, False, **options)


VARLEN_ATTN = inspect.signature(varlen_attn).parameters
NEWER = pytest.mark.skipif("block_table" not in VARLEN_ATTN, reason="PyTorch 2.13's varlen_attn takes block_table")


@NEWER
def test_the_names_of_varlen_attn() -> None:
    """The arguments that PyTorch 2.13 has are those whose way is tested below."""
    by_name = {name for name, p in VARLEN_ATTN.items() if p.kind is p.KEYWORD_ONLY}
    assert by_name == {"return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    positional = "query key value cu_seq_q cu_seq_k max_q max_k"
    assert [name for name in VARLEN_ATTN if name not in by_name] == positional.split()


@NEWER
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (3, 0)])
@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_attn_of_a_cache(num_splits: int | None, window_size: tuple[int, int], on_cpu: None) -> None:
    (q, k, v), cu_seqlens_q, cu_seqlens_k = packed_inputs()
    seqused_k = torch.tensor([4, 0, 7], dtype=torch.int32)
    left, right = (None if size < 0 else size for size in window_size)
    options = {"window_size": window_size, "seqused_k": seqused_k, "num_splits": num_splits, "scale": 0.3}
    with torch.no_grad():
        got = varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, 7, 7, **options)
        kept = [x.split([6, 2, 7])[b][: seqused_k[b]] for x in (k, v) for b in range(3)]
        alone = torch.cat(kept[:3]), torch.cat(kept[3:])
        ends = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
        expected = tileattn.varlen_attention(
            q, *alone, cu_seqlens_q, ends, 7, 7, mask=tileattn.SlidingWindow(left, right), scale=0.3
        )
        torch.testing.assert_close(got, expected)
        pages = [torch.full((6, 4, 4, 16), torch.nan) for _ in range(2)]
        table = torch.tensor([[5, -1], [-1, -1], [0, 2]], dtype=torch.int32)
        for cache, x in zip(pages, alone):
            cache[5], cache[0], cache[2, :3] = x[:4], x[4:8], x[8:]
        paged = varlen_attn(q, *pages, cu_seqlens_q, None, 7, 7, block_table=table, **options)
        torch.testing.assert_close(paged, expected)


def test_other_refusals() -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(NotImplementedError, match="does not take return_debug_mask"):
        torch_sdpa.scaled_dot_product_flash_attention(q, k, v, 0.1, False, True)
    leaves, cu_seqlens, _ = packed_inputs()
    with pytest.raises(ValueError, match="cum_seq_q and cum_seq_k must be given together"):
        torch_sdpa.flash_attention_forward(*leaves, cu_seqlens, None, 7, 7, 0.0, False, False)
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        torch_sdpa.flash_attention_forward(*leaves, cu_seqlens.long(), cu_seqlens, 7, 7, 0.0, False, False)


# --- The registry ---


@pytest.fixture
def nothing_active() -> Iterator[None]:
    assert current_flash_attention_impl() is None
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def has_kernel_for_cuda(name: str = "_scaled_dot_product_flash_attention") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def test_it_is_known_and_not_active() -> None:
    assert "tileattn" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("nothing_active")
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch's own kernels are there as well")
def test_activation_registers_kernels_and_restoring_takes_them_back() -> None:
    names = [name for name in torch_sdpa.KERNELS if hasattr(ATEN, name)]
    for _ in range(2):
        assert not any(map(has_kernel_for_cuda, names))
        activate_flash_attention_impl("tileattn")
        assert current_flash_attention_impl() == "tileattn"
        assert all(map(has_kernel_for_cuda, names))
        restore_flash_attention_impl()
        assert current_flash_attention_impl() is None
    assert not any(map(has_kernel_for_cuda, names))


@pytest.mark.usefixtures("nothing_active")
def test_activating_it_again_is_as_once() -> None:
    for _ in range(2):
        activate_flash_attention_impl("tileattn")
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("nothing_active")
def test_flash_comes_first_while_it_is_active() -> None:
    """Otherwise no call would reach it on GPUs where PyTorch prefers cuDNN."""
    before = list(torch._C._get_sdp_priority_order())
    cudnn_first = [3, 1, 2, 0, 4]
    torch._C._set_sdp_priority_order(cudnn_first)
    try:
        activate_flash_attention_impl("tileattn")
        assert list(torch._C._get_sdp_priority_order()) == [1, 3, 2, 0, 4]
        restore_flash_attention_impl()
        assert list(torch._C._get_sdp_priority_order()) == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)


def test_a_handle_is_removed_once() -> None:
    handle, before = torch_sdpa.Handle("CPU"), list(torch._C._get_sdp_priority_order())
    handle.remove()
    torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])
    handle.remove()
    assert list(torch._C._get_sdp_priority_order()) == [2, 1, 0, 3, 4]
    torch._C._set_sdp_priority_order(before)
