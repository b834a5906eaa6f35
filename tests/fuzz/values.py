"""A call's tensors. Imports nothing of tileattn: the call and the oracle both read what is made here.

q, k and v lie in memory as `Call.strides` says, within memory that is NaN. Of each:

    dense    contiguous
    heads    the heads' dimension outside of the sequence's
    slice    a part of a larger tensor, in rows that begin at multiples of 16 bytes where head dims allow it
    odd      as `slice`, and no row begins at a multiple of 16 bytes
    batch0, seq0, heads0   the dimension repeats one element (stride 0)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .spec import DTYPES, Call, mod_tensor, tensor_dims, terms

Tensors = dict[str, Tensor]
HUGE_ID = 2**32


class Maker:
    """Draws values from one seeded generator of the device; on "meta" tensors hold nothing."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(max(bound, 1), shape, generator=self.generator, device=self.device)

    def kind(self, kind: str, *shape: int) -> Tensor:
        """Values of about 1."""
        if kind == "integers":
            return self.below(5, *shape).float() - 2
        if kind == "constant":
            return torch.ones(shape, device=self.device)
        x = self.normal(*shape)
        if kind == "sparse":
            return x * (self.below(8, *shape) == 0)
        if kind == "offset":
            return x + 2
        return x


def make(call: Call, device: str) -> Tensors:
    """All tensors of a call by their names; q, k and v bshd, of packed sequences (total, heads, head_dim)."""
    maker = Maker(call.seed, device)
    tensors: Tensors = {}
    for name, (seqlen, heads, dim), size, stride in zip(
        "qkv", _shapes(call), (call.q_size, call.q_size, call.v_size), call.strides
    ):
        lead = () if call.packed else (call.elements,)
        x = maker.kind(call.values, *lead, seqlen, heads, dim) * size
        if call.tail:
            x[seqlen - call.tail :] = torch.nan  # rows of no sequence, whatever they hold
        tensors[name] = lay_out(x.to(call.leaf_dtype) if call.dtype != "fp8" else x, stride)
    if call.packed:
        for name, lengths in (("cu_q", call.lengths_q), ("cu_k", call.lengths_k)):
            sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            tensors[name] = sums.to(device)
    if call.sink is not None:
        tensors["sink"] = maker.normal(call.heads).to(DTYPES[call.sink])
    if call.key_padding:
        tensors["key_padding"] = _kept(maker, "holes", call)
    for name, term in terms(call.mask):
        made = _of_mask(maker, term, call)
        if made is not None:
            tensors[name] = made
    for number, mod in enumerate(call.mods):
        name = mod_tensor(number, mod)
        if name is not None:
            tensors[name] = _of_mod(maker, mod, call)
    out = call.torch_dtype if call.dtype != "fp8" else torch.bfloat16
    tensors["do"] = maker.normal(*_out_shape(call)).to(out)
    lse_dtype = torch.float64 if call.dtype == "fp64" else torch.float32
    tensors["dlse"] = maker.normal(*_lse_shape(call)).to(lse_dtype)
    return tensors


def totals(call: Call) -> tuple[int, int]:
    """Rows of q, and of k and v, in memory."""
    if not call.packed:
        return call.seqlen_q, call.seqlen_k
    return sum(call.lengths_q) + call.tail, sum(call.lengths_k) + call.tail


def _shapes(call: Call) -> tuple[tuple[int, int, int], ...]:
    rows, keys = totals(call)
    of_k = (keys, call.kv_heads, call.head_dim)
    return (rows, call.heads, call.head_dim), of_k, (keys, call.kv_heads, call.head_dim_v)


def _out_shape(call: Call) -> tuple[int, ...]:
    shape = (totals(call)[0], call.heads, call.head_dim_v)
    return shape if call.packed else (call.elements, *shape)


def _lse_shape(call: Call) -> tuple[int, ...]:
    shape = (call.heads, totals(call)[0])
    return shape if call.packed else (call.elements, *shape)


