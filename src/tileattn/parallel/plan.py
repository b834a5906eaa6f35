"""`Plan`: how a sequence is laid out over the ranks of a process group, and attention on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.dropout import draw_seed
from ..runtime.run import MaskLike, ScoreModLike, autocast
from ..variant.key import normalize
from ..variant.masks import Causal
from . import operators
from .algorithms.autograd import Work, attend
from .algorithms.call import Call, Operands
from .algorithms.gather import gather_work
from .algorithms.ring import ring_work
from .consent.agreement import Agreement, Signature
from .consent.heartbeat import Heartbeat
from .prediction.cost import Choice, Model, Shape, choose, named, with_groups
from .prediction.topology import Topology
from .prepare import Checked, Given, checked, digest, with_numbers
from .sharding.arguments import as_bounds, as_group, as_node, as_seqlen, check_layout, dim_of_rows
from .sharding.contents import Ask, Kept, ask_of
from .sharding.documents import documents_layout
from .sharding.layout import Run, Span, sequence_layout
from .sharding.ranges import key_ranges
from .sharding.work import assign
from .torch_names import default_store, is_capturing, own_connection, prefixed, uncompiled
from .transport.link import Link
from .transport.unshard import gathered

_REACHED = "the keys that the mask reaches (its tensors must hold the same on all ranks)"  # in a signature


class Traffic(NamedTuple):
    """Bytes that a rank has sent to, and received from, other ranks."""

    sent: int
    received: int


class Prepared(NamedTuple):
    """A call whose arguments are right, and what all ranks must have in common, outside of captures and in one."""

    call: Call
    work: Work
    operands: Operands
    return_lse: bool
    signature: Signature
    captured: Signature


class Plan:
    """A sequence over the ranks of a process group, and exact attention on it.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
        seqlen: the number of tokens of the whole sequence, 0 or more. It need not be a multiple of anything; with few
            tokens some ranks hold none.
        layout: "zigzag" (for causal masks: equal work), "contiguous" (for windows: least traffic), or "documents",
            which needs `documents`.
        documents: cu_seqlens, for a sequence of documents that are packed one after the other: (documents + 1,) ints
            from 0 to seqlen, as a list or an integer tensor. Attention stays within each document, positions count from
            its beginning, and its number is the batch index of masks and modifications, as in
            :func:`tileattn.varlen_attention`. Equal on all ranks.
        mask: with documents, the mask whose areas are balanced over ranks. None: causal.
        check: "first" compares ranks at the first call of each signature, "always" at each call.
        node: how many consecutive ranks share a fast link, for algorithm="2d" and "auto". None: LOCAL_WORLD_SIZE, as
            torchrun sets it, or all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Every rank makes the same plans and the same calls in the same order. Attributes are `ranks`, `rank`, `seqlen`.

        plan = tileattn.parallel.Plan(group, seqlen)
        x, positions, labels = plan.shard(x, positions, labels)
        o = plan.attention(q, k, v, causal=True)       # q, k and v are shards, and so is o
    """

    def __init__(
        self,
        group: Any = None,
        seqlen: int | None = None,
        *,
        layout: str | None = None,
        documents: Sequence[int] | Tensor | None = None,
        mask: MaskLike | None = None,
        check: str = "first",
        node: int | None = None,
    ) -> None:
        group = as_group(group)
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.seqlen = as_seqlen(seqlen)
        bounds = None if documents is None else as_bounds(documents, self.seqlen)
        name = ("zigzag" if bounds is None else "documents") if layout is None else layout
        check_layout(name, bounds, mask)
        if check not in ("first", "always"):
            raise ValueError(f"check must be 'first' or 'always', got {check!r}")
        self.node = as_node(node, self.ranks)
        if bounds is None:
            self._layout = sequence_layout(name, self.seqlen, self.ranks)
        else:
            balanced, _ = normalize(Causal() if mask is None else mask, None, False)
            self._layout = documents_layout(bounds, self.ranks, balanced, 1)
        self._agreement = _agreement(group, self.rank, check == "always")
        self._link = Link(group, self.rank, self._agreement.watch, self._agreement.explain)
        self._text = digest(str((self._layout.runs, bounds, self.node, check)))
        self._kept = Kept()
        self._number = operators.registered(self)

    def __repr__(self) -> str:
        return f"Plan(rank {self.rank} of {self.ranks}, seqlen={self.seqlen}, layout={self._layout.name!r})"

    # --- Shards ---

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's rows, int64 (rows,) on the CPU, as rotary embeddings take them.

        With documents, positions count from the beginning of each document.
        """
        return self._layout.positions_of(self.rank)

    @property
    def tokens(self) -> Tensor:
        """The rows of the whole sequence that this rank holds, int64 (rows,) on the CPU, ascending."""
        return self._layout.tokens_of(self.rank)

    @property
    def rows(self) -> int:
        """The number of this rank's rows."""
        return self._layout.rows(self.rank)

    @property
    def traffic(self) -> Traffic:
        """Bytes between this rank and others so far."""
        return Traffic(self._link.sent, self._link.received)

    def shard(self, *tensors: Tensor) -> Any:
        """This rank's rows of whole tensors: a tensor for one, a tuple for several.

        Args:
            *tensors: (batch, seqlen, ...), or (seqlen,): any dtype, equal on all ranks. Differentiable: the gradient is
                zero in the rows of other ranks.

        Raises:
            TypeError, ValueError: an argument is no tensor, or has another length.
        """
        if not tensors:
            raise TypeError("shard() needs at least one tensor, got none")
        shards = []
        for number, x in enumerate(tensors):
            dim = dim_of_rows(f"tensor {number}", x, self.seqlen)
            parts = [x.narrow(dim, start, stop - start) for start, stop in self._layout.owned[self.rank]]
            shards.append(torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone())
        return shards[0] if len(shards) == 1 else tuple(shards)

    @uncompiled
    def unshard(self, *tensors: Tensor) -> Any:
        """Whole tensors from the shards of all ranks: a tensor for one, a tuple for several. All ranks call it.

        Args:
            *tensors: (batch, rows, ...), or (rows,): what :meth:`shard` returns, any dtype. Differentiable if all ranks
                compute the same loss from the result: the gradient of a shard is its rows of this rank's gradient.

        Raises:
            TypeError, ValueError: an argument is no tensor, or has not this rank's rows.
            RankError: ranks gave tensors of different shapes or dtypes, or one has failed.
        """
        self._agreement.begin()
        try:
            if not tensors:
                raise TypeError("unshard() needs at least one tensor, got none")
            dims = [dim_of_rows(f"tensor {number}", x, self.rows) for number, x in enumerate(tensors)]
        except Exception as error:
            self._agreement.refuse(error)
            raise
        sizes = [(str(x.dtype), [*x.shape[:dim], *x.shape[dim + 1 :]]) for x, dim in zip(tensors, dims)]
        self._agreement.agree({"the call": "unshard", "the plan": self._text, "the tensors": str(sizes)})
        with self._agreement.telling():
            whole = [gathered(self._link, self._layout, x, dim) for x, dim in zip(tensors, dims)]
        return whole[0] if len(whole) == 1 else tuple(whole)

    # --- Attention ---

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: MaskLike | None = None,
        score_mod: ScoreModLike | None = None,
        causal: bool = False,
        scale: float | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        deterministic: bool = False,
        backend: str | None = None,
        algorithm: str = "auto",
        head_groups: int | None = None,
    ) -> Any:
        """Exact attention of the whole sequence, on shards: what :func:`tileattn.attention` computes on one device.

        Args:
            q: this rank's queries (batch, rows, heads, head_dim): float16, bfloat16, float32 or float64.
            k: this rank's keys (batch, rows, kv_heads, head_dim); heads must be a multiple of kv_heads.
            v: this rank's values (batch, rows, kv_heads, head_dim_v).
            mask: as in :func:`tileattn.attention`. Positions are those of the whole sequence, and tensors of masks are
                whole and equal on all ranks.
            score_mod: the same. A :class:`tileattn.Bias` may instead have the rows of this rank's queries only, with
                all keys: (batch or 1, heads or 1, rows, seqlen).
            causal: short for ``mask=Causal()``; with a mask, both hold.
            scale: finite factor of the scores; None means ``head_dim ** -0.5``.
            sink: (heads,): one logit per head, equal on all ranks.
            dropout_p: as in :func:`tileattn.attention`, whose pattern on one device it is, whatever the algorithm and
                the number of ranks. Each rank draws a seed from its default generator, and all take that of rank 0.
            return_lse: whether to also return the log-sum-exp.
            deterministic: whether the gradients of one rank's calls must be bitwise equal from run to run. What ranks
                exchange is always summed in one order.
            backend: as in :func:`tileattn.attention`.
            algorithm: "gather", "ulysses", "2d" or "ring"; "auto" chooses by a cost model.
            head_groups: for "gather" and "2d", into how many groups the key/value heads are cut. Keys and values of a
                group are on their way while the group before computes. None: the cost model chooses.

        Returns:
            o (batch, rows, heads, head_dim_v) in q's dtype; with return_lse ``(o, lse)``, lse (batch, heads, rows) in
            float32 (float64 for float64). Differentiable once in q, k, v, sink and the floating-point tensors of score
            modifications. Gradients of whole tensors are summed over all ranks, and equal on all of them.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument of this rank is wrong or not supported.
            RankError: another rank's arguments were refused, ranks made different calls, or a rank has ended.

        torch.compile traces the call as one operator, also with ``fullgraph=True``.
        """
        if torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        given = Given(
            mask, score_mod, causal, scale, sink, dropout_p, return_lse, deterministic, backend, algorithm, head_groups
        )
        if torch.compiler.is_compiling():
            o, lse = operators.trace(self._number, (q, k, v), with_numbers(given))
        else:
            begun = self._begun((q, k, v), given)
            return_lse = begun.return_lse
            o, lse = attend(begun.call, begun.work, (q, k, v), begun.operands, return_lse)
        return (o, lse) if return_lse else o

    def _begun(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        given: Given,
        requires: Sequence[bool] | None = None,
        seed: Tensor | None = None,
    ) -> Prepared:
        """A call on which all ranks have agreed. rows: q, k and v. seed: of dropout, if this rank has drawn one."""
        self._agreement.begin()
        try:
            prepared = self._prepared(rows, given, requires)
        except Exception as error:
            self._agreement.refuse(error)
            raise
        self._agreement.agree(prepared.signature, is_capturing(rows[0]), prepared.captured)
        if not prepared.call.dropout_p:
            return prepared
        seed = self._link.from_first(draw_seed(rows[0].device) if seed is None else seed, self.ranks)
        return prepared._replace(operands=prepared.operands._replace(seed=seed))

    def _prepared(
        self, rows: tuple[Tensor, Tensor, Tensor], given: Given, requires: Sequence[bool] | None = None
    ) -> Prepared:
        """A call whose arguments are right, as far as this rank can tell."""
        arguments = checked(self._layout, self.rank, rows, with_numbers(given), requires)
        ask = ask_of(arguments.mask, arguments.given[1].tensors, is_capturing(rows[0]))
        work, reached = self._work(arguments, rows[0], rows[2], ask)
        lasting = reached if ask is Ask.LASTING else self._work(arguments, rows[0], rows[2], Ask.LASTING)[1]
        call = Call(
            self._layout, self.rank, self._link, self._agreement, arguments.mask, arguments.mods, arguments.scale,
            arguments.backend, arguments.deterministic, arguments.needs_grad, arguments.local, arguments.heads[0],
            arguments.dropout_p,
        )  # fmt: skip
        common = {"the call": "attention", **arguments.signature, "the plan": self._text}
        signature, captured = (
            {**common, _REACHED: each, "the keys that it may reach": lasting} for each in (reached, lasting)
        )
        return Prepared(call, work, arguments.operands, arguments.return_lse, signature, captured)

    def _work(self, arguments: Checked, q: Tensor, v: Tensor, ask: Ask) -> tuple[Work, str]:
        """This rank's work, and a digest of the ranges of keys that it is made for."""
        choice = self._choice(arguments, q, v, ask)
        if any(arguments.local) and choice.inner > 1:
            raise ValueError(
                f"a Bias with the rows of one rank is for algorithm='gather' and 'ring', got {choice.algorithm!r}; "
                f"give it whole, (batch or 1, heads or 1, {self.seqlen}, {self.seqlen})"
            )
        kept = self._kept.of(*arguments.given, ask)
        key = (choice, arguments.heads, q.shape[0])
        if key not in kept:
            kept[key] = self._made(choice, arguments, q.shape[0], ask)
        found: tuple[Work, str] = kept[key]
        return found

    def _made(self, choice: Choice, arguments: Checked, batch: int, ask: Ask) -> tuple[Work, str]:
        layout, heads, mask = self._layout, arguments.heads, arguments.mask
        known: dict[Run, Span] = {}

        def ranges(of: Sequence[Run]) -> list[Span]:
            new = [run for run in of if run not in known]
            if new:
                known.update(zip(new, key_ranges(mask, layout, new, batch, heads[0], ask)))
            return [known[run] for run in of]

        ranges(sorted({run for each in assign(layout, heads[0], choice.inner).runs for run in each}))
        work: Work
        if choice.algorithm == "ring":
            work = ring_work(layout, self.rank, ranges)
        else:
            work = gather_work(layout, self.rank, ranges, heads, choice.inner, choice.both_groups)
        return work, digest(str((choice, sorted(known.items()))))

    def _choice(self, arguments: Checked, q: Tensor, v: Tensor, ask: Ask) -> Choice:
        """The algorithm, how many ranks share rows by heads, and the groups of heads."""
        name, groups, topology = arguments.algorithm, arguments.head_groups, Topology(self.ranks, self.node)
        if name != "auto" or self.ranks == 1:
            return named(topology, "gather" if name == "auto" else name, groups)
        mask = arguments.mask
        kept = self._kept.of(*arguments.given, ask)
        shape = Shape(q.shape[0], *arguments.heads, q.shape[3], v.shape[3], q.element_size())
        key = (shape, arguments.needs_grad, any(arguments.local))
        if key not in kept:
            model = Model(topology, self._layout, mask, shape, ask)
            kept[key] = choose(model, arguments.needs_grad, any(arguments.local))
        return with_groups(kept[key], groups)


# --- Agreement ---


class _Members:
    """What the plans of one group of ranks share, as long as the process group's store is there."""

    def __init__(self, store: Any, members: Sequence[int], rank: int) -> None:
        whose = "-".join(map(str, members)) if len(members) <= 8 else digest(str(members))
        self.prefix, self.store, self.plans = f"tileattn/{whose}", store, 0
        self.heart = Heartbeat(prefixed(self.prefix, own_connection(store)), rank, len(members))


_members: dict[tuple[tuple[int, ...], int], _Members] = {}


def _agreement(group: Any, rank: int, always: bool) -> Agreement:
    """The agreement of a new plan. All ranks of a group make its plans in one order, so they count them alike."""
    ranks, store = tuple(dist.get_process_group_ranks(group)), default_store()
    members = _members.get((ranks, id(store)))  # the entry holds the store, so that no other has its id
    if members is None:
        members = _members[ranks, id(store)] = _Members(store, ranks, rank)
    members.plans += 1
    return Agreement(prefixed(f"{members.prefix}/{members.plans}", store), members.heart, always)
