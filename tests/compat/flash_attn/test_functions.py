"""`tileattn.compat.flash_attn` by flash-attn's documentation, argument by argument.

The tolerance is flash-attn's (its tests/test_flash_attn.py, 2.8): the largest error of an output, against PyTorch in a
wider dtype, is at most twice that of PyTorch in the same dtype, plus 1e-5; flash-attn allows gradients three times as
much. PyTorch's error may be small by chance. Therefore these tests also allow one rounding of the output's largest
element, and take the larger of PyTorch's errors in two orders of operations.

The same functions run on a CPU, and on a GPU by ``pytest -m gpu``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tileattn.call.dropout import draw_seed, weight_of_kept
from tileattn.compat import flash_attn as compat
from tileattn.compat.flash_attn import bert_padding
from tileattn.testing import dropout_mask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16 = torch.bfloat16, torch.float16
ATOL = 1e-5
OUTPUTS = ("out", "lse", "S_dmask", "dq", "dk", "dv")
BATCH = 3
SEED = 5


class Case(NamedTuple):
    """Lengths are (seqlen_q, seqlen_k), of packed sequences the longest ones."""

    lengths: tuple[int, int] = (70, 83)
    heads: tuple[int, int] = (4, 4)
    dim: int = 64
    dtype: torch.dtype = BF16
    slopes: str = ""  # "heads", or "batch" for (batch, heads)
    options: dict[str, Any] = {}  # of the functions  # noqa: RUF012


CASES = {
    "default": Case(),
    "fp16": Case(dtype=FP16),
    "square": Case((83, 83)),
    "one-query": Case((1, 83), (4, 2)),
    "gqa": Case(heads=(6, 2)),
    "mqa": Case(heads=(6, 1), options={"causal": True}),
    "dim-8": Case(dim=8),
    "dim-40": Case(dim=40, dtype=FP16),
    "dim-59": Case(dim=59, options={"causal": True}),
    "dim-111": Case(dim=111, heads=(4, 2), dtype=FP16),
    "dim-128": Case(dim=128, options={"causal": True}),
    "dim-192": Case(dim=192),
    "dim-250": Case(dim=250, options={"causal": True}),
    "dim-256": Case(dim=256, dtype=FP16),
    "softmax-scale": Case(options={"softmax_scale": 0.3}),
    "softmax-scale-of-a-padded-dim": Case(dim=20, options={"softmax_scale": 0.3}),
    "causal": Case(options={"causal": True}),
    "causal-fp16": Case((83, 83), dtype=FP16, options={"causal": True}),
    "causal-more-queries": Case((83, 60), options={"causal": True}),
    "window": Case(options={"window_size": (9, 5)}),
    "window-left": Case(options={"window_size": (9, -1)}),
    "window-right": Case(options={"window_size": (-1, 5)}),
    "window-of-one": Case(options={"window_size": (0, 0)}),
    "window-wider-than-keys": Case((83, 83), options={"window_size": (200, 0)}),
    "window-causal": Case(heads=(4, 2), options={"window_size": (9, 5), "causal": True}),
    "window-more-queries": Case((83, 60), options={"window_size": (9, 5)}),
    "softcap": Case(options={"softcap": 5.0}),
    "softcap-causal": Case(dtype=FP16, options={"softcap": 5.0, "causal": True}),
    "alibi": Case(slopes="heads"),
    "alibi-causal": Case((83, 83), slopes="heads", options={"causal": True}),
    "alibi-by-batch": Case(slopes="batch", options={"window_size": (20, 20)}),
    "alibi-softcap": Case(slopes="batch", options={"softcap": 5.0}),
    "dropout": Case(options={"dropout_p": 0.17}),
    "dropout-causal": Case((83, 83), (4, 2), dtype=FP16, options={"dropout_p": 0.17, "causal": True}),
    "dropout-alibi": Case(dim=59, slopes="heads", options={"dropout_p": 0.3}),
    "deterministic": Case(options={"deterministic": True, "causal": True}),
}


# --- The definition: what flash-attn documents, in PyTorch ---


def hidden(seqlen_q: int, seqlen_k: int, window_size: tuple[int, int], causal: bool, device: str) -> Tensor:
    """(seqlen_q, seqlen_k), True where query i must not see key j."""
    left, right = window_size
    right = 0 if causal else right
    i, j = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    position = i + seqlen_k - seqlen_q
    outside = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        outside |= j < position - left
    if right >= 0:
        outside |= j > position + right
    return outside


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    kept: Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    scaled_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and probabilities of one sequence, (seqlen, heads, head_dim), in the dtype of q; slopes are (heads,)."""
    (seqlen_q, heads, dim), seqlen_k = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k * scale) if scaled_first else torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        i, j = torch.arange(seqlen_q, device=q.device)[:, None], torch.arange(seqlen_k, device=q.device)
        scores = scores - (slopes[:, None, None] * (i + seqlen_k - seqlen_q - j).abs()).to(scores.dtype)
    nothing = hidden(seqlen_q, seqlen_k, window_size, causal, str(q.device))
    empty = nothing.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(nothing & ~empty, -torch.inf)
    p = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    dropped = p if kept is None else p * (kept * weight_of_kept(dropout_p)).to(p.dtype)
    lse = torch.logsumexp(scores.to(torch.promote_types(p.dtype, torch.float32)), dim=-1).masked_fill(
        empty[:, 0], -torch.inf
    )
    return torch.einsum("hqk,khd->qhd", dropped, v), lse, p


