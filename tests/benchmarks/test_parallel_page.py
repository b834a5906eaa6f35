"""The page of the suite parallel: written from a result file, and the committed page is what the script writes."""

from __future__ import annotations

import importlib.util

from tests.bench.parallel.made_up import made_up
from tests.tools import ROOT
from tileattn.bench.parallel import results

spec = importlib.util.spec_from_file_location("make_parallel_page", ROOT / "benchmarks" / "make_parallel_page.py")
assert spec is not None
assert spec.loader is not None
make_parallel_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_parallel_page)


def test_the_committed_page_is_what_the_script_writes() -> None:
    source = make_parallel_page.SOURCE
    assert make_parallel_page.PAGE.exists() == (source is not None)
    if source is not None:
        picture = str(make_parallel_page.PICTURE.relative_to(make_parallel_page.PAGE.parent))
        written = make_parallel_page.page(results.load(make_parallel_page.RESULTS / source), source, picture)
        assert make_parallel_page.PAGE.read_text() == written, "run python benchmarks/make_parallel_page.py"


def test_a_page_has_every_case_and_says_what_is_missing() -> None:
    text = make_parallel_page.page(made_up(), "parallel/made-up.json", "parallel.png")
    lines = text.splitlines()
    assert "2 × Imaginary GPU, bf16, head dim 128, 2026-11-26, commit `abcdef012345`; torch 2." in text
    assert (
        "| 32k 32/8 causal | 7.00 | 7.20 | 600 | 97.2% | 8.30 (cudnn-alltoall) | 84.3% | 1.15× | 1.0 MiB | 3.0 GiB | "
        "2.0e-03 |"
    ) in lines
    assert any(line.startswith("| 1M 32/8 causal | - | 27000.00 | 600 | - | - | - | - |") for line in lines)
    assert any(
        line.startswith("| 128k 32/8 window 1024 (measurement wrong: over 101% of the ideal) |") for line in lines
    )
    assert "| 128k 32/8 window 1024 | forward | ring | 6.00 | 50.0% |" in lines
    assert "| `plan.attention, check='always'` | 350 |" in lines
    assert "- failed: fa2-allgather: rank 1: OutOfMemoryError: too much [32k 32/8 causal]" in lines
    # Each row of a table has as many cells as its head.
    for i in range(1, len(lines)):
        if lines[i].startswith("|") and lines[i - 1].startswith("|"):
            assert lines[i].count("|") == lines[i - 1].count("|")
