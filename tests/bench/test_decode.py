"""The suite decode: its rows and their order, the caches, the check, the other process, result files, the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tileattn
from tileattn.bench.decode import elsewhere, methods, problem, report, results, summary, timing
from tileattn.bench.decode.cases import CPU_GRID, GPU_GRID, Case, schedule, select
from tileattn.bench.decode.ceilings import Ceiling, overall
from tileattn.bench.decode.check import expect
from tileattn.bench.decode.flashinfer import ELSEWHERE
from tileattn.bench.decode.problem import Pool, Problem
from tileattn.bench.decode.rows import FAILED, REFUSED, Measured, Measurer, Missing, Row
from tileattn.bench.decode.variants import PLAIN, Variant
from tileattn.cli.app import app

CPU = torch.device("cpu")
PAGED = Case(3, 48, 4, 2, 16, 16)
DENSE = replace(PAGED, page=0)


@pytest.fixture(autouse=True)
def small_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few distinct caches, and files in an empty folder."""
    monkeypatch.setitem(problem.COLD_BYTES, "cpu", 2**19)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    monkeypatch.delenv(methods.PEERS, raising=False)


# --- Rows ---


def test_the_gpu_rows_are_those_of_the_issue() -> None:
    cases = GPU_GRID.cases()
    assert len(cases) == len(set(cases)) == 4 * 4 * 4 * 5
    assert {case.batch for case in cases} == {1, 16, 64, 128}
    assert {case.context for case in cases} == {1024, 8192, 32768, 131072}
    assert {(case.heads, case.kv_heads) for case in cases} == {(32, 8), (64, 8), (8, 1), (32, 32)}
    assert {case.page for case in cases} == {0, 1, 16, 64, 256}


def test_rows_beyond_64_gib_are_left_out_and_named() -> None:
    planned = schedule("cuda", 2, None)
    assert all(case.kv_bytes(2) <= 64 * 2**30 for case in planned.cases)
    names = [case.name for case in planned.left_out]
    # 2 (K, V) x 128 x 32768 x 32 x 128 x 2 bytes are 64 GiB exactly: this row stays.
    assert "page 16 (128,32768,32/32)" in [case.name for case in planned.cases]
    assert names == [
        f"{page} ({batch},131072,32/32)"
        for page in ("page 16", "contiguous", "page 64", "page 256", "page 1")
        for batch in (64, 128)
    ]


def test_pages_of_16_and_contiguous_come_first_then_a_fixed_quarter_of_the_rest() -> None:
    planned, again = schedule("cuda", 2, None), schedule("cuda", 2, None)
    assert planned == again
    fits = [case for case in GPU_GRID.cases() if case.kv_bytes(2) <= 64 * 2**30]
    first = [case for case in fits if case.page in (0, 16)]
    assert list(planned.cases[: len(first)]) == first
    rest = planned.cases[len(first) :]
    assert len(rest) == len(set(rest)) == (len(fits) - len(first)) // 4
    assert {case.page for case in rest} == {1, 64, 256}


def test_rows_are_selected_by_all_terms() -> None:
    cases = schedule("cuda", 2, "pages=contiguous,1 context=8k batch=1,16 heads=8/1").cases
    assert [case.name for case in cases] == [
        "contiguous (1,8192,8/1)",
        "contiguous (16,8192,8/1)",
        "page 1 (1,8192,8/1)",
        "page 1 (16,8192,8/1)",
    ]
    both = schedule("cuda", 2, "pages=16 heads=32/32 context=128k")
    assert [case.batch for case in both.cases] == [1, 16]
    assert [case.batch for case in both.left_out] == [64, 128]
    assert select(GPU_GRID.cases(), "", GPU_GRID) == GPU_GRID.cases()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("page=16", "'page=16' is not understood; accepted: batch=..., context=..., heads=..., pages=..."),
        ("pages=", "'pages=' is not understood"),
        ("pages=17", "'pages=17': there is no '17'; accepted: 16, contiguous, 64, 256, 1"),
        ("heads=8", "there is no '8'; accepted: 32/8, 64/8, 8/1, 32/32"),
        ("batch=0", "there is no '0'; accepted: 1, 16, 64, 128"),
        ("context=x", "there is no 'x'; accepted: 1024, 8192, 32768, 131072"),
        ("heads=32/32 context=128k batch=128", "selects no row that fits"),
    ],
)
def test_rows_that_are_not_understood_are_one_error(rows: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"selects|understood|there is no") as raised:
        schedule("cuda", 2, rows)
    assert says in str(raised.value)


