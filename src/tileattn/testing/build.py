"""Builds the tensors of a conformance case: the arguments of its call, and gradients of its outputs."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ..call.fp8 import FP8, Descales, accumulator, quantize_fp8
from .call_arguments import Arguments, ConformanceCase
from .shapes import PackedShape
from .tensors import LAYOUTS, Draw
from .variants import MASKS, SCORES


def build(case: ConformanceCase, device: torch.device | str = "cpu") -> Arguments:
    """The tensors, mask and score modifications of a case on a device, also "meta"; the id determines the values."""
    structure, shape, device = case.structure, case.shape, torch.device(device)
    draw = Draw(torch.Generator().manual_seed(zlib.crc32(case.id.encode())), device)
    keys = (*shape.of_k, shape.kv_heads)
    q = draw.queries_or_keys(shape.values, (*shape.of_q, shape.heads, structure.head_dim), +1)
    k = draw.queries_or_keys(shape.values, (*keys, structure.head_dim), -1)
    v = draw.queries_or_keys("normal", (*keys, structure.head_dim_v), +1)
    descales = None
    if case.dtype == FP8:
        (q, k, v), descales = _in_fp8(draw, shape.values != "normal", (q, k, v))
    packed, dropout_p = None, 0.0
    if isinstance(shape, PackedShape):
        packed, dropout_p = shape.packed(device), shape.dropout_p
        for x, lengths in ((q, shape.lengths_q), (k, shape.lengths_k), (v, shape.lengths_k)):
            x[:, sum(lengths) :] = torch.nan  # rows of no sequence: whoever reads them shows it
    q, k, v = (LAYOUTS[shape.layout](x.to(case.dtype), device) for x in (q, k, v))
    return Arguments(
        q,
        k,
        v,
        mask=MASKS[structure.mask](draw, shape),
        score_mods=tuple(SCORES[name](draw, shape) for name in structure.scores),
        sink=draw.normal(shape.heads) if structure.sink else None,
        scale=shape.scale,
        layout="bhsd" if shape.layout == "bhsd" else "bshd",
        descales=descales,
        packed=packed,
        dropout_p=dropout_p,
    )


def output_gradients(case: ConformanceCase, arguments: Arguments) -> tuple[Tensor, Tensor | None]:
    """Gradients of o and lse: do in the case's memory layout, and dlse for every third case; set by the id."""
    shape, device = case.shape, arguments.q.device
    seed = zlib.crc32(f"gradients of {case.id}".encode())
    generator = torch.Generator().manual_seed(seed)
    batch, rows = shape.of_q
    do = torch.randn((batch, rows, shape.heads, case.structure.head_dim_v), generator=generator)
    dlse = torch.randn((batch, shape.heads, rows), generator=generator)
    if isinstance(shape, PackedShape):
        do[:, sum(shape.lengths_q) :], dlse[..., sum(shape.lengths_q) :] = torch.nan, torch.nan
    do = LAYOUTS[shape.layout](do.to(case.out_dtype), device)
    return do, dlse.to(device, accumulator(case.dtype)) if seed % 3 == 0 else None


def _in_fp8(draw: Draw, exact: bool, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[list[Tensor], Descales]:
    """q, k, v (bshd, float32, on the CPU) in fp8, and descales on the device, which differ much from head to head.

    exact: by powers of two, so that q and k, small integers times 16, lose nothing; else by :func:`quantize_fp8`.
    """
    batch, _, kv_heads, _ = tensors[1].shape
    factors = [torch.rand((batch, kv_heads), generator=draw.generator).to(tensors[1].device) + 0.5 for _ in tensors]
    if exact:
        descales = [torch.exp2((8 * factor).round() - 8) for factor in factors]  # 2^-4 to 2^4
        quantized = [(x / _by_head(d, x)).to(FP8) for x, d in zip(tensors, descales)]
    else:
        *quantized, q_descale, k_descale, v_descale = quantize_fp8(
            *(x * _by_head(factor, x) for x, factor in zip(tensors, factors))
        )
        descales = [q_descale, k_descale, v_descale]
    return quantized, Descales(*(x.to(draw.device) for x in descales))


def _by_head(x: Tensor, of: Tensor) -> Tensor:
    """(batch, kv_heads) shaped to broadcast to a tensor (batch, seqlen, heads, dim)."""
    return x.repeat_interleave(of.shape[2] // x.shape[1], dim=1)[:, None, :, None]
