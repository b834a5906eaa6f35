"""Calls with NaN and infinities, each kind in a head of its own; for the tests of every backend.

The expected o and lse are those of the formula, in float64 on the same inputs, with PyTorch's softmax and logsumexp.
NaN and infinities must be in the same places, and finite values must be right by the tolerance rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileattn import Causal, Documents, KeyPadding, Mask, SlidingWindow
from tileattn.testing import assert_accurate, eager_attention, oracle_attention

NAN, INF = math.nan, math.inf
BEYOND = 70  # rows of NaN behind the last query and key: more than a tile may reach beyond them


class Call(NamedTuple):
    """q, k and v (bshd), as parts of larger tensors of NaN, and the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None


# (q, k, v, key) of one head, each (batch, seqlen, head_dim), changed in place. Every query sees the key, if any does.
Poison = Callable[[Tensor, Tensor, Tensor, int], None]


def _minus_inf_q(q: Tensor, k: Tensor, v: Tensor, key: int) -> None:
    """All scores of a row are -inf."""
    q[:, q.shape[1] // 2, 3] = -INF
    k[..., 3] = k[..., 3].abs() + 1


def _minus_inf_k(q: Tensor, k: Tensor, v: Tensor, key: int) -> None:
    """A score of -inf beside others."""
    k[:, key, 3] = -INF
    q[..., 3] = q[..., 3].abs() + 1


def _inf_then_nan(q: Tensor, k: Tensor, v: Tensor, key: int) -> None:
    """+inf is met, and NaN long before or after it."""
    q[:, q.shape[1] // 2, 3] = INF
    k[:, -1, 2] = NAN


def _large_then_inf(q: Tensor, k: Tensor, v: Tensor, key: int) -> None:
    """Scores whose exponentials overflow, and +inf in one tile."""
    q[:, :, 3] = 200
    k[..., 3] = 4
    k[:, key, 3] = INF


def _set(name: str, value: float, *, row: bool) -> Poison:
    """One element of a row of q, or of the key's row of k or v."""

    def poison(q: Tensor, k: Tensor, v: Tensor, key: int) -> None:
        x = {"q": q, "k": k, "v": v}[name]
        x[:, q.shape[1] // 2 if row else key, 3] = value

    return poison


POISONS: dict[str, Poison] = {
    "clean": lambda q, k, v, key: None,
    "nan_q_row": _set("q", NAN, row=True),
    "inf_q": _set("q", INF, row=True),
    "minus_inf_q": _minus_inf_q,
    "nan_k_seen": _set("k", NAN, row=False),
    "nan_last_key": lambda q, k, v, key: k[:, -1].fill_(NAN),
    "inf_k": _set("k", INF, row=False),
    "minus_inf_k": _minus_inf_k,
    "inf_then_nan": _inf_then_nan,
    "large_then_inf": _large_then_inf,
    "nan_v_seen": _set("v", NAN, row=False),
    "inf_v_seen": _set("v", INF, row=False),
}
# Under a mask a value of NaN is hidden from some rows in most of them, where it is not defined what comes of it.
HEADS = len(POISONS)
SEEN_BY_ALL = {"full": 5, "causal": 0}  # a key


def within_nan(shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers in the middle of NaN: in front of the first row, behind the last one, beside the heads."""
    batch, seqlen, heads, head_dim = shape
    memory = torch.full((batch, 8 + seqlen + BEYOND, heads + 1, head_dim), NAN, dtype=dtype)
    x = memory[:, 8 : 8 + seqlen, :heads]
    x.copy_(torch.randn(shape, generator=generator))
    return x


def mask_of(name: str, batch: int, seqlen_k: int, device: str) -> Mask | None:
    """`full`, `causal`, `window`, `documents`, or `padding`, which hides the first and the last 9 keys."""
    place = torch.arange(seqlen_k, device=device)
    if name == "documents":
        return Documents((place >= seqlen_k // 3).long()) & Causal()
    if name == "padding":
        return KeyPadding(((place >= 9) & (place < seqlen_k - 9)).expand(batch, seqlen_k))
    return {"full": None, "causal": Causal(), "window": SlidingWindow(20, 0)}[name]


def call_of(
    mask: str,
    dtype: torch.dtype,
    device: str,
    seqlen_q: int = 70,
    seqlen_k: int = 140,
    head_dim: int = 16,
    batch: int = 1,
) -> Call:
    """One call with a head for each kind of `POISONS`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, n, HEADS, head_dim) for n in (seqlen_q, seqlen_k, seqlen_k)]
    q, k, v = (within_nan(shape, dtype, generator) for shape in shapes)
    key = SEEN_BY_ALL.get(mask, seqlen_k // 2)
    for head, (name, poison) in enumerate(POISONS.items()):
        if "v_seen" not in name or mask in SEEN_BY_ALL:
            poison(q[:, :, head], k[:, :, head], v[:, :, head], key)
    return Call(*(_moved(x, device) for x in (q, k, v)), mask_of(mask, batch, seqlen_k, device))


def hidden_call(mask: str, dtype: torch.dtype, device: str) -> tuple[Call, Call]:
    """NaN and infinities in keys that no query sees, or some do not; and the same call with numbers there.

    Returns:
        The two calls. Under "window" queries are fewer than keys; under "causal" every row but the last hides the key.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (within_nan((1, n, 3, 16), dtype, generator) for n in (70, 140, 140))
    clean = Call(*(_moved(x, device) for x in (q, k, v)), mask_of(mask, 1, 140, device))
    for head, value in enumerate((NAN, INF, -INF)):
        k[:, -1 if mask in ("causal", "padding") else 0, head, 3] = value
    return Call(clean.q, _moved(k, device), clean.v, clean.mask), clean


def _moved(x: Tensor, device: str) -> Tensor:
    """A tensor on a device, with the memory around it."""
    whole = x._base
    assert whole is not None
    moved = whole.clone().to(device)
    return moved[:, 8 : 8 + x.shape[1], : x.shape[2]]


def assert_as_the_formula(arguments: Sequence[Any], got: tuple[Tensor, Tensor]) -> None:
    """o and lse have NaN and infinities where they belong, head by head, and are right elsewhere.

    arguments: those of `oracle_attention`: a `Call`, and modifications, a sink and a scale if there are any.
    """
    exact, rounded = oracle_attention(*arguments), eager_attention(*arguments)
    (o, lse), (oracle_o, oracle_lse), (eager_o, eager_lse) = got, exact, rounded
    names = list(POISONS) if o.shape[2] == HEADS else [str(head) for head in range(o.shape[2])]
    for head, name in enumerate(names):
        _assert_alike(f"lse of {name}", lse[:, head], oracle_lse[:, head], [x[:, head] for x in eager_lse], o.dtype)
        _assert_alike(f"o of {name}", o[:, :, head], oracle_o[:, :, head], [x[:, :, head] for x in eager_o], None)


def _assert_alike(name: str, got: Tensor, oracle: Tensor, eager: list[Tensor], lse_of: torch.dtype | None) -> None:
    for what, is_value in {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}.items():
        wrong = is_value(got) != is_value(oracle)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} values are wrongly {what}, or not"
    finite = oracle.isfinite()
    got, oracle, *eager = (torch.where(finite, x, 0.0).to(x.dtype) for x in (got, oracle, *eager))
    assert_accurate(name, got, oracle, [x.nan_to_num(0.0, 0.0, 0.0) for x in eager], lse_of=lse_of)
