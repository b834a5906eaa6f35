"""NaN and infinities: results equal eager PyTorch's, and values that no query sees have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.special_values import BEYOND, INF, NAN, Call, assert_as_the_formula, call_of, hidden_call, within_nan
from tileattn import Bias, Causal, SoftCap
from tileattn.reference import flash_attention_1, flash_attention_2, standard_attention
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

MASKS = ("full", "causal", "window", "documents", "padding")
REFERENCE = {f.__name__: f for f in (standard_attention, flash_attention_1, flash_attention_2)}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def _backends(*names: str, reference: bool = False) -> list[object]:
    """(backend, device): on a CPU PyTorch's, the reference and Triton's, interpreted; on a GPU those named."""
    backends: list[object] = [(name, "cpu") for name in (*(REFERENCE if reference else ()), "torch")]
    if not torch.cuda.is_available():
        return backends + [("triton", "cpu")] * ("triton" in names)
    return backends + [pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in names]


each_backend = pytest.mark.parametrize("on", _backends("tilelang", "triton", "torch"), ids="-".join)
TAKES = {"torch": tuple(DTYPES), "tilelang": ("fp16", "bf16"), "triton": ("fp16", "bf16", "fp32")}


def _cases() -> list[object]:
    """(backend, device, dtype, mask); of the reference, and of Triton's interpreter, which takes long, a part."""
    parameters = []
    for on in _backends("tilelang", "triton", "torch", reference=True):
        (backend, device), marks = (on.values[0], on.marks) if hasattr(on, "values") else (on, ())  # type: ignore[misc]
        interpreted = (backend, device) == ("triton", "cpu")
        dtypes = ("fp16",) if interpreted else TAKES.get(backend, ("fp16", "fp32"))
        for mask in ("full", "causal", "documents") if interpreted else MASKS:
            names = [(backend, device, dtype, mask) for dtype in dtypes]
            parameters += [pytest.param(*name, marks=marks, id="-".join(name)) for name in names]
    return parameters


