"""What is measured: the ideal, tileattn by several algorithms, and PyTorch's context_parallel.

Each has a name, says why it refuses a case, and prepares it: what it returns computes o and gradients of this rank's
part of the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import tileattn
from tileattn.bench.baselines.base import OWN
from tileattn.bench.parallel import torch_context_parallel as pytorch
from tileattn.bench.parallel.cases import Case
from tileattn.bench.parallel.problem import Inputs, Part, Source
from tileattn.bench.parallel.ranks import Ranks
from tileattn.bench.parallel.results import IDEAL
from tileattn.parallel import Plan

RINGS = tuple(f"{kernel}-{method}" for kernel in pytorch.KERNELS for method in pytorch.ROTATE_METHODS)
FLEX = ("flex", "flex-ptrr")


@dataclass(eq=False)
class Prepared:
    """An implementation of one case on this rank.

    Attributes:
        part: which tokens and heads this rank's tensors have.
        inputs: its tensors.
        attend: o (1, rows, heads, head_dim) of the inputs.
        context: entered around calls, outside of what is timed.
        traffic: bytes that this rank has sent so far; None if unknown.
        heads_first: whether inputs, o and gradients are (1, heads, rows, head_dim).
    """

    part: Part
    inputs: Inputs
    attend: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    traffic: Callable[[], int] | None = None
    heads_first: bool = False

    def forward(self) -> Tensor:
        """o, without gradients."""
        with torch.no_grad():
            return self.attend()

    def step(self) -> tuple[Tensor, ...]:
        """Gradients of q, k and v: both passes."""
        q, k, v, do = self.inputs
        return torch.autograd.grad(self.attend(), (q, k, v), do)

    def call(self, direction: str) -> Callable[[], object]:
        """What is timed."""
        return self.forward if direction == "fwd" else self.step

    def values(self, direction: str) -> dict[str, Tensor]:
        """What a call computes, (1, rows, heads, head_dim): o, or the gradients."""
        found = {"o": self.forward()} if direction == "fwd" else dict(zip(("dq", "dk", "dv"), self.step()))
        return {name: x.transpose(1, 2) if self.heads_first else x for name, x in found.items()}


class Implementation(Protocol):
    """What is measured."""

    @property
    def name(self) -> str:
        """As in tables."""

    def refusal(self, case: Case, ranks: Ranks) -> str | None:
        """Why it does not take a case; the same on all ranks."""

    def prepare(self, source: Source, ranks: Ranks) -> Prepared:
        """Its part of a case."""


@dataclass(frozen=True)
class Ideal:
    """The whole sequence with a part of the heads, without communication."""

    backend: str | None = None
    name: str = IDEAL

    def refusal(self, case: Case, ranks: Ranks) -> str | None:
        if case.is_long:
            return "it takes no part in the long case"
        if case.kv_heads % ranks.count:
            return f"the {case.kv_heads} key/value heads are no multiple of the {ranks.count} ranks"
        return None

    def prepare(self, source: Source, ranks: Ranks) -> Prepared:
        case, backend = source.case, self.backend
        part = Part(None, _share(case.heads, ranks), _share(case.kv_heads, ranks))
        inputs = source.inputs(part)
        q, k, v, _ = inputs
        if not case.documents:
            return Prepared(part, inputs, lambda: tileattn.attention(q, k, v, mask=case.mask, backend=backend))
        ends = torch.tensor(case.documents, dtype=torch.int32, device=source.device)
        longest = max(case.lengths)

        def packed() -> Tensor:
            o = tileattn.varlen_attention(
                q[0], k[0], v[0], ends, ends, longest, longest, mask=case.mask, backend=backend
            )
            return o[None]

        return Prepared(part, inputs, packed)


def _share(heads: int, ranks: Ranks) -> slice:
    each = heads // ranks.count
    return slice(ranks.rank * each, (ranks.rank + 1) * each)


@dataclass(frozen=True)
class TileAttn:
    """`Plan.attention` by a named algorithm."""

    algorithm: str = "auto"
    groups: int | None = None
    backend: str | None = None

    @property
    def name(self) -> str:
        return OWN if self.algorithm == "auto" else f"{OWN}-{self.algorithm}{self.groups or ''}"

    def refusal(self, case: Case, ranks: Ranks) -> str | None:
        if self.groups is not None and case.kv_heads % self.groups:
            return f"the {case.kv_heads} key/value heads are no multiple of {self.groups} groups"
        return None

    def prepare(self, source: Source, ranks: Ranks) -> Prepared:
        case = source.case
        plan = plan_of(case)
        part = Part(plan.tokens)
        inputs = source.inputs(part)
        q, k, v, _ = inputs

        def attend() -> Tensor:
            o: Tensor = plan.attention(
                q, k, v, mask=case.mask, backend=self.backend, algorithm=self.algorithm, head_groups=self.groups
            )
            return o

        return Prepared(part, inputs, attend, traffic=lambda: plan.traffic.sent)


def plan_of(case: Case, check: str = "first") -> Plan:
    """The plan that suits a case: contiguous for windows, whose halo it then fetches."""
    if case.documents:
        return Plan(None, case.seqlen, documents=list(case.documents), mask=case.mask, check=check)
    return Plan(None, case.seqlen, layout="zigzag" if case.window is None else "contiguous", check=check)


def _heads_first(inputs: Inputs) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
    """The inputs as leaves in PyTorch's order, (1, heads, rows, head_dim); and q, k and v of them."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs[:3])
    return Inputs(q, k, v, inputs.do.transpose(1, 2).contiguous()), (q, k, v)