# --- Tensors ---


@pytest.mark.parametrize("case", [PAGED, DENSE])
def test_caches_are_distinct_and_beyond_the_cold_bytes(case: Case) -> None:
    pool = Pool(CPU, torch.float32)
    given = pool.problem(case)
    assert sum(x.nbytes for x in (*given.k, *given.v)) >= 2**19
    assert len({x.data_ptr() for x in (*given.k, *given.v)}) == 2 * len(given.k)
    for x in (*given.k, *given.v):
        assert x.is_contiguous()
        assert x.numel() == case.elements
    given.k[0].zero_()
    assert given.k[1].std() > 0.9
    assert given.seqlens.tolist() == [48] * 3


def test_the_table_is_a_permutation_and_names_each_sequence_s_pages() -> None:
    given = Pool(CPU, torch.float32).problem(PAGED)
    assert given.table is not None
    assert sorted(given.table.flatten().tolist()) == list(range(9))
    k, v = given.keys_of(2)
    for j in (0, 15, 16, 47):
        page = int(given.table[2, j // 16])
        assert torch.equal(k[j], given.k[0][page, j % 16])
        assert torch.equal(v[j], given.v[0][page, j % 16])


def test_a_pool_grows_and_serves_smaller_rows_from_what_it_has() -> None:
    pool = Pool(CPU, torch.float32)
    small = pool.problem(PAGED).k[0].data_ptr()
    assert pool.problem(DENSE).k[0].data_ptr() == small
    large = pool.problem(replace(PAGED, context=16 * 1024))
    assert large.k[0].numel() == 3 * 16 * 1024 * 2 * 16
    pool.trim()
    assert pool.problem(PAGED).k[0].data_ptr() == large.k[0].data_ptr()


@pytest.mark.parametrize("case", [PAGED, DENSE])
def test_the_check_agrees_with_sdpa_and_sees_a_wrong_row(case: Case) -> None:
    given = Pool(CPU, torch.float32).problem(case)
    keys = [given.keys_of(b) for b in range(3)]
    k, v = (torch.stack([pair[i] for pair in keys]).transpose(1, 2).double() for i in (0, 1))
    q = given.q.transpose(1, 2).double()
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = expect(given)
    assert expected.error(o) < 1e-12
    expected.check(o.float())
    wrong = o.float().clone()
    wrong[2, 3] += 0.01
    with pytest.raises(AssertionError):
        expected.check(wrong)


# --- Measuring ---


@dataclass(frozen=True)
class Made:
    """A method made up for a test, around tileattn's own."""

    name: str
    change: Callable[[Tensor], Tensor] = lambda o: o
    refuses: str | None = None
    variant: Variant = PLAIN
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return self.refuses

    def prepare(self, given: Problem) -> methods.Attend:
        attend = methods.Own("tileattn").prepare(given)
        return lambda i: self.change(attend(i))


def _broken(o: Tensor) -> Tensor:
    raise RuntimeError("broken today\nand more")


def test_each_method_has_a_row_or_a_reason() -> None:
    compared = [
        *methods.own_methods(None),
        methods.fixed(None),
        Made("off", lambda o: o + 0.01),
        Made("tileattn-off", lambda o: o + 0.01),
        Made("nan", lambda o: o * torch.nan),
        Made("broken", _broken),
        Made("unwilling", refuses="not today"),
    ]
    measured = Measurer(Pool(CPU, torch.float32), rounds=2)(PAGED, compared)
    by_name = {row.backend: row for row in measured.rows}
    assert set(by_name) == {"tileattn", "tileattn-planning", "tileattn-fixed", "off"}
    kinds = {entry.backend: (entry.kind, entry.reason) for entry in measured.missing}
    assert kinds["unwilling"] == (REFUSED, "not today")
    assert kinds["broken"] == (FAILED, "RuntimeError: broken today")
    # The tolerance rule is tileattn's; a baseline's error is only shown.
    assert {name for name, (kind, _) in kinds.items() if kind == FAILED} == {"broken", "tileattn-off", "nan"}
    assert by_name["tileattn"].error < 1e-5 < by_name["off"].error
    for row in measured.rows:
        assert row.kv_bytes == 2 * 3 * 48 * 2 * 16 * 4
        assert row.gbps == pytest.approx(row.kv_bytes / row.us / 1e3)
    assert len(measured.failures) == 3


def test_the_plan_is_made_ahead_or_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    real = tileattn.decode

    def decode(*arguments: Any, plan: Any = None, **options: Any) -> Any:
        plans.append((plan is not None, options["splits"]))
        return real(*arguments, plan=plan, **options)

    monkeypatch.setattr(tileattn, "decode", decode)
    given = Pool(CPU, torch.float32).problem(PAGED)
    for method in (*methods.own_methods(None), methods.fixed(None)):
        method.prepare(given)(0)
    assert plans == [(True, None), (False, None), (True, tileattn.FixedSplit(1024))]


def test_every_cache_is_called_once_in_a_sample() -> None:
    seen: list[int] = []
    sample = timing.sampler([lambda i=i: seen.append(i) for i in range(5)], 1, CPU)
    assert sample() > 0
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("page", [0, 16])
def test_baselines_say_why_they_do_not_run_on_a_cpu(page: int) -> None:
    case = replace(PAGED, page=page)
    reasons = {each.name: each.refusal(case, CPU, torch.float32) for each in (*methods.LOCAL, *ELSEWHERE)}
    assert reasons.pop("sdpa") == (methods.NO_PAGES if page else None)
    assert all(reasons.values())


def test_flashattention_3_is_called_as_its_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension module needs a GPU; this holds the numbers of arguments to the module's schemas."""
    calls: dict[str, tuple[Any, ...]] = {}

    class Module:
        def get_scheduler_metadata(self, *arguments: Any) -> str:
            calls["metadata"] = arguments
            return "metadata"

        def fwd(self, *arguments: Any) -> list[Tensor]:
            calls["fwd"] = arguments
            return [arguments[0]]

    monkeypatch.setattr(methods, "_load", lambda path: Module())
    for case in (PAGED, DENSE):
        given = Pool(CPU, torch.bfloat16).problem(case)
        methods.FlashAttention3().prepare(given)(1)
        metadata, fwd = calls["metadata"], calls["fwd"]
        assert (len(metadata), len(fwd)) == (23, 37)
        assert metadata[:8] == (3, 1, 48, 4, 2, 16, 16, torch.bfloat16)
        assert metadata[14] == (case.page or None)
        assert fwd[1] is given.k[1]
        assert fwd[11] is given.seqlens
        assert fwd[14] is given.table
        assert fwd[23] == given.scale
        assert fwd[29] == "metadata"
        assert fwd[0].shape == ((3, 4, 16) if case.page else (3, 1, 4, 16))


# --- The process of the baselines ---


def test_the_other_process_answers_and_its_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere.Elsewhere(CPU, torch.float32, rounds=1) as other:
        measured = other.measure(PAGED, ELSEWHERE)
        assert measured.missing == [
            Missing(PAGED.name, name, REFUSED, methods.CUDA_ONLY) for name in ("flashinfer", "xqa")
        ]
        assert other.versions["torch"] == torch.__version__
    # A module that ends at once.
    monkeypatch.setattr(elsewhere, "MODULE", "abc")
    with elsewhere.Elsewhere(CPU, torch.float32, rounds=1) as other:
        measured = other.measure(PAGED, ELSEWHERE[:1])
        assert measured.rows == []
        (entry,) = measured.missing
        assert (entry.backend, entry.kind) == ("flashinfer", FAILED)
        assert entry.reason == "the process of the baselines ended with exit code 0"
        monkeypatch.setattr(elsewhere.subprocess, "Popen", None)  # it is not started for each row again
        assert other.measure(DENSE, ELSEWHERE[:1]).missing == [replace(entry, case=DENSE.name)]


def test_the_site_of_the_baselines_is_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    own = str(Path(tileattn.__file__).parents[1])
    assert elsewhere.search_path().split(":") == ["/somewhere", own]
    (tmp_path / "site/flashinfer").mkdir(parents=True)
    monkeypatch.setenv(methods.PEERS, str(tmp_path))
    assert elsewhere.search_path().split(":") == [str(tmp_path / "site"), "/somewhere", own]


# --- Summary ---


def made_results() -> results.Results:
    """Two rows with pages and one without; the second is beyond 512 MB."""
    made = results.Results("cuda", "made up", "bf16", {"torch": "2"}, "abc", "today", ["tileattn", "a", "b"])
    times = {
        Case(1, 1024, 32, 8, 16): {"tileattn": 8.0, "a": 10.0, "b": 16.0},
        Case(128, 8192, 32, 8, 16): {"tileattn": 1000.0, "a": 900.0, "b": 2000.0},
        Case(1, 8192, 32, 8, 0): {"tileattn": 20.0, "b": 40.0},
    }
    for case, us in times.items():
        kv_bytes = case.kv_bytes(2)
        sizes = (case.batch, case.context, case.heads, case.kv_heads, case.head_dim, case.page, kv_bytes)
        made.rows += [Row(case.name, name, *sizes, t, kv_bytes / t / 1e3, 1e-3) for name, t in us.items()]
        made.done.append(case.name)
    made.missing.append(Missing(made.done[2], "a", REFUSED, "it takes pages only"))
    made.left_out.append("page 16 (128,131072,32/32)")
    made.ceilings = [Ceiling("before", "tileattn", 4000.0, None), Ceiling("after", "baselines", 4200.0, 4400.0)]
    return made


def test_means_are_against_the_best_baseline_of_each_row() -> None:
    found = {(each.against, each.group): each for each in summary.standings(made_results())}
    small = found["best", "under 512 MB"]
    assert (small.rows, small.geometric_mean) == (2, pytest.approx((1.25 * 2) ** 0.5))
    large = found["best", "from 512 MB"]
    assert (large.rows, large.lowest, large.lowest_case) == (1, pytest.approx(0.9), "page 16 (128,8192,32/8)")
    assert found["best", "all"].geometric_mean == pytest.approx((1.25 * 2 * 0.9) ** (1 / 3))
    assert found["best", "pages"].rows == 2
    assert found["best", "contiguous"].geometric_mean == pytest.approx(2)
    assert found["a", "all"].geometric_mean == pytest.approx((1.25 * 0.9) ** 0.5)
    assert found["b", "all"].rows == 3
    assert summary.slow(made_results()) == [("page 16 (128,8192,32/8)", pytest.approx(0.9))]


def test_notes_say_what_is_missing_and_why() -> None:
    text = "\n".join(report.notes(made_results()))
    assert overall(made_results().ceilings) == (4200.0, 4400.0)
    assert "ceilings: copy 4200 GB/s, read 4400 GB/s" in text
    assert "refused: a: it takes pages only [contiguous (1,8192,32/8)]" in text
    assert "left out, K and V beyond 64 GiB: page 16 (128,131072,32/32)" in text
    assert "below 0.92 of the best baseline: page 16 (128,8192,32/8) 0.90×" in text


# --- Result files ---


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made, path = made_results(), tmp_path / "r.json"
    results.save(made, path)
    assert results.load(path) == made
    assert results.resume(path, replace(made, rows=[], commands=["again"])).commands == ["again"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"rows": [{"case": "x"}]},
        {"rows": 3},
        {"colour": "red"},
        {"ceilings": [{"when": "x", "process": "y", "copy_gbps": 1.0}]},
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"format": results.FORMAT, **asdict(made_results()), **change}))
    with pytest.raises(ValueError, match=r"r\.json is not a result file of the suite decode"):
        results.load(path)


