"""The rates that `Topology` begins with, each with its source.

`benchmarks/calibrate_parallel.py --adopt` writes the lines that two GPUs can measure, one figure a line. The others are
assumptions: no machine with InfiniBand, and no second site, was ever measured.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """A rate in SI units, whether `calibrate_parallel.py` measured it, and where it comes from."""

    value: float
    measured: bool
    source: str


FIGURES = {
    # FLOP/s of the kernels, seconds of a call and of a transfer, bytes/s in one direction.
    "forward": Figure(620e12, False, "trials on two H200s before this package existed"),
    "backward": Figure(520e12, False, "a guess"),
    "call": Figure(10e-6, False, "a guess"),
    "fast": Figure(370e9, False, "trials on two H200s (NVLink) before this package existed"),
    "transfer": Figure(20e-6, False, "a guess"),
    "copy": Figure(0.75e12, False, "bytes/s that PyTorch copies; a profile on two H100s, 2026-11-26"),
    "network": Figure(45e9, False, "400 Gb/s InfiniBand for each GPU, of which 90 % are assumed to be reached"),
    "far": Figure(1.25e9, False, "assumed: 10 Gb/s for each GPU between two sites"),
}
