"""Runs of the suite decode that do not go well: processes that hang or die, a lost GPU, failures; and CUDA's graphs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tileattn.bench.decode import ceilings, elsewhere, methods, problem, rows, run, timing
from tileattn.bench.decode.ahead import jobs
from tileattn.bench.decode.cases import GPU_GRID, Case, schedule
from tileattn.bench.decode.ceilings import Ceiling
from tileattn.bench.decode.elsewhere import Elsewhere, Patience, ProcessEnded
from tileattn.bench.decode.flashinfer import ELSEWHERE, FlashInfer
from tileattn.bench.decode.problem import Pool, Problem
from tileattn.bench.decode.results import Results, load, save
from tileattn.bench.decode.rows import FAILED, REFUSED, GpuLost, Measurer
from tileattn.bench.decode.run import NothingRuns, Run
from tileattn.bench.decode.variants import Variant
from tileattn.cli.app import app

CPU, FP32 = torch.device("cpu"), torch.float32
CASE = Case(2, 48, 4, 2, 16, 16)
CASES = [replace(CASE, batch=batch) for batch in (1, 2, 3)]


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few distinct caches."""
    monkeypatch.setitem(problem.COLD_BYTES, "cpu", 2**16)


def results_of(names: list[str]) -> Results:
    return Results("cpu", "made up", "fp32", {"torch": "2"}, None, "today", names)


@dataclass(frozen=True)
class Made:
    """A method made up for a test: it does something in its n-th call and returns zeros."""

    name: str
    does: Callable[[int], None] = lambda number: None
    is_elsewhere: bool = False
    variant: Variant | None = None
    calls: list[int] = field(default_factory=list, hash=False)

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, given: Problem) -> methods.Attend:
        def attend(i: int) -> Tensor:
            self.calls.append(i)
            self.does(len(self.calls))
            return given.q

        return attend


def fails_from(number: int, error: Exception) -> Callable[[int], None]:
    def does(count: int) -> None:
        if count >= number:
            raise error

    return does


# --- Failures in this process ---


def test_a_failure_while_timing_is_one_missing_measurement() -> None:
    """The first call is checked, the second is timed."""
    late = Made("late", fails_from(2, RuntimeError("late")))
    measured = Measurer(Pool(CPU, FP32), 3)(CASE, [late, Made("fine")])
    assert [row.backend for row in measured.rows] == ["fine"]
    assert [(each.backend, each.kind, each.reason) for each in measured.missing] == [
        ("late", FAILED, "RuntimeError: late")
    ]
    assert len(measured.failures) == 1


def test_a_row_that_does_not_fit_is_a_failure_of_all_and_the_pool_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Case] = []

    def full(self: Pool, case: Case, share: float = 1.0) -> Problem:
        asked.append(case)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Pool, "problem", full)
    measured = Measurer(Pool(CPU, FP32), 1)(CASE, [Made("a"), Made("b")])
    assert asked == [CASE, CASE]  # the second time after what is held has been freed
    assert [(each.backend, each.reason) for each in measured.missing] == [
        ("a", "OutOfMemoryError: no memory"),
        ("b", "OutOfMemoryError: no memory"),
    ]


def test_a_method_out_of_memory_does_not_end_the_row() -> None:
    greedy = Made("greedy", fails_from(1, torch.OutOfMemoryError("too much")))
    measured = Measurer(Pool(CPU, FP32), 1)(CASE, [greedy, Made("fine")])
    assert [row.backend for row in measured.rows] == ["fine"]
    assert measured.missing[0].reason == "OutOfMemoryError: too much"


