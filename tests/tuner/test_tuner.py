"""The tuner without a GPU: its file, its rounds, its session, and the spaces that the TileLang backend offers."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tileattn
from tests import fresh_process
from tileattn.bench import problem
from tileattn.bench.cases import Case
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.cli.app import app
from tileattn.kernels.tilelang import tuned
from tileattn.kernels.tilelang.build import batch
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import space
from tileattn.kernels.tilelang.forward.choice import chosen
from tileattn.kernels.tilelang.forward.config import ForwardConfig, HopperConfig, is_valid
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.measure import timing as bench_timing
from tileattn.reference import standard_attention
from tileattn.runtime import dispatch
from tileattn.tuner import results, state, timing
from tileattn.tuner.agreement import disagreement
from tileattn.tuner.progress import Bar
from tileattn.tuner.results import Result
from tileattn.tuner.search import SearchResult, search
from tileattn.tuner.session import written
from tileattn.tuner.space import Space

H100 = AttentionCall(torch.bfloat16, 128, 128, arch="sm_90a")
SIZES = (64, 4096, 4096, 1)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The results of a test."""
    path = tmp_path / "data" / "tuning.json"
    monkeypatch.setenv("TILEATTN_TUNING_FILE", str(path))
    results._devices.cache_clear()
    yield path
    results._devices.cache_clear()
    state.forget_prepared()


def result(config: Any, ms: float = 1.0) -> Result:
    return Result(written(config), ms, 2.0, 9, "2026-11-21", "torch")


# --- The file ---


def test_a_result_is_found_again_and_by_another_process(file: Path) -> None:
    config = HopperConfig(128, 96, ping_pong=True)
    assert results.find("sm_90a", str(H100), SIZES) is None
    results.keep("sm_90a", str(H100), SIZES, result(config))
    assert results.find("sm_90a", str(H100), SIZES) == written(config)
    code = (
        "from tileattn.tuner import results\n"
        f"assert results.find('sm_90a', {str(H100)!r}, {SIZES})['block_N'] == 96\n"
        f"assert results.find('sm_80', {str(H100)!r}, {SIZES}) is None\n"
    )
    fresh_process.run(code)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((64, 4096, 4096, 1), True),
        ((33, 2049, 2500, 1), True),
        ((65, 4096, 4096, 1), False),
        ((64, 2048, 4096, 1), False),
        ((64, 4096, 4097, 1), False),
        ((64, 4096, 4096, 4), False),
    ],
)
def test_sizes_are_rounded_up_to_powers_of_two(other: tuple[int, int, int, int], same: bool) -> None:
    results.keep("sm_90a", str(H100), SIZES, result(HopperConfig(128, 96)))
    assert (results.find("sm_90a", str(H100), other) is not None) == same


def test_short_lengths_share_a_bucket() -> None:
    assert results.bucket((1, 1, 7, 1)) == results.bucket((1, 64, 33, 1)) == "p1 q64 k64 g1"


def test_results_of_other_processes_stay(file: Path) -> None:
    results.keep("sm_90a", "one", SIZES, result(HopperConfig(128, 96)))
    results.find("sm_90a", "one", SIZES)  # what this process knows
    code = (
        "from tileattn.tuner import results\n"
        f"results.keep('sm_90a', 'two', {SIZES}, results.Result({{'schedule': 'X'}}, 1.0, 1.0, 1, '', ''))"
    )
    fresh_process.run(code)
    results.keep("sm_90a", "three", SIZES, result(HopperConfig(128, 80)))
    assert {call for _, call, _, _ in results.entries(results.read(file))} == {"one", "two", "three"}


def test_threads_lose_nothing(file: Path) -> None:
    threads = [
        threading.Thread(target=results.keep, args=("sm_90a", f"call{index}", SIZES, result(HopperConfig(128, 96))))
        for index in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(results.entries(results.read(file)))) == 12


def _with(**fields: Any) -> str:
    """A file with one result, of which some fields are others."""
    entry = {"config": {}, "ms": 1.0, "default_ms": 2.0, "candidates": 9, "when": "2026-11-21", "versions": "torch"}
    return json.dumps({"version": 1, "devices": {"d": {"c": {"b": {**entry, **fields}}}}})


def test_a_whole_file_is_read(file: Path) -> None:
    """Unlike the damaged files below."""
    file.parent.mkdir()
    file.write_text(_with())
    assert len(list(results.entries(results.read(file)))) == 1


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"version": 0, "devices": {}}',
        '{"version": 1, "devices": {"d": {"c": {"b": {"config": 3}}}}}',
        *(
            _with(**{name: value})
            for name, value in (
                ("when", 3),
                ("versions", None),
                ("candidates", "9"),
                ("ms", True),
                ("ms", math.inf),
                ("default_ms", 10**400),
            )
        ),
        "\0\1",
        "[" * 100_000,
        '{"version": 1, "devices": ' + '{"a":' * 100_000,
        _with(config={"schedule": [[[]]]}),
        _with(candidates=777).replace("777", "7" * 10_000),
    ],
)
def test_a_damaged_file_stays_until_a_result_takes_its_place(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        lookups = [results.find("sm_90a", "call", SIZES) for _ in range(2)]
    assert lookups == [None, None]
    assert len(caught) == 1
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert file.read_text() == content
    with pytest.warns(UserWarning, match=r"it is kept as .*\.unreadable-"):
        results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))
    (aside,) = file.parent.glob("*.unreadable-*")
    assert aside.read_text() == content
    assert results.find("sm_90a", "call", SIZES) is not None


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


