"""Invented results of the suite parallel, to test how they are shown."""

from __future__ import annotations

from tileattn.bench.parallel.results import HostCost, Missing, Results, Row

TIMES = {
    ("32k 32/8 causal", "fwd"): {"ideal": 7.0, "tileattn": 7.2, "cudnn-allgather": 8.4, "cudnn-alltoall": 8.3},
    ("32k 32/8 causal", "fwdbwd"): {"ideal": 25.0, "tileattn": 26.0, "cudnn-alltoall": 28.5},
    ("128k 32/8 window 1024", "fwd"): {"ideal": 3.0, "tileattn": 2.9, "tileattn-ring": 6.0, "flex": 5.0},
    ("1M 32/8 causal", "fwdbwd"): {"tileattn": 27000.0},
}


def made_up() -> Results:
    """Rows with and without PyTorch's, one that is too fast, one whose values differ, and what is missing."""
    rows = []
    for (case, direction), times in TIMES.items():
        for backend, ms in times.items():
            own = backend.startswith("tileattn")
            checked = {"o": 0.002} if direction == "fwd" else {"dk": 0.003, "dq": 0.001, "dv": 0.002}
            wrong = "o" if backend == "tileattn-ring" else ""
            rows.append(
                Row(case, backend, direction, ms, [ms, ms], 600.0, 3 * 2**30, 2**20 if own else None, checked, wrong)
            )
    missing = [
        Missing("128k 32/8 window 1024", "cudnn-alltoall", "fwd", "it takes no mask", False),
        Missing("32k 32/8 causal", "fa2-allgather", "fwd", "rank 1: OutOfMemoryError: too much", True),
    ]
    costs = [HostCost("plan.attention, check='first'", 210.0), HostCost("plan.attention, check='always'", 350.0)]
    done = list(dict.fromkeys(case for case, _ in TIMES))
    return Results(
        "cuda", "Imaginary GPU", 2, "bf16", 2**17, 128, {"torch": "2"}, "abcdef0123456789", "2026-11-26T10:00:00",
        ["tileattn bench"], rows, missing, costs, "2048 tokens", done, done,
    )  # fmt: skip
