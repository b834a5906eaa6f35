"""The link of a plan: all-to-all over a process group, with counts of bytes, and a watch while the host waits.

On a CPU (gloo) the host waits for a transfer. It then looks from time to time whether another rank has failed
(`Agreement.watch`), instead of waiting for a rank that never comes. On a GPU the stream waits, and the host does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_names import before_kernels

Watch = Callable[[float], None]
_CONTIGUOUS = torch.contiguous_format
_SHORTEST, _LONGEST = 20e-6, 5e-3  # seconds between two looks whether a transfer is done


class Pending:
    """A transfer that has begun, or, without a work handle, is done."""

    def __init__(self, link: Link | None = None, work: Any = None, unpack: Callable[[], None] | None = None) -> None:
        self.link, self.work, self.unpack = link, work, unpack

    def wait(self) -> None:
        """Returns when the received tensors hold their values (on a GPU: for the current stream)."""
        if self.work is not None and self.link is not None:
            self.link.await_work(self.work)
        if self.unpack is not None:
            self.unpack()
        self.work = self.unpack = None


class Link:
    """Transfers between the ranks of a group.

    Args:
        group: the process group; None for a single process.
        rank: this rank of the group.
        watch: called with the seconds waited so far, now and then; raises if another rank has failed.
        explain: called with the error of a transfer that failed; raises a better one.

    Attributes:
        sent, received: bytes to and from other ranks since the link was made.
    """

    def __init__(self, group: Any, rank: int, watch: Watch, explain: Callable[[Exception], None]) -> None:
        self.group, self.rank, self.watch, self.explain = group, rank, watch, explain
        self.sent = self.received = 0
        self.direct: dict[int, Any] = {}  # the groups of a GPU's transfers
        self.unsettled: list[Any] = []

    def copy(self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]) -> Pending:
        """Copies what this rank sends to itself; for transfers in which no rank needs anything of another."""
        for source, target in zip(sends[self.rank], receives[self.rank], strict=True):
            if target is not source:
                target.copy_(source)
        return Pending()

    def start(
        self,
        sends: Sequence[Sequence[Tensor]],
        receives: Sequence[Sequence[Tensor]],
        like: Tensor,
        later: frozenset[int] = frozenset(),
    ) -> Pending:
        """Begins an all-to-all: sends[r] goes to rank r, and receives[r], of the same shapes there, comes from it.

        All tensors have the dtype and the device of `like`. On a GPU, what the ranks `later` receive goes beside what
        others receive, so that those need not wait for it.
        """
        others = [rank for rank in range(len(sends)) if rank != self.rank]
        self.sent += like.element_size() * sum(_numel(sends[rank]) for rank in others)
        self.received += like.element_size() * sum(_numel(receives[rank]) for rank in others)
        if like.is_cuda:
            pending = self._start_direct(sends, receives, like.device, later)
        else:
            pending = self._start_packed(sends, receives, like)
        self.copy(sends, receives)  # behind the transfer, which thus finds free multiprocessors
        return pending

    def _start_direct(
        self,
        sends: Sequence[Sequence[Tensor]],
        receives: Sequence[Sequence[Tensor]],
        device: torch.device,
        later: frozenset[int],
    ) -> Pending:
        """Without a copy of what is contiguous. NCCL runs all that one group of ranks receives as one kernel."""
        works: list[Any] = []
        landed: list[tuple[Tensor, Tensor]] = []
        for number in (0, 1) if later else (0,):
            to = [rank for rank in range(len(sends)) if rank != self.rank and (rank in later) == bool(number)]
            group = self._direct_group(number, device)
            operations = [
                dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=rank)
                for rank in to
                for x in sends[rank]
                if x.numel()
            ]
            receiving = (self.rank in later) == bool(number)
            if receiving:
                operations += self._receptions(receives, group, landed)
            if operations:
                # The tensors live until the transfer is done.
                begun = (dist.batch_isend_irecv(operations), operations)
                (works if receiving else self.unsettled).append(begun)

        def unpack() -> None:
            for place, target in landed:
                place.copy_(target)

        return Pending(self, works, unpack)

    def _receptions(
        self, receives: Sequence[Sequence[Tensor]], group: Any, landed: list[tuple[Tensor, Tensor]]
    ) -> list[Any]:
        """Receives what is contiguous in its place; adds the others to `landed`, with what is received for them."""
        operations = []
        for rank, places in enumerate(receives):
            for place in places if rank != self.rank else ():
                if place.numel():
                    target = place if place.is_contiguous() else torch.empty_like(place, memory_format=_CONTIGUOUS)
                    operations.append(dist.P2POp(dist.irecv, target, group=group, group_peer=rank))
                    if target is not place:
                        landed.append((place, target))
        return operations

    def _direct_group(self, number: int, device: torch.device) -> Any:
        if number not in self.direct:
            self.direct[number] = before_kernels(self.group, device, number)
        return self.direct[number]

    def settle(self) -> None:
        """Waits, at the end of a pass, for what was sent beside all else."""
        unsettled, self.unsettled = self.unsettled, []
        self.await_work(unsettled)

    def _start_packed(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], like: Tensor
    ) -> Pending:
        """One tensor for each rank, by all_to_all_single."""
        others = [rank for rank in range(len(sends)) if rank != self.rank]
        outgoing = [0 if rank == self.rank else _numel(each) for rank, each in enumerate(sends)]
        incoming = [0 if rank == self.rank else _numel(each) for rank, each in enumerate(receives)]
        packed, landed = like.new_empty(sum(outgoing)), like.new_empty(sum(incoming))
        sources = [x for rank in others for x in sends[rank]]
        for place, source in zip(packed.split([x.numel() for x in sources]), sources):
            place.view(source.shape).copy_(source)

        def unpack() -> None:
            places = [x for rank in others for x in receives[rank]]
            for place, values in zip(places, landed.split([x.numel() for x in places])):
                place.copy_(values.view(place.shape))

        work = dist.all_to_all_single(landed, packed, incoming, outgoing, group=self.group, async_op=True)
        return Pending(self, [([work], packed)], unpack)  # `packed` lives until the transfer is done

    def from_first(self, x: Tensor, ranks: int) -> Tensor:
        """Rank 0's values of a tensor that has one shape on all ranks."""
        out = torch.empty_like(x)
        sends: list[list[Tensor]] = [[x] if self.rank == 0 else [] for _ in range(ranks)]
        receives: list[list[Tensor]] = [[out] if rank == 0 else [] for rank in range(ranks)]
        (self.start(sends, receives, x) if ranks > 1 else self.copy(sends, receives)).wait()
        return out

    def await_work(self, begun: Sequence[tuple[Any, Any]]) -> None:
        """Waits for transfers: the stream on a GPU, the host on a CPU."""
        try:
            for works, _ in begun:
                for work in works:
                    if not self.direct:
                        self._poll(work)
                    work.wait()
        except RuntimeError as error:
            self.explain(error)
            raise

    def _poll(self, work: Any) -> None:
        begin, pause = time.monotonic(), _SHORTEST
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            self.watch(time.monotonic() - begin)


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() for x in tensors)
