"""Heartbeats: how a rank learns, while it waits, that another's process has ended.

Each process adds to a counter in the store twice a second, from a thread. A counter that stands still for some seconds
belongs to a process that has ended, or in which no Python thread runs. Counters are read only by ranks that wait longer
than usual, so a slow rank is never taken for a dead one.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any

BEAT = 0.5  # seconds
SILENCE = 5.0  # seconds without a beat after which a process counts as ended


class Heartbeat:
    """The beats of the ranks of a group.

    Args:
        store: the part of a store that these ranks share.
        rank, ranks: this rank, and how many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.stop = threading.Event()
        if ranks > 1:
            store.add(f"beat{rank}", 1)
            thread = threading.Thread(target=self._beat, name="tileattn-heartbeat", daemon=True)
            thread.start()
            atexit.register(self._end, thread)

    def _beat(self) -> None:
        while not self.stop.wait(BEAT):
            try:
                self.store.add(f"beat{self.rank}", 1)
            except RuntimeError:  # the store has closed: the process group is gone
                return

    def _end(self, thread: threading.Thread) -> None:
        self.stop.set()
        thread.join(2 * BEAT)

    def watch(self) -> Silence:
        """Begins to listen."""
        return Silence(self)


class Silence:
    """What a rank that waits has heard since it began to listen."""

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.counts: dict[int, int] = {}
        self.heard: dict[int, float] = {}

    def ended(self, silence: float = SILENCE) -> list[int]:
        """Ranks whose counter has stood still for so many seconds, as far as this object has listened."""
        now, quiet = time.monotonic(), []
        for rank in range(self.heart.ranks):
            if rank == self.heart.rank:
                continue
            count = self.heart.store.add(f"beat{rank}", 0)
            if self.counts.get(rank) != count:
                self.counts[rank], self.heard[rank] = count, now
            elif now - self.heard[rank] >= silence:
                quiet.append(rank)
        return quiet