def lay_out(x: Tensor, kind: str) -> Tensor:
    """The values of x ((batch,) seqlen, heads, dim) in memory of this kind."""
    *lead, seqlen, heads, dim = x.shape
    if kind == "dense" or x.dtype.itemsize == 1:
        return x.contiguous()
    if kind == "heads":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind in ("batch0", "seq0", "heads0"):
        axis = {"batch0": 0, "seq0": -3, "heads0": -2}[kind]
        if x.shape[axis] == 0 or (kind == "batch0" and not lead):
            return x.contiguous()
        return x.narrow(axis, 0, 1).contiguous().expand(x.shape)
    step = 16 // x.element_size()
    width = -(-dim // step) * step + (1 if kind == "odd" else step)
    around = torch.full((*lead, seqlen + 2, heads + 1, width), torch.nan, dtype=x.dtype, device=x.device)
    first = 1 if kind == "odd" else 0
    inside = around[..., 1 : seqlen + 1, :heads, first : first + dim]
    inside.copy_(x)
    return inside


def _of_mask(maker: Maker, term: list[Any], call: Call) -> Tensor | None:
    if term[0] == "prefixes":
        return maker.below(term[1] + 1, call.elements).int()
    if term[0] == "padding":
        return _kept(maker, term[1], call)
    if term[0] == "docs":
        return _ids(maker, term[1], call)
    if term[0] == "images":
        return _ids(maker, "any", call, 12)
    if term[0] == "block_sparse":
        return _blocks(maker, term, call)
    if term[0] == "bools":
        return maker.below(3, *_sizes(term[1], call)) > 0
    if term[0] == "fn" and term[1] == "table":
        return maker.below(4, call.heads, call.keys) > 0
    return None


def _blocks(maker: Maker, term: list[Any], call: Call) -> Tensor:
    """Half of the blocks; at least two in each direction, of which those beyond the keys are not there."""
    heads = {"h": call.heads, "g": call.kv_heads, "1": 1}[term[1]]
    rows, columns = -(-call.rows // term[2]), -(-call.keys // term[3])
    blocks = maker.below(2, call.elements, heads, max(rows, 2), max(columns, 2)) > 0
    return blocks & (torch.arange(max(columns, 2), device=maker.device) < columns)


def _ids(maker: Maker, kind: str, call: Call, count: int = 4) -> Tensor:
    shape = (call.elements, call.keys)
    ids = maker.below(count, *shape)
    if kind in ("sorted", "huge"):
        ids = ids.sort(dim=1).values if maker.device != "meta" else ids
    if kind == "huge":
        return ids * HUGE_ID - 1
    return ids if kind == "int64" else ids.int()


def _kept(maker: Maker, kind: str, call: Call) -> Tensor:
    shape = (call.elements, call.keys)
    if kind == "holes":
        return maker.below(4, *shape) > 0
    length = maker.below(call.keys + 1, call.elements)[:, None]
    keys = torch.arange(call.keys, device=maker.device)
    return keys < length if kind == "right" else keys >= length


def _of_mod(maker: Maker, mod: list[Any], call: Call) -> Tensor:
    dtype = DTYPES[mod[2]]
    shape = _sizes(tensor_dims(mod), call)
    x = maker.normal(*shape)
    if mod[0] == "alibi" or mod[1] == "slopes":
        x = x * 0.1
    if mod[1] == "temperature":
        x = x * 0.1 + 1
    if mod[1] == "gate":
        x = x.abs() + 0.1  # a score of -inf stays one
    x = x.to(dtype)
    return _biased(x, call.bias_aligned) if mod[0] == "bias" else x


def _biased(x: Tensor, aligned: bool) -> Tensor:
    """A bias with rows that begin at multiples of 16 bytes, or none but the first."""
    step = 16 // x.element_size()
    width = -(-x.shape[-1] // step) * step + (0 if aligned else 1)
    around = torch.full((*x.shape[:-1], width), torch.nan, dtype=x.dtype, device=x.device)
    around[..., : x.shape[-1]].copy_(x)
    return around[..., : x.shape[-1]]


def _sizes(dims: str, call: Call) -> tuple[int, ...]:
    known = {"b": call.elements, "h": call.heads, "q": call.rows, "k": call.keys, "1": 1}
    return tuple(known[dim] for dim in dims)