def attend(call: Call, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
    if backend in REFERENCE:
        return REFERENCE[backend](*call, **options)
    # A causal call as users write it takes a shorter way.
    causal = type(call.mask) is Causal
    given = {"mask": None if causal else call.mask, "causal": causal, "return_lse": True, **options}
    return tileattn.attention(*call[:3], backend=backend, **given)  # type: ignore[return-value]


@pytest.mark.slow_cases(
    "triton-cpu-fp16-full", "triton-cpu-fp16-documents", reason="1.7 s each in Triton's interpreter"
)
@pytest.mark.parametrize(("backend", "device", "dtype", "mask"), _cases())
def test_o_and_lse(backend: str, device: str, dtype: str, mask: str) -> None:
    call = call_of(mask, DTYPES[dtype], device)
    assert_as_the_formula(call, attend(call, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", ["tilelang", "triton", "mma"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_long_sequences(backend: str, mask: str, head_dim: int) -> None:
    """With many tiles, maxima become stale and rescaling is skipped."""
    call = call_of(mask, torch.bfloat16, "cuda", 700, 1400, head_dim)
    assert_as_the_formula(call, attend(call, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("rung", ["split_kv", "split_q", "shared_kv", "shared_qkv", "pipelined"])
def test_the_ladder(rung: str, mask: str) -> None:
    call = call_of(mask, torch.float16, "cuda", head_dim=64)
    assert_as_the_formula(call, attend(call, f"mma:{rung}"))


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "padding"])
@each_backend
def test_keys_that_only_the_mask_hides(on: tuple[str, str], mask: str) -> None:
    """NaN in them reaches no o and no lse of the rows that do not see them."""
    backend, device = on
    poisoned, clean = hidden_call(mask, torch.float16, device)
    got = attend(poisoned, backend)
    rows = slice(0, -1) if mask == "causal" else slice(None)
    oracle, (eager_o, eager_lse) = oracle_attention(*clean), eager_attention(*clean)
    assert_forward_accurate(
        mask,
        (got[0][:, rows], got[1][..., rows]),
        (oracle[0][:, rows], oracle[1][..., rows]),
        ([x[:, rows] for x in eager_o], [x[..., rows] for x in eager_lse]),
    )


def _packed(device: str, poisoned: bool) -> dict[str, Tensor]:
    """q, k, v and do of three sequences, of which the second is NaN, and rows of NaN behind the last."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, lengths in (("q", QUERIES), ("k", KEYS), ("v", KEYS), ("do", QUERIES)):
        x = within_nan((1, sum(lengths), 2, 16), torch.float16, generator)
        whole = x._base
        assert whole is not None
        x = whole[:, 8:, :2]  # with the rows behind
        if poisoned:
            x[:, lengths[0] : lengths[0] + lengths[1]] = NAN
        else:
            x[:, sum(lengths) :] = 0
        tensors[name] = x[0].to(device).detach()
    return tensors


QUERIES, KEYS = (37, 60, 75), (70, 45, 130)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("on", _backends("tilelang", "torch"), ids="-".join)
def test_packed_sequences_do_not_reach_each_other(on: tuple[str, str], causal: bool, sink: bool) -> None:
    """Outputs and gradients are the same bits with and without NaN in another sequence and in unused rows."""
    backend, device = on
    ends = [[0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (QUERIES, KEYS)]
    cu_seqlens = [torch.tensor(each, dtype=torch.int32, device=device) for each in ends]
    logits = torch.ones(2, device=device) if sink else None
    runs = []
    for poisoned in (True, False):
        given = _packed(device, poisoned)
        q, k, v = (given[name].requires_grad_() for name in "qkv")
        o, lse = tileattn.varlen_attention(
            q, k, v, *cu_seqlens, max(QUERIES), max(KEYS), causal=causal, return_lse=True, deterministic=True,
            backend=backend, sink=logits,
        )  # fmt: skip
        gradients = torch.autograd.grad(o, (q, k, v), given["do"])
        of_q, of_k = [o, lse.mT, gradients[0]], gradients[1:]
        runs.append([(x, QUERIES) for x in of_q] + [(x, KEYS) for x in of_k])
    for (got, lengths), (expected, _) in zip(*runs):
        first, last = slice(0, lengths[0]), slice(lengths[0] + lengths[1], sum(lengths))
        for rows in (first, last):
            assert torch.equal(got[rows], expected[rows])
    o, lse = runs[0][0][0], runs[0][1][0]
    assert (o[sum(QUERIES) :] == 0).all()
    assert (lse[sum(QUERIES) :] == -INF).all()


@pytest.mark.slow_cases("triton-cpu-full", "triton-cpu-causal", reason="1.6 s each in Triton's interpreter")
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@each_backend
def test_gradients_do_not_see_what_lies_beyond(on: tuple[str, str], mask: str) -> None:
    """What surrounds the tensors is NaN or 0: the same bits. A row of q that is NaN reaches no other row or head."""
    backend, device = on
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (within_nan((1, n, 2, 16), torch.float16, generator) for n in (70, 140, 140, 70))
    q[:, 30, 1] = NAN
    results = []
    for poisoned in (True, False):
        memory = [x._base.clone() if poisoned else x._base.nan_to_num(0.0) for x in (q, k, v, do)]
        views = [x.to(device)[:, 8 : x.shape[1] - BEYOND, :2] for x in memory]
        leaves = [x.detach().requires_grad_() for x in views[:3]]
        call = Call(*leaves, hidden_call(mask, torch.float16, device)[1].mask)
        o, _ = attend(call, backend, deterministic=True)
        results.append([o, *torch.autograd.grad(o, leaves, views[3])])
    for got, expected in zip(*results):
        assert got[:, :, 0].isfinite().all()
        if backend != "torch":  # whose products, on a CPU, depend on where memory begins
            assert torch.equal(got[:, :, 0], expected[:, :, 0])
    of_rows = results[0][:2]
    for x in of_rows:  # o and dq of the poisoned head
        assert x[:, 30, 1].isnan().all()
        assert x[:, torch.arange(70, device=device) != 30, 1].isfinite().all()


VARIANTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "softcap": lambda device: {"score_mod": SoftCap(5.0)},
    "bias": lambda device: {"score_mod": Bias(torch.zeros(1, 1, 1, 140, device=device))},
    "sink": lambda device: {"sink": torch.zeros(12, device=device)},
    "function": lambda device: {"score_mod": lambda score, b, h, q, k: score * 0.5},
}


@pytest.mark.slow_cases(
    "triton-cpu-softcap", "triton-cpu-function", "triton-cpu-bias", reason="2 s each in Triton's interpreter"
)
@pytest.mark.parametrize("variant", VARIANTS)
@each_backend
def test_modifications(on: tuple[str, str], variant: str) -> None:
    """Modifications get infinite scores, which a soft cap makes finite."""
    backend, device = on
    call, options = call_of("causal", torch.float16, device), VARIANTS[variant](device)
    mod, sink = options.get("score_mod"), options.get("sink")
    arguments = (*call, () if mod is None else (mod,), sink)
    got = attend(call, backend, **options)
    assert_as_the_formula(arguments, got)


@pytest.mark.slow_cases("triton-cpu-inf", "triton-cpu--inf", reason="0.6 s each in Triton's interpreter")
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@each_backend
def test_a_bias_of_no_number(on: tuple[str, str], value: float) -> None:
    backend, device = on
    generator = torch.Generator().manual_seed(0)
    q, k, v = (within_nan((1, n, 2, 16), torch.float16, generator).to(device) for n in (5, 513, 513))
    tensor = torch.zeros(1, 2, 5, 513, device=device)
    tensor[:, 1, 2, -1] = value
    tensor[:, 1, 3, 7] = value
    call = Call(q, k, v, None)
    got = attend(call, backend, score_mod=Bias(tensor))
    assert_as_the_formula((*call, (Bias(tensor),)), got)


@each_backend
def test_scores_do_not_overflow_in_16_bits(on: tuple[str, str]) -> None:
    """Products of float16 beyond 65504: eager overflows there, so it is given float32."""
    backend, device = on
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (70, 140, 140))
    q, k = ((x * 4).round() * 64 for x in (q, k))
    given = [x.to(device, torch.float16) for x in (q, k, v)]
    assert (given[0].float().transpose(1, 2) @ given[1].float().permute(0, 2, 3, 1)).abs().max() > 65504
    scale = 2.0**-18
    got = attend(Call(*given, None), backend, scale=scale)
    options = (None, (), None, scale)
    as_bf16 = [x.bfloat16() for x in given]  # q and k are whole multiples of 64 that it holds exactly
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(as_bf16[:2], given))
    assert_forward_accurate("large", got, oracle_attention(*given, *options), eager_attention(*as_bf16, *options))


@pytest.mark.parametrize("lost", [0.0, 0.9])
def test_dropout_does_not_hide_an_infinite_score(lost: float) -> None:
    """All weights of +inf may have been dropped: o is NaN nevertheless."""
    q, k, v = (torch.ones(1, n, 4, 16) for n in (3, 5, 5))
    k[:, 2] = INF
    torch.manual_seed(0)
    o, lse = tileattn.attention(q, k, v, dropout_p=lost, return_lse=True)
    assert o.isnan().all()
    assert (lse == INF).all()
