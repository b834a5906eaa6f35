"""The tensors of a case: built once from a seed, and shared by all implementations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from tileattn.bench.cases import Case
from tileattn.call.fp8 import QuantizedFP8, dequantize, quantize_fp8
from tileattn.measure.memory import total_bytes


@dataclass(frozen=True)
class Problem:
    """A case with its tensors.

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads,
    head_dim_v) in the case's dtype, or in bfloat16 for fp8; and, where the variant asks for them, in the same dtype
    `bias` (batch or 1, heads or 1, seqlen_q, seqlen_k); `slopes` of ALiBi and `sink`, (heads,) float32;
    `document_ids`, (seqlen_k,) int32.

    cu_seqlens: For a packed case, int32 (sequences + 1,), for queries and keys. Its q, k, v and do are (tokens, heads,
    head_dim).

    do: For a backward pass, the gradient of o (batch, seqlen_q, heads, head_dim_v), in the same dtype. Then q, k and v
    require grad, and so does the bias where the variant says so.

    fp8: For a case in fp8, the quantised q, k and v, and their descales. The expected result is computed in float64
    from the unquantised q, k and v, so that an error includes that of the quantisation.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    document_ids: Tensor | None = None
    do: Tensor | None = None
    fp8: QuantizedFP8 | None = None
    cu_seqlens: Tensor | None = None

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim), the default everywhere."""
        return float(self.case.head_dim) ** -0.5

    def inputs(self) -> dict[str, Tensor]:
        """The tensors whose gradients a backward pass computes, by the name of the gradient."""
        wanted = {"dq": self.q, "dk": self.k, "dv": self.v}
        return wanted if self.bias is None or not self.case.terms.dbias else {**wanted, "dbias": self.bias}

    def unquantised(self) -> Problem:
        """The same values as a problem in bfloat16."""
        return replace(self, case=replace(self.case, dtype="bf16"), fp8=None)

    def dequantised(self) -> Problem:
        """The values after quantisation, as a problem in bfloat16; the problem itself if it is not in fp8."""
        if self.fp8 is None:
            return self
        pairs = ((self.fp8.q, self.fp8.q_descale), (self.fp8.k, self.fp8.k_descale), (self.fp8.v, self.fp8.v_descale))
        q, k, v = (dequantize(x, descale).to(torch.bfloat16) for x, descale in pairs)
        return replace(self.unquantised(), q=q, k=k, v=v)

    def spans(self) -> list[slice]:
        """The tokens of each sequence of a packed case."""
        ends = accumulate(self.case.lengths)
        return [slice(end - length, end) for end, length in zip(ends, self.case.lengths)]

    def of_sequence(self, span: slice) -> Problem:
        """The tokens of one sequence of a packed case, as a dense problem."""
        of_span = {name: getattr(self, name)[None, span] for name in ("q", "k", "v")}
        do = None if self.do is None else self.do[None, span]
        case = self.case.of_sequence(span.stop - span.start)
        return replace(self, case=case, **of_span, do=do, cu_seqlens=None)

    def dense(self) -> Problem:
        """Packed sequences of one length as a batch."""
        of_all = {name: getattr(self, name).unflatten(0, (self.case.batch, -1)) for name in ("q", "k", "v")}
        do = None if self.do is None else self.do.unflatten(0, (self.case.batch, -1))
        return replace(self, case=replace(self.case, packing=""), **of_all, do=do, cu_seqlens=None)

    def q_pos(self) -> Tensor:
        """Positions of the queries among the keys, aligned bottom-right: int64 (seqlen_q,)."""
        offset = self.case.seqlen_k - self.case.seqlen_q
        return torch.arange(self.case.seqlen_q, device=self.q.device) + offset

    def allowed(self) -> Tensor:
        """The dense mask, bool (seqlen_q, seqlen_k), for baselines that take no other form."""
        lo, hi = self.case.terms.key_range(self.q_pos(), self.case.seqlen_k)
        keys = torch.arange(self.case.seqlen_k, device=self.q.device)
        return (keys >= lo[:, None]) & (keys < hi[:, None])

    def has_empty_rows(self) -> bool:
        """Whether some query sees no key at all."""
        lo, hi = self.case.terms.key_range(self.q_pos(), self.case.seqlen_k)
        return bool((hi <= lo).any())

    def alibi_bias(self, rows: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """`-slope[head] * |q_pos - k_pos|` for the given query indices (all by default): (heads, rows, seqlen_k)."""
        assert self.slopes is not None
        q_pos = self.q_pos() if rows is None else self.q_pos()[rows]
        distance = (q_pos[:, None] - torch.arange(self.case.seqlen_k, device=self.q.device)).abs()
        return -self.slopes.to(dtype)[:, None, None] * distance


def build(case: Case, device: torch.device | str, seed: int = 0, direction: str = "fwd") -> Problem:
    """Random tensors of a case: standard normal, rounded to the case's dtype once, determined by the seed.

    direction: A key of `cases.DIRECTIONS`. Those with a backward pass get `do`, and inputs that require grad.

    On the device "meta" nothing is drawn or allocated, so that the facts of a call of any size can be computed.

    Raises:
        torch.OutOfMemoryError: The tensors exceed the total memory of the device.
    """
    meta = torch.device(device).type == "meta"  # which has no generators
    if not meta:
        _check_memory(case, torch.device(device))
    generator = None if meta else torch.Generator(device=device).manual_seed(seed)
    dtype = case.value_dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    terms = case.terms
    q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
    k = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    v = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v)
    given = Problem(
        case=case,
        q=q,
        k=k,
        v=v,
        bias=normal(*_bias_shape(case)) if terms.bias is not None else None,
        slopes=_alibi_slopes(case.heads, device) if terms.alibi else None,
        # Through the case's dtype, so that a baseline that wants the sink in 16 bits is given the same value.
        sink=normal(case.heads).float() if terms.sink else None,
        document_ids=_document_ids(case.seqlen_k, terms.documents, device) if terms.documents else None,
        fp8=quantize_fp8(q, k, v) if case.dtype == "fp8" else None,
    )
    if direction != "fwd":
        given = replace(given, do=normal(case.batch, case.seqlen_q, case.heads, case.head_dim_v))
    if case.packing:
        given = _packed(given)
    if direction != "fwd":
        for tensor in given.inputs().values():
            tensor.requires_grad_()
    return given


def _packed(given: Problem) -> Problem:
    """The same values as packed sequences, cut at other places where lengths differ."""
    of_all = {name: getattr(given, name).flatten(0, 1) for name in ("q", "k", "v")}
    do = None if given.do is None else given.do.flatten(0, 1)
    ends = torch.tensor([0, *accumulate(given.case.lengths)], dtype=torch.int32)
    return replace(given, **of_all, do=do, cu_seqlens=ends.to(given.q.device))


def _check_memory(case: Case, device: torch.device) -> None:
    """Checks the total size before tensors are drawn, and before a size exceeds PyTorch's integers."""
    of_q = case.batch * case.heads * case.seqlen_q * case.head_dim
    of_k_and_v = case.batch * case.kv_heads * case.seqlen_k * (case.head_dim + case.head_dim_v)
    of_bias = prod(_bias_shape(case)) if case.terms.bias is not None else 0
    needed, available = (of_q + of_k_and_v + of_bias) * case.value_dtype.itemsize, total_bytes(device)
    if needed > available:
        raise torch.OutOfMemoryError(
            f"the tensors of {case.name} take {needed / 2**30:.4g} GiB, and {device} has {available / 2**30:.4g}"
        )


def _bias_shape(case: Case) -> tuple[int, int, int, int]:
    """(batch or 1, heads or 1, seqlen_q, seqlen_k), as the variant's two letters say."""
    has = case.terms.bias or ""
    return case.batch if "b" in has else 1, case.heads if "h" in has else 1, case.seqlen_q, case.seqlen_k


def _alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """2^(-8 i / heads) for i = 1 .. heads, as in the ALiBi paper (arXiv:2108.12409) for powers of two."""
    exponents = torch.arange(1, heads + 1, dtype=torch.float32, device=device) * (-8.0 / heads)
    return torch.exp2(exponents)


def _document_ids(seqlen: int, length: int, device: torch.device | str) -> Tensor:
    return torch.arange(seqlen, dtype=torch.int32, device=device) // length
