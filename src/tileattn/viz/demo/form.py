"""The fields of the page, and limits on them so that a run takes seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tileattn.bench.cases import DTYPES, Case
from tileattn.bench.variants import written_out

MASKS = ("none", "causal", "sliding window", "prefix", "documents")
# The dtypes offered on each device, the default first.
OFFERED = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("bf16", "fp16", "fp32", "fp8")}
LONGEST, MOST_HEADS, WIDEST = 131072, 256, 512


@dataclass(frozen=True)
class Limit:
    """The largest call that the page runs on a device.

    flops: floating-point operations of one call; the slowest implementation is called about ten times. scores: elements
    of the score matrix of all heads, which PyTorch's eager attention stores. elements: of q, k and v together.
    """

    flops: float
    scores: float
    elements: float


LIMITS = {"cpu": Limit(1.2e10, 2**26, 2**26), "cuda": Limit(4e12, 2**31, 2**30)}


@dataclass(frozen=True)
class Form:
    """The values of the page's fields, in the page's order; an empty number field is None."""

    batch: Any = 1
    seqlen_q: Any = 1024
    seqlen_k: Any = 1024
    heads: Any = 8
    kv_heads: Any = 8
    head_dim: Any = 64
    dtype: Any = "fp32"
    mask: Any = "causal"
    size: Any = 256
    right: Any = 0
    softcap: Any = 0.0
    alibi: Any = False
    bias: Any = False
    sink: Any = False

    def case(self, device: torch.device) -> Case:
        """The benchmark case that the fields describe.

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
        offered = OFFERED[device.type]
        if self.dtype not in offered:
            raise ValueError(f"dtype must be one of {', '.join(offered)}, got {self.dtype!r}")
        assert self.dtype in DTYPES
        case = Case(**sizes, head_dim_v=sizes["head_dim"], variant=self._variant(), dtype=self.dtype, packing="")
        _check_limits(case, LIMITS[device.type], device)
        return case

    def _variant(self) -> str:
        """The variant's name, as `tileattn.bench.variants` reads it."""
        if self.mask not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r}")
        terms = []
        if self.mask == "causal":
            terms = ["causal"]
        elif self.mask == "sliding window":
            left, right = _whole("size", self.size, 0, LONGEST), _whole("right", self.right, 0, LONGEST)
            terms = [f"window{left}-{right}" if right else f"window{left}"]
        elif self.mask == "prefix":
            terms = [f"prefix{_whole('size', self.size, 0, LONGEST)}"]
        elif self.mask == "documents":
            terms = [f"documents{_whole('size', self.size, 1, LONGEST)}"]
        cap = self.softcap or 0.0
        if not isinstance(cap, (int, float)) or not 0 <= cap < 1e6 or 0 < cap < 0.01:
            raise ValueError(f"soft cap must be 0 (none) or a number from 0.01 to 1000000, got {cap!r}")
        terms += [f"softcap{written_out(cap)}"] if cap else []
        terms += [name for name in ("alibi", "bias", "sink") if getattr(self, name)]
        return "+".join(terms) or "full"


NAMES = tuple(field.name for field in fields(Form))


def read(values: Sequence[Any]) -> Form:
    """A form from the page's values, in the order of `NAMES`."""
    return Form(**dict(zip(NAMES, values, strict=True)))


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


def _check_limits(case: Case, limit: Limit, device: torch.device) -> None:
    """Raises if the case exceeds the device's limits, before anything is allocated."""
    where = "this GPU" if device.type == "cuda" else "a CPU"
    elements = case.batch * case.head_dim * (case.seqlen_q * case.heads + 2 * case.seqlen_k * case.kv_heads)
    scores = case.batch * case.heads * case.seqlen_q * case.seqlen_k
    for name, asked, most in (
        ("floating-point operations", 4.0 * scores * case.head_dim, limit.flops),
        ("scores", scores, limit.scores),
        ("elements of q, k and v", elements, limit.elements),
    ):
        if asked > most:
            raise ValueError(
                f"too large for {where} in a few seconds: {asked:.2g} {name}, at most {most:.2g}; take fewer or "
                "shorter sequences, fewer heads, or a smaller head dim"
            )
