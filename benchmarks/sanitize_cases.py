"""What `sanitize.py` launches: calls of the forward pass and of the backward pass, each at all of some small sizes.

Inputs are made on the CPU: under the sanitizer each kernel of PyTorch's own costs seconds. For the same reason what a
backward pass is given by its forward pass, o and lse, comes from the torch backend there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tileattn
from tileattn import ALiBi, Bias, Causal, Documents, Mask, SlidingWindow, SoftCap, ops
from tileattn.fp8 import FP8, quantize_fp8
from tileattn.variant import encode

BATCH = 2
# (seqlen_q, seqlen_k), (heads, kv_heads)
Size = tuple[tuple[int, int], tuple[int, int]]
SIZES: tuple[Size, ...] = (
    ((1, 1), (1, 1)),
    ((1, 300), (4, 1)),
    ((63, 63), (2, 2)),
    ((129, 257), (4, 2)),
    ((300, 200), (2, 1)),
)
BF16, FP16 = torch.bfloat16, torch.float16

Launch = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """The forward kernel of a call, at all `SIZES`.

    kind: "full", or terms joined with "+": a mask, modifications, sink, unaligned.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    kind: str

    @property
    def name(self) -> str:
        """What `--cases` is matched with."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        short = {BF16: "bf16", FP16: "fp16", FP8: "fp8"}[self.dtype]
        return f"{short}-{dims}-{self.kind}"

    @property
    def sizes(self) -> tuple[Size, ...]:
        """At which it is run."""
        return SIZES

    @property
    def terms(self) -> list[str]:
        """Of its kind."""
        return self.kind.split("+")

    def calls(self, device: str) -> Iterator[dict[str, Any]]:
        """The arguments of `attention`, for each of the sizes."""
        for (seqlen_q, seqlen_k), (heads, kv_heads) in self.sizes:
            shapes = ((seqlen_q, heads, self.head_dim), (seqlen_k, kv_heads, self.head_dim))
            tensors = [torch.randn(BATCH, *shape) for shape in (*shapes, (seqlen_k, kv_heads, self.head_dim_v))]
            names = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
            if self.dtype == FP8:
                tensors = list(quantize_fp8(*tensors))
            else:
                tensors = [x.to(self.dtype) for x in tensors]
            yield {
                **{name: self._placed(x, device) for name, x in zip(names, tensors)},
                "mask": _mask(self.terms, seqlen_k, device),
                "score_mod": _score_mods(self.terms, (heads, seqlen_q, seqlen_k), device),
                "sink": torch.linspace(-1, 2, heads).to(device) if "sink" in self.terms else None,
            }

    def launches(self, device: str) -> Iterator[Launch]:
        """What is run, one for each of the sizes."""
        for arguments in self.calls(device):
            yield lambda arguments=arguments: tileattn.attention(  # type: ignore[misc]
                **arguments, return_lse=True, backend="tilelang"
            )

    def is_sound(self, *outputs: Tensor) -> bool:
        """Whether a launch's outputs, o and lse, are finite; lse is -inf in a row without keys."""
        o, lse = outputs
        return bool(o.isfinite().all() and (lse < torch.inf).all())

    def _placed(self, x: Tensor, device: str) -> Tensor:
        """On the device; if unaligned, in rows that begin at odd elements."""
        return functional.pad(x, (1, 0)).to(device)[..., 1:] if "unaligned" in self.terms else x.to(device)