# --- Problems ---


class Problem:
    """A case's tensors, and how one of the functions, or the definition, is called with them."""

    def __init__(self, case: Case, device: str, lengths: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.lengths = case, device, lengths

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=case.dtype, device=device)

        heads, kv_heads = case.heads
        self.sequences = [
            (random(of_q, heads, case.dim), random(of_k, kv_heads, case.dim), random(of_k, kv_heads, case.dim))
            for of_q, of_k in lengths
        ]
        self.do = [torch.randn_like(q) for q, _, _ in self.sequences]
        shape = {"": None, "heads": (heads,), "batch": (len(lengths), heads)}[case.slopes]
        self.slopes = None if shape is None else torch.rand(shape, device=device) * 0.3

    def seed(self) -> Tensor:
        """What a call draws first after ``torch.manual_seed(SEED)``."""
        torch.manual_seed(SEED)
        return draw_seed(self.device)

    def defined(self, dtype: torch.dtype, scaled_first: bool = False) -> list[list[Tensor]]:
        """For each sequence: out, lse, probabilities, dq, dk, dv."""
        return [self._defined(b, dtype, scaled_first) for b in range(len(self.lengths))]

    def _defined(self, b: int, dtype: torch.dtype, scaled_first: bool) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in self.sequences[b]]
        slopes = self.slopes if self.slopes is None or self.slopes.ndim == 1 else self.slopes[b]
        p, kept = self.case.options.get("dropout_p", 0.0), None
        if p > 0:
            pattern = dropout_mask(self.seed(), p, len(self.lengths), self.case.heads[0], *self.case.lengths)
            kept = pattern[b, :, : self.lengths[b][0], : self.lengths[b][1]]
        out, lse, probabilities = definition(*leaves, slopes, kept, **self.case.options, scaled_first=scaled_first)
        gradients = torch.autograd.grad(out, leaves, self.do[b].to(dtype))
        return [out.detach(), lse.detach(), probabilities.detach(), *gradients]


class Call(NamedTuple):
    """One of the functions, and what it is called with: leaves come first."""

    problem: Problem
    function: Callable[..., Any]
    leaves: list[Tensor]
    rest: tuple[Any, ...]
    do: Tensor

    def outputs(self, **more: Any) -> Any:
        torch.manual_seed(SEED)
        given = {**self.problem.case.options, "alibi_slopes": self.problem.slopes}
        return self.function(*self.leaves, *self.rest, **given, **more)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.do)


def dense_call(case: Case, device: str) -> Call:
    problem = Problem(case, device, [case.lengths] * BATCH)
    leaves = [torch.stack(tensors).requires_grad_() for tensors in zip(*problem.sequences)]
    return Call(problem, compat.flash_attn_func, leaves, (), torch.stack(problem.do))


