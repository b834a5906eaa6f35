"""Sets what the cost model predicts beside the rows of `tileattn bench --suite parallel`.

A case is read from its name, such as "128k 32/8 window 1024", and its length is a multiple of the file's `base`, which
stands for 128k. Rows that no model fits are left out: other implementations, and what has another form.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tileattn import Causal, SlidingWindow
from tileattn.parallel import Topology, simulate

LENGTHS = {"32k": 0.25, "128k": 1, "256k": 2, "1M": 8}  # as parts of the base
BASE = 131072
CASE = re.compile(r"(?P<length>\w+) (?P<heads>\d+)/(?P<kv_heads>\d+) (?P<kind>.+)")
OWN = re.compile(r"tileattn(?:-(?P<algorithm>gather|ulysses|2d|ring)(?P<groups>\d*))?")
SUITE = "tileattn.bench.parallel.cases"


class Compared(NamedTuple):
    """A measured row, and the milliseconds of the model."""

    file: str
    gpu: str
    ranks: int
    case: str
    backend: str
    direction: str
    ms: float
    predicted_ms: float


def compared(folder: Path) -> list[Compared]:
    """All rows of a folder's result files that the model fits, measured on GPUs."""
    return [row for path in sorted(folder.glob("*.json")) for row in of_file(path.name, json.loads(path.read_text()))]


def of_file(name: str, content: Any) -> Iterator[Compared]:
    """The rows of a file; none if it is another kind of file, or of a CPU."""
    if not isinstance(content, dict) or content.get("device") != "cuda" or "ranks" not in content:
        return
    for row in content.get("rows", ()):
        if not isinstance(row, dict) or not {"case", "backend", "direction", "ms"} <= row.keys():
            continue
        seconds = predicted(content, row)
        if seconds is not None:
            origin = name, content.get("gpu", "unknown"), content["ranks"]
            yield Compared(*origin, row["case"], row["backend"], row["direction"], row["ms"], 1e3 * seconds)


def predicted(content: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Seconds by the model, of the slowest rank; None where no model fits."""
    case, own = CASE.fullmatch(row["case"]), OWN.fullmatch(row["backend"])
    if case is None or own is None or case["length"] not in LENGTHS or row["direction"] not in ("fwd", "bwd", "fwdbwd"):
        return None
    given = _mask(case["kind"], content, row["case"])
    if given is None:
        return None
    seqlen = int(content.get("base", BASE) * LENGTHS[case["length"]])
    shape = (1, seqlen, int(case["heads"]), int(case["kv_heads"]), content.get("head_dim", 128))
    algorithm, groups = own["algorithm"] or "auto", int(own["groups"]) if own["groups"] else None
    found = simulate(Topology(content["ranks"]), shape=shape, algorithm=algorithm, head_groups=groups, **given)
    parts = {"fwd": (1, 0), "bwd": (0, 1), "fwdbwd": (1, 1)}[row["direction"]]
    return max(parts[0] * f + parts[1] * b for f, b in zip(found.forward, found.backward))


def _mask(kind: str, content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The arguments of `simulate` that say which mask and layout a case has."""
    if kind == "causal":
        return {"mask": Causal()}
    if (window := re.fullmatch(r"window (\d+)", kind)) is not None:
        return {"mask": SlidingWindow(int(window[1]), 0), "layout": "contiguous"}
    if not kind.startswith("documents") or importlib.util.find_spec(SUITE.rpartition(".")[0]) is None:
        return None
    cases = importlib.import_module(SUITE).suite("cuda", content.get("base"), content.get("head_dim"))
    ends = next((case.documents for case in cases if case.name == name), None)
    return None if ends is None else {"mask": Causal(), "documents": list(ends)}
