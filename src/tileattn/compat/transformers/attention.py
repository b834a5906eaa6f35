"""The attention function that transformers' models call in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...call.scalars import as_float
from ...variant.scores import Bias, SoftCap
from . import keywords
from .mask import MaskParts
from .packed import Length, attend_packed
from .seen import seen, seen_when_packed


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskParts | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Length = None,
    max_length_k: Length = None,
    deterministic: bool | None = None,
    *,
    backend: str | None = None,
    ignored: frozenset[str] = frozenset(),
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it.

    Args:
        module: the layer; its ``is_causal`` counts where neither a mask nor the argument says it.
        query: (batch, heads, q_length, head_dim).
        key: (batch, kv_heads, kv_length, head_dim).
        value: (batch, kv_heads, kv_length, head_dim_v).
        attention_mask: as :func:`.mask.make_mask` makes it; or a user's own tensor (batch or 1, heads or 1, queries or
            1, kv_length), bool (True: seen) or float (added to the scores); or None.
        dropout: of the probabilities; 0 when not training.
        scaling: of the scores; None: ``head_dim ** -0.5``.
        is_causal: where there is no mask.
        sliding_window: how many keys a query sees, itself included, where there is no mask.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        s_aux: attention sinks, one logit for each head (gpt-oss).
        position_bias: added to the scores after the cap, (batch or 1, heads or 1, queries or 1, kv_length) (T5).
        cu_seq_lens_q: (sequences + 1,), where packed sequences begin and end; the batch elements are one row of them.
        cu_seq_lens_k: the same of the keys.
        max_length_q: the longest sequence's length, or more; a tensor on a GPU is not asked.
        max_length_k: the same of the keys.
        deterministic: ask for bitwise equal gradients.
        backend: of tileattn's attention.
        ignored: keyword arguments that may be there and do not matter.
        others: other keyword arguments, see :mod:`.keywords`.

    Returns:
        o (batch, q_length, heads, head_dim_v), and None in place of the weights.
    """
    keywords.check(others, ignored)
    q, k, v = (_last_contiguous(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": None if scaling is None else as_float("scaling", scaling),
        "sink": None if s_aux is None else s_aux.reshape(-1),
        "dropout_p": dropout,
        "deterministic": bool(deterministic),
        "backend": backend,
    }
    caps = [] if softcap is None else [SoftCap(softcap)]
    visible = (module, attention_mask, q.shape[1], k.shape[1], is_causal, sliding_window)
    cu_seqlens = (cu_seq_lens_q, cu_seq_lens_k)
    if cu_seqlens != (None, None):
        if position_bias is not None:
            raise NotImplementedError('attn_implementation="tileattn": position_bias cannot go with cu_seq_lens')
        own = seen_when_packed(*visible)
        options |= {"mask": own.mask, "causal": own.causal, "score_mod": caps or None}
        return attend_packed(q, k, v, cu_seqlens, (max_length_q, max_length_k), **options), None
    what = seen(*visible)
    if what.keys < k.shape[1]:
        k, v = k[:, : what.keys], v[:, : what.keys]
    biases = [Bias(bias[..., : what.keys]) for bias in (position_bias, what.bias) if bias is not None]
    options |= {"mask": what.mask, "causal": what.causal, "score_mod": [*caps, *biases] or None}
    o = attention(q, k, v, **options)
    assert isinstance(o, Tensor)
    return o, None


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
