"""The page of the suite decode: written from a result file, and the committed page is what the script writes."""

from __future__ import annotations

import importlib.util

from tests.bench.test_decode import made_results
from tests.tools import ROOT
from tileattn.bench.decode import results

spec = importlib.util.spec_from_file_location("make_decode_page", ROOT / "benchmarks" / "make_decode_page.py")
assert spec is not None
assert spec.loader is not None
make_decode_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_decode_page)


def test_the_committed_page_is_what_the_script_writes() -> None:
    source = make_decode_page.SOURCE
    assert make_decode_page.PAGE.exists() == (source is not None)
    if source is not None:
        written = make_decode_page.page(results.load(make_decode_page.RESULTS / source), source)
        assert make_decode_page.PAGE.read_text() == written, "run python benchmarks/make_decode_page.py"


def test_a_page_has_every_row_and_says_what_is_missing() -> None:
    text = make_decode_page.page(made_results(), "decode/made-up.json")
    lines = text.splitlines()
    assert "commit `abc`; torch 2. A copy reached 4200 GB/s, a read 4400 GB/s." in text
    assert "| best | under 512 MB | 2 | 1.581× | 1.25× | page 16 (1,1024,32/8) |" in lines
    table = lines.index("## Page 16")
    assert lines[table + 2].startswith("| batch, context, heads | tileattn | GB/s | of copy | of read | a | b |")
    assert lines[table + 4] == "| 1, 1024, 32/8 | 8.00 | 524 | 12% | 12% | 10.00 | 16.00 | 1.25× | 1.0e-03 |"
    assert lines[table + 5].endswith("| 900.0 | 2000 | **0.90×** | 1.0e-03 |")
    table = lines.index("## Contiguous")
    assert lines[table + 4].startswith("| 1, 8192, 32/8 | 20.00 |")
    assert "| - | 40.00 | 2.00× |" in lines[table + 4]
    assert "- refused: a: it takes pages only [contiguous (1,8192,32/8)]" in lines
    assert "- left out, K and V beyond 64 GiB: page 16 (128,131072,32/32)" in lines
    # Each row of a table has as many cells as its head.
    for i in range(1, len(lines)):
        if lines[i].startswith("|") and lines[i - 1].startswith("|"):
            assert lines[i].count("|") == lines[i - 1].count("|")
