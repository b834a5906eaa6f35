"""The autograd function behind :mod:`rotary`: it rotates parts of a tensor, each by its own tables of cos and sin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.triton.rotary import check, rotate

# A part of a tensor and its tables: (slices of the dimensions after the first two, cos, sin).
Place = tuple[slice, ...]
Part = tuple[Place, Tensor, Tensor]


class Rotation(torch.autograd.Function):
    """Rotates parts of x; the backward pass rotates the gradient in the opposite direction.

    An in-place rotation does not mark x as modified, for two reasons. flash-attn's functions accept a leaf that needs a
    gradient, and autograd refuses to modify one. They also accept one of several views of a tensor, such as q of
    ``q, k, v = qkv.unbind(2)``; if autograd saw the write, it would refuse to use the other views.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        places: tuple[Place, ...],
        interleaved: bool,
        inplace: bool,
        offsets: Any,
        cu_seqlens: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:
        is_tensor = isinstance(offsets, Tensor)
        ctx.places, ctx.interleaved, ctx.offsets = places, interleaved, None if is_tensor else offsets
        ctx.save_for_backward(cu_seqlens, offsets if is_tensor else None, *tables)
        result = x if inplace else x.clone()
        hides_write = inplace and not torch.compiler.is_compiling() and x._is_view()
        _rotate_parts(x, x.data if hides_write else result, places, tables, offsets, cu_seqlens, interleaved, False)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, offsets, *tables = ctx.saved_tensors
        offsets = ctx.offsets if offsets is None else offsets
        dx = dy.clone()
        _rotate_parts(dy, dx, ctx.places, tables, offsets, cu_seqlens, ctx.interleaved, True)
        return dx, *(None,) * (5 + len(tables))


def _rotate_parts(
    x: Tensor,
    result: Tensor,
    places: Any,
    tables: Any,
    offsets: Any,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    for place, cos, sin in zip(places, tables[::2], tables[1::2]):
        where = (slice(None), slice(None), *place) if place else ()
        rotate(x[where], result[where], cos, sin, offsets, cu_seqlens, interleaved, conjugate)


def rotated(
    x: Tensor,
    parts: list[Part],
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates parts of x; the other arguments are those of :func:`..ops.triton.rotary.apply_rotary`."""
    offsets: Any = seqlen_offsets
    for _, cos, sin in parts:
        offsets = check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    places = tuple(place for place, _, _ in parts)
    tables = [table for _, cos, sin in parts for table in (cos, sin)]
    result: Tensor = Rotation.apply(x, places, interleaved, inplace, offsets, cu_seqlens, *tables)
    return result
