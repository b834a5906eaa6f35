"""`varlen_attention`: its errors, and that it equals `attention` of each sequence.

The conformance suites check values by the tolerance rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.api.test_attention import message
from tests.runtime.test_compile import Compiled
from tileattn import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    PrefixLM,
    SlidingWindow,
    SoftCap,
    attention,
    varlen_attention,
)
from tileattn.call.facts import AttentionCall
from tileattn.runtime.dispatch import BACKENDS
from tileattn.variant.key import encode

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 8, 16
LENGTHS_Q, LENGTHS_K = [5, 0, 3, 7, 4], [6, 3, 0, 9, 2]
SEQUENCES, MAX_Q, MAX_K = 5, 9, 11  # upper bounds, beyond the longest
BEHIND = 3  # rows that belong to no sequence
TOTAL_Q, TOTAL_K = sum(LENGTHS_Q) + BEHIND, sum(LENGTHS_K) + BEHIND


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def qkv(**options: Any) -> dict[str, Tensor]:
    return {
        "q": random(TOTAL_Q, HEADS, DIM, **options),
        "k": random(TOTAL_K, KV_HEADS, DIM, seed=1, **options),
        "v": random(TOTAL_K, KV_HEADS, DIM_V, seed=2, **options),
    }


def where() -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens(LENGTHS_Q),
        "cu_seqlens_k": cu_seqlens(LENGTHS_K),
        "max_seqlen_q": MAX_Q,
        "max_seqlen_k": MAX_K,
    }


def call(**changes: Any) -> Any:
    """Packed attention of valid arguments, but for the changes."""
    return varlen_attention(**(qkv() | where() | changes))


# --- Refused ---

Q, K = cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K)


def changed(cu: Tensor, index: int, value: int) -> Tensor:
    cu = cu.clone()
    cu[index] = value
    return cu


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda x: x.tolist(), TypeError, ("must be an int32 tensor (sequences + 1,), got list",)),
        (lambda x: None, TypeError, ("must be an int32 tensor", "got NoneType")),
        (lambda x: x.long(), TypeError, ("must be int32, got torch.int64", ".int()")),
        (lambda x: x.float(), TypeError, ("must be int32, got torch.float32",)),
        (lambda x: x[None], ValueError, ("must have shape (sequences + 1,), got (1, 6)",)),
        (lambda x: x[:0], ValueError, ("must have shape (sequences + 1,), got (0,)",)),
        (lambda x: x.repeat_interleave(2)[::2], ValueError, ("must be contiguous, got strides (2,)", ".contiguous()")),
        (lambda x: x.to("meta"), ValueError, ("must be on q's device cpu, got meta",)),
        (lambda x: x + 1, ValueError, ("must start at 0, got 1",)),
        (lambda x: x - 1, ValueError, ("must start at 0, got -1",)),
        (lambda x: changed(x, 3, 1), ValueError, ("must not decrease, got 1 after", "(sequence 2)")),
        (lambda x: x[[0, 1, 2, 3, 5, 4]], ValueError, ("must not decrease", "(sequence 4)")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_cu_seqlens(name: str, change: Callable[[Tensor], Any], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(name, *says)):
        call(**{name: change(where()[name])})


@pytest.mark.parametrize(("side", "total"), [("q", TOTAL_Q), ("k", TOTAL_K)])
def test_last_value_beyond_total(side: str, total: int) -> None:
    name = f"cu_seqlens_{side}"
    with pytest.raises(ValueError, match=message(f"last value of {name}", f"total_{side} = {total}, got {total + 1}")):
        call(**{name: changed(where()[name], -1, total + 1), f"max_seqlen_{side}": 100})


def test_numbers_of_sequences_that_differ() -> None:
    with pytest.raises(ValueError, match=message("cu_seqlens_q and cu_seqlens_k", "got 5 and 4", "(6,)", "(5,)")):
        call(cu_seqlens_k=K[:-1])


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize(
    "value",
    [None, 8.0, True, np.bool_(True), np.float32(8), torch.tensor([8]), "8"],
    ids=lambda value: type(value).__name__,
)
def test_max_seqlen_that_is_no_int(name: str, value: Any) -> None:
    with pytest.raises(
        TypeError, match=message(f"{name} must be an int that the host knows, got", type(value).__name__)
    ):
        call(**{name: value})


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_may_be_numpys(name: str) -> None:
    for plain in (True, False):  # calls that are prepared once, and others
        options = {} if plain else {"dropout_p": 1.0}
        longest = {"max_seqlen_q": MAX_Q, "max_seqlen_k": MAX_K}[name]
        for size in (np.int64(longest), torch.tensor(longest)):
            assert torch.equal(call(**{name: size}, **options), call(**options))


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_that_is_too_small(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        call(**{name: -1})
    longest = max(LENGTHS_Q if name.endswith("q") else LENGTHS_K)
    with pytest.raises(ValueError, match=message(name, "longest length", f"{longest - 1} and a length of {longest}")):
        call(**{name: longest - 1})
    assert torch.equal(call(**{name: longest}), call())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"q": 3.0}, TypeError, ("q must be a torch.Tensor, got float",)),
        ({"k": random(1, 5, 2, 8)}, ValueError, ("k must have 3 dimensions, (total, heads, head_dim)", "(1, 5, 2, 8)")),
        ({"v": random(TOTAL_K, DIM_V, 2).mT}, ValueError, ("v must have a contiguous last dimension",)),
        ({"q": random(TOTAL_Q, HEADS, DIM).half()}, TypeError, ("q, k and v must have one dtype",)),
        ({"q": random(TOTAL_Q, 3, DIM)}, ValueError, ("heads of q must be a multiple", "got 3 and 2")),
        ({"q": random(TOTAL_Q, HEADS, 9)}, ValueError, ("q and k must have one head_dim, got 9 and 8",)),
        ({"v": random(TOTAL_K, KV_HEADS, 0)}, ValueError, ("head dims must be at least 1", "0 for v")),
        ({"v": random(TOTAL_K - 1, 2, 8)}, ValueError, ("k and v must have one total", "23 and 2 in k, 22 and 2 in v")),
        ({"sink": random(3)}, ValueError, ("sink must have shape (heads,) = (4,), got (3,)",)),
        ({"scale": float("nan")}, ValueError, ("scale must be a finite number",)),
        ({"dropout_p": 1.5}, ValueError, ("dropout_p must be a probability",)),
        ({"causal": "no"}, TypeError, ("causal must be True or False, got 'no'",)),
        ({"deterministic": 1, "score_mod": ALiBi(random(5, HEADS))}, TypeError, ("deterministic must be True or",)),
        ({"mask": Causal}, TypeError, ("mask must be a tileattn mask", "the class Causal")),
        ({"mask": PrefixLM(torch.zeros(4, dtype=torch.int32))}, ValueError, ("prefix must have shape (5,), got (4,)",)),
        ({"mask": Documents(torch.zeros(5, 10, dtype=torch.int32))}, ValueError, ("Documents: ids", "(5, 11)")),
        ({"score_mod": ALiBi(random(4, HEADS))}, ValueError, ("ALiBi: slopes", "(5, 4)", "got (4, 4)")),
        ({"score_mod": Bias(random(1, 1, 8, 11))}, ValueError, ("Bias: tensor", "max_seqlen_q", "(5, 4, 9, 11)")),
        ({"score_mod": Bias(random(1, 1, 9, 10))}, ValueError, ("Bias: tensor", "max_seqlen_k", "got (1, 1, 9, 10)")),
        ({"score_mod": Bias(random(4, 1, 9, 11))}, ValueError, ("Bias: tensor", "sequences or 1")),
        ({"backend": "cuda"}, ValueError, ("backend must be one of",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(changes: dict[str, Any], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        call(**changes)


def test_fp8_is_refused() -> None:
    with pytest.raises(TypeError, match="packed sequences are not taken in fp8"):
        call(**{name: x.to(torch.float8_e4m3fn) for name, x in qkv().items()})


def test_who_refuses_says_so() -> None:
    """That the calls name packed sequences, by which a backend knows them."""
    known = AttentionCall(torch.bfloat16, 64, 64, packed=True, arch="sm_90a")
    assert "packed" in str(known)
    for backend in BACKENDS:
        if backend.name in ("triton", "mma"):
            reason = backend.refusal(known)
            assert reason is not None
            assert "packed" in reason or "sm_8" in reason or "not installed" in reason


# --- The same as each sequence by itself ---


def bias_of(seed: int = 5, **options: Any) -> Tensor:
    """Larger than it need be."""
    return random(SEQUENCES, HEADS, MAX_Q + 2, MAX_K + 3, seed=seed, **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window and sink": {"mask": SlidingWindow(2, 1), "sink": random(HEADS)},
    "prefixes": {"mask": PrefixLM(torch.tensor([3, 1, 0, 7, 2])), "causal": True},
    "documents": {"mask": Documents(torch.arange(SEQUENCES * MAX_K).view(SEQUENCES, MAX_K) % 7 // 2)},
    "function": {"mask": lambda b, h, q, k: (b + h + q + k) % 3 != 0},
    "bias": {"score_mod": Bias(bias_of())},
    "bias of keys": {"score_mod": [SoftCap(2.0), Bias(random(1, HEADS, 1, MAX_K))], "causal": True},
    "alibi and user": {"score_mod": [ALiBi(random(SEQUENCES, HEADS)), lambda s, b, h, q, k: s * 0.5 + b - q * h]},
    "scale": {"scale": 0.3},
}


def of_sequence(i: int, value: Any) -> Any:
    """A mask, modification, or sequence of them, as one sequence has it by itself."""
    rows, keys = LENGTHS_Q[i], LENGTHS_K[i]
    if isinstance(value, (list, tuple)):
        return [of_sequence(i, each) for each in value]
    if isinstance(value, Bias):
        part = value.tensor if value.tensor.shape[0] == 1 else value.tensor[i : i + 1]
        return Bias(part[:, :, : rows if part.shape[2] > 1 else 1, :keys])
    if isinstance(value, PrefixLM):
        return PrefixLM(value.prefix[i : i + 1])
    if isinstance(value, Documents):
        return Documents(value.ids[i : i + 1, :keys])
    if isinstance(value, ALiBi):
        return ALiBi(value.slopes[i : i + 1] if value.slopes.ndim == 2 else value.slopes)
    if callable(value) and not isinstance(value, (SlidingWindow, SoftCap)):
        if value.__code__.co_argcount == 4:
            return lambda b, h, q, k: value(b + i, h, q, k)
        return lambda score, b, h, q, k: value(score, b + i, h, q, k)
    return value


def one_by_one(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """o and lse from dense calls; 0 and -inf behind the last sequence."""
    (q, k, v), outputs = tensors.values(), []
    for i, (rows, keys) in enumerate(zip(itertools.pairwise(Q.tolist()), itertools.pairwise(K.tolist()))):
        given = options | {name: of_sequence(i, options[name]) for name in ("mask", "score_mod") if name in options}
        o, lse = attention(
            q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)], return_lse=True, **given
        )
        outputs.append((o[0], lse[0]))
    o, lse = torch.cat([o for o, _ in outputs]), torch.cat([lse for _, lse in outputs], dim=1)
    behind = o.new_zeros(BEHIND, *o.shape[1:]), lse.new_full((HEADS, BEHIND), -torch.inf)
    return torch.cat([o, behind[0]]), torch.cat([lse, behind[1]], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_by_itself(variant: str, dtype: torch.dtype) -> None:
    """Equal bit for bit, whatever the unused rows at the end hold."""
    tensors = qkv(dtype=dtype)
    for x in tensors.values():
        x[-BEHIND:] = torch.nan
    got = call(**tensors, **VARIANTS[variant], return_lse=True)
    torch.testing.assert_close(got, one_by_one(tensors, **VARIANTS[variant]), rtol=0, atol=0)
    assert torch.equal(call(**tensors, **VARIANTS[variant]), got[0])


def leaves_of(variant: str) -> tuple[dict[str, Tensor], dict[str, Any], list[Tensor]]:
    """q, k, v; the options of the variant with tensors that require grad; and all that do."""
    tensors = {name: x.requires_grad_() for name, x in qkv(dtype=torch.float64).items()}
    options = dict(VARIANTS[variant])
    wanted, score_mods = list(tensors.values()), []
    if "sink" in options:
        options["sink"] = options["sink"].double().requires_grad_()
        wanted.append(options["sink"])
    mods = options.get("score_mod", [])
    for mod in mods if isinstance(mods, list) else [mods]:
        if isinstance(mod, (Bias, ALiBi)):
            leaf = (mod.tensor if isinstance(mod, Bias) else mod.slopes).double().requires_grad_()
            wanted.append(leaf)
            mod = type(mod)(leaf)
        score_mods.append(mod)
    return tensors, options | ({"score_mod": score_mods} if score_mods else {}), wanted


def scalar(o: Tensor, lse: Tensor) -> Tensor:
    seen = lse.isfinite()
    return (o * random(*o.shape, seed=9)).sum() + (lse[seen] * random(*lse.shape, seed=10)[seen]).sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_each_sequence_by_itself(variant: str) -> None:
    tensors, options, wanted = leaves_of(variant)
    got = torch.autograd.grad(scalar(*call(**tensors, **options, return_lse=True)), wanted)
    expected = torch.autograd.grad(scalar(*one_by_one(tensors, **options)), wanted)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for gradient in got[:3]:
        assert not gradient[-BEHIND:].any()


def test_unused_rows_reach_no_gradient() -> None:
    tensors = qkv()
    for x in tensors.values():
        x[-BEHIND:] = torch.nan
        x.requires_grad_()
    sink = random(HEADS).requires_grad_()
    o, lse = call(**tensors, sink=sink, return_lse=True)
    do, dlse = random(*o.shape), random(*lse.shape)
    do[-BEHIND:], dlse[:, -BEHIND:] = torch.nan, torch.nan
    for gradient in torch.autograd.grad([o, lse], [*tensors.values(), sink], [do, dlse]):
        assert gradient.isfinite().all()


def test_only_what_is_wanted_has_a_gradient() -> None:
    tensors = qkv()
    tensors["k"].requires_grad_()
    (got,) = torch.autograd.grad(call(**tensors).sum(), tensors["k"])
    assert got.shape == tensors["k"].shape
    with torch.no_grad():
        assert not call(**tensors).requires_grad


@pytest.mark.parametrize("sequences", [0, 3])
def test_nothing_to_do(sequences: int) -> None:
    """No sequence, or only empty ones; with unused rows at the end, or none."""
    nothing = torch.zeros(sequences + 1, dtype=torch.int32)
    for total in (0, 4):
        q, k = random(total, HEADS, DIM).requires_grad_(), random(total, KV_HEADS, DIM)
        sink = random(HEADS).requires_grad_()
        o, lse = varlen_attention(q, k, k, nothing, nothing, 0, 0, sink=sink, return_lse=True)
        assert (o.shape, lse.shape) == ((total, HEADS, DIM), (HEADS, total))
        assert not o.any()
        assert (lse == -torch.inf).all()
        dq, dsink = torch.autograd.grad(o.sum(), [q, sink])
        assert not dq.any()
        assert not dsink.any()


def test_a_sequence_without_keys_has_the_sink() -> None:
    sink = random(HEADS)
    o, lse = call(sink=sink, return_lse=True)
    rows = slice(*Q[2:4])
    assert LENGTHS_K[2] == 0
    assert not o[rows].any()
    assert torch.equal(lse[:, rows], sink[:, None].expand(HEADS, LENGTHS_Q[2]))


def test_strides() -> None:
    """Tensors cut from a projection; heads first."""
    projected = random(TOTAL_Q, 3, HEADS, DIM)
    cut = dict(zip("qkv", projected.unbind(1)))
    given = where() | {"cu_seqlens_k": Q, "max_seqlen_k": MAX_Q, "causal": True}
    expected = varlen_attention(**{name: x.contiguous() for name, x in cut.items()}, **given)
    assert torch.equal(varlen_attention(**cut, **given), expected)
    heads_first = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in cut.items()}
    assert torch.equal(varlen_attention(**heads_first, **given), expected)


def test_dropout_does_not_depend_on_the_packing() -> None:
    """Another sequence's length, or rows between, change nothing in a sequence; its number and the seed do."""

    def run(lengths_q: list[int], lengths_k: list[int], seed: int = 0) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        q, k, v = (x[: LENGTHS_Q[3] if name == "q" else LENGTHS_K[3]] for name, x in qkv().items())
        before = sum(lengths_q[:3]), sum(lengths_k[:3])
        packed = [torch.cat([random(n, *x.shape[1:]), x]) for n, x in ((before[0], q), (before[1], k), (before[1], v))]
        leaf = packed[0].requires_grad_()
        cu = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
        o = varlen_attention(*packed, *cu, MAX_Q, MAX_K, dropout_p=0.5, causal=True)[before[0] :]
        return o, torch.autograd.grad(o.sum(), leaf)[0][before[0] :]

    rows, keys = LENGTHS_Q[3], LENGTHS_K[3]
    first = run([5, 0, 3, rows], [6, 3, 0, keys])
    torch.testing.assert_close(run([1, 2, 0, rows], [0, 8, 8, keys]), first, rtol=0, atol=0)
    assert not torch.equal(run([5, 0, 3, rows], [6, 3, 0, keys], seed=1)[0], first[0])


