"""`attend_paged`: the attention function of transformers' continuous batching (``model.generate_batch``).

transformers keeps the keys of all requests in one flat cache and packs the tokens of a step: prompts, or parts of
them, beside single tokens of requests that generate. Its `cache.update` writes the new keys and returns those that each
request may see, packed; :func:`tileattn.varlen_attention` then takes each request by its own length. Where all requests
have few new tokens, nothing is gathered: :func:`tileattn.decode` reads the cache (blocks.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.varlen import varlen_attention
from ...call.scalars import as_float
from ...variant.masks import SlidingWindow
from ...variant.scores import SoftCap
from . import keywords
from .blocks import are_steps, attend_blocks

# Arguments of a step that other implementations use.
_UNUSED = frozenset({"block_table", "is_causal", "logits_indices", "logits_processor_args"})


def attend_paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int | dict[str, int] = 0,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    backend: str | None = None,
    ignored: frozenset[str] = frozenset(),
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one step of continuous batching.

    Args:
        module: the layer; its ``layer_idx`` says which part of the cache it has, and its ``sliding_window``, if it has
            one, how many keys a query sees.
        query: (1, heads, tokens, head_dim), the tokens of all requests of the step.
        key: (1, kv_heads, tokens, head_dim), the new keys, which are written to the cache.
        value: (1, kv_heads, tokens, head_dim), the new values.
        attention_mask: must be None: causal attention within each request is meant.
        dropout: must be 0.
        scaling: factor of the inner products; None: ``head_dim ** -0.5``.
        sliding_window: the number of keys that a query sees, its own included; None: that of the module.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks, one logit per head.
        cache: transformers' PagedAttentionCache.
        cu_seq_lens_q: (requests + 1,), the boundaries of the requests in the queries.
        cu_seq_lens_k: (requests + 1,), the boundaries in the keys; a dict with one for each type of layer.
        max_seqlen_q: an upper bound of the requests' numbers of queries.
        max_seqlen_k: an upper bound of the numbers of keys; a dict as cu_seq_lens_k.
        read_index: for `cache.update`.
        write_index: for `cache.update`.
        backend: as for :func:`tileattn.varlen_attention`.
        ignored: names of keyword arguments to ignore.
        others: other keyword arguments; :mod:`.keywords` checks them.

    Returns:
        o (1, tokens, heads, head_dim_v), and None in place of the weights.

    Raises:
        ValueError: there is no cache: the call is not one of continuous batching.
        NotImplementedError: there is a mask.
    """
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            'attn_implementation="paged|tileattn" is for continuous batching (generate_batch), and got no paged cache: '
            'use attn_implementation="tileattn" for all else'
        )
    if attention_mask is not None:
        raise NotImplementedError('attn_implementation="paged|tileattn" does not take an attention mask')
    keywords.check(others, ignored | _UNUSED)
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    layers = "sliding_attention" if window else "full_attention"
    ends_k = cu_seq_lens_k[layers] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    longest_k = max_seqlen_k[layers] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    options: dict[str, Any] = {
        "score_mod": None if softcap is None else SoftCap(softcap),
        "scale": None if scaling is None else as_float("scaling", scaling),
        "sink": None if s_aux is None else s_aux.reshape(-1),
        "backend": backend,
    }
    q = query.transpose(1, 2).squeeze(0)
    cu_seqlens_q, cu_seqlens_k = cu_seq_lens_q.to(torch.int32), ends_k.to(torch.int32)
    indices: dict[str, Any] = {"layer_idx": module.layer_idx, "read_index": read_index, "write_index": write_index}
    if not window and not dropout and are_steps(cache, q, key, max_seqlen_q, **indices):
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, longest_k)
        return attend_blocks(cache, q, key, value, lengths, indices, **options)[None], None
    k, v = cache.update(key_states=key, value_states=value, **indices)
    options |= {"causal": True, "mask": SlidingWindow(window - 1, 0) if window else None, "dropout_p": dropout}
    o = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, longest_k, **options)
    assert isinstance(o, Tensor)
    return o[None], None
