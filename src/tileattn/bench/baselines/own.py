"""tileattn itself, called through its public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, SlidingWindow, SoftCap, attention, varlen_attention
from tileattn.bench.baselines.base import OWN, Prepared, tensor_bytes
from tileattn.bench.problem import Problem
from tileattn.bench.variants import user_score
from tileattn.call.facts import Packed
from tileattn.call.inputs import Inputs, Operands
from tileattn.runtime import operators as ops
from tileattn.runtime.dispatch import Backend, select
from tileattn.variant.key import encode, normalize
from tileattn.variant.program import with_alignment


@dataclass(frozen=True)
class TileAttn:
    """`tileattn.attention`; `backend` None leaves the choice to its dispatch."""

    backend: str | None = None
    name: str = OWN
    deterministic: bool = False

    def refusal(self, problem: Problem) -> str | None:
        if self.deterministic and problem.do is None:
            return "it is there for gradients: a forward pass always gives the same bits"
        try:
            _selected(problem, self.backend)
        except NotImplementedError as refused:
            return str(refused)
        return None

    def prepare(self, problem: Problem) -> Prepared:
        # In fp8 q, k and v come with their descales, by the names that `attention` gives them.
        inputs: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v}
        inputs = inputs if problem.fp8 is None else problem.fp8._asdict()
        mask, score_mod = mask_of(problem), score_mods_of(problem)
        # Plain causal attention is asked for as most users do.
        causal, mask = (True, None) if isinstance(mask, Causal) else (False, mask)
        attend = attention if problem.cu_seqlens is None else _varlen(problem.cu_seqlens, max(problem.case.lengths))

        def call() -> Tensor:
            out = attend(
                **inputs,
                mask=mask,
                score_mod=score_mod,
                causal=causal,
                sink=problem.sink,
                backend=self.backend,
                deterministic=self.deterministic,
            )
            assert isinstance(out, Tensor)
            return out

        chosen = _selected(problem, self.backend).name
        return Prepared(call, _held_bytes(mask, score_mod, problem), chosen=chosen)


@dataclass(frozen=True)
class TileAttnBf16:
    """`tileattn.attention` on the bfloat16 values that a case in fp8 was quantised from."""

    name: str = f"{OWN}-bf16"

    def refusal(self, problem: Problem) -> str | None:
        if problem.fp8 is None:
            return "it is there to be compared with fp8"
        return TileAttn().refusal(problem.unquantised())

    def prepare(self, problem: Problem) -> Prepared:
        return replace(TileAttn().prepare(problem.unquantised()), chosen=None, dtype="bf16")


@dataclass(frozen=True)
class TileAttnDense:
    """`tileattn.attention` on packed sequences of one length, as the batch that they are."""

    name: str = f"{OWN}-dense"

    def refusal(self, problem: Problem) -> str | None:
        if problem.case.packing != "uniform":
            return "it is there for packed sequences of one length"
        return TileAttn().refusal(problem.dense())

    def prepare(self, problem: Problem) -> Prepared:
        prepared = TileAttn().prepare(problem.dense())
        return replace(prepared, call=lambda: prepared.call().flatten(0, 1), chosen=None)


def _varlen(cu_seqlens: Tensor, longest: int) -> Callable[..., Any]:
    """`tileattn.varlen_attention` for q, k and v with the same cu_seqlens."""
    return functools.partial(
        varlen_attention,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )


def variant_key(problem: Problem) -> str:
    """The problem's variant as an `AttentionCall` names it."""
    key, operands = _encoded(problem)
    return with_alignment(key, operands.tensors)


def needs(problem: Problem) -> tuple[bool, ...]:
    """Which gradients a backward pass of the problem computes, as a `BackwardCall` lists them."""
    q, k, v = (x.requires_grad for x in (problem.q, problem.k, problem.v))
    _, operands = _encoded(problem)
    return q, k, v, False, *(tensor.requires_grad for tensor in operands.tensors)


def _encoded(problem: Problem) -> tuple[str, Operands]:
    return encode(*normalize(mask_of(problem), score_mods_of(problem), causal=False))


def _selected(problem: Problem, backend: str | None) -> Backend:
    """The backend that `attention` chooses for the problem, or the named one."""
    tensors = problem if problem.fp8 is None else problem.fp8
    ends, packed = problem.cu_seqlens, None
    if ends is not None:
        longest = max(problem.case.lengths)
        packed = Packed(ends, ends, longest, longest)
    q, k, v = (x if packed is None else x[None] for x in (tensors.q, tensors.k, tensors.v))
    inputs = Inputs(q, k, v, problem.sink, packed=packed)
    return select(ops.make_call(inputs, variant_key(problem), needs_grad=problem.do is not None), backend)


def _held_bytes(mask: Mask | None, score_mods: list[Callable[..., Any]] | None, problem: Problem) -> int:
    """Bytes of the tensors that masks and modifications allocate, such as the bounds of documents."""
    _, operands = encode(*normalize(mask, score_mods, causal=False))
    given = {x.data_ptr() for x in (problem.bias, problem.slopes, problem.document_ids) if x is not None}
    return tensor_bytes(*(tensor for tensor in operands.tensors if tensor.data_ptr() not in given))


def mask_of(problem: Problem) -> Mask | None:
    """The mask of the problem's variant."""
    terms = problem.case.terms
    masks: list[Mask] = [Causal()] if terms.causal else []
    if terms.window is not None:
        masks.append(SlidingWindow(*terms.window))
    if terms.prefix is not None:
        masks.append(PrefixLM(terms.prefix))
    if problem.document_ids is not None:
        masks.append(Documents(problem.document_ids))
    if not masks:
        return None
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask
    return combined


def score_mods_of(problem: Problem) -> list[Callable[..., Any]] | None:
    """The score modifications in the order of `variants`: softcap, ALiBi, bias, the user's function."""
    softcap = problem.case.terms.softcap
    mods: list[Callable[..., Any]] = [SoftCap(softcap)] if softcap is not None else []
    if problem.slopes is not None:
        mods.append(ALiBi(problem.slopes))
    if problem.bias is not None:
        mods.append(Bias(problem.bias))
    if problem.case.terms.userscore:
        mods.append(user_score)
    return mods or None