@dataclass
class TorchRing:
    """PyTorch's context_parallel over a kernel of SDPA."""

    name: str
    device_mesh: Any = field(default=None, repr=False)

    def refusal(self, case: Case, ranks: Ranks) -> str | None:
        if case.is_long:
            return "it takes no part in the long case"
        if case.documents or case.window is not None:
            return "PyTorch's ring takes no mask but a causal one"
        return _unavailable(lambda: pytorch.check_ring(ranks.device.type))

    def prepare(self, source: Source, ranks: Ranks) -> Prepared:
        self.device_mesh = self.device_mesh or pytorch.mesh(ranks.device.type, ranks.count)
        kernel, _, method = self.name.partition("-")
        seqlen = source.case.seqlen
        part = Part(pytorch.ring_tokens(seqlen, ranks.rank, ranks.count))
        inputs, (q, k, v) = _heads_first(source.inputs(part))
        return Prepared(
            part, inputs, lambda: pytorch.sdpa(q, k, v), lambda: pytorch.ring(self.device_mesh, seqlen, kernel, method),
            heads_first=True,
        )  # fmt: skip


@dataclass
class TorchFlex:
    """PyTorch's context_parallel over FlexAttention. "flex" balances documents by cutting each; "flex-ptrr" by time."""

    name: str
    device_mesh: Any = field(default=None, repr=False)

    def refusal(self, case: Case, ranks: Ranks) -> str | None:
        if case.is_long:
            return "it takes no part in the long case"
        if not case.documents and case.window is None:
            return "causal attention is measured with PyTorch's ring"
        if self.name == "flex-ptrr" and not case.documents:
            return "ranks have equal parts of a window as it is"
        return None

    def prepare(self, source: Source, ranks: Ranks) -> Prepared:
        pytorch.forget_compiled()
        self.device_mesh = self.device_mesh or pytorch.mesh(ranks.device.type, ranks.count)
        case, mask_mod = source.case, mask_mod_of(source.case, source.device)
        balancer = None
        if case.documents and self.name == "flex":
            balancer = pytorch.document_balancer(case.lengths, ranks.count, source.device)
        elif case.documents:
            balancer = pytorch.time_balancer(mask_mod, case.seqlen, ranks.count, source.device)
        attend = pytorch.FlexParallel(self.device_mesh, mask_mod, case.seqlen, balancer)
        part = Part(attend.tokens)
        inputs, leaves = _heads_first(source.inputs(part))

        def call() -> Tensor:
            # On a CPU it refuses inputs that take gradients, also where none are computed.
            return attend(*(leaves if torch.is_grad_enabled() else (x.detach() for x in leaves)))

        return Prepared(part, inputs, call, heads_first=True)


def mask_mod_of(case: Case, device: torch.device) -> pytorch.MaskMod:
    """The mask as FlexAttention's documentation writes it, of whole positions."""
    window = case.seqlen if case.window is None else case.window
    lengths = torch.tensor(case.lengths, device=device)
    ids = torch.arange(len(case.lengths), device=device, dtype=torch.int32).repeat_interleave(lengths)

    def windowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= q - window)

    def of_documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (ids[q] == ids[k])

    return of_documents if case.documents else windowed


def _unavailable(check: Callable[[], None]) -> str | None:
    try:
        check()
    except pytorch.Unavailable as error:
        return str(error)
    return None


def known(backend: str | None) -> dict[str, list[Implementation]]:
    """What `--baselines` names, with all that it stands for."""
    own = [TileAttn(algorithm, None, backend) for algorithm in ("gather", "ulysses", "2d", "ring")]
    own += [TileAttn("gather", groups, backend) for groups in (1, 2, 4, 8)]
    found: dict[str, list[Implementation]] = {}
    for kernel in pytorch.KERNELS:
        found[kernel] = [TorchRing(name) for name in RINGS if name.startswith(kernel)]
    found |= {name: [TorchRing(name)] for name in RINGS}
    found |= {name: [TorchFlex(name)] for name in FLEX}
    return found | {each.name: [each] for each in own}


def always(backend: str | None) -> list[Implementation]:
    """What each run measures."""
    return [Ideal(backend), TileAttn(backend=backend)]