def packed_call(case: Case, device: str) -> Call:
    """Sequences of other lengths; one is empty."""
    (long_q, long_k), one_key = case.lengths, case.options.get("causal", False)
    lengths = [
        (long_q, long_k),
        (0, 0),
        (max(long_q // 3, 1), long_k // 2),
        (max(long_q // 2, 1), 1 if one_key else 41),
    ]
    problem = Problem(case, device, lengths)
    leaves = [torch.cat(tensors).requires_grad_() for tensors in zip(*problem.sequences)]
    ends = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device) for n in zip(*lengths))
    return Call(problem, compat.flash_attn_varlen_func, leaves, (*ends, *case.lengths), torch.cat(problem.do))


def dense(case: Case, device: str) -> tuple[Problem, list[list[Tensor]]]:
    """`flash_attn_func`'s results, sequence by sequence."""
    call = dense_call(case, device)
    out, lse, probabilities = call.outputs(return_attn_probs=True)
    assert out.shape == call.leaves[0].shape
    assert lse.shape == (BATCH, case.heads[0], case.lengths[0])
    assert (out.dtype, lse.dtype, probabilities.dtype) == (case.dtype, torch.float32, case.dtype)
    of_sequences = probabilities if probabilities.numel() else [probabilities] * BATCH
    return call.problem, [list(each) for each in zip(out, lse, of_sequences, *call.gradients(out))]


def packed(case: Case, device: str) -> tuple[Problem, list[list[Tensor]]]:
    """`flash_attn_varlen_func`'s results, sequence by sequence."""
    call = packed_call(case, device)
    lengths = call.problem.lengths
    out, lse, probabilities = call.outputs(return_attn_probs=True)
    assert out.shape == call.leaves[0].shape
    assert lse.shape == (case.heads[0], out.shape[0])
    assert (out.dtype, lse.dtype, probabilities.dtype) == (case.dtype, torch.float32, case.dtype)
    of_sequences = [probabilities] * len(lengths)
    if probabilities.numel():
        assert probabilities.shape == (len(lengths), case.heads[0], *case.lengths)
        of_sequences = [x[:, :n, :m] for x, (n, m) in zip(probabilities, lengths)]
    of_q, of_k = map(list, zip(*lengths))
    dq, dk, dv = call.gradients(out)
    split = (out.split(of_q), lse.split(of_q, dim=1), of_sequences, dq.split(of_q), dk.split(of_k), dv.split(of_k))
    return call.problem, [list(each) for each in zip(*split)]


FORMS: dict[str, Callable[[Case, str], tuple[Problem, list[list[Tensor]]]]] = {"dense": dense, "varlen": packed}


def compiled_calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""
    for case in CASES.values():
        for form in (dense_call, packed_call):
            call = form(case, "meta")
            yield lambda call=call: call.gradients(call.outputs())  # type: ignore[misc]


def flat(run: list[list[Tensor]], place: int) -> Tensor:
    """One output, of all sequences."""
    return torch.cat([each[place].detach().double().flatten() for each in run])


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_as_documented(name: str, form: str, device: str) -> None:
    case = CASES[name]
    problem, ours = FORMS[form](case, device)
    exact = problem.defined(torch.float64)
    eager = [problem.defined(case.dtype, scaled_first) for scaled_first in (False, True)]
    with_dropout = case.options.get("dropout_p", 0.0) > 0
    for place, what in enumerate(OUTPUTS):
        got, expected, *theirs = (flat(run, place) for run in (ours, exact, *eager))
        if what == "S_dmask" and not with_dropout:
            assert got.numel() == 0
            continue
        got = got.abs() if what == "S_dmask" else got
        assert torch.equal(got.isinf(), expected.isinf()), what
        expected, *finite = (x.masked_fill(expected.isinf(), 0.0) for x in (expected, got, *theirs))
        error, *of_eager = (largest(x - expected) for x in finite)
        allowed = 2 * max(of_eager) + torch.finfo(case.dtype).eps / 2 * largest(expected) + ATOL
        assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"
    if with_dropout:
        kept = dropout_mask(
            problem.seed(), case.options["dropout_p"], len(problem.lengths), case.heads[0], *case.lengths
        )
        for b, (each, (n, m)) in enumerate(zip(ours, problem.lengths)):
            visible = each[2] != 0
            assert torch.equal((each[2] > 0)[visible], kept[b, :, :n, :m][visible])


# --- The packed forms are the same, of views ---


def each_with_gradients(function: Callable[..., Any], leaves: list[Tensor], *arguments: Any) -> list[Tensor]:
    torch.manual_seed(5)
    outputs = function(*leaves, *arguments, dropout_p=0.1, causal=True, return_attn_probs=True)
    torch.manual_seed(6)
    return [*outputs, *torch.autograd.grad(outputs[0], leaves, torch.randn_like(outputs[0]))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 59])
def test_packed_tensors(device: str, dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 70, 3, 4, dim, dtype=BF16, device=device, requires_grad=True)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    *expected, dq, dk, dv = each_with_gradients(compat.flash_attn_func, [q, k, v])
    *of_qkv, dqkv = each_with_gradients(compat.flash_attn_qkvpacked_func, [qkv])
    *of_kv, dq_of_kv, dkv = each_with_gradients(compat.flash_attn_kvpacked_func, [q, kv])
    same([*expected, dq, dk, dv], [*of_qkv, *dqkv.unbind(2)], device)
    same([*expected, dq, dk, dv], [*of_kv, dq_of_kv, *dkv.unbind(2)], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 59])
