"""The calls that `sanitize.py` launches: forward and backward passes, each at several small sizes.

Inputs are made on the CPU, because each of PyTorch's own kernels takes seconds under the sanitizer. For the same reason
the o and lse of a backward pass are computed by the torch backend on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

import tileattn
from tileattn import ALiBi, Bias, BlockSparse, Causal, Documents, Mask, SlidingWindow, SoftCap, Strided
from tileattn.call.facts import BackwardCall
from tileattn.call.fp8 import FP8, quantize_fp8
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch as backward_launch
from tileattn.kernels.tilelang.backward.shares.last_wave import Dealt, most_whole_keys
from tileattn.runtime import operators as ops
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

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
# Lengths of packed sequences, of queries and of keys, at and around the ends of tiles.
PACKED_SIZES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 128, 0, 129, 63), (1, 128, 0, 129, 63)),
    ((200, 1, 0, 64), (65, 300, 7, 0)),
    ((130, 128), (150, 129)),  # of similar lengths: blocks may share keys
)
PACKED_HEADS = (4, 2)
BEYOND = (0, 10**6, -(10**6))  # what is added to the cumulative lengths: all but 0 leads out of the tensors
BF16, FP16 = torch.bfloat16, torch.float16
TILE = 128  # keys in a tile of the kernel whose blocks share groups

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
        """The name that `--cases` is matched with."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        short = {BF16: "bf16", FP16: "fp16", FP8: "fp8"}[self.dtype]
        return f"{short}-{dims}-{self.kind}"

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes at which the case is run."""
        return SIZES

    @property
    def terms(self) -> list[str]:
        """The terms of the case's kind."""
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
        """The launches of the case, one for each of its sizes."""
        for arguments in self.calls(device):
            yield lambda arguments=arguments: tileattn.attention(  # type: ignore[misc]
                **arguments, return_lse=True, backend="tilelang"
            )

    def is_sound(self, *outputs: Tensor) -> bool:
        """Whether a launch's outputs, o and lse, are finite; lse is -inf in a row without keys."""
        o, lse = outputs
        return bool(o.isfinite().all() and (lse < torch.inf).all())

    def _placed(self, x: Tensor, device: str) -> Tensor:
        """The tensor on the device; if unaligned, in rows that begin at odd elements."""
        return functional.pad(x, (1, 0)).to(device)[..., 1:] if "unaligned" in self.terms else x.to(device)


@dataclass(frozen=True)
class PackedCase(Case):
    """The kernels of packed sequences' forward pass, also with cumulative lengths that lead outside the tensors."""

    @property
    def name(self) -> str:
        dtype, _, rest = super().name.partition("-")
        return f"{dtype}-packed-{rest}"

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sums of the lengths."""
        return tuple(((sum(q), sum(k)), PACKED_HEADS) for q, k in PACKED_SIZES for _ in BEYOND)

    def launches(self, device: str) -> Iterator[Launch]:
        heads, kv_heads = PACKED_HEADS
        for lengths in PACKED_SIZES:
            shapes = ((heads, self.head_dim), (kv_heads, self.head_dim), (kv_heads, self.head_dim_v))
            rows = (sum(lengths[0]), sum(lengths[1]), sum(lengths[1]))
            q, k, v = (
                self._placed(torch.randn(total, *shape).to(self.dtype), device) for total, shape in zip(rows, shapes)
            )
            ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths]
            terms, longest = self.terms, [max(each) for each in lengths]
            named = {
                "mask": _mask(terms, longest[1], device),
                "score_mod": _score_mods(terms, (heads, *longest), device),
                "sink": torch.linspace(-1, 2, heads).to(device) if "sink" in terms else None,
            }
            for beyond in BEYOND:
                where = [each.add(beyond).to(device) for each in ends]
                yield partial(_varlen, q, k, v, *where, *longest, **named)


def _varlen(*arguments: Any, **named: Any) -> Sequence[Tensor]:
    outputs = tileattn.varlen_attention(*arguments, **named, return_lse=True, backend="tilelang")
    with suppress(ValueError):  # what the lengths were wrong with
        tileattn.check_packed()
    return outputs


@dataclass(frozen=True)
class BackwardCase(Case):
    """The kernels of a backward pass, without the forward pass; of its kind may be "deterministic" and "dlse", too.

    "dalibi" and "dbias" ask for the gradient of the slopes, or of the bias. With "shares" two blocks share each group
    of heads: of the keys behind the first tile if all queries see that one, else of all keys.
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
        options = ops.Options(variant, q.shape[3] ** -0.5, "tilelang", deterministic="deterministic" in self.terms)
        inputs = Inputs(q, k, v, sink, Operands(tensors, operands.ints, operands.floats))
        needs = (True, True, True, sink is not None, *of_tensors)

        def run() -> Sequence[Tensor]:
            return ops.run_backward(options, inputs, needs, o, lse, do, dlse)  # type: ignore[no-any-return]

        return partial(self._with_shares, run) if "shares" in self.terms else run

    def _with_shares(self, run: Launch) -> Sequence[Tensor]:
        def dealt(call: BackwardCall, _: Any, q_shape: torch.Size, k_shape: torch.Size) -> Dealt:
            cut = most_whole_keys(call, q_shape, k_shape) >= TILE
            return Dealt(2, TILE if cut else 0) if q_shape[2] > k_shape[2] else Dealt()

        forget_prepared()  # what was prepared for these sizes without shares
        try:
            with mock.patch.object(backward_launch, "dealt", dealt):
                return run()
        finally:
            forget_prepared()