def _make_newer(path: Path) -> None:
    path.write_text('{"version": 99, "devices": {"d": {}}}')


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_make_folder, "it is no regular file"),
        (os.mkfifo, "it is no regular file"),
        (_make_newer, "a newer tileattn wrote them: their version is 99, this one's 1"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
    ids=["folder", "pipe", "newer", "loop"],
)
def test_what_is_not_ours_is_never_moved(make: Callable[[Path], None], why: str, file: Path) -> None:
    file.parent.mkdir()
    make(file)
    before = file.lstat()
    with pytest.warns(UserWarning, match=why):
        assert results.find("sm_90a", "call", SIZES) is None
    with pytest.raises(OSError, match="TILEATTN_TUNING_FILE"):
        results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))
    with pytest.warns(UserWarning, match=why):
        assert results.clear() == 0
    after = file.lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {each.name for each in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


def test_a_file_that_cannot_be_opened_now_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))

    def read_bytes(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as scope:
        scope.setattr(Path, "read_bytes", read_bytes)
        with pytest.warns(UserWarning, match="Too many open files"):
            assert results.find("sm_90a", "call", SIZES) is None
    results._devices.cache_clear()
    assert results.find("sm_90a", "call", SIZES) is not None


@pytest.mark.parametrize("make", [None, _make_folder, os.mkfifo, _make_newer], ids=["no", "folder", "pipe", "newer"])
def test_that_nothing_can_be_kept_is_found_out_before_anything_is_measured(
    make: Callable[[Path], None] | None, fake: Fake, file: Path
) -> None:
    if make is None:
        file.parent.write_text("a file where the folder should be")
    else:
        file.parent.mkdir()
        make(file)
    before = file.parent.lstat() if make is None else file.lstat()
    with pytest.raises(OSError, match=r"cannot be written .* set TILEATTN_TUNING_FILE"), tileattn.tuning(quiet=True):
        tileattn.attention(*qkv())
    assert (state.session, fake.compiled, fake.ran) == (None, [], [])
    code, output = invoke(f"tune {SHAPE}")
    assert code == 1
    assert output.startswith(f"the tuner's results {file} cannot be written")
    assert fake.ran == []
    after = file.parent.lstat() if make is None else file.lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_that_takes_no_new_file_is_found_out(fake: Fake, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the lock exists already. Tests may run as root, who may write everywhere."""
    results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))

    def mkstemp(**options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(results.tempfile, "mkstemp", mkstemp)
    with pytest.raises(PermissionError, match=r"Permission denied.* set TILEATTN_TUNING_FILE"), tileattn.tuning():
        tileattn.attention(*qkv())
    assert fake.ran == []


@pytest.mark.parametrize("content", [None, "{", '{"version": 1, "devices": {}}'], ids=["none", "damaged", "whole"])
def test_opening_a_session_changes_no_file(content: str | None, file: Path) -> None:
    file.parent.mkdir()
    if content is not None:
        file.write_text(content)
    with tileattn.tuning():
        pass
    assert {each.name for each in file.parent.iterdir()} - {f"{file.name}.lock"} == ({file.name} if content else set())
    assert content is None or file.read_text() == content


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEATTN_TUNING_FILE", str(tmp_path / "file" / "tuning.json"))
    with pytest.raises(OSError, match="TILEATTN_TUNING_FILE"):
        results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))


def test_a_full_disk_is_named_with_what_is_needed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))
    before = file.read_text()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(results.os, "replace", full)
    with pytest.raises(
        OSError, match=rf"{file} cannot be written .*take \d+ bytes.* set TILEATTN_TUNING_FILE"
    ) as raised:
        results.keep("sm_90a", "another", SIZES, result(HopperConfig(128, 96)))
    assert raised.value.errno == errno.ENOSPC
    assert file.read_text() == before
    assert {each.name for each in file.parent.iterdir()} == {file.name, f"{file.name}.lock"}


def test_a_file_without_end_is_not_read(file: Path) -> None:
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(2**40)  # sparse
    with pytest.warns(UserWarning, match=f"{file} cannot be used .*{2**40} bytes"):
        assert results.find("sm_90a", "call", SIZES) is None
    with pytest.raises(OSError, match="cannot be used"):
        results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEATTN_TUNING_FILE", "~/results.json")
    assert results.default_file() == tmp_path / "results.json"


def test_without_a_home_calls_run_and_results_say_where_to_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TILEATTN_TUNING_FILE", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert results.find("sm_90a", "call", SIZES) is None
    with pytest.raises(FileNotFoundError, match=r"no home directory, .*results .* Set TILEATTN_TUNING_FILE"):
        results.keep("sm_90a", "call", SIZES, result(HopperConfig(128, 96)))
    for command in ("tune --show", "tune --clear --yes", f"tune {SHAPE}"):
        code, output = invoke(command)
        assert code == 1, output
        assert "Set TILEATTN_TUNING_FILE" in output


def test_a_home_that_is_not_known_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_TUNING_FILE", "~nobody-has-this-name/t.json")
    with pytest.warns(UserWarning, match="TILEATTN_TUNING_FILE='~nobody-has-this-name/t.json' begins") as caught:
        assert [results.find("sm_90a", "call", SIZES) for _ in range(2)] == [None, None]
    assert len(caught) == 1


def test_clearing_says_how_many_there_were(file: Path) -> None:
    for call in ("one", "two"):
        results.keep("sm_90a", call, SIZES, result(HopperConfig(128, 96)))
    assert results.clear() == 2
    assert not file.exists()
    assert results.find("sm_90a", "one", SIZES) is None
    assert results.clear() == 0


# --- The race ---


class Clock:
    """Fake times: each run has a name, of which the time is known."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.calls = times, dict.fromkeys(times, 0)
        self.last = ""

    def run(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.last = name

        return call

    def __call__(self, run: Callable[[], object], calls: int) -> list[float]:
        run()
        self.calls[self.last] += calls
        return [self.times[self.last]] * calls


def test_slow_candidates_are_hardly_measured() -> None:
    clock = Clock({f"c{index}": 1.0 + index / 10 for index in range(100)})
    runs = {name: clock.run(name) for name in clock.times}
    estimates = {name: timing.quick(run, clock) for name, run in runs.items()}
    times = timing.race(runs, estimates, "c50", clock)
    assert set(times) == {"c0", "c50"}
    assert min(times, key=times.__getitem__) == "c0"
    assert clock.calls["c99"] == timing.FEWEST_CALLS
    assert clock.calls["c5"] < 10 < clock.calls["c0"]
    spent = sum(calls * clock.times[name] for name, calls in clock.calls.items())
    assert spent < 2500  # milliseconds, of which the estimates take 1200


# --- The search ---


@dataclass(frozen=True)
class Tile:
    size: int


class Quiet:
    def begin(self, call: str, candidates: int) -> None: ...
    def checked(self, config: Any, error: str | None) -> None: ...
    def timing(self, number: int, config: Any) -> None: ...


def space_of(
    candidates: Sequence[Tile], output: Callable[[Tile], torch.Tensor], errors: dict[Tile, str] | None = None
) -> Space:
    def compile_(configs: Sequence[Tile]) -> Iterator[tuple[Tile, str | None]]:
        for config in reversed(configs):  # the default comes last: the order is not promised
            yield config, (errors or {}).get(config)

    return Space("call", SIZES, Tile(0), lambda: candidates, compile_, lambda config: lambda: (config, output(config)))


def found_with(space: Space, times: dict[Tile, float]) -> Any:
    turn: list[Tile] = []

    def call(prepared: Callable[[], Any]) -> list[torch.Tensor]:
        config, o = prepared()
        turn[:] = [config]
        return [o]

    def timer(run: Callable[[], object], calls: int) -> list[float]:
        run()
        return [times[turn[0]]] * calls

    return search(space, call, timer, Quiet(), torch.bfloat16)


def test_the_fastest_that_is_right_is_found() -> None:
    torch.manual_seed(0)
    right = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    outputs = {Tile(3): right + 0.5, Tile(4): torch.full_like(right, torch.nan)}
    space = space_of([Tile(index) for index in range(1, 6)], lambda tile: outputs.get(tile, right), {Tile(5): "no"})
    times = {Tile(0): 3.0, Tile(1): 2.0, Tile(2): 2.5, Tile(3): 1.0, Tile(4): 1.0}
    outcome = found_with(space, times)
    assert (outcome.best, outcome.ms, outcome.default_ms, outcome.measured) == (Tile(1), 2.0, 3.0, 3)
    assert set(outcome.rejected) == {Tile(3), Tile(4), Tile(5)}


def test_a_candidate_that_cannot_be_launched_is_left_out() -> None:
    def output(tile: Tile) -> torch.Tensor:
        if tile == Tile(1):
            raise ValueError("too much shared memory")
        return torch.ones(1, 2, 1, 16)

    outcome = found_with(space_of([Tile(1), Tile(2)], output), {Tile(0): 2.0, Tile(2): 1.0})
    assert outcome.best == Tile(2)
    assert outcome.rejected == {Tile(1): "ValueError: too much shared memory"}


def test_the_default_stays_within_the_noise() -> None:
    right = torch.ones(1, 2, 1, 16)
    outcome = found_with(space_of([Tile(1)], lambda tile: right), {Tile(0): 1.01, Tile(1): 1.0})
    assert outcome.best == Tile(0)


def test_a_default_that_does_not_compile_is_an_error() -> None:
    space = space_of([Tile(1)], lambda tile: torch.ones(1), {Tile(0): "nvcc is not there"})
    with pytest.raises(RuntimeError, match="nvcc is not there"):
        found_with(space, {})


def test_outputs_may_differ_by_roundings_only() -> None:
    torch.manual_seed(0)
    exact = torch.randn(2, 64, 3, 32)
    o, lse = exact.bfloat16(), torch.randn(2, 3, 64)
    rounded = (exact * (1 + 2**-9 * torch.randn_like(exact))).bfloat16()
    assert disagreement([rounded, lse + 1e-4], [o, lse], o.dtype) is None
    wrong = o.clone()
    wrong[1, 63, 2] = 0  # one row
    assert "worst row" in (disagreement([wrong, lse], [o, lse], o.dtype) or "")
    assert disagreement([o, lse + 0.1], [o, lse], o.dtype) is not None
    assert disagreement([o, None], [o, lse], o.dtype) is not None
    assert disagreement([o, None], [o, None], o.dtype) is None
    empty = lse.clone()
    empty[0, 0, :5] = -torch.inf
    assert disagreement([o, empty], [o, lse], o.dtype) is not None
    assert disagreement([o, lse], [o, empty], o.dtype) is not None
    assert disagreement([o, empty.clone()], [o, empty], o.dtype) is None
    hit = o.clone()
    hit[0, 3] = torch.nan
    assert disagreement([hit.clone(), lse], [hit, lse], o.dtype) is None


def test_gradients_may_differ_by_roundings_of_the_calls_dtype() -> None:
    torch.manual_seed(0)
    dq, dsink = torch.randn(2, 64, 3, 32).bfloat16(), torch.randn(4)
    of_bias = torch.randn(64, 64)
    outputs = [dq, None, None, dsink, of_bias]
    near = [dq, None, None, dsink * 1.001, of_bias * 1.001]
    assert disagreement(near, outputs, torch.bfloat16, gradients=True) is None
    for index, factor in ((3, 1.1), (4, 1.1)):
        wrong: list[torch.Tensor | None] = list(outputs)
        wrong[index] = outputs[index] * factor  # type: ignore[operator]
        assert f"output {index}" in (disagreement(wrong, outputs, torch.bfloat16, gradients=True) or "")


# --- The session, with a backend that runs PyTorch's operations in tiles of different names ---


class Fake:
    """A tunable backend for CPUs: the torch backend, under configurations that only the clock can tell apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {Tile(0): 3.0, Tile(1): 2.0, Tile(2): 1.0}
        self.wrong: set[Tile] = set()
        self.compiled: list[Tile] = []
        self.ran: list[Tile] = []
        self.arch = "cpu"
        (index,) = [i for i, each in enumerate(dispatch.BACKENDS) if each.name == "torch"]
        self.torch = dispatch.BACKENDS[index]
        mine = replace(self.torch, prepare=self.prepare, space=self.space)
        backends = (*dispatch.BACKENDS[:index], mine, *dispatch.BACKENDS[index + 1 :])
        monkeypatch.setattr(dispatch, "BACKENDS", backends)
        dispatch._select.cache_clear()
        state.forget_prepared()
        monkeypatch.setattr(bench_timing, "time_calls", self.time)

    def prepare(self, call: AttentionCall, *sizes: Any) -> Callable[..., Any]:
        record = results.find(call.arch, str(call), tuned.sizes_of(*sizes[:2]))
        return self.with_config(Tile(0) if record is None else Tile(record["size"]), call, *sizes)

    def with_config(self, config: Tile, call: AttentionCall, *sizes: Any) -> Callable[..., Any]:
        run = self.torch.prepare(call, *sizes)

        def forward(*arguments: Any, **options: Any) -> Any:
            self.ran.append(config)
            o, lse = run(*arguments, **options)
            return (o + 1 if config in self.wrong else o), lse

        return forward

    def space(self, call: AttentionCall, *sizes: Any) -> Space:
        def compile_(configs: Sequence[Tile]) -> Iterator[tuple[Tile, str | None]]:
            self.compiled += configs
            yield from ((config, None) for config in configs)

        known = results.find(call.arch, str(call), tuned.sizes_of(*sizes[:2])) is not None
        return Space(
            str(call),
            tuned.sizes_of(*sizes[:2]),
            Tile(0),
            lambda: [Tile(1), Tile(2)],
            compile_,
            lambda config: self.with_config(config, call, *sizes),
            known,
        )

    def time(self, run: Callable[[], object], device: torch.device, calls: int) -> list[float]:
        run()
        return [self.times[self.ran[-1]]] * calls


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    yield Fake(monkeypatch)
    monkeypatch.undo()
    dispatch._select.cache_clear()
    state.forget_prepared()


def qkv(seqlen: int = 100, head_dim: int = 16, grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, seqlen, 2, head_dim, requires_grad=grad) for _ in range(3)]


def last(fake: Fake, **options: Any) -> Tile:
    """Which configuration a call runs."""
    fake.ran.clear()
    tileattn.attention(*qkv(), **options)
    (ran,) = fake.ran
    return ran


def test_nothing_is_tuned_unasked(fake: Fake, file: Path) -> None:
    assert last(fake) == Tile(0)
    assert fake.compiled == []
    assert not file.exists()


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_tuned_once_and_its_result_stays(fake: Fake, causal: bool, capfd: pytest.CaptureFixture[str]) -> None:
    mask = None if causal else tileattn.SlidingWindow(5, 0)  # a plain call and one with a variant
    assert last(fake, causal=causal, mask=mask) == Tile(0)
    with tileattn.tuning():
        o = tileattn.attention(*qkv(), causal=causal, mask=mask)
        assert fake.compiled == [Tile(0), Tile(1), Tile(2)]
        assert last(fake, causal=causal, mask=mask) == Tile(2)
        tileattn.attention(*qkv(128), causal=causal, mask=mask)  # the same bucket
        assert len(fake.compiled) == 3
        tileattn.attention(*qkv(129), causal=causal, mask=mask)
        assert len(fake.compiled) == 6
    assert last(fake, causal=causal, mask=mask) == Tile(2)
    torch.testing.assert_close(o, tileattn.attention(*qkv(), causal=causal, mask=mask))
    assert "3.00 times the default's speed" in capfd.readouterr().err
    with tileattn.tuning(quiet=True):  # a result is there
        tileattn.attention(*qkv(), causal=causal, mask=mask)
    assert len(fake.compiled) == 6
    with tileattn.tuning(quiet=True, again=True):
        tileattn.attention(*qkv(), causal=causal, mask=mask)
    assert len(fake.compiled) == 9
    assert capfd.readouterr().err == ""


def test_a_candidate_that_is_wrong_does_not_win(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    fake.wrong = {Tile(2)}
    with tileattn.tuning():
        tileattn.attention(*qkv())
    assert last(fake) == Tile(1)
    assert "left out: Tile(size=2): output 0: its worst row" in " ".join(capfd.readouterr().err.split())


def test_gradients_and_their_threads_are_left_in_peace(fake: Fake) -> None:
    """The forward pass of a call with gradients is tuned; this backend's backward pass has no choice."""
    with tileattn.tuning(quiet=True):
        q, k, v = qkv(grad=True)
        tileattn.attention(q, k, v).sum().backward()
        assert q.grad is not None
        assert len(fake.compiled) == 3
    assert fake.ran[-1] == Tile(2)


def test_a_traced_call_is_refused(fake: Fake) -> None:
    compiled = torch.compile(lambda q, k, v: tileattn.attention(q, k, v), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"tileattn\.tuning\(\) is open while a call is traced"), tileattn.tuning():
        compiled(*qkv())
    torch._dynamo.reset()
    before = compiled(*qkv())  # what was compiled before is tuned by its own calls
    with tileattn.tuning(quiet=True):
        torch.testing.assert_close(compiled(*qkv()), before)
    assert fake.ran[-1] == Tile(2)


def test_an_error_closes_the_session(fake: Fake) -> None:
    with pytest.raises(ZeroDivisionError), tileattn.tuning():
        raise ZeroDivisionError
    assert last(fake) == Tile(0)
    assert state.session is None


def test_it_does_not_open_twice() -> None:
    with tileattn.tuning(), pytest.raises(RuntimeError, match="open already"), tileattn.tuning():
        pass
    assert state.session is None


def test_a_backend_without_configurations_says_so_once(capfd: pytest.CaptureFixture[str], file: Path) -> None:
    with tileattn.tuning():
        for seqlen in (8, 9, 8):
            tileattn.attention(*qkv(seqlen))
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "tuning: the torch backend has nothing to tune on cpu; its calls run as they are"
    assert not file.exists()


# --- What the TileLang backend offers ---

CALLS = {
    "sm_90a": H100,
    "sm_90a causal 64": AttentionCall(torch.bfloat16, 64, 64, "Causal()", arch="sm_90a"),
    "sm_90a softcap 256": AttentionCall(torch.float16, 256, 256, "Causal()+SoftCap(f)", arch="sm_90a"),
    "sm_90a 40/96": AttentionCall(torch.float16, 40, 96, arch="sm_90a"),
    "sm_90a unaligned": AttentionCall(torch.float16, 72, 72, arch="sm_90a", aligned=False),
    "sm_90a fp8": AttentionCall(torch.float8_e4m3fn, 128, 128, arch="sm_90a"),
    "sm_80": AttentionCall(torch.bfloat16, 128, 128, "Causal()", arch="sm_80"),
    "sm_89 256": AttentionCall(torch.bfloat16, 256, 256, arch="sm_89"),
}


@pytest.mark.parametrize("name", CALLS)
def test_candidates_fit_and_are_at_most_108(name: str) -> None:
    candidates = space.candidates(CALLS[name], SIZES)
    assert 3 <= len(candidates) <= space.MOST
    assert len(set(candidates)) == len(candidates)
    assert all(is_valid(CALLS[name], config) for config in candidates)


def test_candidates_of_short_calls_have_small_tiles() -> None:
    assert {config.block_M for config in space.candidates(H100, (64, 4096, 4096, 1))} > {64, 128}
    assert {config.block_M for config in space.candidates(H100, (64, 40, 40, 1))} == {64}


@pytest.mark.parametrize("config", [ForwardConfig(64, 64, 2, 128), HopperConfig(128, 80, two_level=True)])
def test_a_result_is_used_where_it_is_valid(config: Any) -> None:
    shapes = torch.Size((4, 4096, 16, 128)), torch.Size((4, 4096, 16, 128))
    assert forward_launch._chosen(H100, *shapes) == chosen(H100, *shapes)
    results.keep("sm_90a", str(H100), tuned.sizes_of(*shapes), result(config))
    assert forward_launch._chosen(H100, *shapes) == config
    shorter = torch.Size((4, 1000, 16, 128))
    assert forward_launch._chosen(H100, shorter, shorter) == default(H100, 1000)


@pytest.mark.parametrize(
    "record",
    [
        {"schedule": "ForwardConfig", "block_M": 256, "block_N": 256, "num_stages": 3, "threads": 256},
        {"schedule": "ForwardConfig", "block_M": 64},
        {"schedule": "ForwardConfig", "block_M": "64", "block_N": 64, "num_stages": 2, "threads": 128},
        {"schedule": "HopperConfig", "block_M": 128, "block_N": 64, "colour": 3},
        {"schedule": "AnotherConfig", "block_M": 64},
        {},
        {"schedule": []},
        {"schedule": {}},
        {"schedule": None, "block_M": 64},
        *(
            {"schedule": "ForwardConfig", "block_M": 64, "block_N": 64, "num_stages": 2, "threads": 128, **other}
            for other in (
                {"threads": 0},  # a division by it
                {"threads": 1},
                {"block_M": 0},  # a multiple of everything
                {"block_M": -64},
                {"block_N": 2**70},
                {"block_M": 64.0},
                {"num_stages": True},
                {"block_M": math.nan},
                {"block_M": []},
            )
        ),
        *(
            {"schedule": "HopperConfig", "block_M": 128, "block_N": 64, **other}
            for other in (
                {"rescale_threshold": math.inf},
                {"rescale_threshold": math.nan},
                {"ping_pong": 1},
                {"num_stages": 1e300},
            )
        ),
    ],
)
def test_a_result_that_is_not_valid_is_ignored(record: dict[str, Any]) -> None:
    shapes = torch.Size((4, 4096, 16, 128)), torch.Size((4, 4096, 16, 128))
    kept = Result(record, 1.0, 2.0, 9, "", "")
    results.keep("sm_90a", str(H100), tuned.sizes_of(*shapes), kept)
    assert forward_launch._chosen(H100, *shapes) == chosen(H100, *shapes)
    offered = forward_launch.space(H100, *shapes, scale=1.0)
    assert offered is not None
    assert not offered.known


def test_a_record_with_an_old_name_of_a_field_is_used() -> None:
    """`rescale_threshold` was called `patience`."""
    record = {"schedule": "HopperConfig", "block_M": 128, "block_N": 80, "patience": 4.0, "two_level": True}
    shapes = torch.Size((4, 4096, 16, 128)), torch.Size((4, 4096, 16, 128))
    results.keep("sm_90a", str(H100), tuned.sizes_of(*shapes), Result(record, 1.0, 2.0, 9, "", ""))
    config = HopperConfig(128, 80, rescale_threshold=4.0, two_level=True)
    assert forward_launch._chosen(H100, *shapes) == config
    offered = forward_launch.space(H100, *shapes, scale=1.0)
    assert offered is not None
    assert offered.known


def pretended(call: AttentionCall, config: Any) -> Callable[..., None]:
    """A stand-in for a compiled kernel: it writes PyTorch's result; one configuration is wrong."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *_: Any) -> None:
        ran.append(config)
        right = standard_attention(q.float(), k.float(), v.float(), tileattn.Causal())
        o.copy_(right[0] if config.block_N != 32 else 0)
        lse.copy_(right[1])

    return kernel


ran: list[Any] = []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_a_forward_call_is_tuned(arch: str, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """From a call to its result on disk, in each schedule, without compilers and clocks."""
    call = AttentionCall(torch.bfloat16, 64, 64, "Causal()", arch=arch)
    q, k, v = (torch.randn(1, 300, 2, 64).bfloat16() for _ in range(3))
    monkeypatch.setattr(forward_launch, "forward_function", pretended)
    monkeypatch.setattr(forward_launch, "tickets", lambda device: torch.zeros(1))
    monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(space, "MOST", 12)
    monkeypatch.setattr(tuned, "compiled", lambda jobs: iter([(config, None) for config in jobs]))

    def clock(run: Callable[[], object], device: torch.device, calls: int) -> list[float]:
        run()
        return [10.0 if ran[-1] == default(call, 300) else 1.0 + ran[-1].block_N / 1000] * calls

    monkeypatch.setattr(bench_timing, "time_calls", clock)
    (tilelang,) = [each for each in dispatch.BACKENDS if each.name == "tilelang"]
    monkeypatch.setattr(dispatch, "_select", lambda call, name: tilelang)
    with tileattn.tuning(quiet=True):
        forward = dispatch.prepare_forward(call, "tilelang", q.shape, k.shape, 0.125)
        o, lse = forward(Inputs(q, k, v))
    ((_, kept, bucket, result),) = results.entries(results.read(file))
    assert (kept, bucket) == (str(call), "p2 q512 k512 g1")
    tried = {config.block_N for config in space.candidates(call, (2, 300, 300, 1)) if config != default(call, 300)}
    assert result.config["block_N"] == min(tried - {32})
    assert result.ms < result.default_ms == 10.0
    assert result.candidates >= 3
    chosen = forward_launch._chosen(call, q.shape, k.shape)
    assert written(chosen) == result.config
    assert ran[-1] == chosen
    dispatch.prepare_forward(call, "tilelang", q.shape, k.shape, 0.125)(Inputs(q, k, v))
    assert ran[-1] == chosen
    assert lse is not None
    assert o.isfinite().all()


@dataclass(frozen=True)
class Pretended:
    """A job: of equal keys one is compiled."""

    key: str

    def compile(self) -> None:
        raise AssertionError("the processes are pretended as well")


def test_configurations_are_ready_when_their_last_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that several have is compiled once, and its error is that of all of them."""
    began: list[str] = []

    def compile_all(jobs: Sequence[Pretended], processes: int) -> Iterator[batch.Done]:
        for job in jobs:
            began.append(job.key)
            yield batch.Done(job, error="it spills" if job.key == "wide" else None)

    monkeypatch.setattr(batch, "compile_all", compile_all)
    jobs = {1: "prepare small", 2: "prepare wide", 3: "wide late", 4: "small prepare"}
    ready = tuned.compiled({config: [Pretended(key) for key in keys.split()] for config, keys in jobs.items()})
    assert list(ready) == [(1, None), (4, None), (2, "it spills"), (3, "it spills")]
    assert began == ["prepare", "small", "wide", "late"]


def test_calls_of_nothing_have_no_space() -> None:
    shape = torch.Size((4, 0, 16, 128))
    assert forward_launch.space(H100, shape, shape, 1.0) is None


def test_the_file_is_json_for_people(file: Path) -> None:
    results.keep("sm_90a", str(H100), SIZES, result(HopperConfig(128, 96)))
    content = json.loads(file.read_text())
    (device,) = content["devices"]
    assert device.endswith("(sm_90a)")
    assert list(content["devices"][device]) == ["bfloat16 d128 full lse sm_90a"]


@pytest.mark.slow(reason="6 s: processes that import PyTorch")
def test_a_script_without_a_guard_does_not_run_again(tmp_path: Path) -> None:
    """Kernels are compiled in spawned processes, which import a script's main module unless it is hidden from them."""
    script = tmp_path / "script.py"
    script.write_text(
        "from tileattn.kernels.tilelang.build.batch import compile_all\n"
        "print('main', sorted(compile_all([1, 2, 3], 2, work=repr)), __file__ is not None)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "main ['1', '2', '3'] True\n", done.stderr


# --- The command line ---


def invoke(line: str, answer: str | None = None) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, shlex.split(line), input=answer, env={"COLUMNS": "300"})
    return outcome.exit_code, " ".join(outcome.output.split())


SHAPE = "--B 1 --H 4 --KV 2 --N 48,100 --D 16 --Dv 32 --causal --dtype fp32 --device cpu"


def test_tune_tunes_a_case_at_each_length(fake: Fake, file: Path) -> None:
    code, output = invoke(f"tune {SHAPE} --softcap 20 --sink")
    assert code == 0, output
    assert f"results: {file}" in output
    kept = {(call, bucket) for _, call, bucket, _ in results.entries(results.read(file))}
    call = "float32 d16/32 Causal()+SoftCap(f) sink cpu"
    assert kept == {(call, "p4 q64 k64 g2"), (call, "p4 q128 k128 g2")}
    assert fake.compiled == 2 * [Tile(0), Tile(1), Tile(2)]
    assert invoke(f"tune {SHAPE} --softcap 20 --sink -q") == (0, f"results: {file}")
    assert len(fake.compiled) == 6
    invoke(f"tune {SHAPE} --softcap 20 --sink --again")
    assert len(fake.compiled) == 12


def test_show_and_clear(fake: Fake, file: Path) -> None:
    assert invoke("tune --show") == (0, f"no results in {file}")
    assert invoke("tune --clear") == (0, f"no results in {file}")
    invoke(f"tune {SHAPE}")
    code, output = invoke("tune --show")
    assert code == 0
    for shown in (
        "no GPU (cpu)",
        "float32 d16/32 Causal() cpu",
        "p4 q128 k128 g2",
        "Tile(size=2)",
        "3.00x",
        "2 results",
    ):
        assert shown in output
    code, output = invoke("tune --clear", answer="n\n")
    assert code == 1
    assert file.exists()
    assert invoke("tune --clear", answer="y\n")[1].endswith("removed 2 results")
    invoke(f"tune {SHAPE}")
    assert invoke("tune --clear --yes") == (0, "removed 2 results")
    assert not file.exists()


def test_a_case_that_cannot_be_run_is_named_and_the_others_are_tuned(
    fake: Fake, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = problem.build

    def short_of_memory(case: Case, *arguments: Any, **options: Any) -> problem.Problem:
        if case.seqlen_q == 48:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 EiB")
        return build(case, *arguments, **options)

    monkeypatch.setattr(problem, "build", short_of_memory)
    code, output = invoke(f"tune {SHAPE} --quiet")
    assert (code, output) == (
        1,
        f"D16/32 causal (1,48,4/2): OutOfMemoryError: CUDA out of memory. results: {file}",
    )
    assert [bucket for _, _, bucket, _ in results.entries(results.read(file))] == ["p4 q128 k128 g2"]


HOSTILE = "f[bold]loat[/red] :x: [link=a]"


def test_names_are_shown_as_they_are(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """rich's markup would drop brackets, raise, or draw emoji."""
    monkeypatch.setattr(results, "device_name", lambda arch: HOSTILE)
    monkeypatch.setenv("TILEATTN_TUNING_FILE", str(tmp_path / "[b]x[/i]" / "t.json"))
    assert invoke("tune --show")[1] == f"no results in {tmp_path}/[b]x[/i]/t.json"
    results.keep("sm_90a", f"call {HOSTILE}", SIZES, Result({"schedule": HOSTILE}, 1.0, 2.0, 9, "[/i]", ""))
    code, output = invoke("tune --show")
    assert code == 0
    for shown in (f"{HOSTILE} call sizes", f"call {HOSTILE} p64", f"{HOSTILE}()", "[/i]", f"in {tmp_path}/[b]x[/i]/t"):
        assert shown in output
    bar = Bar(quiet=False)
    bar.begin(f"call {HOSTILE}", 3)
    assert str(bar.progress.columns[-1](bar.progress.tasks[0])) == f"compiling and checking: call {HOSTILE}"
    bar.end()
    bar.finished(SearchResult(HOSTILE, 1.0, 2.0, 3, {HOSTILE: "[/why]"}), 1.0)
    bar.say(HOSTILE)
    said = capfd.readouterr().err
    for shown in (f"tuned call {HOSTILE} in", f"speed: {HOSTILE}", f"left out: {HOSTILE}: [/why]", f"\n{HOSTILE}\n"):
        assert shown in said


def test_what_is_piped_is_not_folded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.keep("sm_90a", str(H100), SIZES, result(HopperConfig(128, 96)))
    outcome = CliRunner().invoke(app, ["tune", "--show"], env={"COLUMNS": "40"})
    config = ", ".join(
        f"{name}={value}" for name, value in written(HopperConfig(128, 96)).items() if name != "schedule"
    )
    assert f"HopperConfig({config})" in outcome.output


def test_tune_says_where_there_is_nothing_to_tune(file: Path) -> None:
    code, output = invoke(f"tune {SHAPE}")
    assert code == 0
    assert "the torch backend has nothing to tune on cpu" in output
    assert output.endswith("no results: there was nothing to tune")
    assert "results: /" not in output
    assert not file.exists()


def test_tune_refuses_what_it_does_not_know() -> None:
    for line, said in (
        ("tune --direction up", "--direction"),
        ("tune --show --clear", "--clear"),
        ("tune --show --N 5", "Invalid value for --show: it takes no other option, got --seqlen"),
        ("tune --clear --yes -q", "Invalid value for --clear: it takes no other option, got --quiet"),
        (f"tune {SHAPE} --yes", "Invalid value for --yes: it goes with --clear"),
        (f"tune {SHAPE} --backend none", "--backend"),
        (f"tune {SHAPE} --suite quick", "--suite"),
        ("tune --N abc", "Invalid value for --seqlen / --N: 'abc' is not understood"),
        ("tune --D 0", "Invalid value for --head-dim / --D: 0 is too few"),
    ):
        code, output = invoke(line)
        assert code == 2
        assert said in output
    code, output = invoke(f"tune {SHAPE} --backend tilelang")
    assert code == 1
    assert "device 'cpu' is not one of" in output
