"""append_kv in PyTorch operations, for any device.

On a GPU there is no host-device synchronisation. Rows that must not be written, which only the device knows, are
therefore not left out: they write the row of another token once more. Errors go to the device's status
(:mod:`tileattn.call.cache_status`). On other devices values are checked at once, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import cache_fields, cache_status
from ...call.appending import AppendCall, AppendInputs
from .recorder import Recorder


def refusal(call: AppendCall) -> str | None:
    """The reason why these operations do not run a call: there is none."""
    return None


def prepare(call: AppendCall) -> Callable[[AppendInputs], Tensor | None]:
    """See :class:`tileattn.runtime.append_dispatch.AppendPhase`."""

    def append(inputs: AppendInputs) -> Tensor | None:
        deferred = inputs.k.is_cuda
        if deferred:
            cache_status.raise_pending()
        q = _append(call, inputs, _Deferrer(inputs.k.device) if deferred else _Raiser())
        if deferred:
            cache_status.report(inputs.k.device)
        return q

    return append


class _Rows(NamedTuple):
    """Where the rows of k or q belong: int64 tensors (batch, rows); packed: (1, total).

    Attributes:
        sequence: the row's sequence.
        position: its position in that sequence, negative for a row before the first key or of no sequence.
    """

    sequence: Tensor
    position: Tensor


def _append(call: AppendCall, inputs: AppendInputs, errors: _Deferrer | _Raiser) -> Tensor | None:
    k, v, q = inputs.k, inputs.v, inputs.q
    rows = _rows(inputs, k.shape[1], errors)
    of_cache, written = _places(inputs, rows, errors)
    q_rows = rows if q is None or q.shape[1] == k.shape[1] else _rows(inputs, q.shape[1], errors)
    rotated = None
    if inputs.cos is not None:
        positions = rows.position if inputs.positions is None else inputs.positions.long()
        k = _rotated(k, rows, positions, call, inputs, errors)
        if q is not None:
            given = inputs.positions if inputs.q_positions is None else inputs.q_positions
            rotated = _rotated(q, q_rows, q_rows.position if given is None else given.long(), call, inputs, errors)
    if k.shape[0] and k.shape[1] and inputs.k_cache.numel():
        _write(inputs.k_cache, k, of_cache, written)
        _write(inputs.v_cache, v, of_cache, written)
    return rotated


def _rows(inputs: AppendInputs, count: int, errors: _Deferrer | _Raiser) -> _Rows:
    """The rows of a tensor with `count` rows in each batch element."""
    seqlens, cu_seqlens = inputs.seqlens_k.long(), inputs.cu_seqlens_q
    index = torch.arange(count, device=seqlens.device)
    wrong = (seqlens < 0) | (seqlens > inputs.capacity)
    errors.of_sequences(
        cache_fields.SEQLENS_K, wrong, seqlens, f"seqlens_k must be from 0 to the cache's capacity {inputs.capacity}"
    )
    if cu_seqlens is None:
        sequence = torch.arange(seqlens.shape[0], device=seqlens.device)[:, None].expand(-1, count)
        return _Rows(sequence, seqlens.clamp(min=0)[:, None] - count + index)
    bounds = cu_seqlens.long()
    wrong = bounds[1:] < bounds[:-1]
    wrong[:1] |= bounds[:1] != 0
    wrong[-1:] |= bounds[-1:] > count
    text = f"cu_seqlens_q must start at 0, must not decrease, and must not go beyond the {count} rows of k"
    errors.of_sequences(cache_fields.CU_SEQLENS_Q, wrong, bounds[1:], text)
    if seqlens.shape[0] == 0:
        return _Rows(index[None], torch.full_like(index, -1)[None])
    sequence = (torch.searchsorted(bounds, index, right=True) - 1).clamp(0, seqlens.shape[0] - 1)
    first, end = bounds[sequence], bounds[sequence + 1]
    position = seqlens.clamp(min=0)[sequence] - (end - index)
    return _Rows(sequence[None], torch.where((first <= index) & (index < end), position, -1)[None])


def _places(inputs: AppendInputs, rows: _Rows, errors: _Deferrer | _Raiser) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The indices (row of the cache, token) of new tokens, each (batch, rows), and whether they are written."""
    position, tokens = rows.position, inputs.k_cache.shape[1]
    written = (position >= 0) & (position < inputs.capacity)
    if inputs.page_table is None:
        return (rows.sequence, position), written
    if not inputs.page_table.numel():
        return (position, position), written
    page_index = torch.where(written, position, 0) // max(tokens, 1)
    page = inputs.page_table.long()[rows.sequence, page_index]
    pages = inputs.k_cache.shape[0]
    exists = (page >= 0) & (page < pages)
    text = f"page_table's entries for new tokens must be from 0 to the number of pages - 1 = {pages - 1}"
    errors.of_rows(cache_fields.PAGE_TABLE, written & ~exists, page, rows.sequence, text)
    return (page, position % max(tokens, 1)), written & exists


