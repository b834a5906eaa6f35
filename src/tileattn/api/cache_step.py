"""One step of a model over a :class:`tileattn.PagedKVCache`: what its layers share, and the attention of a layer.

All layers of a step have the same page table and lengths, and those whose options agree share one plan of the GPU's
work: it is made by the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..call.decoding import DecodePlan, Splits
from ..runtime.operators import is_traced
from ..runtime.run import MaskLike, ScoreModLike
from ..variant.key import encode, normalize
from .decode import decode
from .shared_plans import SharedPlans

if TYPE_CHECKING:
    from .kv_cache import PagedKVCache


class CacheStep:
    """The new tokens of all sequences in one step of a model; made by :meth:`tileattn.PagedKVCache.step`.

    Attributes:
        cache: the cache, whose lengths count the new tokens.
        tokens: the new tokens of each sequence, where all have as many, or None.
        cu_seqlens_q: int32 (batch + 1,), where the new tokens are packed, or None.
        max_seqlen_q: with cu_seqlens_q, the most new tokens of a sequence or any upper bound.
    """

    def __init__(
        self, cache: PagedKVCache, tokens: int | None, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None
    ) -> None:
        self.cache, self.tokens, self.cu_seqlens_q, self.max_seqlen_q = cache, tokens, cu_seqlens_q, max_seqlen_q
        self._version = _version(cache.seqlens)
        self._plans = SharedPlans()

    @property
    def packed(self) -> bool:
        """Whether the new tokens are packed: tensors are (total, ...) instead of (batch, new, ...)."""
        return self.cu_seqlens_q is not None

    def layer(self, index: int) -> LayerCache:
        """The part of a layer, as modules take it: ``module(x, cache=step.layer(index))``."""
        if not 0 <= index < self.cache.layers:
            raise ValueError(f"index must lie in 0 .. {self.cache.layers - 1}, the layers of the cache, got {index}")
        return LayerCache(self, index)

    def check(self, **new: Any) -> None:
        """Raises ValueError if the cache's lengths have changed since the step began, or tokens are not as many.

        Args:
            new: q, k and v, by their names. How many rows of packed ones belong to sequences, only the device knows.
        """
        for name, x in new.items():
            if self.tokens is not None and isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] != self.tokens:
                raise ValueError(
                    f"{name} must have the {self.tokens} new tokens of each sequence that the step began with, by "
                    f"cache.step({self.tokens}), got {x.shape[1]}"
                )
        if torch.compiler.is_compiling():
            return  # a graph serves all steps
        if _version(self.cache.seqlens) != self._version:
            raise ValueError(
                "the cache's lengths have changed since this step began: make one step for each call of the model, by "
                "cache.step(...)"
            )

    def plan(self, pages: tuple[Tensor, Tensor], q: Tensor, options: dict[str, Any]) -> DecodePlan | None:
        """The plan that the layers with these options share; None under torch.compile, where each call makes its own.

        Args:
            pages: the layer's pages.
            q: its queries.
            options: the other arguments of :func:`tileattn.decode`.
        """
        if is_traced(q):
            return None
        mask, mods = normalize(options["mask"], options["score_mod"], options["causal"])
        variant, operands = encode(mask, mods)
        kind = (
            variant, *map(id, operands.tensors), *operands.ints, *operands.floats, options["sink"] is None,
            options["splits"], options["backend"],
        )  # fmt: skip
        return self._plans.plan(kind, q, *pages, self.cache.seqlens, options, kept=operands)


class LayerCache:
    """The keys and values of one layer in a step; made by :meth:`CacheStep.layer`.

    Attributes:
        step: the step, which all layers share.
        index: the number of the layer.
    """

    def __init__(self, step: CacheStep, index: int) -> None:
        self.step, self.index = step, index

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        mask: MaskLike | None = None,
        score_mod: ScoreModLike | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        splits: Splits = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        backend: str | None = None,
    ) -> Tensor:
        """Writes the new tokens' keys and values, and returns attention of their queries over all of the layer's.

        With cos and sin, keys and queries are rotated by their positions. There is no host-device synchronisation.

        Args:
            q: (batch, new, heads, head_dim); in a packed step (total, heads, head_dim). In the cache's dtype.
            k: the same with kv_heads.
            v: (batch, new, kv_heads, head_dim_v), or packed.
            causal: as in :func:`tileattn.decode`, and so are mask, score_mod, sink, scale and splits.
            mask: see :func:`tileattn.decode`.
            score_mod: see :func:`tileattn.decode`.
            sink: see :func:`tileattn.decode`.
            scale: see :func:`tileattn.decode`.
            splits: see :func:`tileattn.decode`.
            cos: as in :func:`tileattn.append_kv`, and so are sin and interleaved.
            sin: see :func:`tileattn.append_kv`.
            interleaved: see :func:`tileattn.append_kv`.
            backend: of both; None takes the first that accepts the call.

        Returns:
            o (batch, new, heads, head_dim_v), or packed, in q's dtype.

        Raises:
            TypeError, ValueError, NotImplementedError: as :func:`tileattn.append_kv` and :func:`tileattn.decode`. There
                are no gradients: call it under torch.no_grad(). ValueError also if the step began with another number
                of tokens, or the cache's lengths have changed since.
        """
        step, cache = self.step, self.step.cache
        step.check(q=q, k=k, v=v)
        rotated = cache.append(
            k, v, layer=self.index, cu_seqlens_q=step.cu_seqlens_q, cos=cos, sin=sin, interleaved=interleaved,
            q=None if cos is None else q, backend=backend,
        )  # fmt: skip
        q = q if rotated is None else rotated
        pages = cache.layer(self.index)
        options: dict[str, Any] = {
            "page_table": cache.page_table, "cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q,
            "causal": causal, "mask": mask, "score_mod": score_mod, "sink": sink, "scale": scale, "splits": splits,
            "backend": backend,
        }  # fmt: skip
        o: Tensor = decode(q, *pages, cache.seqlens, plan=step.plan(pages, q, options), **options)
        return o


def _version(x: Tensor) -> int:
    """A number that grows when the tensor is changed in place; 0 for a tensor of inference mode, which has none."""
    return 0 if x.is_inference() else x._version