@dataclass(frozen=True)
class BackwardCase(Case):
    """The kernels of a backward pass, without the forward pass; of its kind may be "deterministic" and "dlse", too.

    "dalibi" and "dbias" ask for the gradient of the slopes, or of the bias.
    """

    @property
    def sizes(self) -> tuple[Size, ...]:
        # A tensor's dimension of 1 is another kernel, of no more interest.
        return SIZES if {"documents", "alibi", "bias", "sharedbias"}.isdisjoint(self.terms) else SIZES[2:]

    def launches(self, device: str) -> Iterator[Launch]:
        for arguments in self.calls("cpu"):
            yield self._launch(device, **arguments)

    def is_sound(self, *outputs: Tensor) -> bool:
        return all(bool(x.isfinite().all()) for x in outputs)

    def _launch(
        self, device: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score_mod: list[Any], sink: Tensor | None
    ) -> Launch:
        named = {"mask": mask, "score_mod": score_mod or None, "sink": sink}
        o, lse = tileattn.attention(q, k, v, **named, return_lse=True, backend="torch")  # type: ignore[arg-type]
        do, dlse = torch.randn_like(o), torch.randn_like(lse) if "dlse" in self.terms else None
        variant, operands = encode(mask, score_mod)
        wanted = not {"dalibi", "dbias"}.isdisjoint(self.terms)
        of_tensors = [wanted and x.dtype.is_floating_point for x in operands.tensors]
        do, q, k, v, o = (self._placed(x, device) for x in (do, q, k, v, o))
        dlse, lse, sink, *tensors = (x if x is None else x.to(device) for x in (dlse, lse, sink, *operands.tensors))
        return lambda: ops.run_backward(
            *(do, dlse, q, k, v, o, lse, sink, variant, tensors, operands.ints, operands.floats),
            scale=q.shape[3] ** -0.5,
            backend="tilelang",
            deterministic="deterministic" in self.terms,
            needs=(True, True, True, sink is not None, *of_tensors),
        )


def _mask(terms: Sequence[str], seqlen_k: int, device: str) -> Mask | None:
    if "documents" in terms:
        return Documents((torch.arange(seqlen_k) // 70).to(torch.int32).to(device)) & Causal()
    if "window" in terms:
        return SlidingWindow(40, 3)
    return Causal() if "causal" in terms else None


def _score_mods(terms: Sequence[str], sizes: tuple[int, int, int], device: str) -> list[Any]:
    """sizes: heads, seqlen_q, seqlen_k. The elements of "bias" are read by one score each, of "sharedbias" by some."""
    mods: list[Any] = []
    if "alibi" in terms:
        mods.append(ALiBi(torch.linspace(0.1, 0.9, sizes[0]).to(device)))
    if "bias" in terms:
        mods.append(Bias(torch.randn(BATCH, *sizes).to(BF16).to(device)))
    if "sharedbias" in terms:
        mods.append(Bias(torch.randn(1, *sizes).to(device)))
    if "softcap" in terms:
        mods.append(SoftCap(20.0))
    return mods


FORWARD = (
    *(
        Case(BF16, dim, dim, kind)
        for dim in (64, 128, 256)
        for kind in ("full", "causal", "window", "sink", "causal+softcap", "causal+alibi")
    ),
    *(Case(FP8, dim, dim, kind) for dim in (64, 128, 256) for kind in ("full", "causal", "window+softcap")),
    Case(BF16, 128, 128, "documents"),
    Case(BF16, 192, 128, "causal"),
    Case(FP16, 96, 96, "causal"),
)

_NARROW = (
    *("full", "causal", "window", "documents", "causal+softcap", "causal+alibi", "causal+alibi+dalibi"),
    *("bias+dbias", "causal+sharedbias+dbias", "sink+dlse", "full+deterministic", "causal+deterministic"),
)
# Wide heads have dq from a kernel of its own, in a fixed order, anyway.
_WIDE = ("full", "causal", "window", "causal+softcap", "causal+alibi", "causal+alibi+dalibi")
BACKWARD = (
    *(BackwardCase(BF16, dim, dim, kind) for dim in (64, 128) for kind in _NARROW),
    BackwardCase(BF16, 64, 64, "causal+sharedbias+dbias+deterministic"),
    BackwardCase(BF16, 128, 128, "causal+alibi+dalibi+softcap"),
    BackwardCase(FP16, 96, 96, "causal"),
    *(BackwardCase(BF16, 256, 256, kind) for kind in _WIDE),
    *(BackwardCase(BF16, 192, 128, kind) for kind in ("full", "causal", "causal+softcap")),
    # The schedule for every architecture: on sm_90a that of tensors which TMA cannot copy.
    *(
        BackwardCase(BF16, dim, dim, f"{kind}unaligned{more}")
        for dim in (64, 128, 256)
        for kind, more in (("", ""), ("causal+", ""), ("causal+", "+deterministic"))
    ),
    BackwardCase(BF16, 64, 64, "causal+alibi+dalibi+unaligned"),
    BackwardCase(BF16, 128, 128, "window+softcap+unaligned"),
)

CASES: dict[str, tuple[Case, ...]] = {"fwd": FORWARD, "bwd": BACKWARD}  # by direction
