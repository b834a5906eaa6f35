"""The page of the suite decode: written from a result file, and the committed page is what the script writes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from tests.bench.test_decode import made_results
from tests.tools import ROOT
from tileattn.bench.decode import plot, results
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.rows import Row

spec = importlib.util.spec_from_file_location("make_decode_page", ROOT / "benchmarks" / "make_decode_page.py")
assert spec is not None
assert spec.loader is not None
make_decode_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_decode_page)


def test_the_committed_page_is_what_the_script_writes() -> None:
    source = make_decode_page.SOURCE
    assert make_decode_page.PAGE.exists() == (source is not None)
    if source is not None:
        of_ratios = make_decode_page.RATIOS_SOURCE
        ratios = None if of_ratios is None else results.load(make_decode_page.RESULTS / of_ratios)
        picture = str(make_decode_page.PICTURE.relative_to(make_decode_page.PAGE.parent))
        measured = results.load(make_decode_page.RESULTS / source)
        written = make_decode_page.page(measured, source, ratios, of_ratios, picture)
        assert make_decode_page.PAGE.read_text() == written, "run python benchmarks/make_decode_page.py"


def test_a_page_has_every_row_and_says_what_is_missing() -> None:
    text = make_decode_page.page(made_results(), "decode/made-up.json")
    lines = text.splitlines()
    assert "commit `abc`; torch 2. A copy reached 4200 GB/s, a read 4400 GB/s." in text
    assert "| best | under 512 MB | 2 | 1.581× | 1.25× | page 16 (1,1024,32/8) |" in lines
    table = lines.index("### Page 16")
    assert lines[table + 2].startswith("| batch, context, heads | tileattn | GB/s | of copy | of read | a | b |")
    assert lines[table + 4] == "| 1, 1024, 32/8 | 8.00 | 524 | 12% | 12% | 10.00 | 16.00 | 1.25× | 1.0e-03 |"
    assert lines[table + 5].endswith("| 900.0 | 2000 | **0.90×** | 1.0e-03 |")
    table = lines.index("### Contiguous")
    assert lines[table + 4].startswith("| 1, 8192, 32/8 | 20.00 |")
    assert "| - | 40.00 | 2.00× |" in lines[table + 4]
    assert "- refused: a: it takes pages only [contiguous (1,8192,32/8)]" in lines
    assert "- left out, K and V beyond 64 GiB: page 16 (128,131072,32/32)" in lines
    required = (
        "| mean against the best, all rows (aim): 1.05 | - | none ran |  |  |"  # neither a nor b is one of the three
    )
    assert required in lines
    assert "| batch 1 at 1k: 7.5 us or less, 10.5 at 32/32 | no | 0 of 1 | 8.00 us | page 16 (1,1024,32/8) |" in lines
    # Each row of a table has as many cells as its head.
    for i in range(1, len(lines)):
        if lines[i].startswith("|") and lines[i - 1].startswith("|"):
            assert lines[i].count("|") == lines[i - 1].count("|")


def test_a_page_shows_what_options_cost() -> None:
    case = Case(1, 8192, 32, 8, 16)
    sizes = (case.batch, case.context, case.heads, case.kv_heads, case.head_dim, case.page, case.kv_bytes(2))
    times = {"tileattn": 10.0, "tileattn-q2": 10.5, "tileattn-q4": 12.0, "tileattn-sink": 10.0}
    rows = [Row(case.name, name, *sizes, us, 1.0, 1e-3) for name, us in times.items()]
    of_ratios = replace(made_results(), rows=rows, missing=[])
    text = make_decode_page.page(made_results(), "decode/made-up.json", of_ratios, "decode/ratios.json", "decode.png")
    lines = text.splitlines()
    assert "| q_len | 1 of 2 | 1.10× | 1.20× | page 16 (1,8192,32/8) | tileattn-q4 |" in lines
    assert "| score modification | 1 of 1 | 1.10× | 1.00× | page 16 (1,8192,32/8) | tileattn-sink |" in lines
    assert "(decode.png)" in text


def test_the_picture_has_a_panel_for_each_kind_of_cache_and_heads() -> None:
    figure = plot.draw(made_results())
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "32 query heads, 8 KV heads,\npages of 16",
        "32 query heads, 8 KV heads,\ncontiguous caches",
    ]
    paged = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert paged["tileattn"] == [pytest.approx(524.288), pytest.approx(4294.967296)]
    assert paged["a copy"] == [4200.0, 4200.0]
    with pytest.raises(ValueError, match="no rows with pages of 16"):
        plot.draw(replace(made_results(), rows=[]))
