"""`tileattn bundle` and `tileattn record`: what they list and refuse, and the exit status of a recorded program."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileattn.bench import presets
from tileattn.cli import run_bundle
from tileattn.cli.app import app
from tileattn.kernels.bundles import lock
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.tilelang.build import ahead, record
from tileattn.kernels.tilelang.build.batch import Done
from tileattn.kernels.tilelang.build.library import version
from tileattn.kernels.tilelang.build.sources import Sources
from tileattn.kernels.tilelang.bundling import content
from tileattn.kernels.tilelang.bundling.generating import DoneWithSources
from tileattn.kernels.tilelang.packed.library import PlanJob

KERNELS = [PlanJob("sm_90a"), PlanJob("sm_80")]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "TERMINAL_WIDTH"):  # so wide that no message is broken
        monkeypatch.setenv(name, "300")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def invoke(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, shlex.split(line))
    return result.exit_code, result.output


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a kernel for sm_90a and one for sm_80."""
    path = Path("kernels.jsonl")
    monkeypatch.setenv(record.VARIABLE, str(path.absolute()))
    for job in KERNELS:
        record.note(job)
    monkeypatch.delenv(record.VARIABLE)
    return path


def test_a_preset_is_listed() -> None:
    status, output = invoke("bundle --arch sm_80 --preset sample --list")
    assert status == 0
    *lines, count = output.splitlines()
    assert lines == [str(job) for job in presets.named("sample", "sm_80")]
    assert count == "24 kernels"


def test_of_a_file_the_kernels_of_the_architecture_are_listed(recorded: Path) -> None:
    assert invoke(f"bundle --arch sm_80 --preset {recorded} --list") == (0, f"{KERNELS[1]}\n1 kernels\n")


REFUSED = {
    "bundle --list": "there is no GPU here to compile for; name an architecture, such as sm_90a",
    "bundle --arch sm_70 --list": "'sm_70' is not known; accepted: sm_80, ",
    "bundle --arch sm_80 --preset most --list": "'most' is neither a file nor one of default, all, first, sample",
    "bundle --arch sm_89 --preset kernels.jsonl": "kernels.jsonl has no kernel for sm_89 (it has kernels for: sm_80, "
    "sm_90a)",
    "bundle --arch sm_80 --preset damaged.jsonl": "damaged.jsonl, line 1, is no record of a kernel",
    "bundle --arch gfx942 --sources gfx942.json.xz": "sources are kept for NVIDIA's architectures, not for gfx942",
    "bundle --arch sm_80 --sources a.json.xz --lock a.txt": "it cannot be given with --lock: a run writes one of them",
    "record --output gone/kernels.jsonl -- true": "there is no folder",
    "record -- ./no-such-program": "./no-such-program cannot be run",
}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("line", REFUSED)
def test_wrong_options_are_one_error(line: str) -> None:
    Path("damaged.jsonl").write_text("{}\n")
    status, output = invoke(line)
    assert status == 2, output
    assert REFUSED[line] in output


@pytest.mark.parametrize("module", run_bundle.NEEDED)
def test_what_is_missing_is_named_before_anything_is_compiled(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name) or object)
    monkeypatch.setattr(run_bundle, "_all_done", pytest.fail)
    status, output = invoke("bundle --arch sm_80 --preset sample")
    assert status == 2
    assert f"{run_bundle.NEEDED[module]}, is not installed (pip install" in output


@pytest.fixture
def tools_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object)
    monkeypatch.setattr(content, "cuda_version", lambda: "13.0.88")


@pytest.mark.usefixtures("tools_are_there")
def test_kernels_that_fail_are_named_and_nothing_is_built(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "cached", lambda job: None)
    monkeypatch.setattr(
        run_bundle, "compile_all", lambda jobs, processes, work: [Done(job, error="no nvcc") for job in jobs]
    )
    status, output = invoke(f"bundle --arch sm_80 --preset {recorded} --out dist")
    assert status == 1
    assert f"{KERNELS[1]}: no nvcc" in output
    assert not Path("dist").exists()


