"""Two streams of a GPU, so that the blocks of one call fill the multiprocessors that the end of another leaves idle.

The main lane is the current stream. On a CPU, and where lanes are not wanted, there is one lane only: the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Lanes:
    """A context with two lanes; the main one waits for the side lane at the end.

    Args:
        device: of the tensors.
        wanted: False for one lane only.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.device = device
        self.side: Any = _side_stream(device) if wanted and device.type == "cuda" else None

    def __enter__(self) -> Lanes:
        self.catch_up()
        return self

    def __exit__(self, *_: object) -> None:
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side)

    def catch_up(self) -> None:
        """Lets the side lane wait for all that the main lane has been given so far."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.device))

    def lane(self, number: int) -> AbstractContextManager[Any]:
        """The lane of a call: even numbers are on the main lane, odd ones on the side lane."""
        return self.on_side() if number % 2 else nullcontext()

    def on_side(self) -> AbstractContextManager[Any]:
        """The side lane."""
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def keep(self, tensors: Sequence[Tensor | None]) -> None:
        """Says that the side lane reads tensors of the main lane, so that their memory is not given away before."""
        if self.side is not None:
            for x in tensors:
                if x is not None:
                    x.record_stream(self.side)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