def test_dropout_is_that_of_a_dense_call() -> None:
    """Sequences of equal length drop the same probabilities as a batch, also in the backward pass."""
    shapes = ((2, 9, HEADS, DIM), (2, 11, KV_HEADS, DIM), (2, 11, KV_HEADS, DIM))
    q, k, v = (random(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes))
    runs = []
    for packed in (False, True):
        torch.manual_seed(3)
        leaf = q.clone().requires_grad_()
        if packed:
            cu = cu_seqlens([9, 9]), cu_seqlens([11, 11])
            flat = (x.flatten(0, 1) for x in (leaf, k, v))
            o = varlen_attention(*flat, *cu, 9, 11, dropout_p=0.3).unflatten(0, (2, 9))
        else:
            o = attention(leaf, k, v, dropout_p=0.3)
        runs.append((o, *torch.autograd.grad(o.square().sum(), leaf)))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-10, atol=1e-10)


# --- What surrounds it ---


def test_autocast() -> None:
    tensors = {name: x.requires_grad_() for name, x in qkv().items()}
    with torch.autocast("cpu", torch.bfloat16):
        o = call(**tensors)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, call(**{name: x.bfloat16() for name, x in tensors.items()}))
    assert torch.autograd.grad(o.sum(), tensors["q"])[0].dtype == torch.float32