def _write(cache: Tensor, x: Tensor, places: tuple[Tensor, Tensor], written: Tensor) -> None:
    """Writes the rows of x that are `written`; there are rows, and the cache has elements."""
    x, written = x.flatten(0, 1), written.flatten()
    # A row that is not written takes value and place of the first one that is, or else those of the cache's first row.
    # Indices keep a dimension: the host would read one without.
    first = written.int().argmax(keepdim=True)
    source = torch.where(written, torch.arange(written.shape[0], device=x.device), first)
    some = written.index_select(0, first)
    row, token = (torch.where(some, place.flatten()[source], 0) for place in places)
    cache[row, token] = torch.where(some[:, None, None], x[source], cache[0, 0])


def _rotated(
    x: Tensor, rows: _Rows, positions: Tensor, call: AppendCall, inputs: AppendInputs, errors: _Deferrer | _Raiser
) -> Tensor:
    """x with rotated pairs, in x's dtype; rows at negative positions are copied."""
    cos, sin = inputs.cos, inputs.sin
    assert cos is not None
    assert sin is not None
    text = f"cos and sin, with {cos.shape[0]} rows, must have a row for each position"
    errors.of_rows(cache_fields.POSITIONS, positions >= cos.shape[0], positions, rows.sequence, text)
    has_row = (positions >= 0) & (positions < cos.shape[0])
    place = torch.where(has_row, positions, 0)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # (batch, rows, 1, rotary_dim / 2)
    cos, sin = (table[place].to(dtype)[:, :, None] for table in (cos, sin))
    result = x.clone(memory_format=torch.contiguous_format)
    a, b = (part.to(dtype) for part in _pairs(x, call))
    # (a, b) -> (a cos - b sin, a sin + b cos)
    for part, old, new in zip(_pairs(result, call), (a, b), (a * cos - b * sin, a * sin + b * cos)):
        part.copy_(torch.where(has_row[:, :, None, None], new, old))
    return result


def _pairs(x: Tensor, call: AppendCall) -> tuple[Tensor, Tensor]:
    """The first and the second element of each pair, as views."""
    rotary_dim = call.rotary_dim
    if call.interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


# --- Errors ---


class _Raiser:
    """Raises the first error at once."""

    def of_sequences(self, field: int, wrong: Tensor, values: Tensor, text: str) -> None:
        """An error of the sequences that are `wrong`; the tensors are (batch,)."""
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            raise ValueError(f"{text}, got {int(values[at])} (sequence {at})")

    def of_rows(self, field: int, wrong: Tensor, values: Tensor, sequence: Tensor, text: str) -> None:
        """An error of the rows that are `wrong`; the tensors are (batch, rows)."""
        if bool(wrong.any()):
            at = int(wrong.flatten().int().argmax())
            number = int(sequence.flatten()[at])
            raise ValueError(f"{text}, got {int(values.flatten()[at])} (sequence {number})")


class _Deferrer:
    """Records errors in the device's status."""

    def __init__(self, device: torch.device) -> None:
        self.recorder = Recorder(device)

    def of_sequences(self, field: int, wrong: Tensor, values: Tensor, text: str) -> None:
        """See :class:`_Raiser`."""
        self.recorder.record(field, wrong)

    def of_rows(self, field: int, wrong: Tensor, values: Tensor, sequence: Tensor, text: str) -> None:
        """See :class:`_Raiser`."""
        self.recorder.record(field, wrong, sequence)
