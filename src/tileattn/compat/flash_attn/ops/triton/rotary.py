"""``flash_attn.ops.triton.rotary``: rotary embeddings of one tensor, in PyTorch operations for any device."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._absent import absent_names

if not TYPE_CHECKING:
    __getattr__ = absent_names(__name__, {"rotary_kernel": "apply_rotary of the same module"})


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates pairs of the first ``rotary_dim`` elements of each head by the angles of the row's position.

    A pair ``(a, b)`` becomes ``(a cos - b sin, a sin + b cos)``, computed in float32 (float64 for float64 tensors).

    Args:
        x: (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim).
        cos: (rows, rotary_dim / 2): row ``p`` has the cosines at position ``p``; any floating-point dtype.
        sin: (rows, rotary_dim / 2): the sines.
        seqlen_offsets: added to the positions: an int, or a tensor (batch,) of int32 or int64, one for each sequence. A
            tensor is not read on the host; therefore rows of x whose position has no row in cos are left unchanged.
        cu_seqlens: int32 (batch + 1,): packed sequences, as for :func:`flash_attn.flash_attn_varlen_func`. Unused tail
            rows, after the last sequence, are left unchanged.
        max_seqlen: the longest packed sequence; cos must have rows for it. None: not checked.
        interleaved: whether pairs are neighbours (GPT-J); else ``i`` and ``i + rotary_dim / 2`` are a pair (GPT-NeoX).
        inplace: whether to write to x and return x.
        conjugate: whether to rotate in the opposite direction, as for the gradient.

    Returns:
        The rotated tensor, with x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names the argument, its value and what is accepted.
    """
    _check_tensor("x", x)
    ndim, shape = (4, "(batch, seqlen, heads, head_dim)") if cu_seqlens is None else (3, "(total, heads, head_dim)")
    if x.ndim != ndim:
        raise ValueError(f"x must have {ndim} dimensions, {shape}, got shape {tuple(x.shape)}")
    result = x if inplace else x.clone()
    offsets = check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    rotate(x, result, cos, sin, offsets, cu_seqlens, interleaved, conjugate)
    return result


def check(
    x: Tensor, cos: Any, sin: Any, seqlen_offsets: Any, cu_seqlens: Any, max_seqlen: int | None
) -> int | torch.SymInt | Tensor:
    """Checks the arguments of `rotate`. Returns the offsets, with numpy's ints converted to Python's."""
    _check_tensor("cos", cos)
    _check_tensor("sin", sin)
    if cos.ndim != 2 or sin.shape != cos.shape:
        both = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"cos and sin must both have shape (rows, rotary_dim / 2), got {both}")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos: rotary_dim must be at most x's head_dim {x.shape[-1]}, got {2 * cos.shape[1]}")
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(cu_seqlens.shape)} in {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens must be an int32 tensor (batch + 1,), got shape {got}")
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    seqlen = x.shape[1] if cu_seqlens is None else max_seqlen or min(x.shape[0], 1)
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,) or seqlen_offsets.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(seqlen_offsets.shape)} in {seqlen_offsets.dtype}"
            raise ValueError(
                f"seqlen_offsets must be an int, or an int32 tensor (batch,) = ({batch},), got shape {got}"
            )
        first: int | torch.SymInt = 0
    else:
        seqlen_offsets = first = _offset(seqlen_offsets)
    if cos.shape[0] < first + seqlen:
        raise ValueError(f"cos must have a row for each of {first + seqlen} positions, got {cos.shape[0]} rows")
    return seqlen_offsets  # type: ignore[no-any-return]


def rotate(
    x: Tensor,
    result: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: int | torch.SymInt | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Writes the rotated pairs of x to `result`, a copy of x or x itself; other elements of `result` do not change.

    x is (batch, seqlen, ..., head_dim) or (total, ..., head_dim), with any dimensions for the heads.
    """
    dtype, rotary_dim = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[1]
    rows = 2 if cu_seqlens is None else 1
    cos, sin = (t.to(dtype) for t in _of_rows(x.shape[:rows], cos, sin, offsets, cu_seqlens))
    over_heads = (*cos.shape[:-1], *(1,) * (x.ndim - rows - 1), cos.shape[-1])
    cos, sin = cos.reshape(over_heads), sin.reshape(over_heads)
    sin = -sin if conjugate else sin
    a, b = (half.to(dtype) for half in _pairs(x, rotary_dim, interleaved))
    rotated = a * cos - b * sin, a * sin + b * cos  # compute both before writing: `result` may be x
    for half, values in zip(_pairs(result, rotary_dim, interleaved), rotated):
        half.copy_(values)


def _pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second element of each pair, as views."""
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


def _of_rows(
    rows: torch.Size, cos: Tensor, sin: Tensor, offsets: int | torch.SymInt | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The tables cos and sin at the positions of x's rows: ([batch,] seqlen, rotary_dim / 2), or (total, ...).

    Rows without a position in the tables get cos = 1 and sin = 0.
    """
    if cu_seqlens is None and not isinstance(offsets, Tensor):
        of_rows = slice(offsets, offsets + rows[1])
        return cos[of_rows], sin[of_rows]
    if cu_seqlens is None:
        positions = torch.arange(rows[1], device=cos.device) + offsets[:, None]  # type: ignore[index]
        in_table = positions < cos.shape[0]
    else:
        row, cu_seqlens = torch.arange(rows[0], device=cos.device), cu_seqlens.long()
        sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
        in_table = sequence < cu_seqlens.shape[0] - 1
        sequence = torch.where(in_table, sequence, 0)
        positions = row - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
        in_table &= positions < cos.shape[0]
    in_table &= positions >= 0
    positions = torch.where(in_table, positions, 0)
    in_table = in_table.unsqueeze(-1)
    return torch.where(in_table, cos[positions], 1.0), torch.where(in_table, sin[positions], 0.0)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def _offset(offset: Any) -> int | torch.SymInt:
    try:
        number = offset if isinstance(offset, (int, torch.SymInt)) else operator.index(offset)
    except TypeError:
        raise TypeError(f"seqlen_offsets must be an int or a tensor of ints (batch,), got {offset!r}") from None
    if number < 0:
        raise ValueError(f"seqlen_offsets must be at least 0, got {number}")
    return number
