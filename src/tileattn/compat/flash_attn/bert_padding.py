"""``flash_attn.bert_padding``: conversion between padded batches and packed sequences, with flash-attn's results.

A padded batch is (batch, seqlen, ...) with a mask (batch, seqlen) that is not 0 for tokens and 0 for padding. Packed
sequences are the tokens alone, (total, ...), one sequence after another, as the varlen functions take them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...api import padding
from ...call.argument_names import renamed
from ._absent import NotProvided

_NAMES = {"x": "hidden_states", "mask": "attention_mask"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns einops' `rearrange` and `repeat`, which existing code imports from flash-attn's module."""
        if name not in ("rearrange", "repeat"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module("einops"), name)
        except ModuleNotFoundError:
            message = f"flash_attn.bert_padding.{name} is einops.{name}: pip install einops, and import it from there"
            raise NotProvided(message, name="einops") from None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: (rows, ...) and (n,) give (n, ...). Differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with the rows of values (n, ...) written at indices (n,). Differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``input[indices]`` (n, ...), and the input itself (rows, ...) for a residual connection.

    The second result shares the input's memory, but autograd does not treat it as a view, so it may be changed in
    place. The input's gradient is the sum of both results' gradients.
    """
    return IndexFirstAxisResidual.apply(input, indices)  # type: ignore[no-any-return]


class IndexFirstAxis(torch.autograd.Function):
    """:func:`index_first_axis` as an autograd function, for code that calls ``IndexFirstAxis.apply(input, indices)``.

    The gradient of a row that occurs several times in `indices` is a sum.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = input.shape
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_add(0, indices, gradients[0]), None


class IndexPutFirstAxis(torch.autograd.Function):
    """:func:`index_put_first_axis` as an autograd function: ``apply(values, indices, first_axis_dim)``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        return index_put_first_axis(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return gradients[0].index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """:func:`index_first_axis_residual` as an autograd function: ``apply(input, indices)``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        of_rows, of_residual = gradients
        (indices,) = ctx.saved_tensors
        return of_residual.index_add(0, indices, of_rows), None


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs a padded batch, by :func:`tileattn.unpad_input`.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int; not 0 for tokens, 0 for padding.
        unused_mask: (batch, seqlen), bool or int; not 0 for padding that stays in the packed sequences.

    Returns:
        hidden_states (total, ...) of the packed positions; their indices (total,) in the flattened batch; cu_seqlens
        (batch + 1,), int32; the longest length; and the numbers of tokens without unused positions (batch,), int32.
    """
    try:
        return padding.unpad_input(hidden_states, attention_mask, unused_mask)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES) from None


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs a padded batch whose rows each contain several sequences, one after another.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), int: the lengths of a row's sequences, in order, then zeros.

    Returns:
        hidden_states (total, ...) of the tokens; their indices (total,) in the flattened batch; cu_seqlens
        (sequences + 1,), int32; and the longest length.
    """
    seqlen = attention_mask_in_length.shape[-1]
    tokens_of_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    is_token = torch.arange(seqlen, device=tokens_of_row.device) < tokens_of_row
    tokens, indices, *_ = padding.unpad_input(hidden_states, is_token)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, cu_seqlens, int(lengths.max()) if len(lengths) else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`, by :func:`tileattn.pad_input`: (total, ...) -> (batch, seqlen, ...), padding is 0.

    indices: (total,), from `unpad_input`.
    """
    try:
        return padding.pad_input(hidden_states, indices, batch, seqlen)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES) from None
