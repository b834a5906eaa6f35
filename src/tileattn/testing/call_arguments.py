"""The types of conformance cases: `Structure`, `ConformanceCase`, and the `Arguments` of a case's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call.facts import Packed
from ..call.fp8 import FP8, Descales, output_dtype
from ..variant.key import encode
from ..variant.masks import Mask
from ..variant.program import restore
from .shapes import PackedShape, Shape

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": FP8,
}
ScoreFn = Callable[..., Any]
AnyShape = Shape | PackedShape
DROPOUT_SEED = 5


@dataclass(frozen=True)
class Structure:
    """The static facts of a case, for which a kernel is compiled: `mask` is a name of `MASKS`, `scores` of `SCORES`."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    scores: tuple[str, ...]
    sink: bool
    aligned: bool

    @property
    def name(self) -> str:
        """Short and readable."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        flags = ["sink"] * self.sink + ["unaligned"] * (not self.aligned)
        return "-".join([self.dtype, dims, self.mask, *self.scores, *flags])


@dataclass(frozen=True)
class ConformanceCase:
    """One call to attention. The `smoke` cases are a small subset in which every feature occurs."""

    structure: Structure
    shape: AnyShape
    smoke: bool = False

    @property
    def id(self) -> str:
        """Short, readable and unique."""
        return f"{self.structure.name}-{self.shape.name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return DTYPES[self.structure.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of o."""
        return output_dtype(self.dtype)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a case's call. q, k, v are bshd views; their memory has the case's layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score_mods: tuple[ScoreFn, ...]
    sink: Tensor | None
    scale: float | None
    layout: str
    """What `attention(layout=...)` is to be told: "bhsd" where the memory is, so that it is given the original."""
    descales: Descales | None = None
    """Of an fp8 case."""
    packed: Packed | None = None
    """Of a packed case, whose tensors have one batch element."""
    dropout_p: float = 0.0
    """With the seed that the call draws after ``torch.manual_seed(DROPOUT_SEED)``."""

    @property
    def named_descales(self) -> dict[str, Tensor]:
        """The descales as keyword arguments; empty except for fp8."""
        return {} if self.descales is None else {f"{name}_descale": x for name, x in self.descales._asdict().items()}

    def leaves(self) -> dict[str, Tensor]:
        """The tensors with gradients, as leaves of autograd's graph, by the names of their gradients.

        These are q, k, v, the sink, and the floating-point tensors of the score modifications. This call makes them
        require grad.
        """
        _, operands = encode(None, self.score_mods)
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dsink": self.sink}
        named |= {f"dt{i}": x for i, x in enumerate(operands.tensors) if x.dtype.is_floating_point}
        return {name: x.requires_grad_() for name, x in named.items() if x is not None}

    def double(self) -> tuple[Arguments, dict[str, Tensor]]:
        """The same call in float64, for the oracle, and its leaves."""
        doubles = {name: x.detach().double().requires_grad_() for name, x in self.leaves().items()}
        key, operands = encode(None, self.score_mods)
        operands.tensors = [doubles.get(f"dt{i}", x) for i, x in enumerate(operands.tensors)]
        _, score_mods = restore(key, operands, torch.float64)
        q, k, v = doubles["dq"], doubles["dk"], doubles["dv"]
        return replace(self, q=q, k=k, v=v, sink=doubles.get("dsink"), score_mods=score_mods), doubles

    @property
    def positional(self) -> tuple[Any, ...]:
        """(q, k, v, mask, score_mods, sink, scale, *descales), as the oracle, eager, and the reference take them."""
        descales = (None, None, None) if self.descales is None else self.descales
        return (self.q, self.k, self.v, self.mask, self.score_mods, self.sink, self.scale, *descales)