def test_a_lost_gpu_ends_the_run_and_the_row_says_who_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = Made("breaks", fails_from(1, RuntimeError("illegal address")))
    monkeypatch.setattr(rows, "is_lost", lambda device: bool(breaks.calls))
    results = results_of(["first", "breaks", "after"])
    made = [Made("first"), breaks, Made("after")]
    with pytest.raises(GpuLost, match=r"in the row page 16 \(1,48,4/2\)"):
        Run(CASES, lambda case: made, CPU, FP32, 1, results)()
    reasons = {each.backend: each.reason for each in results.missing}
    assert reasons["breaks"] == "it broke the CUDA context: RuntimeError: illegal address"
    assert reasons["first"] == reasons["after"] == "GpuLost: not measured: breaks broke the CUDA context in this row"
    # A continued run does not try the row again.
    assert results.done == [CASES[0].name]
    breaks.calls.clear()
    with pytest.raises(GpuLost):
        Run(CASES, lambda case: made, CPU, FP32, 1, results)()
    # After the second row it is not tried again.
    breaks.calls.clear()
    Run(CASES, lambda case: made, CPU, FP32, 1, results)()
    assert results.done == [case.name for case in CASES]
    assert results.missing[-1].reason == "not tried: it ended its process in 2 rows"
    assert [row.case for row in results.rows] == [CASES[2].name] * 2


def test_a_row_that_was_begun_and_did_not_end_comes_last() -> None:
    """It may be the one that hangs."""
    results = results_of(["fine"])
    results.begun = [CASES[0].name, CASES[1].name]
    results.done = [CASES[0].name]
    Run(CASES, lambda case: [Made("fine")], CPU, FP32, 1, results)()
    assert results.done == [CASES[i].name for i in (0, 2, 1)]
    assert results.begun == [CASES[i].name for i in (0, 1, 2)]