@pytest.mark.usefixtures("tools_are_there")
def test_the_lock_has_the_digests_of_the_sources(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "cached", lambda job: content.Kept(Path("kernel.so"), "ab" * 16))
    status, output = invoke(f"bundle --arch sm_80 --preset {recorded} --lock locks/sm_80.txt")
    assert (status, output) == (0, "locks/sm_80.txt: 1 digests\n")
    digests = {identity(KERNELS[1].name.facts): "ab" * 16}
    assert lock.read(Path("locks/sm_80.txt")) == (version("tilelang"), digests)


@pytest.mark.usefixtures("tools_are_there")
def test_the_sources_of_a_preset_are_written(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no nvcc."""
    made = ahead.Generated(Sources("device", "host", b"image"), "of these files")
    monkeypatch.setattr(
        run_bundle, "compile_all", lambda jobs, processes, work: [DoneWithSources(job, generated=made) for job in jobs]
    )
    monkeypatch.setattr(content, "cuda_version", pytest.fail)
    status, output = invoke(f"bundle --arch sm_80 --preset {recorded} --sources made/sm_80.json.xz")
    assert (status, output) == (0, "made/sm_80.json.xz: the sources of 1 kernels, 0 KiB\n")
    found = ahead.read(Path("made/sm_80.json.xz"))
    assert found == (version("tilelang"), {identity(KERNELS[1].name.facts): made})


@pytest.mark.usefixtures("tools_are_there")
def test_sources_that_cannot_be_generated_leave_no_file(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_bundle, "compile_all", lambda jobs, processes, work: [DoneWithSources(job, error="no") for job in jobs]
    )
    status, output = invoke(f"bundle --arch sm_80 --preset {recorded} --sources made/sm_80.json.xz")
    assert (status, output) == (1, f"{KERNELS[1]}: no\n")
    assert not Path("made").exists()


def test_without_nvcc_nothing_is_compiled(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvcc() -> str:
        raise RuntimeError("there is no nvcc")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object)
    monkeypatch.setattr(content, "cuda_version", no_nvcc)
    monkeypatch.setattr(run_bundle, "_all_done", pytest.fail)
    status, output = invoke(f"bundle --arch sm_80 --preset {recorded}")
    assert status == 2
    assert "there is no nvcc" in output


NOTES = """
import sys
from tileattn.kernels.tilelang.build import record
from tileattn.kernels.tilelang.packed.library import PlanJob
record.note(PlanJob("sm_90a"))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_recorded_program_keeps_its_exit_status(status: int, tmp_path: Path) -> None:
    Path("app.py").write_text(NOTES)
    found, output = invoke(f"record -o found.jsonl -- {sys.executable} app.py {status}")
    assert found == status
    assert f"{tmp_path / 'found.jsonl'}: 1 kernels" in output
    assert list(record.read(Path("found.jsonl"))) == KERNELS[:1]


def test_a_file_with_other_lines_keeps_the_exit_status_too() -> None:
    Path("app.py").write_text(NOTES)
    Path("found.jsonl").write_text("other\n")
    status, output = invoke(f"record -o found.jsonl -- {sys.executable} app.py 3")
    assert status == 3
    assert "found.jsonl, line 1, is no record of a kernel" in output


def test_a_program_without_kernels_leaves_no_file() -> None:
    status, output = invoke(f"record -- {sys.executable} -c pass")
    assert status == 0
    assert "kernels.jsonl: 0 kernels" in output
    assert not Path("kernels.jsonl").exists()


def test_help_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, words in {"bundle --help": ("--preset", "--lock", "--list"), "record --help": ("--output", "--")}.items():
        status, output = invoke(line)
        assert status == 0
        given: Any = output
        assert all(word in given for word in words)
