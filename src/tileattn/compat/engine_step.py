"""What the adapters of serving engines share: a layer's options, and one step of an engine over paged caches.

An engine makes the metadata of a step once and then calls every layer with it. Layers of a kind share a plan of
:func:`tileattn.decode` (api/shared_plans.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..api.decode import decode
from ..api.shared_plans import SharedPlans
from ..call.decoding import FixedSplit
from ..variant.masks import SlidingWindow
from ..variant.scores import ALiBi, ScoreMod, SoftCap


@dataclass(frozen=True, eq=False)
class LayerOptions:
    """What a layer computes.

    Attributes:
        scale: factor of the scores.
        left: the keys before its own that a query sees; None for all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None for no cap.
        slopes: ALiBi's slopes (heads,), or None.
        sink: one logit per head (heads,), or None.
    """

    scale: float
    left: int | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None

    def kind(self) -> Hashable:
        """Equal for layers that can share a plan."""
        return self.left, self.soft_cap, self.slopes is None, self.sink is None

    def arguments(self) -> dict[str, Any]:
        """Of `decode` and `decode_plan`."""
        mods: list[ScoreMod] = [] if self.soft_cap is None else [SoftCap(self.soft_cap)]
        mods += [] if self.slopes is None else [ALiBi(self.slopes)]
        causal = self.left is None  # a window ends at the query
        mask = None if causal else SlidingWindow(self.left, 0)
        return {"causal": causal, "mask": mask, "score_mod": mods or None, "sink": self.sink, "scale": self.scale}


@dataclass(eq=False)
class Step:
    """The sequences of a step.

    Attributes:
        seqlens_k: int32 (batch,): the keys of each sequence, those of the step included.
        page_table: int32 (batch, width).
        cu_seqlens_q: int32 (batch + 1,); None if row i of q is the only query of sequence i.
        max_seqlen_q: an upper bound of the numbers of queries.
        splits: as :func:`tileattn.decode` takes it.
    """

    seqlens_k: Tensor
    page_table: Tensor
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 1
    splits: FixedSplit | None = None
    _plans: SharedPlans = field(default_factory=SharedPlans, init=False, repr=False)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: LayerOptions, out: Tensor | None = None
    ) -> Tensor:
        """Attention of a layer: o (rows, heads, head_dim_v), 0 in rows of no sequence.

        Args:
            q: (rows, heads, head_dim), the queries of all sequences.
            k_cache: (pages, page_size, kv_heads, head_dim), which holds the step's own keys.
            v_cache: (pages, page_size, kv_heads, head_dim_v).
            options: what the layer computes.
            out: where o is written.
        """
        arguments = options.arguments() | {"page_table": self.page_table, "splits": self.splits}
        if self.cu_seqlens_q is not None:
            arguments |= {"cu_seqlens_q": self.cu_seqlens_q, "max_seqlen_q": self.max_seqlen_q}
        else:
            q, out = q.unsqueeze(1), None if out is None else out.unsqueeze(1)
        plan = self._plans.plan(options.kind(), q, k_cache, v_cache, self.seqlens_k, arguments)
        o = decode(q, k_cache, v_cache, self.seqlens_k, plan=plan, out=out, **arguments)
        assert isinstance(o, Tensor)
        return o if self.cu_seqlens_q is not None else o.squeeze(1)