# --- The command ---


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, shlex.split(f"bench --suite decode --device cpu {line}"))
    return result.exit_code, " ".join(result.output.split())


TWO = "--rows 'pages=16,contiguous batch=1 context=128 heads=8/2' --rounds 1"


def test_the_command_measures_writes_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(f"{TWO} --baselines sdpa,xqa --json r.json --commit abc")
    assert code == 0, text
    written = json.loads(Path("r.json").read_text())
    assert written["done"] == ["page 16 (1,128,8/2)", "contiguous (1,128,8/2)"]
    ran = {(row["case"], row["backend"]) for row in written["rows"]}
    own = {(case, name) for case in written["done"] for name in ("tileattn", "tileattn-planning")}
    assert ran == own | {("contiguous (1,128,8/2)", "sdpa")}
    assert written["commit"] == "abc"
    assert {"device": "cpu", "dtype": "fp32"}.items() <= written.items()
    assert "torch" in written["versions"]
    assert "refused: sdpa: it takes no pages [page 16 (1,128,8/2)]" in text
    assert "refused: xqa: it runs on CUDA only" in text
    assert "2/2] contiguous (1,128,8/2): tileattn" in text

    asked: list[str] = []
    real = Measurer.__call__

    def measure(self: Measurer, case: Case, compared: Any) -> Measured:
        asked.append(case.name)
        return real(self, case, compared)

    monkeypatch.setattr(Measurer, "__call__", measure)
    more = TWO.replace("context=128", "context=128,1024")
    code, text = run(f"{more} --baselines sdpa,xqa --json r.json --commit abc --resume")
    assert code == 0, text
    assert asked == ["page 16 (1,1024,8/2)", "contiguous (1,1024,8/2)"]
    again = json.loads(Path("r.json").read_text())
    assert again["rows"][: len(written["rows"])] == written["rows"]
    assert len(again["done"]) == 4
    assert len(again["commands"]) == 2
    # Rows of another code or beside other baselines are not mixed into a file.
    code, text = run(f"{more} --baselines sdpa,xqa --json r.json --commit abd --resume")
    assert code == 2
    assert "has commit 'abc', and this run has 'abd'" in text
    code, text = run(f"{more} --baselines sdpa --json r.json --commit abc --resume")
    assert code == 2
    assert "r.json has backends" in text


