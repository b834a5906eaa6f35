"""docs/benchmarks.md is what its script writes from the committed result files, and the script shows all of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace

import pytest

from tests.tools import ROOT
from tests.tools.made_up import made_up
from tileattn.bench import results
from tileattn.bench.baselines.base import OWN
from tileattn.bench.modules import results as module_results
from tileattn.measure import ceilings

spec = importlib.util.spec_from_file_location("make_page", ROOT / "benchmarks" / "make_page.py")
assert spec is not None
assert spec.loader is not None
make_page = importlib.util.module_from_spec(spec)
sys.modules["make_page"] = make_page  # where dataclasses look for it
spec.loader.exec_module(make_page)

CEILINGS = [ceilings.Ceiling("before", 760.0, 4.3), ceilings.Ceiling("after", 740.0, 4.1)]


def test_the_committed_page_is_what_the_script_writes() -> None:
    committed = (ROOT / "docs" / "benchmarks.md").read_text()
    assert committed == make_page.page(make_page.load(), make_page.load_modules()), "run python benchmarks/make_page.py"


def test_pictures_and_links_of_the_page_are_there() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert any(target.endswith(".png") for target in targets)
    for target in targets:
        assert (ROOT / "docs" / target).is_file(), target


@pytest.mark.parametrize("suite", make_page.SOURCES)
def test_a_suite_is_shown_from_a_file_of_its_own(suite: str) -> None:
    name = make_page.SOURCES[suite]
    if name is None:
        return
    measured = results.load(ROOT / "benchmarks" / "results" / name)
    assert measured.device == "cuda"
    if suite.startswith("triton"):
        assert set(measured.implementation.values()) == {"triton"}
        words = {"fp16": "", "fp32": "-fp32", "full": "-full", "causal": "", "fwd": "", "bwd": "-bwd"}
        kinds = {(row.dtype, row.variant, row.direction, row.head_dim) for row in measured.rows}
        names = {f"triton{words[dtype]}{words[mask]}{words[way]}-d{dim}" for dtype, mask, way, dim in kinds}
        assert names == {suite}
        return
    if suite.startswith("tilelang"):
        kinds = {(row.suite, row.seqlen_q, row.variant) for row in measured.rows}
        assert kinds == {("custom", 4096, suite.rpartition("-")[2])}
        assert {row.seqlen_k for row in measured.rows} == {8192 if "8192" in suite else 4096}
        return
    shown, _, direction = suite.partition("-")
    assert {(row.suite, row.direction) for row in measured.rows} == {(shown, direction or "fwd")}
    assert measured.direction == (direction or "fwd")


def test_every_remark_is_on_the_page() -> None:
    text = make_page.PAGE.read_text()
    assert make_page.REMARKS
    for name, remark in make_page.REMARKS.items():
        assert name in make_page.SOURCES.values(), f"the remark about {name} is about a file that is not shown"
        section = text.split(f"[`{name}`]")[1].split("\n## ")[0]
        assert remark in section, name


def made_up_page(**suites: results.Results) -> str:
    text = make_page.page({suite: make_page.Source(f"{suite}.json", measured) for suite, measured in suites.items()})
    assert isinstance(text, str)
    return text


def test_random_shapes_stand_beside_the_fixed_grid() -> None:
    fa, drawn = (made_up(suite, "cuda", OWN, "fa4", direction="bwd") for suite in ("fa", "random"))
    alone, slow = drawn.draws["1"][:2]
    drawn.rows = [
        replace(row, ms=1.25) if (row.case, row.backend) == (slow, OWN) else row
        for row in drawn.rows
        if (row.case, row.backend) != (alone, "fa4")
    ]
    text = made_up_page(**{"fa-bwd": fa, "random-bwd": drawn})
    section = text.split("## Random shapes, backward\n")[1]
    assert "| random, all | 39 | 1.094× | 0.88× | 1 |\n| the fixed grid | 40 | 1.100× | 1.10× | 0 |" in section
    assert f"| {slow} | **0.88×** |" in section
    assert f"No baseline ran: {alone}." in section
    assert "40 cases\nfrom a seed (here 1): batch" in section
    assert "Not measured:" not in section
    assert "benchmarks/random-bwd.png" in section
    drawn.rows = [row for row in drawn.rows if row.case != slow]
    assert f"Not measured: {slow}." in made_up_page(**{"fa-bwd": fa, "random-bwd": drawn})


def test_every_suite_has_its_section() -> None:
    fa = replace(made_up("fa", "cuda", OWN, "fa2", "cudnn", "fa4"), ceilings=CEILINGS)
    variants = replace(made_up("variants", "cuda", OWN, "flex"), ceilings=CEILINGS)
    heads = made_up("heads", "cuda", OWN, "cudnn")
    text = made_up_page(fa=fa, variants=variants, heads=heads, fp8=made_up("fp8", "cuda", OWN, "tileattn-bf16"))
    sections = ["Method", "Forward pass", "Variants", "Grouped heads and head dims", "fp8"]
    assert re.findall(r"^## (.*)", text, re.M) == sections
    assert re.findall(r"^### (.*)", text, re.M) == [
        *(f"Head dim {dim}, {variant}" for dim in (64, 128, 256) for variant in ("full", "causal")),
        "Other shapes",
        *("D128 (4,4096,16)", "D128 (1,16384,16)", "D64 (4,4096,32)"),
    ]
    assert "cuBLAS reached 750 TFLOPS, a copy 4.20 TB/s (before and after)." in text
    # 2 * 2 * 16 * 8192^2 * 256 FLOPs in 1 ms, of 750 TFLOPS; the baselines are 1.1, 1.21 and 1.331 times slower.
    row, of_fp8 = re.findall(r"^\| D128 full \(2,8192,16\) .*", text, re.M)
    assert row == "| D128 full (2,8192,16) | 1100 | 1000 | 909 | 826 | 1.10× | 147% | 2.0e-03 | 2.0e-03 |"
    assert "| causal+softcap50 | 1.000 | 1.100 | 275 | 1.10× | 1.00× | causal | 2.0e-03 |" in text
    assert of_fp8 == "| D128 full (2,8192,16) | 1100 | 1000 | 1.10× | 2.0e-03 | 2.0e-03 |"
    assert "- refused: fa2: needs [one] head dim [D192/128 causal (4,4096,16), D192/128 full (2,8192,16)]" in text
    # All take 1 ms, so that TFLOPS are in proportion to heads times head dim: 25 * 80 over 21 * 96.
    assert "| D128 causal (4,4096,32/8) | 1.000 | 1.000 | 1.00× |" in text
    assert re.search(r"^\| 80 \| \d+ \| 96 \| \d+ \| 99% \|$", text, re.M)
    assert re.search(r"^\| 192/128 \| \d+ \| 256 \| \d+ \| 125% \|$", text, re.M)
    assert "Not measured yet" not in text


def test_a_published_shape_and_the_modules_have_sections() -> None:
    measured = made_up("fa", "cuda", OWN, "fa2")
    measured.rows = [replace(row, seqlen_q=4096) for row in measured.rows if row.case == "D128 causal (2,8192,16)"]
    shape = module_results.Shape(4, 12, 4, 64, "fp32", "fwd")
    rows = [module_results.Row(name, 512, ms, 2**20, 1e-6) for name, ms in (("naive", 3.0), ("v2", 2.0))]
    missing = [module_results.Missing("triton", 512, "no GPU")]
    of_modules = module_results.Results("NVIDIA H200", {}, "a" * 40, "2026-11-23", "", shape, rows, missing)
    sources = {"tilelang-4096x8192-causal": make_page.Source("t.json", measured)}
    text = make_page.page(sources, {"memory/modules-h200.json": of_modules})
    assert "## TileLang's example, 4096 queries, 8192 keys, causal" in text
    assert "| D128 causal (2,8192,16) | 550 | 500 | 1.10× |" in text
    assert "Queries are aligned with the last keys" in text
    assert "## Modules of tileattn.nn, forward, fp32\n" in text
    assert "| 512 | `v2` | 2 | 1.5× | 1.0 MiB | 1× | 1.0e-06 |" in text
    assert "](benchmarks/modules-h200.png)" in text
    assert "- `triton` at 512: no GPU" in text


def test_rows_behind_are_bold_and_what_is_absent_is_said() -> None:
    fa = made_up("fa", "cuda", OWN, "cudnn")
    fa.rows = [replace(row, ms=1.375) if row.backend == OWN else row for row in fa.rows]
    text = made_up_page(fa=fa)
    assert text.count("**0.80×**") == 40
    assert "of cuBLAS" not in text
    assert "This run did not measure the ceilings." in text
    assert "Not measured yet\n\nThe suites `variants` and `heads` and `fp8`." in text


def test_a_case_that_only_a_baseline_ran_has_dashes() -> None:
    fa = made_up("fa", "cuda", OWN, "cudnn")
    fa.rows = [row for row in fa.rows if (row.backend, row.case) != (OWN, "D128 full (2,8192,16)")]
    assert "| D128 full (2,8192,16) | – | 1000 | – | – | 2.0e-03 |" in made_up_page(fa=fa)


def test_the_backward_pass_has_sections_of_its_own() -> None:
    fa = made_up("fa", "cuda", OWN, "fa4")
    backward = {
        suite: replace(made_up(suite, "cuda", OWN, "flex", direction="bwd"), ceilings=CEILINGS)
        for suite in ("fa", "variants", "heads")
    }
    memory = made_up("fa", "cuda", OWN, "eager", direction="fwdbwd")
    memory.rows = [replace(row, suite="memory") for row in memory.rows if row.head_dim == 128][:12]
    named = {**{f"{suite}-bwd": measured for suite, measured in backward.items()}, "memory-fwdbwd": memory}
    text = made_up_page(fa=fa, **named)
    sections = ["Method", "Forward pass", "Backward pass", "Variants, backward"]
    sections += ["Grouped heads and head dims, backward", "Memory", "Not measured yet"]
    assert re.findall(r"^## (.*)", text, re.M) == sections
    headings = re.findall(r"^#+ (.*)", text, re.M)
    assert len(set(headings)) == len(headings), "their anchors would clash"
    assert "how fast forward and backward passes are, beside other implementations" in text
    # 2.5 times the forward's FLOPs in the same 1 ms, of 750 TFLOPS.
    row = re.findall(r"^\| D128 full \(2,8192,16\) .*", text, re.M)[1]
    assert row == "| D128 full (2,8192,16) | 2749 | 2499 | 1.10× | 367% | 2.0e-03 | 2.0e-03 |"
    assert "| causal+bias+dbias | 1.000 |" in text
    assert "| D128 full (2,8192,16) | 3.0 MiB | 3.0 MiB |" in text
    assert "![TFLOPS of the backward pass against sequence length at head dim 64" in text
    assert "(benchmarks/backward-d64.png)" in text


def test_packed_sequences_are_beside_the_dense_kernel() -> None:
    varlen = made_up("varlen", "cuda", OWN, "fa4", f"{OWN}-dense")
    varlen.rows = [replace(row, ms=1.375) if row.backend == OWN else row for row in varlen.rows]
    skewed = {row.case for row in varlen.rows if row.packing == "skewed"}
    varlen.rows = [row for row in varlen.rows if row.case not in skewed or row.backend != f"{OWN}-dense"]
    text = made_up_page(fa=made_up("fa", "cuda", OWN), varlen=varlen)
    assert "## Packed sequences\n" in text
    # 1.1 and 1.21 ms beside 1.375.
    assert "| D128 full (4,4096,16) uniform | 1.375 | 1.100 | 1.210 | **0.80×** | **0.88×** | 2.0e-03 |" in text
    assert "| D128 full (64,1024,16) skewed | 1.375 | 1.100 | – | **0.80×** | – | 2.0e-03 |" in text


def test_a_remark_is_of_a_file_that_is_shown() -> None:
    assert set(make_page.REMARKS) <= set(make_page.SOURCES.values())


def test_the_page_says_nothing_of_a_backward_pass_that_is_not_measured() -> None:
    text = made_up_page(fa=made_up("fa", "cuda", OWN, "cudnn"))
    assert "ackward" not in text
    assert "-bwd" not in text


def test_head_dims_with_enough_lengths_have_a_picture() -> None:
    assert make_page.head_dims(made_up("fa", "cuda", OWN, "fa2")) == [64, 128, 256]