def test_a_run_in_which_nothing_runs_stops_early() -> None:
    broken, works = Made("tileattn", fails_from(1, RuntimeError("broken"))), Made("tileattn")
    many = [replace(CASE, batch=batch) for batch in range(1, 8)]
    results = results_of(["tileattn"])
    with pytest.raises(NothingRuns, match="in all of the first 4 rows"):
        Run(many, lambda case: [broken], CPU, FP32, 1, results)()
    assert len(results.done) == 4
    Run(many[4:], lambda case: [works], CPU, FP32, 1, results)()
    assert len(results.done) == 7
    some = results_of(["tileattn"])
    Run(many, lambda case: [works if case.batch == 3 else broken], CPU, FP32, 1, some)()
    assert len(some.done) == 7


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (GpuLost("a kernel broke the CUDA context in the row x"), 75, "in the row x; what was measured is kept"),
        (NothingRuns("tileattn failed"), 1, "stopped: tileattn failed"),
        (None, 130, "stopped: what was measured so far"),
    ],
)
def test_the_command_tells_how_a_run_ended(
    error: Exception | None, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(self: Run) -> None:
        if error is None:
            os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does
            time.sleep(30)
        else:
            raise error

    monkeypatch.setattr(Run, "__call__", ends)
    before = signal.getsignal(signal.SIGTERM)
    line = ["bench", "--suite", "decode", "--device", "cpu", "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == code
    assert says in " ".join(result.output.split())
    assert load(tmp_path / "r.json").rows == []
    assert signal.getsignal(signal.SIGTERM) == before


# --- The process of the baselines ---

WORKER = """
import json, os, signal, sys, time
def answer(**content):
    print(json.dumps(content), flush=True)
starts = os.path.join(os.path.dirname(__file__), "starts")
open(starts, "a").write("x")
number = len(open(starts).read())
for line in sys.stdin:
    request = json.loads(line)
    if "device" in request:
        answer(versions={"flashinfer": "1"})
    elif "build" in request:
        SLEEP
        answer()
    elif "ceilings" in request:
        answer(when=request["ceilings"], process="baselines", copy_gbps=1.0, read_gbps=None)
    else:
        case = request["case"]
        DOES
        answer(rows=[], missing=[dict(case="x", backend=name, kind="refused", reason="of %d" % number)
                                 for name in request["methods"]], failures=[])
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Replaces the process of the baselines by a script that does something on a row, or before it is ready."""
    monkeypatch.delenv(methods.PEERS, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(elsewhere, "MODULE", "made_up_worker")

    def make(does: str = "pass", sleep: str = "pass") -> Path:
        text = WORKER.replace("DOES", does).replace("SLEEP", sleep)
        (tmp_path / "made_up_worker.py").write_text(text)
        return tmp_path / "starts"

    return make


def reason(other: Elsewhere, case: Case) -> str:
    (missing,) = other.measure(case, ELSEWHERE[:1]).missing
    return missing.reason


def test_a_process_that_dies_on_a_row_is_started_anew_for_the_next(worker: Callable[..., Path]) -> None:
    worker("os.kill(os.getpid(), signal.SIGSEGV) if case['batch'] == 1 else None")
    with Elsewhere(CPU, FP32, 1) as other:
        assert reason(other, CASES[1]) == "of 1"
        assert reason(other, CASES[0]) == "the process of the baselines ended with exit code -11"
        assert reason(other, CASES[1]) == "of 2"
        assert other.ceilings("after") == Ceiling("after", "baselines", 1.0, None)


def test_methods_of_a_row_that_ends_the_process_are_tried_alone(worker: Callable[..., Path]) -> None:
    worker("os._exit(7) if 'xqa' in request['methods'] else None")
    with Elsewhere(CPU, FP32, 1) as other:
        measured = other.measure(CASE, ELSEWHERE)
    assert [(each.backend, each.reason) for each in measured.missing] == [
        ("flashinfer", "of 2"),
        ("xqa", "the process of the baselines ended with exit code 7"),
    ]


def test_a_process_that_ends_after_its_answer_costs_no_row(worker: Callable[..., Path]) -> None:
    """So a worker ends whose CUDA context is broken."""
    starts = worker("(answer(rows=[], missing=[], failures=[]), os._exit(0)) if case['batch'] == 1 else None")
    with Elsewhere(CPU, FP32, 1) as other:
        assert other.measure(CASES[0], ELSEWHERE[:1]).missing == []
        process = other._process
        assert process is not None
        process.wait()
        assert reason(other, CASES[1]) == "of 2"
    assert starts.read_text() == "xx"


def test_a_process_that_hangs_is_killed_with_its_children(worker: Callable[..., Path], tmp_path: Path) -> None:
    worker(
        "(open(os.path.join(os.path.dirname(__file__), 'child'), 'w').write(str(os.spawnlp(os.P_NOWAIT, 'sleep', "
        "'sleep', '600'))), time.sleep(600)) if case['batch'] == 1 else None"
    )
    with Elsewhere(CPU, FP32, 1, Patience(ready=60, row=1.0)) as other:
        other.wait()
        start = time.monotonic()
        assert reason(other, CASES[0]) == "the process of the baselines was killed: it did not answer in time"
        assert time.monotonic() - start < 30
        child = int((tmp_path / "child").read_text())
        assert _has_ended(child)
        other._patience = Patience()
        assert reason(other, CASES[1]) == "of 2"


def _has_ended(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # nobody waits for it here
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_an_answer_that_is_no_json_is_a_failure(worker: Callable[..., Path]) -> None:
    worker("print('warning: something') if case['batch'] == 1 else None")
    with Elsewhere(CPU, FP32, 1) as other:
        assert reason(other, CASES[0]).startswith("the process of the baselines was killed: its answer is not JSON")
        assert reason(other, CASES[1]) == "of 2"


def test_a_process_that_dies_on_every_row_is_not_started_for_each(worker: Callable[..., Path]) -> None:
    starts = worker("os._exit(7)")
    with Elsewhere(CPU, FP32, 1) as other:
        for _ in range(elsewhere.MOST_ENDS):
            assert reason(other, CASE) == "the process of the baselines ended with exit code 7"
        for _ in range(3):
            assert reason(other, CASE) == (
                "not tried: the process of the baselines ended with exit code 7, the last of 6 ends"
            )
        with pytest.raises(ProcessEnded):
            other.ceilings("after")
    assert starts.read_text() == "x" * elsewhere.MOST_ENDS


def test_kernels_are_built_while_this_process_goes_on(worker: Callable[..., Path]) -> None:
    worker(sleep="time.sleep(0.6)")
    with Elsewhere(CPU, FP32, 1) as other:
        start = time.monotonic()
        other.begin([CASE], ELSEWHERE)
        assert time.monotonic() - start < 0.5
        assert other.versions == {}
        other.wait()
        assert time.monotonic() - start > 0.6
        assert other.versions == {"flashinfer": "1"}
        assert reason(other, CASE) == "of 1"


def test_a_process_that_dies_while_it_builds_is_started_by_the_first_row(worker: Callable[..., Path]) -> None:
    worker(sleep="os._exit(1)")
    with Elsewhere(CPU, FP32, 1) as other:
        other.begin([CASE], ELSEWHERE)
        other.wait()
        assert reason(other, CASE) == "of 2"


def test_what_cannot_be_imported_fails_in_its_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker's code, in this process."""
    monkeypatch.setenv(methods.PEERS, str(tmp_path))
    (tmp_path / "site/flashinfer").mkdir(parents=True)
    (tmp_path / "site/flashinfer/__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(FlashInfer, "refusal", lambda *arguments: None)
    measured = Measurer(Pool(CPU, FP32), 1)(CASE, ELSEWHERE[:1])
    assert [each.reason for each in measured.missing] == ["ImportError: libcuda.so.1: cannot open"]


def test_a_method_that_ends_its_process_twice_is_not_tried_again(worker: Callable[..., Path]) -> None:
    worker("os._exit(7) if 'xqa' in request['methods'] else None")
    results = results_of(["flashinfer", "xqa"])
    made = [Made(name, is_elsewhere=True) for name in results.backends]
    cases = [replace(CASE, batch=batch) for batch in range(1, 5)]
    Run(cases, lambda case: made, CPU, FP32, 1, results)()
    reasons = [each.reason for each in results.missing if each.backend == "xqa"]
    assert reasons[:2] == ["the process of the baselines ended with exit code 7"] * 2
    assert reasons[2:] == ["not tried: it ended its process in 2 rows"] * 2
    assert [each.kind for each in results.missing if each.backend == "flashinfer"] == [REFUSED] * 4


def test_rows_alternate_between_the_processes(worker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    worker()
    order: list[str] = []
    real = Elsewhere.measure

    def measure(self: Elsewhere, case: Case, there: Any) -> Any:
        order.append(f"there {case.batch}")
        return real(self, case, there)

    monkeypatch.setattr(Elsewhere, "measure", measure)
    here = Made("here", lambda number: order.append("here"))
    there = Made("flashinfer", is_elsewhere=True)
    results = results_of(["here", "flashinfer"])
    Run(CASES, lambda case: [here, there], CPU, FP32, 1, results)()
    assert [each for each in dict.fromkeys(order) if each != "here"] == ["there 1", "there 2", "there 3"]
    assert [order[i - 1] for i, each in enumerate(order) if each != "here"] == ["here"] * 3
    assert results.baseline_versions == {"flashinfer": "1"}
    assert [each.kind for each in results.missing] == [REFUSED] * 3


# --- What needs a GPU, on a made-up one ---


@dataclass
class Graphs:
    """Stands in for torch.cuda's streams, graphs and events: a captured call runs when its graph is replayed."""

    replays: list[int] = field(default_factory=list)
    capturing: bool = False
    captured: int = 0
    clock: float = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs = self

        class Stream:
            def wait_stream(self, other: Any) -> None: ...

        class Graph:
            def replay(self) -> None:
                graphs.replays.append(graphs.captured)
                graphs.clock += graphs.captured * 0.5

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = graphs.clock

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        @contextmanager
        def graph(made: Graph) -> Any:
            graphs.capturing, graphs.captured = True, 0
            yield
            graphs.capturing = False

        @contextmanager
        def stream(given: Stream) -> Any:
            yield

        fakes = {
            "Stream": Stream,
            "current_stream": Stream,
            "stream": stream,
            "CUDAGraph": Graph,
            "graph": graph,
            "Event": Event,
            "synchronize": lambda *device: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_graph_has_calls_on_all_caches_and_a_sample_is_one_of_two_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    graphs.install(monkeypatch)
    seen: list[tuple[int, bool]] = []

    def call(i: int) -> Callable[[], None]:
        def run() -> None:
            seen.append((i, graphs.capturing))
            graphs.captured += graphs.capturing

        return run

    sample = timing.sampler([call(i) for i in range(5)], 2**26, torch.device("cuda"))
    assert [i for i, captured in seen if not captured] == [0, 1, 2]
    assert [i for i, captured in seen if captured] == list(range(5)) * 13  # 64 calls of 64 MB, of all caches alike
    assert graphs.replays == [65]
    assert sample() == pytest.approx(500.0)  # half a millisecond a call, on the clock above
    assert graphs.replays == [65] * 3


def test_graphs_of_the_rows_are_short_and_cold() -> None:
    for case in schedule("cuda", 2, None).cases:
        kv_bytes = case.kv_bytes(2)
        caches = -(-problem.COLD_BYTES["cuda"] // kv_bytes)
        count = len(timing.captured([print] * caches, kv_bytes))
        assert count % caches == 0
        assert caches * kv_bytes >= 2**30
        assert count <= 2048
        assert 2**32 <= count * kv_bytes <= max(2**36, kv_bytes) or count >= 64


@pytest.mark.parametrize(("total", "kept"), [(143771 * 2**20, True), (80 * 2**30, False)])
def test_a_pool_is_kept_where_two_fit(total: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with 64 GiB each on an H200; on a smaller GPU a large pool is freed after its row."""

    @dataclass
    class Bytes:
        nbytes: int
        total_memory: int

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Bytes(0, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    pool = Pool(CPU, FP32)
    pool.device = torch.device("cuda")
    held: Any = (Bytes(2**35, 0), Bytes(2**35, 0))
    pool._held = held
    pool.trim()
    assert pool._held is (held if kept else None)


def test_the_kernels_of_a_run_are_known_ahead() -> None:
    """Each kind of page has attention kernels; the planning kernels come last."""
    pytest.importorskip("tilelang")
    compared = [*methods.own_methods(None), methods.fixed(None), methods.Sdpa("sdpa")]
    of_run = [case for case in GPU_GRID.cases() if case.context == 8192]
    pairs = [(case, each) for case in of_run for each in compared]
    found = [str(job) for job in jobs(pairs, CPU, torch.bfloat16, "sm_90a")]
    assert len(found) == len(set(found))
    plans = [name.startswith("plan of") for name in found]
    assert plans == sorted(plans)
    assert any(plans)
    for kind in ("contiguous", "pages of 1s", "pages of 16s", "pages of 64s"):
        assert any(f" {kind} " in name for name in found[: plans.index(True)])
    assert all(" sm_90a" in name for name in found)


def test_ceilings_are_measured_in_both_processes_before_and_after(
    worker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker()
    monkeypatch.setattr(ceilings, "measure", lambda when, process, device: Ceiling(when, process, 2.0, 3.0))
    monkeypatch.setattr(run, "compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Measurer, "__call__", lambda self, case, given: rows.Measured())
    monkeypatch.setattr(run, "Pool", lambda device, dtype: None)
    results = results_of(["here", "flashinfer"])
    made = [Made("here"), Made("flashinfer", is_elsewhere=True)]
    Run(CASES[:1], lambda case: made, torch.device("cuda"), FP32, 1, results)()
    assert [(each.when, each.process) for each in results.ceilings] == [
        ("before", "tileattn"),
        ("before", "baselines"),
        ("after", "tileattn"),
        ("after", "baselines"),
    ]


def test_results_of_a_stopped_run_name_the_row_that_was_begun(tmp_path: Path) -> None:
    path, results = tmp_path / "r.json", results_of(["stops"])

    def stop(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(CASES, lambda case: [Made("stops", stop)], CPU, FP32, 1, results, on_begin=lambda: save(results, path))()
    assert json.loads(path.read_text())["begun"] == [CASES[0].name]
    assert load(path).done == []
