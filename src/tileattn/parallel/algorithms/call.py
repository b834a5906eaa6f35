"""One attention call of a plan: its options, and the calls of backends for its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.dropout import Dropout, Place
from ...call.facts import Packed
from ...call.inputs import Inputs
from ...runtime import operators as ops
from ...variant.masks import Mask
from ...variant.scores import SoftCap
from ..consent.agreement import Agreement
from ..sharding.layout import Layout, Span
from ..transport.link import Link
from .shifted import LocalVariant, Part, ScoreFn, is_relative, localized
from .widened import Widened, padded, widened


class Operands(NamedTuple):
    """The tensors of a call that are not sharded by rows, as autograd passes them.

    Attributes:
        sink: (heads,), or None.
        variant: those of the mask and the modifications, in the order of `tileattn.variant.key.encode`.
        seed: of dropout, equal on all ranks; None without dropout.
    """

    sink: Tensor | None
    variant: tuple[Tensor, ...]
    seed: Tensor | None = None


class Call(NamedTuple):
    """What a call is, but for its tensors.

    Attributes:
        layout, rank, link, agreement: of the plan.
        mask, mods: the variant of the whole call.
        scale, backend, deterministic, needs_grad: as in `tileattn.runtime.operators.Options`.
        local: for each tensor of the variant, whether it has the rows of this rank's queries only.
        heads: of the queries.
        dropout_p: the probability with which an element is dropped.
    """

    layout: Layout
    rank: int
    link: Link
    agreement: Agreement
    mask: Mask | None
    mods: tuple[ScoreFn, ...]
    scale: float
    backend: str | None
    deterministic: bool
    needs_grad: bool
    local: tuple[bool, ...]
    heads: int
    dropout_p: float = 0.0

    @property
    def packs(self) -> bool:
        """Whether whole sequences can be the sequences of one packed call: the variant is the same for each."""
        return not self.dropout_p and is_relative(self.mask) and all(type(mod) is SoftCap for mod in self.mods)

    def part(self, sequence: int, queries: Span, keys: Span, heads: Span) -> Part:
        """The part of these positions and query heads."""
        rows = self._rows(sequence, queries) if any(self.local) else None
        number = sequence if self.layout.packed else None
        return Part(number, queries, keys, heads, rows, self.layout.length(sequence))

    def _rows(self, sequence: int, queries: Span) -> Span:
        """The rows of the shard that hold these queries."""
        first = 0
        for run in self.layout.runs[self.rank]:
            if run.sequence == sequence and run.start <= queries[0] and queries[1] <= run.stop:
                return first + queries[0] - run.start, first + queries[1] - run.start
            first += run.stop - run.start
        raise AssertionError("a bias of local rows is for algorithms that keep rows where they are")

    def variant(self, part: Part, hidden: int = 0) -> LocalVariant:
        """The variant of a part whose first keys are hidden from all queries."""
        return localized(self.mask, self.mods, part, hidden)

    def options(self, variant: LocalVariant) -> ops.Options:
        """The options of a backend's call."""
        return ops.Options(variant.key, self.scale, self.backend, self.deterministic, self.needs_grad)


class Rows(NamedTuple):
    """q, k and v of a part, bshd."""

    q: Tensor
    k: Tensor
    v: Tensor