def test_packed_tensors_of_packed_sequences(device: str, dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(90, 3, 4, dim, dtype=BF16, device=device, requires_grad=True)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(1))
    kv = torch.stack((k, v), dim=1).detach().requires_grad_()
    ends = torch.tensor([0, 30, 31, 90], dtype=torch.int32, device=device)
    *expected, dq, dk, dv = each_with_gradients(compat.flash_attn_varlen_func, [q, k, v], ends, ends, 59, 59)
    *of_qkv, dqkv = each_with_gradients(compat.flash_attn_varlen_qkvpacked_func, [qkv], ends, 59)
    *of_kv, dq_of_kv, dkv = each_with_gradients(compat.flash_attn_varlen_kvpacked_func, [q, kv], ends, ends, 59, 59)
    same([*expected, dq, dk, dv], [*of_qkv, *dqkv.unbind(1)], device)
    same([*expected, dq, dk, dv], [*of_kv, dq_of_kv, *dkv.unbind(1)], device)


def same(x: list[Tensor], y: list[Tensor], device: str) -> None:
    """Equal bit for bit; on a GPU dq is summed in any order, and strides may select another kernel."""
    for mine, theirs in zip(x, y, strict=True):
        if device == "cpu":
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


# --- What else is documented ---

SIGNATURES = {
    "flash_attn_func": "q, k, v",
    "flash_attn_kvpacked_func": "q, kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen",
}
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters
    expected = dict.fromkeys(SIGNATURES[name].split(", "), inspect.Parameter.empty) | OPTIONS
    if name == "flash_attn_varlen_func":
        expected["block_table"] = None
    assert [(n, p.default) for n, p in parameters.items()] == list(expected.items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert getattr(compat.flash_attn_interface, name) is getattr(compat, name)


def test_only_out_is_returned_unless_more_is_asked_for() -> None:
    q = torch.randn(1, 5, 2, 16)
    assert isinstance(compat.flash_attn_func(q, q, q, 0.1), Tensor)
    out, lse, probabilities = compat.flash_attn_func(q, q, q, return_attn_probs=True)
    assert probabilities.shape == (0,)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(lse[0], torch.einsum("qhd,khd->hqk", q[0], q[0]).div(4).logsumexp(-1))


def test_return_attn_probs_changes_no_numbers() -> None:
    """The probabilities are drawn with the seed of the next call, and the generator's state is restored."""
    q = torch.randn(2, 30, 2, 16)
    torch.manual_seed(1)
    expected = compat.flash_attn_func(q, q, q, 0.3), torch.rand(3)
    torch.manual_seed(1)
    out, _, probabilities = compat.flash_attn_func(q, q, q, 0.3, return_attn_probs=True)
    torch.testing.assert_close((out, torch.rand(3)), expected, rtol=0, atol=0)
    assert not probabilities.requires_grad


def test_an_empty_batch() -> None:
    q = torch.randn(3, 6, 2, 16)[:0]
    out, lse, probabilities = compat.flash_attn_func(q, q[:, :5], q[:, :5], 0.1, return_attn_probs=True)
    assert (out.shape, lse.shape, probabilities.shape) == (q.shape, (0, 2, 6), (0, 2, 6, 5))


def test_wider_dtypes_run_on_a_cpu() -> None:
    q = torch.randn(1, 5, 2, 20, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
    torch.testing.assert_close(compat.flash_attn_func(q, q, q), expected)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_autocast_changes_nothing(p: float) -> None:
    """As in flash-attn, nothing is cast to float16, in which these values overflow."""
    torch.manual_seed(0)
    q = (torch.randn(1, 6, 2, 20) * 1e5).bfloat16()
    ends = torch.tensor([0, 6], dtype=torch.int32)

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        dense = compat.flash_attn_func(q, q, q, p, return_attn_probs=True)
        packed = compat.flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 6, 6, p, return_attn_probs=True)
        return [*dense, *packed, compat.flash_attn_func(q, q, q)]

    expected = results()
    with torch.autocast("cpu", torch.float16):
        got = results()
    assert got[0].dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_autocast_changes_nothing_in_compiled_code() -> None:
    q = torch.randn(1, 6, 2, 16)
    compiled = torch.compile(compat.flash_attn_func, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(q, q, q)
    torch.testing.assert_close(got, compat.flash_attn_func(q, q, q))


def test_any_strides() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 16, 4, 9).transpose(1, 3)
    assert q.stride(-1) != 1
    torch.testing.assert_close(compat.flash_attn_func(q, q, q), compat.flash_attn_func(*[q.contiguous()] * 3))


def test_windows_and_lengths_may_be_tensors() -> None:
    q = torch.randn(1, 40, 2, 16)
    window, ends, longest = torch.tensor([5, 3]), torch.tensor([0, 40], dtype=torch.int32), torch.tensor(40)
    got = compat.flash_attn_func(q, q, q, window_size=window)
    assert torch.equal(got, compat.flash_attn_func(q, q, q, window_size=(5, 3)))
    of_packed = compat.flash_attn_varlen_func(*[q[0]] * 3, ends, ends, longest, longest, window_size=(5, 3))
    torch.testing.assert_close(of_packed, got[0])


def test_numbers_may_be_numpys_or_tensors() -> None:
    q = torch.randn(6, 2, 16)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    expected = compat.flash_attn_varlen_func(q, q, q, ends, ends, 6, 6, 0.0, 0.5, softcap=2.0)
    for number in (np.float32, torch.tensor):
        options = {"dropout_p": number(0), "softmax_scale": number(0.5), "softcap": number(2.0)}
        got = compat.flash_attn_varlen_func(q, q, q, ends, ends, np.int64(6), np.int32(6), **options)
        assert torch.equal(got, expected)


def test_lse_and_slopes_have_gradients() -> None:
    """flash-attn has neither."""
    torch.manual_seed(0)
    q = torch.randn(1, 9, 2, 16, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def lse(q: Tensor, slopes: Tensor) -> Tensor:
        return compat.flash_attn_func(q, q, q, alibi_slopes=slopes, return_attn_probs=True)[1]

    assert torch.autograd.gradcheck(lse, (q, slopes))


@pytest.mark.slow(reason="2 s in Dynamo; test_packed_sequences_under_torch_compile stays")
def test_under_torch_compile() -> None:
    q = torch.randn(1, 9, 2, 20, requires_grad=True)

    def loss(q: Tensor) -> Tensor:
        return compat.flash_attn_func(q, q, q, causal=True, window_size=(3, 3), softcap=5.0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), loss(q))
    torch.testing.assert_close(*(torch.autograd.grad(f(q), q) for f in (compiled, loss)))


def test_packed_sequences_under_torch_compile() -> None:
    qkv, ends = torch.randn(9, 3, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    compiled = torch.compile(compat.flash_attn_varlen_qkvpacked_func, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv, ends, 5), compat.flash_attn_varlen_qkvpacked_func(qkv, ends, 5))


# --- Errors ---

Q = torch.zeros(2, 5, 4, 16)
ENDS = torch.tensor([0, 5, 10], dtype=torch.int32)
PACKED = Q.flatten(0, 1)
QKV = torch.stack([PACKED] * 3, dim=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compat.flash_attn_func(Q[0], Q, Q), ValueError, r"q must have 4 dimensions, \(batch, seqlen"),
        (lambda: compat.flash_attn_func(Q, [1], Q), TypeError, "k must be a torch.Tensor, got list"),
        (
            lambda: compat.flash_attn_func(*[torch.zeros(1, 2, 1, 257)] * 3),
            ValueError,
            r"head_dim must lie in 1 \.\. 256.*got 257",
        ),
        (lambda: compat.flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "multiple of the heads.*4 and 3"),
        (lambda: compat.flash_attn_func(Q, Q.half(), Q), TypeError, "one dtype"),
        (lambda: compat.flash_attn_func(Q, Q, Q, window_size=3), TypeError, "window_size must be two ints.*got 3"),
        (lambda: compat.flash_attn_func(Q, Q, Q, window_size=(1, 2, 3)), TypeError, "window_size must be two ints"),
        (lambda: compat.flash_attn_func(Q, Q, Q, 2.0), ValueError, "dropout_p must be a probability"),
        (lambda: compat.flash_attn_func(Q, Q, Q, "0"), TypeError, "dropout_p must be a probability"),
        (lambda: compat.flash_attn_func(Q, Q, Q, softmax_scale="x"), TypeError, "softmax_scale must be.*got 'x'"),
        (lambda: compat.flash_attn_func(Q, Q, Q, softcap=None), TypeError, "softcap must be .*got None"),
        (lambda: compat.flash_attn_func(Q, Q, Q, alibi_slopes=torch.ones(3)), ValueError, r"ALiBi: slopes.*got \(3,\)"),
        (lambda: compat.flash_attn_kvpacked_func(Q, Q), ValueError, r"kv must have shape \(batch, seqlen, 2, heads"),
        (lambda: compat.flash_attn_qkvpacked_func(Q), ValueError, r"qkv must have shape \(batch, seqlen, 3, heads"),
        (lambda: compat.flash_attn_qkvpacked_func(None), TypeError, "qkv must be a torch.Tensor, got NoneType"),
        (
            lambda: compat.flash_attn_varlen_qkvpacked_func(PACKED, ENDS, 5),
            ValueError,
            r"qkv must have shape \(total, 3, heads, head_dim\), got \(10, 4, 16\)",
        ),
        *[
            (lambda arguments=arguments: compat.flash_attn_varlen_qkvpacked_func(QKV, *arguments), error, message)
            for arguments, error, message in (
                ((ENDS.long(), 5), TypeError, "^cu_seqlens must be int32"),
                ((ENDS + 1, 5), ValueError, "^cu_seqlens must start at 0"),
                ((ENDS, None), TypeError, "^max_seqlen must be an int"),
                ((ENDS, 3), ValueError, "^max_seqlen must be at least the longest length"),
                ((ENDS, torch.tensor([5, 5])), TypeError, r"^max_seqlen must be an int.* shape \(2,\)"),
            )
        ],
        *[
            (
                lambda size=size: compat.flash_attn_varlen_func(*[PACKED] * 3, ENDS, ENDS, 5, size),
                TypeError,
                "max_seqlen_k must be an int, or an integer tensor of one element, got a tensor",
            )
            for size in (torch.tensor([5, 5]), torch.tensor(5.5), torch.tensor(True))
        ],
        (
            lambda: compat.flash_attn_varlen_func(Q, Q, Q, ENDS, ENDS, 5, 5),
            ValueError,
            r"q must have 3 dimensions, \(total, heads, head_dim\)",
        ),
        (
            lambda: compat.flash_attn_varlen_func(*[PACKED] * 3, ENDS.long(), ENDS, 5, 5),
            TypeError,
            "cu_seqlens_q must be int32",
        ),
        (
            lambda: compat.flash_attn_varlen_func(*[PACKED] * 3, ENDS, ENDS + 1, 5, 5),
            ValueError,
            "cu_seqlens_k must start at 0",
        ),
        (
            lambda: compat.flash_attn_varlen_func(*[PACKED] * 3, ENDS, ENDS, 5, 5, block_table=ENDS),
            ValueError,
            r"k must have 4 dimensions, \(pages, page_size, kv_heads, head_dim\) with block_table",
        ),
        (
            lambda: bert_padding.unpad_input([1], ENDS),
            TypeError,
            "hidden_states must be a torch.Tensor, got list",
        ),
        (lambda: bert_padding.unpad_input(Q, Q), TypeError, "attention_mask must be a tensor of bool or integers"),
        (lambda: bert_padding.pad_input([1], ENDS, 3, 5), TypeError, "hidden_states must be a torch.Tensor, got list"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
def test_only_16_bits_on_a_gpu() -> None:
    q = torch.zeros(1, 4, 2, 16, device="cuda")
    with pytest.raises(TypeError, match="on a GPU q, k and v must be float16 or bfloat16, as in flash-attn, got"):
        compat.flash_attn_func(q, q, q)


# --- bert_padding ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(device: str, dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], device=device).to(dtype)
    x = torch.randn(3, 4, 2, 5, device=device, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert indices.tolist() == [0, 1, 5, 6, 7]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 2, 5, 5], torch.int32)
    assert (longest, type(longest)) == (3, int)
    assert used.tolist() == [2, 3, 0]
    padded = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(padded, x * mask[..., None, None])
    (dx,) = torch.autograd.grad(padded.square().sum(), x)
    torch.testing.assert_close(dx, 2 * x * mask[..., None, None])


def test_places_that_are_kept_without_a_token() -> None:
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 1]])
    x = torch.arange(6.0).reshape(2, 3)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert tokens.tolist() == [0, 1, 3, 4, 5]
    assert indices.tolist() == [0, 1, 3, 4, 5]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 2, 5], 3, [1, 2])


