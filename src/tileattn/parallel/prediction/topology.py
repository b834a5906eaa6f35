"""Machines for the cost model: how many ranks, which links between them, how fast attention runs on one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks and their links. Rates are those of one GPU, in one direction, as a program sees them.

    The defaults are an H200 with NVLink inside a node and 400 Gb/s InfiniBand between nodes. They come from trials
    before this package (forward speed, NVLink) and from data sheets; the backward speed, the network and `call` are
    assumptions. Nothing is calibrated on this code.

    Args:
        ranks: the number of GPUs, at least 1.
        node: consecutive ranks that share the fast link.
        site: consecutive ranks that share the network; None: all.
        fast: bytes/s between ranks of a node.
        network: bytes/s between nodes of a site.
        far: bytes/s between sites.
        forward: FLOP/s of the forward kernel.
        backward: FLOP/s of the backward kernel.
        call: seconds of the host and the launch for one call of a kernel.

    Raises:
        ValueError: a number is not positive.
    """

    ranks: int
    node: int = 8
    site: int | None = None
    fast: float = 370e9
    network: float = 45e9
    far: float = 1.25e9
    forward: float = 620e12
    backward: float = 520e12
    call: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("ranks", "node", "site", "fast", "network", "far", "forward", "backward"):
            value = getattr(self, name)
            if name in ("ranks", "node", "site") and not (name == "site" and value is None):
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ValueError(f"Topology: {name} must be an int of at least 1, got {value!r}")
            elif value is not None and not value > 0:
                raise ValueError(f"Topology: {name} must be a positive number, got {value!r}")

    @property
    def rates(self) -> tuple[float, float, float]:
        """Bytes/s within a node, between nodes of a site, and between sites."""
        return self.fast, self.network, self.far

    def neighbours(self, rank: int) -> tuple[range, range, range]:
        """The ranks of this rank's node, of its site, and all."""
        site = self.ranks if self.site is None else self.site
        return self._around(rank, self.node), self._around(rank, site), range(self.ranks)

    def _around(self, rank: int, size: int) -> range:
        first = rank // size * size
        return range(first, min(first + size, self.ranks))
