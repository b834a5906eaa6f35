"""Random calls to attention, small enough to be printed: masks and score modifications, composed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow, SoftCap

BATCH, HEADS = 2, 4
SCORES = ("softcap", "alibi", "alibi_b", "bias", "bias_b", "user")


@st.composite
def masks(draw: st.DrawFn, batch: int, seqlen_k: int, depth: int = 2) -> Mask:
    """A mask, or two joined by `&` or `|`, each of which may again be two."""
    if depth > 0 and draw(st.booleans()):
        x, y = draw(masks(batch, seqlen_k, depth - 1)), draw(masks(batch, seqlen_k, depth - 1))
        return x & y if draw(st.booleans()) else x | y
    bound = st.integers(0, seqlen_k + 1)
    kind = draw(st.sampled_from(["causal", "window", "prefix", "prefix_b", "documents", "padding", "function"]))
    if kind == "causal":
        return Causal()
    if kind == "window":
        return SlidingWindow(draw(st.none() | bound), draw(st.none() | bound))
    if kind == "prefix":
        return PrefixLM(draw(bound))
    if kind == "prefix_b":
        return PrefixLM(torch.tensor(draw(st.lists(bound, min_size=batch, max_size=batch))))
    if kind == "documents":
        ids = st.lists(st.integers(0, 3), min_size=seqlen_k, max_size=seqlen_k)
        return Documents(torch.tensor([sorted(draw(ids)) if draw(st.booleans()) else draw(ids) for _ in range(batch)]))
    if kind == "padding":
        keep = st.lists(st.booleans(), min_size=seqlen_k, max_size=seqlen_k)
        return KeyPadding(torch.tensor([draw(keep) for _ in range(batch)]))
    step = draw(st.integers(1, 4))
    return FunctionMask(lambda b, h, q, k: (q + k + h) % step == 0)


@dataclass(frozen=True)
class Composition:
    """A random call, small enough to be printed."""

    seqlen_q: int
    seqlen_k: int
    kv_heads: int
    mask: Mask | None
    scores: tuple[str, ...]
    sink: bool
    scale: float | None
    seed: int

    def arguments(self) -> tuple[object, ...]:
        """(q, k, v, mask, score_mods, sink, scale); in float16, where sums in float32 are exact by comparison."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        mods = {
            "softcap": SoftCap(3.0),
            "alibi": ALiBi(normal(HEADS).abs()),
            "alibi_b": ALiBi(normal(BATCH, HEADS).abs()),
            "bias": Bias(normal(1, HEADS, self.seqlen_q, self.seqlen_k)),
            "bias_b": Bias(normal(BATCH, 1, self.seqlen_q, self.seqlen_k)),
            "user": lambda score, b, h, q, k: score * 0.75 - 0.01 * (q - k) * h,
        }
        return (
            normal(BATCH, self.seqlen_q, HEADS, 16).half(),
            normal(BATCH, self.seqlen_k, self.kv_heads, 16).half(),
            normal(BATCH, self.seqlen_k, self.kv_heads, 8).half(),
            self.mask,
            tuple(mods[name] for name in self.scores),
            normal(HEADS) if self.sink else None,
            self.scale,
        )


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    seqlen_k = draw(st.integers(1, 40))
    return Composition(
        seqlen_q=draw(st.integers(1, 40)),
        seqlen_k=seqlen_k,
        kv_heads=draw(st.sampled_from([1, 2, HEADS])),
        mask=draw(st.none() | masks(BATCH, seqlen_k)),
        scores=tuple(draw(st.lists(st.sampled_from(SCORES), max_size=3))),
        sink=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.5, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )
