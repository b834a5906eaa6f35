"""The kernels that an application asks for, in a file: noted by several processes, read once each."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.build import library, record
from tileattn.kernels.tilelang.packed.library import PlanJob

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
KERNELS = [*map(PlanJob, ARCHITECTURES), *(SharesJob(torch.bfloat16, arch) for arch in ARCHITECTURES)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernels.jsonl"
    monkeypatch.setenv(record.VARIABLE, str(path))
    return path


def note_all(times: int) -> None:
    for _ in range(times):
        for job in KERNELS:
            record.note(job)


def test_what_is_noted_is_read_once(file: Path) -> None:
    note_all(3)
    assert len(file.read_text().splitlines()) == 3 * len(KERNELS)
    assert list(record.read(file)) == KERNELS


def test_without_the_variable_nothing_is_noted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(record.VARIABLE)
    note_all(1)
    assert not file.exists()


def test_processes_append_whole_lines(file: Path) -> None:
    context = multiprocessing.get_context("fork")  # its children have imported what this process has
    processes = [context.Process(target=note_all, args=(50,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    lines = file.read_text().splitlines()
    assert len(lines) == 4 * 50 * len(KERNELS)
    assert len(set(lines)) == len(KERNELS)
    assert set(record.read(file)) == set(KERNELS)


def test_a_kernel_that_is_looked_up_is_noted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes from, a bundle too: the next bundle should have it again."""
    monkeypatch.setattr(library.installed, "find", lambda facts, modules, arch: Path("kernel.so"))
    assert library.find_or_compile(KERNELS[0]) == Path("kernel.so")
    assert list(record.read(file)) == KERNELS[:1]


DAMAGED = {
    "cut off": lambda line: line[:-9],
    "a list": lambda line: "[]",
    "a number": lambda line: "3",
    "another class": lambda line: json.dumps({"job": {"class": "os:system", "fields": {}}, "modules": []}),
    "a class that is gone": lambda line: line.replace("PlanJob", "GoneJob"),
    "a field that is gone": lambda line: line.replace('"arch"', '"gone"'),
    "a module that is gone": lambda line: line.replace('"modules": []', '"modules": ["tileattn_gone"]'),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_one_error_with_its_number(file: Path, damage: object) -> None:
    assert callable(damage)
    record.note(KERNELS[0])
    line = file.read_text().strip()
    assert damage(line) != line
    file.write_text(f"{line}\n\n{damage(line)}\n")
    with pytest.raises(ValueError, match=r"kernels\.jsonl, line 3, is no record of a kernel") as error:
        list(record.read(file))
    assert "\n" not in str(error.value)
