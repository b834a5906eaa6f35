"""Checks the keyword arguments that reach an attention function of transformers.

A model passes keyword arguments that it does not use down to its attention layers, so the attention receives arguments
that are meant for other code. Arguments that change the result are arguments of :func:`.attention.attend` or are
refused here. Unknown arguments are refused too, because they might change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Arguments for other parts of a model, for its outputs or loss, or for other implementations of attention.
HARMLESS = frozenset({
    "attention_interface", "cache_position", "inputs_embeds", "kernel_options", "logits_to_keep", "max_seqlen",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "token_type_ids", "training", "use_cache",
})  # fmt: skip

REFUSED = {
    "output_attentions": "the weights are never in memory; to look at them load the model with "
    'attn_implementation="eager"',
    "head_mask": 'tileattn does not weigh heads; use attn_implementation="eager"',
    "layer_head_mask": 'tileattn does not weigh heads; use attn_implementation="eager"',
    "indices": "tileattn does not know attention to selected keys (DeepSeek's sparse attention)",
    "block_indices": "tileattn does not know attention to selected blocks of keys",
}


def check(keywords: Mapping[str, Any], ignored: frozenset[str]) -> None:
    """Raises for the first keyword argument that changes, or might change, the result.

    Raises:
        NotImplementedError: the argument is known, and tileattn does not support it.
        TypeError: the argument is unknown.
    """
    for name, value in keywords.items():
        if value is None or value is False or name in HARMLESS or name in ignored:
            continue
        if name in REFUSED:
            raise NotImplementedError(f'attn_implementation="tileattn": {name} is not supported: {REFUSED[name]}')
        raise TypeError(
            f'attn_implementation="tileattn" got a keyword argument {name!r} that it does not know. If it does not '
            f"concern attention, register(ignore=({name!r},)) lets it pass"
        )