def test_rows_are_written_as_they_come_and_ctrl_c_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Measurer.__call__

    def measure(self: Measurer, case: Case, compared: Any) -> Measured:
        if case.page == 0:
            assert json.loads(Path("r.json").read_text())["done"] == ["page 16 (1,128,8/2)"]
            raise KeyboardInterrupt
        return real(self, case, compared)

    monkeypatch.setattr(Measurer, "__call__", measure)
    code, text = run(f"{TWO} --baselines none --json r.json")
    assert code == 130
    assert "stopped" in text
    assert json.loads(Path("r.json").read_text())["done"] == ["page 16 (1,128,8/2)"]


def test_a_failure_of_tileattn_is_shown_and_the_exit_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("broken today")

    monkeypatch.setattr(tileattn, "decode", broken)
    code, text = run(f"{TWO} --json r.json")
    assert code == 1
    assert "failed: tileattn: RuntimeError: broken today" in text
    assert {row["backend"] for row in json.loads(Path("r.json").read_text())["rows"]} == {"sdpa"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--heads 4", "Invalid value for --heads / --H: the suite decode does not have it"),
        ("--plot x.png", "Invalid value for --plot: the suite decode does not have it"),
        ("--direction bwd", "Invalid value for --direction: the suite decode does not have it"),
        ("--dtype fp8", "Invalid value for --dtype: 'fp8' is not measured in this suite; accepted: bf16, fp16, fp32"),
        ("--rows batch=7", "Invalid value for --rows: 'batch=7': there is no '7'; accepted: 1, 4"),
        ("--baselines fa9", "Invalid value for --baselines: 'fa9': not known in this suite; accepted: none, fa3"),
        ("--rounds 0", "Invalid value for --rounds: 0 is too few"),
        ("--resume", "Invalid value for --resume: it goes on from the file of --json"),
    ],
)
def test_a_bad_option_is_one_error(options: str, says: str) -> None:
    code, text = run(options)
    assert code == 2
    assert says in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "says"),
    [("--rows batch=1", "only decode and parallel have it"), ("--resume", "only random, parallel and the suites of")],
)
def test_other_suites_do_not_have_its_options(option: str, says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *option.split()])
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.gpu
def test_the_command_on_a_gpu() -> None:
    """The caches, graphs and ceilings of a GPU: a row that is launch-bound must not be faster than a launch."""
    line = "bench --suite decode --rows 'pages=16,contiguous batch=1 context=1k heads=8/1' --rounds 2"
    result = CliRunner().invoke(app, shlex.split(f"{line} --baselines fa2,fa3 --json g.json"))
    written = results.load(Path("g.json"))
    assert result.exit_code == 0, result.output
    assert len(written.ceilings) == 2
    assert all(1 < row.us < 1000 for row in written.rows)
    assert written.row("contiguous (1,1024,8/1)", "fa2") is not None
    assert all(written.row(case, "tileattn-planning") is not None for case in written.done)


def test_the_cpu_rows_are_few() -> None:
    assert len(schedule("cpu", 4, None).cases) == 16 + 16 // 4
    assert len(CPU_GRID.cases()) == 32
