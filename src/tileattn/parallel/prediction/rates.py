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
    "forward": Figure(697000000000000.0, True, "benchmarks/results/parallel/calibration-h100.json"),
    "backward": Figure(537000000000000.0, True, "benchmarks/results/parallel/calibration-h100.json"),
    "call": Figure(2.6e-05, True, "benchmarks/results/parallel/calibration-h100.json"),
    "fast": Figure(304000000000.0, True, "benchmarks/results/parallel/calibration-h100.json"),
    "transfer": Figure(4.19e-05, True, "benchmarks/results/parallel/calibration-h100.json"),
    "copy": Figure(0.75e12, False, "bytes/s that PyTorch copies; a profile on two H100s, 2026-11-26"),
    "network": Figure(45e9, False, "400 Gb/s InfiniBand for each GPU, of which 90 % are assumed to be reached"),
    "far": Figure(1.25e9, False, "assumed: 10 Gb/s for each GPU between two sites"),
}
