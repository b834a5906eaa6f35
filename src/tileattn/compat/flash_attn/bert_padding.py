"""``flash_attn.bert_padding``: between padded batches and packed sequences; what the functions of that name return.

A padded batch is (batch, seqlen, ...) with a mask (batch, seqlen) of the tokens that are there; packed are those alone,
(total, ...), one sequence behind the other, as the varlen functions take them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: (rows, ...) and (n,) give (n, ...). Differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with the rows of values (n, ...) at indices (n,), and zeros elsewhere. Differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes the tokens out of a padded batch. Waits for the device: how many there are decides about sizes.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int; not 0 where a token is.
        unused_mask: the same of places that are kept in the result although no token is there.

    Returns:
        hidden_states (total, ...) of the tokens; their indices (total,) in the flattened batch; cu_seqlens
        (batch + 1,), int32; the longest length; and the lengths without unused places (batch,), int32.
    """
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = used if unused_mask is None else kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows that hold several sequences one behind the other, each to be attended to by itself.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), int: the lengths of a row's sequences, in order; 0 for no sequence.

    Returns:
        hidden_states (total, ...), indices (total,), cu_seqlens (sequences + 1,), int32, and the longest length.
    """
    seqlen = attention_mask_in_length.shape[-1]
    tokens_of_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    there = torch.arange(seqlen, device=tokens_of_row.device) < tokens_of_row
    indices = there.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts tokens (total, ...) back to where :func:`unpad_input` found them: (batch, seqlen, ...), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
