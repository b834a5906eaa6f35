"""`attend`: the attention function that transformers' models call in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...call.scalars import as_float
from ...runtime.context_parallel import is_active
from ...variant.scores import Bias, SoftCap
from . import keywords, layers
from .context_parallel import ContextParallel, Layer, attend_shards
from .mask import MaskParts
from .packed import Length, attend_packed
from .seen import seen, seen_when_packed
from .step import attend_step, is_step


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
    context_parallel: ContextParallel | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments of transformers' attention functions.

    Args:
        module: the layer; its ``is_causal`` is used if there is neither a mask nor the argument is_causal.
        query: (batch, heads, q_length, head_dim).
        key: (batch, kv_heads, kv_length, head_dim).
        value: (batch, kv_heads, kv_length, head_dim_v).
        attention_mask: the result of :func:`.mask.make_mask`; or a user's tensor (batch or 1, heads or 1, queries or 1,
            kv_length), bool (True: visible) or float (added to the scores); or None.
        dropout: probability of dropping a weight; 0 outside training.
        scaling: factor of the inner products; None: ``head_dim ** -0.5``.
        is_causal: whether attention is causal; used only without a mask.
        sliding_window: the number of keys that a query sees, its own position included; used only without a mask.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        s_aux: attention sinks, one logit per head (gpt-oss).
        position_bias: added to the scores after the cap, (batch or 1, heads or 1, queries or 1, kv_length) (T5).
        cu_seq_lens_q: (sequences + 1,), the boundaries of packed sequences in the queries; the batch elements, one
            after another, are one row of packed tokens.
        cu_seq_lens_k: (sequences + 1,), the boundaries in the keys.
        max_length_q: an upper bound of the sequences' numbers of queries. A tensor on a GPU is not read.
        max_length_k: an upper bound of the sequences' numbers of keys. A tensor on a GPU is not read.
        deterministic: whether gradients must be bitwise equal from run to run.
        backend: as for :func:`tileattn.attention`.
        ignored: names of keyword arguments to ignore.
        context_parallel: the plan to which q, k and v, shards of the sequence, are given; or None.
        others: other keyword arguments; :mod:`.keywords` checks them.

    Returns:
        o (batch, q_length, heads, head_dim_v), and None in place of the weights.
    """
    keywords.check(others, ignored)
    q, k, v = (_last_contiguous(x.transpose(1, 2)) for x in (query, key, value))
    sink = None if s_aux is None else s_aux.reshape(-1)
    if context_parallel is not None or is_active():
        refused = {"dropout": dropout, "position_bias": position_bias, "backend": backend}
        refused |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        layer = Layer(module, attention_mask, is_causal, sliding_window, softcap, sink, scaling, refused)
        return attend_shards(context_parallel, q, k, v, layer), None
    kind: tuple[Any, ...] | None = None
    ordinary = dropout == 0.0 and position_bias is cu_seq_lens_q is cu_seq_lens_k is None
    calls = attention_mask.calls if isinstance(attention_mask, MaskParts) and ordinary else None
    if calls is not None:
        kind = layers.key_of(module, q, k, v, sink, scaling, softcap, is_causal, backend)
        if kind is not None and kind in calls:
            return layers.attend_again(attention_mask, kind, module, q, k, v, sink), None
    options: dict[str, Any] = {
        "scale": None if scaling is None else as_float("scaling", scaling),
        "sink": sink,
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
    o = _attend(q, k, v, visible, position_bias, caps, options)
    if calls is not None and kind is not None:  # the call was right: later layers make it together
        calls[kind] = None
    return o, None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: tuple[Any, ...],
    position_bias: Tensor | None,
    caps: list[SoftCap],
    options: dict[str, Any],
) -> Tensor:
    """Computes o of a call that is not packed. visible: the arguments of :func:`.seen.seen`."""
    what, mask = seen(*visible), visible[1]
    if position_bias is None and is_step(mask, q, k, v, options["sink"], options["dropout_p"]):
        of_step = {name: options[name] for name in ("scale", "sink", "backend")}
        return attend_step(q, k, v, mask, score_mod=caps or None, **of_step)
    if what.keys < k.shape[1]:
        k, v = k[:, : what.keys], v[:, : what.keys]
    biases = [Bias(bias[..., : what.keys]) for bias in (position_bias, what.bias) if bias is not None]
    o = attention(q, k, v, mask=what.mask, causal=what.causal, score_mod=[*caps, *biases] or None, **options)
    assert isinstance(o, Tensor)
    return o


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
