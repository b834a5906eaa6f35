"""The cost of a mask or score modification: its time relative to that of its visible tiles without it.

That cost is taken from our own plain kernel at the same shape in the same run:

    causal+softcap50    the time of causal
    softcap50           the time of full
    window1024          the time of full x (tiles of 128 x 128 that the mask lets any score of through / all tiles)
    causal+bias         the time of causal, or that of copying the visible tiles of the bias, if it is longer

Every kernel must read a bias from memory, hence the last line. Each element of the bias counts once, also where it is
broadcast and every head reads it again (from the L2 cache, at best): the cost is a lower bound. All times are of one
direction. Each pass reads the bias, and writes its gradient where one is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tileattn.bench.baselines.base import OWN
from tileattn.bench.cases import Case
from tileattn.bench.compare import own_ms
from tileattn.bench.results import Results
from tileattn.measure.ceilings import overall

TILE = 128


@dataclass(frozen=True)
class Cost:
    """A case of ours, its time, and the time that its visible tiles cost without the modification, in milliseconds.

    compared_with: How the latter came about, in words.
    """

    case: str
    ms: float
    plain_ms: float
    compared_with: str

    @property
    def ratio(self) -> float:
        return self.ms / self.plain_ms


def costs(results: Results) -> list[Cost]:
    """The costs of dense cases with a mask (except causal) or a modification, if the run has the plain kernel."""
    times = own_ms(results)
    ceiling = overall(results.ceilings)
    cases = [row.as_case() for row in results.rows if row.backend == OWN]
    measured_costs = []
    for case in cases:
        if case.terms.plain or case.packing:
            continue
        of_tiles = _tiles_ms(case, times)
        if of_tiles is None:
            continue
        plain_ms, compared_with = of_tiles
        if case.terms.bias is not None and ceiling is not None:
            traffic_ms = _times_moved(case, results.direction) * bias_bytes(case) / ceiling.copy_tbps / 1e9
            if traffic_ms > plain_ms:
                plain_ms, compared_with = traffic_ms, "bias from memory"
        measured_costs.append(Cost(case.name, times[case.name], plain_ms, compared_with))
    return measured_costs


def _tiles_ms(case: Case, times: dict[str, float]) -> tuple[float, str] | None:
    """The time of the visible tiles in the plain kernel, and how it came about; None if that was not measured."""
    mask = case.terms.mask.name
    if mask == "causal":
        ms = times.get(replace(case, variant="causal").name)
        return None if ms is None else (ms, "causal")
    ms = times.get(replace(case, variant="full").name)
    if ms is None or mask == "full":
        return None if ms is None else (ms, "full")
    share = visited_tiles(case) / _all_tiles(case)
    return ms * share, f"{share:.1%} of full"


def visited_tiles(case: Case) -> int:
    """Tiles of 128 x 128 scores, per batch element and head, of which the mask lets some score through."""
    rows = torch.arange(case.seqlen_q) + case.seqlen_k - case.seqlen_q
    lo, hi = case.terms.key_range(rows, case.seqlen_k)
    visited = 0
    for block_lo, block_hi in zip(lo.split(TILE), hi.clamp(max=case.seqlen_k).split(TILE), strict=True):
        seen = block_hi > block_lo
        if seen.any():
            first, last = int(block_lo[seen].min()) // TILE, (int(block_hi[seen].max()) - 1) // TILE
            visited += last - first + 1
    return visited


def _all_tiles(case: Case) -> int:
    return -(-case.seqlen_q // TILE) * -(-case.seqlen_k // TILE)


def _times_moved(case: Case, direction: str) -> int:
    """How often a pass reads a bias and writes its gradient."""
    return {"fwd": 1, "bwd": 1, "fwdbwd": 2}[direction] + (case.terms.dbias and direction != "fwd")


def bias_bytes(case: Case) -> int:
    """Bytes of the bias's tiles that the mask lets through, each once: none without a bias."""
    has = case.terms.bias
    if has is None:
        return 0
    copies = (case.batch if "b" in has else 1) * (case.heads if "h" in has else 1)
    return copies * visited_tiles(case) * TILE * TILE * case.value_dtype.itemsize
