"""One process in the place of a rank: its plans are that rank's, and it makes the rank's calls; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from tileattn.parallel import plan as plan_module
from tileattn.parallel.consent.agreement import Agreement


class _Done:
    """A transfer that is done. What it should have received holds anything."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@contextmanager
def playing(rank: int, ranks: int) -> Iterator[None]:
    """Inside, plans of the default group are those of one of several ranks."""
    heart: Any = SimpleNamespace(rank=rank, ranks=1)  # nobody is there to agree with

    def always(value: Any) -> Callable[..., Any]:
        """In place of a mock, which would keep the tensors that it is called with."""
        return lambda *_, **__: value

    with (
        mock.patch.object(plan_module, "as_group", always(None)),
        mock.patch.object(plan_module, "_agreement", always(Agreement(None, heart, False))),
        mock.patch.object(dist, "get_world_size", always(ranks)),
        mock.patch.object(dist, "get_rank", always(rank)),
        mock.patch.object(dist, "all_to_all_single", always(_Done())),
        mock.patch.object(dist, "P2POp", lambda send, tensor, **_: tensor),
        mock.patch.object(dist, "batch_isend_irecv", always([_Done()])),
    ):
        yield
