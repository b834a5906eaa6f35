"""Conversion between padded batches and packed sequences, as in flash-attn's ``bert_padding``."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Unpadded(NamedTuple):
    """The result of :func:`unpad_input`.

    Attributes:
        x: (total, ...), the tokens of all sequences, one sequence after the other.
        indices: int64 (total,), the position of each token in the flattened (batch * seqlen) input.
        cu_seqlens: int32 (batch + 1,), the cumulative lengths for :func:`tileattn.varlen_attention`.
        max_seqlen: the length of the longest sequence.
        seqused: int32 (batch,), the number of used tokens in each sequence.
    """

    x: torch.Tensor
    indices: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    seqused: torch.Tensor


def unpad_input(x: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None) -> Unpadded:
    """Packs the tokens of a padded batch, without the padding.

    The host waits for the device, because the number of tokens decides the result's shape. The result is
    differentiable in x: padding gets a gradient of 0.

    Args:
        x: (batch, seqlen, ...), any dtype.
        mask: bool or integer tensor (batch, seqlen) on x's device; False or 0 marks padding.
        unused_mask: tensor like mask, True for tokens that are packed but do not count in ``seqused``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted.
    """
    _check_tensor("x", x)
    if x.ndim < 2:
        raise ValueError(f"x must have shape (batch, seqlen, ...), got {tuple(x.shape)}")
    used = taken = _as_bool("mask", mask, x)
    if unused_mask is not None:
        taken = used | _as_bool("unused_mask", unused_mask, x)
    lengths = taken.sum(dim=1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    return Unpadded(
        x.flatten(0, 1).index_select(0, indices),
        indices,
        F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if len(lengths) else 0,
        used.sum(dim=1, dtype=torch.int32),
    )


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _as_bool(name: str, mask: Any, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype.is_floating_point or mask.dtype.is_complex:
        given = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a tensor of bool or integers, 0 where there is padding, got {given}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} must have shape (batch, seqlen) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {mask.device}")
    return mask != 0


def pad_input(x: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of :func:`unpad_input`: a padded batch (batch, seqlen, ...) with zeros in the padding.

    The result is differentiable in x.

    Args:
        x: (total, ...), any dtype.
        indices: int64 or int32 (total,) on x's device, as returned by :func:`unpad_input`.
        batch: the batch size of the padded tensor.
        seqlen: the sequence length of the padded tensor.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted. The
            *values* of indices are checked on a CPU only: on a GPU, reading them would synchronise.
    """
    _check_tensor("x", x)
    _check_tensor("indices", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices must be int64 or int32, got {indices.dtype}")
    if indices.ndim != 1 or x.ndim < 1 or x.shape[0] != indices.shape[0]:
        raise ValueError(
            f"x and indices must have shapes (total, ...) and (total,), got {tuple(x.shape)} and {tuple(indices.shape)}"
        )
    if indices.device != x.device:
        raise ValueError(f"indices must be on x's device {x.device}, got {indices.device}")
    batch, seqlen = _size("batch", batch), _size("seqlen", seqlen)
    padded = x.new_zeros(batch * seqlen, *x.shape[1:])
    try:
        padded = padded.index_copy(0, indices.long(), x)
    except IndexError as error:
        places = f"0 .. batch * seqlen - 1 = {batch * seqlen - 1}"
        raise ValueError(f"indices must lie in {places}, got others: {error}") from None
    return padded.view(batch, seqlen, *x.shape[1:])


def _size(name: str, size: Any) -> Any:
    """The size as an int. numpy integers and one-element tensors are accepted, as by :func:`operator.index`."""
    try:
        value = size if isinstance(size, (int, torch.SymInt)) else operator.index(size)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {size!r}") from None
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value