def test_rows_of_several_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 7)
    tokens, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 5, 8, 10, 16], torch.int32, 6)


def test_index_first_axis() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[indices])
    put = bert_padding.index_put_first_axis(x[:3], torch.tensor([6, 1, 0], dtype=torch.int32), 8)
    assert torch.equal(put[torch.tensor([6, 1, 0])], x[:3])
    assert (put[torch.tensor([2, 3, 4, 5, 7])] == 0).all()
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_put_first_axis(x, indices[:2].expand(2), 8), x[:2])


def test_index_first_axis_residual() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert torch.equal(residual, x)
    assert residual.data_ptr() == x.data_ptr()
    d_rows, d_residual = torch.randn_like(rows), torch.randn_like(residual)
    (dx,) = torch.autograd.grad((rows, residual), x, (d_rows, d_residual))
    torch.testing.assert_close(dx, d_residual.index_add(0, indices, d_rows))
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis_residual(x, indices), x)
    residual = bert_padding.index_first_axis_residual(x, indices)[1]
    before = x.detach().clone()
    residual.add_(1)  # as flash-attn's may
    assert torch.equal(x, before + 1)


def test_the_autograd_classes() -> None:
    """`IndexFirstAxis.apply` and its like, which existing code calls, do what the functions do."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    taken, places = torch.tensor([4, 0, 4]), torch.tensor([6, 1, 0, 5, 2], dtype=torch.int32)
    for apply, function, arguments in (
        (bert_padding.IndexFirstAxis.apply, bert_padding.index_first_axis, (taken,)),
        (bert_padding.IndexPutFirstAxis.apply, bert_padding.index_put_first_axis, (places, 8)),
        (bert_padding.IndexFirstAxisResidual.apply, bert_padding.index_first_axis_residual, (taken,)),
    ):
        torch.testing.assert_close(apply(x, *arguments), function(x, *arguments))
        assert torch.autograd.gradcheck(lambda x: apply(x, *arguments), x)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x: apply(x, *arguments), x)  # noqa: B023
