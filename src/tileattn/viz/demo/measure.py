"""Measures one case, and PyTorch's own attention on it, with the benchmark's runner, oracle and tolerance rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tileattn.bench import problem, results
from tileattn.bench.baselines import BASELINES, TileAttn
from tileattn.bench.baselines.base import OWN
from tileattn.bench.baselines.own import mask_of
from tileattn.bench.cases import Case
from tileattn.bench.plot import LABELS
from tileattn.bench.results import Results, Row
from tileattn.bench.runner import Run
from tileattn.bench.variants import written_out
from tileattn.measure import timing
from tileattn.measure.profiling import current, rate_text
from tileattn.measure.units import human_bytes
from tileattn.viz.tiles import draw_tiles, tile_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS = ("implementation", "ms", "rate", "error", "memory")
# Shorter than the benchmark's measurements, so that the page answers soon.
EFFORT = timing.Effort(warmup_ms=5.0, measure_ms=20.0, rounds=2)
# The baselines of a dtype that PyTorch's attention does not support: for fp8, tileattn on the same values in bf16.
BESIDE = {"fp8": ("tileattn-bf16",)}
MOST_TILES = 256


@dataclass(frozen=True)
class Answer:
    """The result of a run.

    table: measurements, with the columns of `HEADINGS`. notes: what was checked, and which implementations are missing,
    with the reasons. code: the call in Python. figure: the tile map.
    """

    table: list[list[str]]
    notes: list[str]
    code: str
    figure: Figure


def run(case: Case, device: torch.device) -> Answer:
    """Measures a case and draws its tile map.

    Raises:
        RuntimeError: tileattn failed, or its error exceeds the tolerance; the message gives the reason.
    """
    measured = results.begin(device, None, "tileattn demo")
    names = BESIDE.get(case.dtype, ("sdpa", "eager"))
    with current(device):  # gradio calls this function in another thread, which has its own current device
        Run("demo", [case], [TileAttn(), *(BASELINES[name] for name in names)], device, measured, EFFORT)()
    failed = [entry for entry in measured.failed if entry.backend == OWN]
    if failed:
        raise RuntimeError(failed[0].reason)
    return Answer(_table(measured), _notes(measured, case), code(case), draw(case))


def _table(measured: Results) -> list[list[str]]:
    chosen = next(iter(measured.implementation.values()), "")

    def line(row: Row) -> list[str]:
        name = f"tileattn ({chosen})" if row.backend == OWN else LABELS.get(row.backend, row.backend)
        return [name, f"{row.ms:.3f}", rate_text(row.tflops, "FLOPS"), f"{row.error:.1e}", human_bytes(row.peak_bytes)]

    return [line(row) for row in measured.rows]


def _notes(measured: Results, case: Case) -> list[str]:
    notes = [f"error over {measured.checked[case.name]} against float64; tileattn's keeps the tolerance rule"]
    notes += [f"{LABELS.get(entry.backend, entry.backend)} is missing: {entry.reason}" for entry in measured.refused]
    notes += [f"{LABELS.get(entry.backend, entry.backend)} failed: {entry.reason}" for entry in measured.failed]
    return notes


def draw(case: Case) -> Figure:
    """Draws the tile map of the case's mask with tiles of 128 x 128, or larger ones if there would be too many."""
    block = 128
    while max(case.seqlen_q, case.seqlen_k) > block * MOST_TILES:
        block *= 2
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=1, head_dim_v=1, variant=case.terms.mask.name)
    mask = mask_of(problem.build(replace(one_head, dtype="fp32"), torch.device("cpu")))
    return draw_tiles(tile_map(mask, case.seqlen_q, case.seqlen_k, block, block), case.terms.mask.name)


def code(case: Case) -> str:
    """The case as a call of `tileattn.attention` in Python."""
    terms = case.terms
    masks = [f"SlidingWindow{terms.window}"] if terms.window else []
    masks += [f"PrefixLM({terms.prefix})"] if terms.prefix is not None else []
    masks += ["Documents(ids)"] if terms.documents else []
    mods = [f"SoftCap({written_out(terms.softcap)})"] if terms.softcap else []
    mods += ["ALiBi(slopes)"] if terms.alibi else []
    mods += ["Bias(bias)"] if terms.bias else []
    arguments = ["**quantize_fp8(q, k, v)._asdict()"] if case.dtype == "fp8" else ["q", "k", "v"]
    arguments += ["causal=True"] if terms.causal else []
    arguments += [f"mask={' & '.join(masks)}"] if masks else []
    arguments += [f"score_mod={mods[0] if len(mods) == 1 else '[' + ', '.join(mods) + ']'}"] if mods else []
    arguments += ["sink=sink"] if terms.sink else []
    return f"o = tileattn.attention({', '.join(arguments)})"
