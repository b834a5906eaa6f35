"""flash-attn's four functions of one pass each (`_flash_attn_forward`, ...), as ring-flash-attn calls them.

The same tests run on a CPU, and on a GPU by ``pytest -m gpu``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn.call.dropout import weight_of_kept
from tileattn.compat.flash_attn import flash_attn_interface as interface
from tileattn.testing import (
    assert_forward_accurate,
    assert_gradients_accurate,
    dropout_mask,
    eager_attention,
    eager_gradients,
    oracle_attention,
    oracle_gradients,
)
from tileattn.variant.masks import Mask

F32, BF16 = torch.float32, torch.bfloat16
DEVICES = [("cpu", F32), ("cpu", BF16), pytest.param(("cuda", BF16), marks=pytest.mark.gpu)]
NONE = (-1, -1)


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def random(
    place: tuple[str, torch.dtype], of_q: int, of_k: int, heads: tuple[int, int] = (4, 2), dim: int = 16
) -> Call:
    torch.manual_seed(0)
    device, dtype = place
    sizes = ((of_q, heads[0]), (of_k, heads[1]), (of_k, heads[1]), (of_q, heads[0]))
    return Call(*(torch.randn(2, n, h, dim, device=device).to(dtype) for n, h in sizes))


def poison(*tensors: Tensor) -> list[Tensor]:
    """NaN in their shapes, every other head of a larger tensor: ring-flash-attn passes such slices."""
    return [torch.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), torch.nan).to(x)[..., ::2, :] for x in tensors]


def forward(call: Call, causal: bool = False, window: tuple[int, int] = NONE, **more: Any) -> tuple[Tensor, ...]:
    given = {"dropout_p": 0.0, "softmax_scale": 0.3, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
    left, right = window
    return interface._flash_attn_forward(
        call.q, call.k, call.v, causal=causal, window_size_left=left, window_size_right=right, **(given | more)
    )


def backward(
    call: Call, out: Tensor, lse: Tensor, causal: bool = False, window: tuple[int, int] = NONE, **more: Any
) -> list[Tensor]:
    written = poison(call.q, call.k, call.v)
    given = {"dropout_p": 0.0, "softmax_scale": 0.3, "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    left, right = window
    options = {"causal": causal, "window_size_left": left, "window_size_right": right, **(given | more)}
    interface._flash_attn_backward(call.do, call.q, call.k, call.v, out, lse, *written, **options)
    return written


def check(
    name: str, call: Call, got: tuple[Tensor, ...], mask: Mask | None, mods: Any = (), dropout: Tensor | None = None
) -> None:
    """got: o, lse, dq, dk, dv."""
    of_call = (mask, mods, None, 0.3)
    arguments = (*call[:3], *of_call)
    eager = eager_attention(*arguments, dropout=dropout)
    assert_forward_accurate(name, got[:2], oracle_attention(*arguments, dropout=dropout), eager)
    exact, same = ([x.to(dtype).requires_grad_() for x in call[:3]] for dtype in (torch.float64, call.q.dtype))
    names = ("dq", "dk", "dv")
    oracle, sizes = oracle_gradients(dict(zip(names, exact)), call.do.double(), None, *exact, *of_call, dropout=dropout)
    runs = eager_gradients(dict(zip(names, same)), call.do, None, *same, *of_call, dropout=dropout)
    assert_gradients_accurate(name, dict(zip(names, got[2:])), oracle, runs, sizes, call.q.dtype)


# --- One call ---


CASES: dict[str, tuple[tuple[int, int], dict[str, Any], Mask | None]] = {
    "full": ((37, 53), {}, None),
    "causal": ((53, 53), {"causal": True}, tileattn.Causal()),
    "causal, fewer queries": ((37, 53), {"causal": True}, tileattn.Causal()),
    "causal, more queries": ((53, 37), {"causal": True}, tileattn.Causal()),
    "window": ((37, 53), {"window": (9, 4)}, tileattn.SlidingWindow(9, 4)),
    "window, causal": ((37, 53), {"window": (9, 4), "causal": True}, tileattn.SlidingWindow(9, 0)),
    "window to the left": ((37, 53), {"window": (9, -1)}, tileattn.SlidingWindow(9, None)),
}


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_pass_each(case: str, place: tuple[str, torch.dtype]) -> None:
    lengths, options, mask = CASES[case]
    call = random(place, *lengths)
    out, lse, shown, state = forward(call, **options)
    assert (shown.numel(), state.dtype, state.shape) == (0, torch.int64, (2,))
    assert not out.requires_grad
    check(case, call, (out, lse, *backward(call, out, lse, **options)), mask)


@pytest.mark.parametrize("place", DEVICES)
def test_a_head_dim_that_is_padded_with_a_cap_and_slopes(place: tuple[str, torch.dtype]) -> None:
    call = random(place, 37, 37, dim=20)
    slopes = torch.rand(4, device=place[0]) * 0.3
    more = {"softcap": 5.0, "alibi_slopes": slopes}
    out, lse, *_ = forward(call, causal=True, **more)
    mods = (tileattn.SoftCap(5.0), tileattn.ALiBi(slopes))
    check("padded", call, (out, lse, *backward(call, out, lse, causal=True, **more)), tileattn.Causal(), mods)


@pytest.mark.parametrize("place", DEVICES)
def test_dropout_by_the_state_that_the_forward_pass_returned(place: tuple[str, torch.dtype]) -> None:
    call = random(place, 37, 53)
    out, lse, shown, state = forward(call, dropout_p=0.3, return_softmax=True)
    torch.manual_seed(99)  # the backward pass draws nothing
    kept = dropout_mask(state[:1], 0.3, 2, 4, 37, 53)
    assert torch.equal(shown >= 0, kept)
    gradients = backward(call, out, lse, dropout_p=0.3, rng_state=state)
    check("dropout", call, (out, lse, *gradients), None, dropout=kept * weight_of_kept(0.3))
    *_, again = forward(call, dropout_p=0.3)
    assert not torch.equal(again, state)


def test_a_gradient_that_is_not_wanted_is_left_out() -> None:
    call = random(("cpu", F32), 9, 9)
    out, lse, *_ = forward(call)
    dk, dv = poison(call.k, call.v)
    left = (0.0, 0.3, False, -1, -1, 0.0, None, False)
    interface._flash_attn_backward(call.do, *call[:3], out, lse, None, dk, dv, *left)
    assert [torch.equal(x, y) for x, y in zip((dk, dv), backward(call, out, lse)[1:])] == [True, True]


def test_the_signatures_let_ring_flash_attn_fill_in_the_defaults() -> None:
    """It passes every argument by name, with None for what has no default, and asks for these names."""
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        given = inspect.getfullargspec(getattr(interface, name))
        varlen = inspect.getfullargspec(getattr(interface, name.replace("attn_", "attn_varlen_")))
        assert {"window_size_left", "window_size_right", "softcap", "alibi_slopes"} <= set(given.args)
        assert {*given.args, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"} <= set(varlen.args)
        assert (given.varkw, given.kwonlyargs) == (None, [])


# --- Packed sequences ---


LENGTHS = [(21, 33), (0, 5), (17, 9), (1, 1)]


def packed(place: tuple[str, torch.dtype]) -> tuple[list[Call], Call, dict[str, Any]]:
    """The sequences one by one, packed, and the arguments that say where they lie; 2 rows are of no sequence."""
    parts = [random(place, of_q, of_k) for of_q, of_k in LENGTHS]
    parts = [Call(*(x[:1] for x in part)) for part in parts]
    rest = Call(*(x[0, :2] for x in random(place, 2, 2)))
    whole = Call(*(torch.cat([*(part[i][0] for part in parts), rest[i]]) for i in range(4)))
    ends: dict[str, Any] = {}
    for side, lengths in zip("qk", zip(*LENGTHS)):
        starts = torch.tensor([0, *lengths], device=place[0]).cumsum(0).to(torch.int32)
        ends |= {f"cu_seqlens_{side}": starts, f"max_seqlen_{side}": max(lengths)}
    return parts, whole, ends


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize(("causal", "window"), [(False, NONE), (True, NONE), (False, (5, 3))])
def test_packed_sequences_each_by_itself(place: tuple[str, torch.dtype], causal: bool, window: tuple[int, int]) -> None:
    parts, whole, ends = packed(place)
    options = {"softmax_scale": 0.3, "causal": causal, "window_size_left": window[0], "window_size_right": window[1]}
    options |= {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "zero_tensors": False, **ends}
    out, lse, *_ = interface._flash_attn_varlen_forward(*whole[:3], **options)
    written = poison(*whole[:3])
    more = {"deterministic": True, **options}
    interface._flash_attn_varlen_backward(whole.do, *whole[:3], out, lse, *written, **more)
    mask = tileattn.SlidingWindow(*window) if window != NONE else tileattn.Causal() if causal else None
    rows, keys = (ends[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for b, part in enumerate(parts):
        of_q, of_k = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        got = (out[None, of_q], lse[None, :, of_q], *(x[None, s] for x, s in zip(written, (of_q, of_k, of_k))))
        check(f"sequence {b}", part, got, mask)
    assert not any(x[-2:].any() for x in (out, *written))
    assert (lse[:, -2:] == -torch.inf).all()


def test_packed_queries_over_pages_and_over_the_first_keys() -> None:
    """ring-flash-attn passes neither; flash-attn's callers that serve models do."""
    torch.manual_seed(0)
    q, pages = torch.randn(5, 4, 16), torch.randn(2, 6, 3, 2, 16)
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    used, ends = torch.tensor([4, 6], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    k, v = (x[table.long()].flatten(1, 2) for x in pages)
    end_k = torch.tensor([0, 6, 12], dtype=torch.int32)
    options = (0.0, 0.3, True)
    of_pages = interface._flash_attn_varlen_forward(q, *pages, ends, end_k, 3, 6, *options, block_table=table)
    of_rows = interface._flash_attn_varlen_forward(q, k.flatten(0, 1), v.flatten(0, 1), ends, end_k, 3, 6, *options)
    torch.testing.assert_close(of_pages[:2], of_rows[:2])
    first = interface._flash_attn_varlen_forward(
        q, k.flatten(0, 1), v.flatten(0, 1), ends, end_k, 3, 6, *options, seqused_k=used
    )
    expected = tileattn.attention(q[None, :2], k[:1, :4], v[:1, :4], causal=True, scale=0.3)
    torch.testing.assert_close(first[0][:2], expected[0])


# --- Rings, simulated in one process ---


def ring(call: Call, ranks: int) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv of causal attention, of which each rank has a run of queries and keys; floats are summed."""
    parts = [Call(*each) for each in zip(*(x.chunk(ranks, dim=1) for x in call))]
    results = []
    for rank, mine in enumerate(parts):
        out: Tensor | None = None
        for source in reversed(range(rank + 1)):
            part = mine._replace(k=parts[source].k, v=parts[source].v)
            block, block_lse, *_ = forward(part, causal=source == rank)
            if out is None:
                out, lse = block.float(), block_lse
            else:
                out, lse = tileattn.merge(out, lse, block.float(), block_lse)
        assert out is not None
        results.append((out.to(call.q.dtype), lse))
    sums = [[torch.zeros_like(x, dtype=F32) for x in part[:3]] for part in parts]
    for rank, mine in enumerate(parts):
        for source in range(rank + 1):
            part = mine._replace(k=parts[source].k, v=parts[source].v)
            dq, dk, dv = backward(part, *results[rank], causal=source == rank)
            sums[rank][0] += dq
            sums[source][1] += dk
            sums[source][2] += dv
    joined = [torch.cat(each, dim=1).to(call.q.dtype) for each in zip(*sums)]
    out, lse = torch.cat([o for o, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=2)
    return out, lse, *joined


@pytest.mark.parametrize("place", DEVICES)
def test_a_ring_gives_what_one_call_gives(place: tuple[str, torch.dtype]) -> None:
    call = random(place, 63, 63)
    check("a ring of three", call, ring(call, 3), tileattn.Causal())


@pytest.mark.parametrize("place", DEVICES)
def test_gathered_keys_give_what_one_call_gives(place: tuple[str, torch.dtype]) -> None:
    """As in ring-flash-attn's llama3 functions: a rank's run of queries over the keys up to its end, with a window."""
    call = random(place, 60, 60)
    sums = [torch.zeros_like(x, dtype=F32) for x in call[1:3]]
    rows = []
    for end in (20, 40, 60):
        mine = Call(call.q[:1, end - 20 : end], call.k[:1, :end], call.v[:1, :end], call.do[:1, end - 20 : end])
        flat = Call(*(x[0] for x in mine))
        ends = [torch.tensor([0, n], dtype=torch.int32, device=place[0]) for n in (20, end)]
        options = (*ends, 20, end, 0.0, 0.3, True, 25, 0, 0.0, None)
        out, lse, *_ = interface._flash_attn_varlen_forward(*flat[:3], *options)
        written = poison(*flat[:3])
        interface._flash_attn_varlen_backward(flat.do, *flat[:3], out, lse, *written, *options, False)
        for total, part in zip(sums, written[1:]):
            total[0, :end] += part
        rows.append((out, lse, written[0]))
    out, lse, dq = (torch.cat(each, dim=dim)[None] for each, dim in zip(zip(*rows), (0, 1, 0)))
    got = (out, lse, dq, *(x[:1].to(call.q.dtype) for x in sums))
    check("gathered", Call(*(x[:1] for x in call)), got, tileattn.SlidingWindow(25, 0))


# --- Errors ---


def of(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given.update({name: value})


def backward_arguments() -> dict[str, Any]:
    call = random(("cpu", F32), 9, 9)
    out, lse, *_ = forward(call)
    dq, dk, dv = poison(*call[:3])
    given = {"dout": call.do, "q": call.q, "k": call.k, "v": call.v, "out": out, "softmax_lse": lse}
    given |= {"dq": dq, "dk": dk, "dv": dv, "dropout_p": 0.0, "softmax_scale": 0.3, "causal": False}
    more = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    return {**given, **more, "deterministic": False}


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "dout": (torch.zeros(2, 9, 4, 8), ValueError, "dout must have shape (2, 9, 4, 16), got (2, 9, 4, 8)"),
    "out": (torch.zeros(2, 9, 4, 16, dtype=BF16), TypeError, "out must be torch.float32, got torch.bfloat16"),
    "softmax_lse": (torch.zeros(2, 9, 4), ValueError, "softmax_lse must have shape (2, 4, 9), got (2, 9, 4)"),
    "dk": (torch.zeros(2, 9, 4, 16), ValueError, "dk must have shape (2, 9, 2, 16), got (2, 9, 4, 16)"),
    "dv": ([], TypeError, "dv must be a torch.Tensor, got list"),
    "k": (torch.zeros(2, 9, 3, 16), ValueError, "k and v must have one seqlen and one number of heads"),
    "softmax_scale": (float("inf"), ValueError, "softmax_scale must be a finite number or None, got inf"),
    "window_size_left": ((1, 2), TypeError, "window_size_left must be an int, -1 for no bound, got (1, 2)"),
    "causal": (1, TypeError, "causal"),
    "deterministic": ("no", TypeError, "deterministic"),
    "dropout_p": (0.1, ValueError, "rng_state must be given with dropout_p > 0"),
    "alibi_slopes": (torch.zeros(3), ValueError, "slopes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_of_the_backward_pass_is_named_and_nothing_written(name: str) -> None:
    value, error, message = BAD[name]
    given = backward_arguments() | {name: value}
    with pytest.raises(error, match=re.escape(message)):
        interface._flash_attn_backward(**given)
    assert all(given[each].isnan().all() for each in ("dq", "dk", "dv") if each != name)


def test_a_state_of_another_kind_is_refused() -> None:
    given = backward_arguments() | {"dropout_p": 0.1, "rng_state": torch.zeros(2)}
    with pytest.raises(TypeError, match=r"rng_state must be torch\.int64"):
        interface._flash_attn_backward(**given)


def test_wrong_arguments_of_the_forward_passes() -> None:
    call = random(("cpu", F32), 9, 9)
    with pytest.raises(ValueError, match="return_softmax must be False without dropout"):
        forward(call, return_softmax=True)
    with pytest.raises(ValueError, match=r"softmax_scale must be a finite number"):
        forward(call, softmax_scale=float("nan"))
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q must have 3 dimensions, \(total, heads, head_dim\)"):
        interface._flash_attn_varlen_forward(*call[:3], ends, ends, 9, 9, 0.0, None, True)
    _, whole, where = packed(("cpu", F32))
    with pytest.raises(NotImplementedError, match=r"leftpad_k is not taken .* use flash_attn_with_kvcache"):
        interface._flash_attn_varlen_forward(
            *whole[:3], **where, dropout_p=0.0, softmax_scale=None, causal=True, leftpad_k=where["cu_seqlens_q"]
        )
    used = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dropout_p must be 0 with seqused_k, got 0\.1"):
        interface._flash_attn_varlen_forward(
            *whole[:3], **where, dropout_p=0.1, softmax_scale=None, causal=True, seqused_k=used
        )
