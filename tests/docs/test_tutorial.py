"""Pages of the tutorial: their code runs and prints what they say; their figures are the result files'."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tools import ROOT

TUTORIAL = ROOT / "docs/tutorial"
RESULTS = ROOT / "benchmarks/results"
PAGES = sorted(path.stem for path in TUTORIAL.glob("*.md") if path.stem not in ("index", "glossary"))
EXAMPLE = ROOT / "examples/causal_kernel.py"
VARIANTS = ROOT / "examples/variant_kernel.py"


def text_of(page: str) -> str:
    """A page without the package's code that `make pages` wrote into it, which does not run by itself."""
    text = (TUTORIAL / f"{page}.md").read_text()
    return re.sub(r"^<!-- source .*?^<!-- end of source -->$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks_of(page: str, language: str = "python") -> list[str]:
    """The page's own code, without that which it shows of the package."""
    text = re.sub(r"<!-- source .*?<!-- end of source -->", "", text_of(page), flags=re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prints(page: str) -> list[str]:
    """The lines that a page says its code prints."""
    text = text_of(page)
    inline = re.findall(r"It prints `([^`]+)`", text)
    return [*inline, *"".join(re.findall(r"It prints\n\n```text\n(.*?)```", text, re.DOTALL)).splitlines()]


@pytest.mark.parametrize(
    ("page", "also"),
    [
        ("memory", ["167 multiply-adds", "1024 30.1", "16384 31.9", "46937 tokens; 1.54 GB"]),
        ("softmax", []),
        ("tiles", ["15 of 25 tiles"]),
        ("steps", ["['25%', '67%']", "256.0 cycles of exp2, 256.0 of products"]),
        ("variants", ["a mask or score modification cannot branch on its arguments"]),
        ("decoding", []),
    ],
)
def test_a_page_runs_and_prints_what_it_says(page: str, also: list[str]) -> None:
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks_of(page):
            exec(block, scope)
    expected = prints(page) + also
    assert expected
    for line in expected:
        assert line in printed.getvalue()


def test_each_page_has_a_task_and_its_answer() -> None:
    assert len(PAGES) == 10
    for page in PAGES:
        task = text_of(page).partition("\n## Task")[2]
        answer = re.search(r'<details markdown="1">\s*<summary>Answers?</summary>(.*)</details>', task, re.DOTALL)
        assert answer is not None, page
        assert answer[1].strip(), page


TERMS = {  # of the glossary, and their anchors
    r"warps?": "warp",
    r"warpgroups?": "warpgroup",
    r"banks?": "bank",
    r"swizzl(?:ed?|es|ing)": "swizzle",
    r"wgmma": "wgmma",
    r"mbarriers?": "mbarrier",
    r"TMA": "tma",
    r"occupancy": "occupancy",
    r"tensor\s+cores?": "tensor-core",
    r"shared\s+memory": "shared-memory",
    r"global\s+memory": "global-memory",
    r"registers?": "register",
    r"multiprocessors?": "multiprocessor",
    r"fragments?": "fragment",
    r"barriers?": "barrier",
    r"producers?": "producer",
    r"consumers?": "consumer",
    r"TFLOPS": "tflops",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_first_use_of_a_term_leads_to_the_glossary(page: str) -> None:
    prose = re.sub(r"^```.*?^```$|^[#|<].*?$|`[^`]*`", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    anchors = re.findall(r'<a id="([\w-]+)"></a>', text_of("glossary"))
    for term, anchor in TERMS.items():
        assert anchors.count(anchor) == 1
        first = re.search(rf"(?<![\w/#-])(?:{term})(?![\w-])(?!\.md)", prose, re.IGNORECASE if anchor != "tma" else 0)
        if first is not None:
            after = prose[first.end() :]
            assert re.match(rf"[^\[\]]*\]\((?:glossary\.md#{anchor}|(?!glossary)[^)]*)\)", after), (
                f"{page}: the first {first[0]!r} is no link to glossary.md#{anchor}: ...{after[:40]!r}"
            )


# --- Figures ---


def test_the_tflops_of_the_steps_are_the_result_files() -> None:
    measured = {row["backend"]: row for row in json.loads((RESULTS / "ladder/d64-h200.json").read_text())["rows"]}
    page = text_of("steps")
    text = " ".join(page.split())
    table = re.findall(r"^\| `([\w,=]+)`(?:, for comparison)? \| (\d+) \|", page, re.MULTILINE)
    assert len(table) == 8

    def row(name: str) -> Any:
        return measured.get(name) or measured[f"mma:{name}"]

    assert [int(tflops) for _, tflops in table] == [round(row(name)["tflops"]) for name, _ in table]
    steps = [name for name, _ in table if "=" in name]
    for before, after in itertools.pairwise(steps):  # by one idea
        assert sum(a != b for a, b in zip(before.split(","), after.split(","), strict=True)) == 1
    less = re.findall(r"`(\w+,stages=2,acc=fp32,smem=swizzle)`,\s+which [^,`]*,\s(?:has )?(\d+)", text)
    assert len(less) == 2
    assert [int(tflops) for _, tflops in less] == [round(row(name)["tflops"]) for name, _ in less]
    half = row("shared_kv,stages=2,acc=fp16,smem=swizzle")
    assert f"has {half['tflops']:.0f} TFLOPS. Its largest error in" in text
    assert f"{half['error']:.1e}, and {row(steps[-1])['error']:.1e} with sums in float32" in text
    assert f"milliseconds = {row(steps[-1])['ms']:.3f}" in text


def test_the_memory_table_is_the_result_files() -> None:
    rows = json.loads((RESULTS / "memory/memory-fwdbwd-h200.json").read_text())["rows"]
    of = {(row["seqlen_q"], row["backend"]): row for row in rows}
    table = re.findall(
        r"^\| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) ms \| ([\d.]+) ms \|", text_of("memory"), re.M
    )
    assert len(table) == 3
    for tokens, *figures in table:
        matrix, ours = of[int(tokens), "eager"], of[int(tokens), "tileattn"]
        gigabytes = f"{matrix['peak_bytes'] / 1e9:.1f}", f"{ours['peak_bytes'] / 1e9:.2f}"
        assert tuple(figures) == (*gigabytes, f"{matrix['ms']:.1f}", f"{ours['ms']:.1f}")
    ceilings = json.loads((RESULTS / "forward/fa-h200.json").read_text())["ceilings"]
    assert "4.24e12" in text_of("memory")
    copies = sum(each["copy_tbps"] for each in ceilings) / len(ceilings)
    assert copies == pytest.approx(4.24, abs=0.02)  # runs differ by as much


def test_the_times_of_variants_are_the_result_files() -> None:
    rows = json.loads((RESULTS / "variants/variants-h200.json").read_text())["rows"]
    ms = {r["variant"]: r["ms"] for r in rows if r["case"].endswith("(1,16384,16)") and r["backend"] == "tileattn"}
    table = re.findall(r"^\| `([\w+]+)`.* \| ([\d.]+) \|$", text_of("variants"), re.MULTILINE)
    assert len(table) == 5
    assert [figure for _, figure in table] == [f"{ms[variant]:.2f}" for variant, _ in table]
    assert f"{{{ms['window1024']:.3f} / {ms['full']:.3f}:.1%}} of the time" in text_of("variants")


def test_the_times_of_decoding_are_the_result_files() -> None:
    rows = json.loads((RESULTS / "decode/decode-h200.json").read_text())["rows"]
    measured = {row["case"]: row for row in rows if row["backend"] == "tileattn"}
    page = text_of("decoding")
    table = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) MB \| ([\d.]+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(table) == 5
    for sequences, keys, *figures in table:
        row = measured[f"contiguous ({sequences},{keys},32/8)"]
        assert figures == [f"{row['kv_bytes'] / 1e6:.0f}", f"{row['us']:.1f}", f"{row['gbps']:.0f}"]
    assert f"measured {measured['contiguous (16,8192,32/8)']['us']:.0f} us" in page
    assert f"measured {measured['contiguous (1,32768,32/8)']['us']:.1f} us" in page


# --- The kernels ---


def test_the_page_shows_the_kernel_of_the_example() -> None:
    shown = blocks_of("kernel")[0].partition("import tilelang.language as T\n\n\n")[2]
    assert shown.startswith("def causal_attention(")
    assert shown in EXAMPLE.read_text()
    assert len(shown.partition("with T.Kernel(")[2].splitlines()) <= 45


def test_the_variants_page_shows_lines_of_its_example() -> None:
    shown = blocks_of("variants", "py")
    assert len(shown) == 4
    source = VARIANTS.read_text()
    for block in shown:
        assert any(textwrap.indent(block, " " * depth) in source for depth in (0, 12, 16)), block


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("tilelang")
    return module(EXAMPLE)


def module(path: Path) -> ModuleType:
    """TileLang reads the sources of its functions, so they must be in files."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


needs_gpp = pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux")


@needs_gpp
@pytest.mark.slow  # compiles two kernels with g++
def test_the_kernel_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("tilelang")
    (tmp_path / "mine.py").write_text("\n".join(blocks_of("kernel")))
    module(tmp_path / "mine.py")


@needs_gpp
@pytest.mark.slow  # compiles two kernels with g++
def test_the_example_and_the_answer_are_right(example: ModuleType, tmp_path: Path) -> None:
    assert example.largest_error(2, 200, 64, "cpu") < 2e-3
    source = EXAMPLE.read_text()
    for answer in blocks_of("kernel", "py"):
        start = answer.partition("(")[0]
        changed = re.sub(rf"^( +){re.escape(start)}.*\n", lambda match, to=answer: match[1] + to, source, flags=re.M)
        assert changed != source
        source = changed.replace("is_causal=True", "is_causal=False")
    (tmp_path / "full.py").write_text(source)
    assert module(tmp_path / "full.py").largest_error(2, 200, 64, "cpu") < 2e-3


@needs_gpp
@pytest.mark.slow  # compiles a kernel with g++
def test_the_answer_with_a_sink_is_right(tmp_path: Path) -> None:
    pytest.importorskip("tilelang")
    parameters, end, check = blocks_of("forward", "py")
    source = blocks_of("kernel")[0]
    for before, after in (
        ('        o: T.Tensor(shape, "float16"),\n', parameters),
        ("            for i, j in T.Parallel(block_M, dim):\n                acc[i, j] /= l[i]\n", end),
    ):
        assert source.count(before) == 1
        source = source.replace(before, after)
    (tmp_path / "mine.py").write_text(f"{source}\n{check}")
    module(tmp_path / "mine.py")


@needs_gpp
@pytest.mark.slow  # compiles two kernels with g++
def test_the_variants_are_right_and_their_errors_those_of_the_page() -> None:
    pytest.importorskip("tilelang")
    example = module(VARIANTS)
    for name in example.VARIANTS:
        error = example.largest_error(name, "cpu")
        assert error < 2e-3
        assert f"`{name}: largest error on cpu: {error:.1e}`" in " ".join(text_of("variants").split())


@pytest.mark.gpu
def test_the_variants_are_right_on_a_gpu() -> None:
    pytest.importorskip("tilelang")
    example = module(VARIANTS)
    for name in example.VARIANTS:
        assert example.largest_error(name, "cuda") < 2e-3


@pytest.mark.gpu
def test_the_example_is_right_on_a_gpu(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.largest_error(2, 200, 64, "cuda") < 2e-3
    example.main()
    assert re.search(r"this kernel: [\d.]+ ms, \d+ TFLOPS\nPyTorch: ", capsys.readouterr().out)


def test_the_speed_of_the_examples_is_the_result_file() -> None:
    page = (ROOT / "docs/tutorial/index.md").read_text()
    runs = json.loads((RESULTS / "examples/examples-h200.json").read_text())["runs"]
    for run in runs:
        script = run["command"].removeprefix("python examples/")
        for direction in {row["direction"] for row in run["rows"]}:
            own, peer = (row["tflops"] for row in run["rows"] if row["direction"] == direction)
            assert re.search(rf"^\| `{re.escape(script)}`, {direction}.* \| {own} \| {peer} \|$", page, re.M), script
