"""The fields of the page, and limits on them so that a run takes seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tileattn.bench.cases import DTYPES
from tileattn.viz.demo import terms
from tileattn.viz.demo.call import Call, Term
from tileattn.viz.demo.function import read_mask, read_score
from tileattn.viz.demo.implementations import IMPLEMENTATIONS

MASKS = ("causal", "sliding window", "prefix", "documents", "my function")
JOINS = {"all of them (&)": "&", "any of them (|)": "|"}
# The dtypes offered on each device, the default first.
OFFERED = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("bf16", "fp16", "fp32", "fp8")}
LONGEST, MOST_HEADS, WIDEST = 131072, 256, 512


@dataclass(frozen=True)
class Limit:
    """The largest call that the page runs on a device.

    flops: floating-point operations of one call; the slowest implementation is called about ten times. scores: elements
    of the score matrix of all heads, which the definition of attention stores. elements: of q, k and v together.
    gradients: scores where gradients are checked, which needs all of them in float64 several times.
    """

    flops: float
    scores: float
    elements: float
    gradients: float


LIMITS = {"cpu": Limit(1.2e10, 2**26, 2**26, 2**22), "cuda": Limit(4e12, 2**31, 2**30, 2**28)}


@dataclass(frozen=True)
class Form:
    """The values of the page's fields, in the page's order; an empty number field is None."""

    batch: Any = 1
    seqlen_q: Any = 512
    seqlen_k: Any = 512
    heads: Any = 8
    kv_heads: Any = 8
    head_dim: Any = 64
    dtype: Any = "fp32"
    masks: Any = ("causal",)
    join: Any = "all of them (&)"
    left: Any = 128
    right: Any = 0
    prefix: Any = 64
    document: Any = 128
    mask_function: Any = "(q - k) % 32 == 0"
    softcap: Any = 0.0
    alibi: Any = False
    bias: Any = False
    sink: Any = False
    score_function: Any = ""
    implementations: Any = tuple(IMPLEMENTATIONS)
    gradients: Any = False

    def call(self, device: torch.device) -> Call:
        """The call that the fields describe.

        Raises:
            ValueError: a field is wrong, or the call exceeds the device's limits; the page shows the message.
        """
        sizes = {
            "batch": _whole("batch", self.batch, 1, 64),
            "seqlen_q": _whole("length of q", self.seqlen_q, 1, LONGEST),
            "seqlen_k": _whole("length of k and v", self.seqlen_k, 1, LONGEST),
            "heads": _whole("heads of q", self.heads, 1, MOST_HEADS),
            "kv_heads": _whole("heads of k and v", self.kv_heads, 1, MOST_HEADS),
            "head_dim": _whole("head dim", self.head_dim, 1, WIDEST),
        }
        if sizes["heads"] % sizes["kv_heads"]:
            raise ValueError(
                f"heads of q must be a multiple of the heads of k and v, got {sizes['heads']} and {sizes['kv_heads']}"
            )
        dtype = _one_of("dtype", self.dtype, OFFERED[device.type])
        assert dtype in DTYPES
        if self.gradients and dtype == "fp8":
            raise ValueError("gradients need dtype bf16, fp16 or fp32, got 'fp8'")
        call = Call(
            **sizes,
            dtype=dtype,
            masks=self._masks(),
            join=JOINS[_one_of("joined by", self.join, JOINS)],
            mods=self._mods(),
            sink=terms.sink() if self.sink else None,
            gradients=bool(self.gradients),
            implementations=_some_of("compare", self.implementations, IMPLEMENTATIONS),
        )
        if not call.implementations:
            raise ValueError("compare: choose one implementation at least")
        _check_limits(call, LIMITS[device.type], device)
        return call

    def _masks(self) -> tuple[Term, ...]:
        chosen = _some_of("masks", self.masks, MASKS)
        made = {
            "causal": terms.causal,
            "sliding window": lambda: terms.window(
                _whole("left", self.left, 0, LONGEST), _whole("right", self.right, 0, LONGEST)
            ),
            "prefix": lambda: terms.prefix(_whole("prefix", self.prefix, 0, LONGEST)),
            "documents": lambda: terms.documents(_whole("document", self.document, 1, LONGEST)),
            "my function": lambda: terms.typed_mask(read_mask(self.mask_function)),
        }
        return tuple(made[name]() for name in chosen)

    def _mods(self) -> tuple[Term, ...]:
        cap = self.softcap or 0.0
        if not isinstance(cap, (int, float)) or not 0 <= cap < 1e6 or 0 < cap < 0.01:
            raise ValueError(f"soft cap must be 0 (none) or a number from 0.01 to 1000000, got {cap!r}")
        made = [terms.softcap(cap)] if cap else []
        made += [terms.alibi()] if self.alibi else []
        made += [terms.bias()] if self.bias else []
        text = self.score_function or ""
        return (*made, *([terms.typed_score(read_score(text))] if not isinstance(text, str) or text.strip() else []))


NAMES = tuple(field.name for field in fields(Form))
# What the buttons above the fields set, by the name of a field; everything else is left as it is.
_PLAIN: dict[str, Any] = {"masks": ("causal",), "join": "all of them (&)", "kv_heads": 8, "heads": 8}
STARTS: dict[str, dict[str, Any]] = {
    "multi-head": _PLAIN,
    "grouped-query (GQA)": {**_PLAIN, "kv_heads": 2},
    "multi-query (MQA)": {**_PLAIN, "kv_heads": 1},
    "sliding window": {**_PLAIN, "masks": ("sliding window",)},
    "window or prefix": {**_PLAIN, "masks": ("sliding window", "prefix"), "join": "any of them (|)"},
    "packed documents": {**_PLAIN, "masks": ("causal", "documents")},
    "my own function": {**_PLAIN, "masks": ("causal", "my function")},
}


def read(values: Sequence[Any]) -> Form:
    """A form from the page's values, in the order of `NAMES`."""
    return Form(**dict(zip(NAMES, values, strict=True)))


def _one_of(name: str, value: Any, accepted: Any) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
    return value


def _some_of(name: str, values: Any, accepted: Any) -> tuple[str, ...]:
    """The chosen names in the order of `accepted`."""
    chosen = {_one_of(name, value, accepted) for value in values or ()}
    return tuple(each for each in accepted if each in chosen)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != int(value)
    ):
        given = "nothing" if value is None else repr(value)
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {given}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {int(value)}")
    return int(value)


def _check_limits(call: Call, limit: Limit, device: torch.device) -> None:
    """Raises if the call exceeds the device's limits, before anything is allocated."""
    where = "this GPU" if device.type == "cuda" else "a CPU"
    elements = call.batch * call.head_dim * (call.seqlen_q * call.heads + 2 * call.seqlen_k * call.kv_heads)
    for name, asked, most in (
        ("floating-point operations", 4.0 * call.scores * call.head_dim, limit.flops),
        ("scores", call.scores, limit.scores),
        ("elements of q, k and v", elements, limit.elements),
        ("scores with gradients", call.scores if call.gradients else 0, limit.gradients),
    ):
        if asked > most:
            raise ValueError(
                f"too large for {where} in a few seconds: {asked:.2g} {name}, at most {most:.2g}; take fewer or "
                "shorter sequences, fewer heads, or a smaller head dim"
            )
