"""A call that the page describes: its tensors, its mask and modifications, and the same as a Python script.

Everything is made twice, as a value for this process and as text for the user, by one `Term` each, so that the script
computes what the page has measured. `tests/viz/test_demo.py` runs scripts and compares their output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileattn.bench.cases import DTYPES
from tileattn.call.fp8 import QuantizedFP8, quantize_fp8
from tileattn.variant.masks import Mask

Made = dict[str, Tensor]


@dataclass(frozen=True)
class Term:
    """A mask, a score modification or a sink.

    text: as written in Python. make: the value, from the call's tensors. names, math_names: what the text uses of
    tileattn and of tileattn.math. setup: the lines of Python that come before, for a call and a device. draw: the name
    of the tensor that they make, and the tensor itself; None if they make none.
    """

    text: str
    make: Callable[[Made], Any]
    names: tuple[str, ...] = ()
    math_names: tuple[str, ...] = ()
    setup: Callable[[Call, str], str] | None = None
    draw: tuple[str, Callable[[Call, torch.device], Tensor]] | None = None


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call. do is None unless gradients are wanted; fp8 is None but for fp8."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score_mods: tuple[Callable[..., Any], ...]
    sink: Tensor | None
    do: Tensor | None
    fp8: QuantizedFP8 | None

    def leaves(self) -> dict[str, Tensor]:
        """q, k and v by the names of their gradients."""
        return {"dq": self.q, "dk": self.k, "dv": self.v}

    def inputs(self) -> dict[str, Any]:
        """q, k and v as arguments of `tileattn.attention`; quantised for fp8."""
        return {"q": self.q, "k": self.k, "v": self.v} if self.fp8 is None else self.fp8._asdict()


@dataclass(frozen=True)
class Call:
    """A checked call. The masks are joined by `join`, "&" or "|"; dtype is a key of `tileattn.bench.cases.DTYPES`."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    masks: tuple[Term, ...] = ()
    join: str = "&"
    mods: tuple[Term, ...] = ()
    sink: Term | None = None
    gradients: bool = False
    implementations: tuple[str, ...] = ("tileattn",)

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of q, k and v before quantisation."""
        return torch.bfloat16 if self.dtype == "fp8" else DTYPES[self.dtype]

    @property
    def scores(self) -> int:
        """Elements of the score matrices of all heads."""
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms, in the order in which their tensors are drawn."""
        return (*self.masks, *self.mods, *(() if self.sink is None else (self.sink,)))

    @property
    def mask_text(self) -> str:
        """The masks as written in Python; "" without one."""
        return f" {self.join} ".join(term.text for term in self.masks)

    @property
    def plain_causal(self) -> bool:
        """Whether the mask is `causal=True` and nothing else."""
        return self.mask_text == "Causal()"

    @property
    def title(self) -> str:
        """The shape and the variant, in one line."""
        lengths = f"{self.seqlen_q} queries, {self.seqlen_k} keys"
        heads = f"{self.heads} heads" + (f" over {self.kv_heads}" if self.heads != self.kv_heads else "")
        variant = ", ".join([self.mask_text or "no mask", *(term.text for term in self.mods)])
        sink = ", a sink" if self.sink is not None else ""
        return f"{variant}{sink}; batch {self.batch}, {lengths}, {heads}, head dim {self.head_dim}, {self.dtype}"

    def mask(self, made: Made) -> Mask | None:
        """The masks joined, from the tensors that they need."""
        masks = [term.make(made) for term in self.masks]
        if not masks:
            return None
        joined: Mask = masks[0]
        for mask in masks[1:]:
            joined = joined & mask if self.join == "&" else joined | mask
        return joined

    def made(self, device: torch.device, terms: tuple[Term, ...]) -> Made:
        """The tensors of some terms."""
        return {term.draw[0]: term.draw[1](self, device) for term in terms if term.draw is not None}

    def tensors(self, device: torch.device) -> Tensors:
        """Draws the tensors, in the order of the script."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            shapes = ((self.seqlen_q, self.heads), (self.seqlen_k, self.kv_heads), (self.seqlen_k, self.kv_heads))
            q, k, v = (
                torch.randn(self.batch, *shape, self.head_dim, device=device, dtype=self.value_dtype)
                for shape in shapes
            )
            made = self.made(device, self.terms)
            do = torch.randn_like(q) if self.gradients else None
        if self.gradients:
            for x in (q, k, v):
                x.requires_grad_()
        mods = tuple(term.make(made) for term in self.mods)
        sink = None if self.sink is None else self.sink.make(made)
        fp8 = quantize_fp8(q, k, v) if self.dtype == "fp8" else None
        return Tensors(q, k, v, self.mask(made), mods, sink, do, fp8)

    def code(self, device: torch.device) -> str:
        """A script that can be copied and run, with the same numbers as on the page."""
        written = self.mods if self.plain_causal else self.terms
        names = sorted({name for term in written for name in term.names})
        math_names = sorted({name for term in self.terms for name in term.math_names})
        shape = (
            f"torch.randn({self.batch}, {{}}, {{}}, {self.head_dim}, device={device.type!r}, dtype={self.value_dtype})"
        )
        lines = ["import torch", "import tileattn"]
        lines += [f"from tileattn import {', '.join(names)}"] if names else []
        lines += [f"from tileattn.math import {', '.join(math_names)}"] if math_names else []
        lines += ["", "torch.manual_seed(0)", "# (batch, seqlen, heads, head_dim)"]
        lines += [f"q = {shape.format(self.seqlen_q, self.heads)}"]
        lines += [f"{x} = {shape.format(self.seqlen_k, self.kv_heads)}" for x in "kv"]
        lines += [term.setup(self, repr(device.type)) for term in self.terms if term.setup is not None]
        lines += ["do = torch.randn_like(q)"] if self.gradients else []
        lines += ["for x in (q, k, v):", "    x.requires_grad_()"] if self.gradients else []
        lines += ["", f"o = tileattn.attention({', '.join(self._arguments())})"]
        lines += ["o.backward(do)"] if self.gradients else []
        lines += ["print(o.shape" + (", q.grad.shape)" if self.gradients else ")")]
        return "\n".join(lines)

    def _arguments(self) -> list[str]:
        given = ["**tileattn.quantize_fp8(q, k, v)._asdict()"] if self.dtype == "fp8" else ["q", "k", "v"]
        if self.plain_causal:
            given.append("causal=True")
        elif self.mask_text:
            given.append(f"mask={self.mask_text}")
        texts = [term.text for term in self.mods]
        if texts:
            given.append(f"score_mod={texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}")
        return [*given, *(["sink=sink"] if self.sink is not None else [])]