def test_checkpointing_draws_the_same_dropout() -> None:
    tensors = {name: x.requires_grad_() for name, x in qkv().items()}
    run = functools.partial(call, dropout_p=0.5, **tensors)
    runs = []
    for recompute in (False, True):
        torch.manual_seed(0)
        o = checkpoint(run, use_reentrant=False) if recompute else run()
        runs.append(torch.autograd.grad(o.square().sum(), list(tensors.values())))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


def test_second_derivatives_are_refused() -> None:
    tensors = {name: x.requires_grad_() for name, x in qkv().items()}
    (dq,) = torch.autograd.grad(call(**tensors).square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()


def test_torch_func() -> None:
    tensors = qkv()
    got = torch.func.grad(lambda q: call(**(tensors | {"q": q})).square().sum())(tensors["q"])
    leaf = tensors["q"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(call(**(tensors | {"q": leaf})).square().sum(), leaf)
    assert torch.equal(got, expected)


# --- torch.compile ---


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED: dict[str, Callable[..., Any]] = {
    "causal": functools.partial(varlen_attention, causal=True, return_lse=True),
    "bias and window": lambda q, k, v, cu_q, cu_k, max_q, max_k: varlen_attention(
        q, k, v, cu_q, cu_k, max_q, max_k, score_mod=[Bias(BIAS), SoftCap(3.0)], mask=SlidingWindow(3, 2)
    ),
}
BIAS = bias_of()


@pytest.mark.slow_except("bias and window", reason="2 s each, in Dynamo")
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_once_for_all_lengths(name: str) -> None:
    compiled = Compiled(COMPILED[name])
    q, k, v = (x.requires_grad_() for x in qkv().values())
    for cut in (0, 1, 2):
        of_q, of_k = (cu_seqlens([*lengths[:-1], lengths[-1] - cut]) for lengths in (LENGTHS_Q, LENGTHS_K))
        given = (of_q, of_k, MAX_Q - (cut > 0), MAX_K - cut // 2)
        compiled.check(*(x.detach()[cut:].clone().requires_grad_() for x in (q, k, v)), *given)
    assert compiled.compilations == 1
    assert compiled.operators == ["tileattn.forward.default"]
    results = [
        torch.autograd.grad(run(q, k, v, Q, K, MAX_Q, MAX_K)[0].sum(), (q, k, v))
        for run in (compiled.compiled, compiled.function)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_call_checks_values_when_it_runs() -> None:
    compiled = torch.compile(varlen_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease"):
        compiled(*qkv().values(), changed(Q, 3, 1), K, MAX_Q, MAX_K)
    with pytest.raises(Exception, match="cu_seqlens_q must be int32"):
        compiled(*qkv().values(), Q.long(), K, MAX_Q, MAX_K)


def test_the_operators_satisfy_opcheck() -> None:
    q, k, v = (x[None] for x in qkv(dtype=torch.float64).values())
    slopes, sink = random(SEQUENCES, HEADS), random(HEADS)
    variant, operands = encode(Causal(), [ALiBi(slopes)])
    arguments = (q, k, v, sink, variant, operands.tensors, operands.ints, operands.floats, 0.3, None)
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (Q, K, MAX_Q, MAX_K)))
    with_gradients = [x.clone().requires_grad_() for x in arguments[:4]]
    results = torch.library.opcheck(
        torch.ops.tileattn.forward, (*with_gradients, *arguments[4:]), given | {"needs_grad": True}
    )
    assert set(results.values()) == {"SUCCESS"}
    o, lse = torch.ops.tileattn.forward(*arguments, **given)
    backward = (random(*o.shape), None, q, k, v, o, lse, sink, *arguments[4:], False, [True] * 5)
    assert set(torch.library.opcheck(torch.ops.tileattn.backward, backward, given).values()) == {"SUCCESS"}