@dataclass(frozen=True)
class PackedBackwardCase(PackedCase):
    """Both passes of packed sequences; "deterministic" and "dalibi" as in :class:`BackwardCase`."""

    def launches(self, device: str) -> Iterator[Launch]:
        for launch in super().launches(device):
            yield partial(self._gradients, launch.func, *launch.args, **launch.keywords)  # type: ignore[attr-defined]

    def is_sound(self, *outputs: Tensor) -> bool:
        return all(bool(x.isfinite().all()) for x in outputs)

    def _gradients(self, run: Launch, *arguments: Any, **named: Any) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in arguments[:3]]
        if "dalibi" in self.terms:
            slopes = named["score_mod"][0].slopes.detach().requires_grad_()
            named = {**named, "score_mod": [ALiBi(slopes)]}
            leaves.append(slopes)
        with torch.enable_grad():
            o, lse = run(*leaves[:3], *arguments[3:], **named, deterministic="deterministic" in self.terms)
            return torch.autograd.grad((o, lse), leaves, (torch.ones_like(o), torch.ones_like(lse)))


def _mask(terms: Sequence[str], seqlen_k: int, device: str) -> Mask | None:
    if "documents" in terms:
        return Documents((torch.arange(seqlen_k) // 70).to(torch.int32).to(device)) & Causal()
    if "window" in terms:
        return SlidingWindow(40, 3)
    if "strided" in terms:
        return Strided(stride=7, local=5)
    if "blocks" in terms:
        return BlockSparse(torch.eye(8, -(-seqlen_k // 64), dtype=torch.bool, device=device)[None, None], 64)
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
    *(Case(BF16, dim, dim, kind) for dim in (64, 128, 256) for kind in ("strided", "blocks")),  # by lists of tiles
    Case(BF16, 192, 128, "causal"),
    Case(FP16, 96, 96, "causal"),
    *(
        PackedCase(BF16, dim, dim, kind)
        for dim in (64, 128, 256)
        for kind in ("full", "causal", "window", "sink", "strided")
    ),
    PackedCase(BF16, 128, 128, "causal+softcap"),
    PackedCase(BF16, 256, 256, "causal+softcap"),
    PackedCase(FP16, 64, 64, "causal+alibi+unaligned"),
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
    *(BackwardCase(BF16, dim, dim, kind) for dim in (64, 128, 256) for kind in ("strided", "strided+deterministic")),
    *(BackwardCase(BF16, dim, dim, kind) for dim in (80, 112) for kind in ("full", "causal")),  # padding left out
    *(
        BackwardCase(BF16, dim, dim, f"{kind}+shares")
        for dim in (64, 128)
        for kind in ("full", "causal", "window", "documents", "full+deterministic")
    ),
    BackwardCase(BF16, 80, 80, "full+shares"),
    BackwardCase(BF16, 160, 160, "causal+shares"),
    BackwardCase(BF16, 192, 192, "causal+shares"),
    BackwardCase(BF16, 256, 200, "full+shares"),  # columns of padding that are not stored
    BackwardCase(FP16, 96, 96, "causal"),
    BackwardCase(BF16, 96, 96, "documents"),
    *(BackwardCase(BF16, 256, 256, kind) for kind in _WIDE),
    *(
        BackwardCase(BF16, *dims, kind)
        for dims in ((192, 128), (160, 160))
        for kind in ("full", "causal", "causal+softcap")
    ),
    # The schedule for every architecture: on sm_90a that of tensors which TMA cannot copy.
    *(
        BackwardCase(BF16, dim, dim, f"{kind}unaligned{more}")
        for dim in (64, 128, 256)
        for kind, more in (("", ""), ("causal+", ""), ("causal+", "+deterministic"))
    ),
    BackwardCase(BF16, 64, 64, "causal+alibi+dalibi+unaligned"),
    BackwardCase(BF16, 128, 128, "window+softcap+unaligned"),
    *(
        PackedBackwardCase(BF16, dim, dim, kind)
        for dim in (64, 128)
        for kind in ("full", "causal", "window", "causal+deterministic", "causal+alibi+dalibi", "strided")
    ),
    PackedBackwardCase(BF16, 128, 128, "strided+deterministic"),
    PackedBackwardCase(BF16, 256, 256, "causal"),
    PackedBackwardCase(BF16, 256, 256, "strided"),
    PackedBackwardCase(FP16, 128, 128, "causal+unaligned"),
    PackedBackwardCase(FP16, 128, 128, "causal+unaligned+deterministic"),
)

CASES: dict[str, tuple[Case, ...]] = {"fwd": FORWARD, "bwd": BACKWARD}  # by direction
