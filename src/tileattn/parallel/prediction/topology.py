"""Machines for the cost model: how many ranks, which links between them, how fast attention runs on one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from .rates import FIGURES

MEASURED = ("forward", "backward", "call", "fast", "transfer")  # what two GPUs can tell
FORMAT = "parallel-calibration-1"


@dataclass(frozen=True)
class Topology:
    """The ranks and their links. Rates are those of one GPU, in one direction, as a program sees them.

    The defaults are an H100 with NVLink inside a node and 400 Gb/s InfiniBand between nodes; rates.py has the source of
    each figure, and says which were measured. :meth:`calibrated` takes those that were measured on your machine.

    Args:
        ranks: the number of GPUs, at least 1.
        node: consecutive ranks that share the fast link.
        site: consecutive ranks that share the network; None: all.
        fast: bytes/s between ranks of a node.
        network: bytes/s between nodes of a site.
        far: bytes/s between sites.
        forward: FLOP/s of the forward kernel.
        backward: FLOP/s of the backward kernel.
        call: seconds that one more call of a kernel costs.
        transfer: seconds that one more transfer costs, whatever its size.
        copy: bytes/s that are copied within a GPU.

    Raises:
        ValueError: a number is not positive.
    """

    ranks: int
    node: int = 8
    site: int | None = None
    fast: float = FIGURES["fast"].value
    network: float = FIGURES["network"].value
    far: float = FIGURES["far"].value
    forward: float = FIGURES["forward"].value
    backward: float = FIGURES["backward"].value
    call: float = FIGURES["call"].value
    transfer: float = FIGURES["transfer"].value
    copy: float = FIGURES["copy"].value

    def __post_init__(self) -> None:
        for name in ("ranks", "node", "site"):
            value = getattr(self, name)
            if not (name == "site" and value is None) and (type(value) is not int or value < 1):
                raise ValueError(f"Topology: {name} must be an int of at least 1, got {value!r}")
        for name in ("fast", "network", "far", "forward", "backward", "copy"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Topology: {name} must be a positive number, got {getattr(self, name)!r}")
        for name in ("call", "transfer"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Topology: {name} must be a number of at least 0, got {getattr(self, name)!r}")

    @classmethod
    def calibrated(cls, file: str | PathLike[str], ranks: int, **others: Any) -> Topology:
        """A topology with the rates that `benchmarks/calibrate_parallel.py` measured.

        Args:
            file: the JSON file that it wrote.
            ranks: the number of GPUs.
            **others: arguments of the class, such as `node` and `network`; they come before those of the file.

        Raises:
            ValueError: the file is no calibration.
        """
        content = json.loads(Path(file).read_text())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"Topology: {file} is no file of benchmarks/calibrate_parallel.py")
        return cls(ranks, **{**{name: content["topology"][name] for name in MEASURED}, **others})

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