def part_forward(
    call: Call, part: Part, rows: Rows, operands: Operands, place: Tensor | None = None, packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """o (batch, queries, heads, head_dim_v) and lse (batch, heads, queries) of a part.

    place: where o belongs; o is a view of it afterwards. packed: the sequences, if the part is several of them.
    """
    wide = widened(part) if call.dropout_p else Widened(part)
    variant = call.variant(wide.part, wide.keys)
    o, lse = ops.run_forward(call.options(variant), _inputs(call, wide, variant, rows, operands, packed, place))
    return _placed(o[:, wide.rows :] if wide.rows else o, place), lse[..., wide.rows :]


def _placed(found: Tensor, place: Tensor | None) -> Tensor:
    """What a backend has found, in its place: a backend that can, wrote there."""
    return found if place is None or found is place else place.copy_(found)


class Outputs(NamedTuple):
    """What a backward pass reads of a forward pass, and the gradients of its outputs; see who takes it for shapes."""

    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None


class PartGradients:
    """Sums of gradients over the parts of this rank: of the sink and the variant's tensors, in float32 or wider.

    Args:
        operands: the tensors.
        needs: which have gradients: the sink, and each of the variant.
        dtype: in which sums are computed.
    """

    def __init__(self, operands: Operands, needs: Sequence[bool], dtype: torch.dtype) -> None:
        self.operands, self.needs = operands, needs
        given = (operands.sink, *operands.variant)
        self.sums = [
            torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if need and x is not None else None
            for x, need in zip(given, needs)
        ]

    def without_sink(self) -> PartGradients:
        """The same sums for calls without the sink."""
        same = object.__new__(PartGradients)
        same.operands, same.needs = self.operands._replace(sink=None), [False, *self.needs[1:]]
        same.sums = [None, *self.sums[1:]]
        return same

    def backward(
        self,
        call: Call,
        part: Part,
        rows: Rows,
        of_rows: Sequence[bool],
        outputs: Outputs,
        place: Tensor | None = None,
        packed: Packed | None = None,
    ) -> list[Tensor | None]:
        """Gradients of q, k and v of a part, those that `of_rows` asks for; adds the others to the sums.

        outputs: o and do (bshd), lse and dlse (batch, heads, queries) of the part. place: where dq belongs. packed: the
        sequences, if the part is several of them.
        """
        wide = widened(part) if call.dropout_p else Widened(part)
        variant = call.variant(wide.part, wide.keys)
        inputs = _inputs(call, wide, variant, rows, self.operands, packed, place if of_rows[0] else None)
        needs = [*of_rows, *self.needs]
        found = iter(ops.run_backward(call.options(variant), inputs, needs, *_outputs(wide, outputs)))
        gradients = [next(found) if need else None for need in needs]
        self._add(gradients[3:], wide.part, variant)
        before = (wide.rows, wide.keys, wide.keys)
        dq, dk, dv = (x[:, first:] if first and x is not None else x for x, first in zip(gradients, before))
        return [None if dq is None else _placed(dq, place), dk, dv]

    def _add(self, gradients: Sequence[Tensor | None], part: Part, variant: LocalVariant) -> None:
        views = [(slice(*part.heads),), *variant.views]
        for total, gradient, view in zip(self.sums, gradients, views):
            if total is not None and gradient is not None:
                place = total if view is None else total[view]
                place += gradient


def _inputs(
    call: Call,
    wide: Widened,
    variant: LocalVariant,
    rows: Rows,
    operands: Operands,
    packed: Packed | None,
    place: Tensor | None,
) -> Inputs:
    part = wide.part
    sink = None if operands.sink is None else operands.sink[slice(*part.heads)]
    dropout = None
    if operands.seed is not None:
        head = (part.sequence or 0) * call.heads + part.heads[0]
        dropout = Dropout(call.dropout_p, operands.seed, Place(call.heads, head, part.queries[0], part.keys[0]))
    q, k, v = (padded(x, count) for x, count in zip(rows, (wide.rows, wide.keys, wide.keys)))
    out = place if place is not None and place.is_contiguous() and not wide.rows else None
    return Inputs(q, k, v, sink, variant.operands(operands.variant), dropout, packed, out=out)


def _outputs(wide: Widened, outputs: Outputs) -> Outputs:
    """With lse = inf the rows before have probabilities of 0, and so gradients of 0."""
    o, lse, do, dlse = outputs
    of_lse = None if dlse is None else padded(dlse, wide.rows, 2)
    return Outputs(padded(o, wide.rows), padded(lse, wide.rows, 2, torch.inf), padded(do, wide.rows), of_lse)


def part_outputs(outputs: Outputs, rows: Span, heads: Span) -> Outputs:
    """Those of some rows and heads, as :meth:`PartGradients.backward` takes them, from (batch, rows, heads, dim)."""

    def by_head(x: Tensor) -> Tensor:
        return cut(x, rows, heads)[..., 0].transpose(1, 2).contiguous()

    o, lse, do, dlse = outputs
    return Outputs(cut(o, rows, heads), by_head(lse), cut(do, rows, heads), None if dlse is None else by_head(dlse))


def cut(x: Tensor, rows: Span, segment: Span) -> Tensor:
    """Rows and heads of a tensor (batch, rows, heads, dim), a view."""
    return x[:, slice(*rows), slice(*segment)]


def within(span: Span, first: int) -> Span:
    """A span counted from `first`."""
    return span[0] - first, span[1] - first
