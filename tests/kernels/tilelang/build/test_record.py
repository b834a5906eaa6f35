"""The kernels that an application asks for, in a file: noted by several processes, read once each."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

from tests import fresh_process
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


def test_threads_append_whole_lines(file: Path) -> None:
    threads = [threading.Thread(target=note_all, args=(20,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = file.read_text().splitlines()
    assert len(lines) == 4 * 20 * len(KERNELS)
    assert len(set(lines)) == len(KERNELS)


def test_a_program_that_changes_its_folder_writes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(record.VARIABLE, "relative.jsonl")
    record._absolute.cache_clear()
    record.note(KERNELS[0])
    os.chdir(tmp_path / "elsewhere")
    record.note(KERNELS[1])
    record._absolute.cache_clear()
    assert list(record.read(tmp_path / "relative.jsonl")) == KERNELS[:2]


@pytest.mark.parametrize("place", [".", "no-such-folder/kernels.jsonl", "file/kernels.jsonl"])
def test_a_file_that_cannot_be_written_is_one_warning(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no error: the application that is recorded goes on."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(record.VARIABLE, str(tmp_path / place))
    monkeypatch.setattr(record, "_warned", set())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        note_all(2)
    assert len(given) == 1
    assert f"kernels are missing in {tmp_path / place} (TILEATTN_RECORD), the first is {KERNELS[0]}" in str(
        given[0].message
    )


def test_a_kernel_that_has_no_form_is_one_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_warned", set())
    with pytest.warns(UserWarning, match="has no form in JSON") as given:
        record.note(PlanJob({"sm_90a"}))  # type: ignore[arg-type]
    assert len(given) == 1
    assert not file.exists()


OF_MAIN = """
import dataclasses, warnings, torch, tileattn
from tileattn.kernels.tilelang.build import record
from tileattn.kernels.tilelang.lists.library import BitsJob
from tileattn.variant.key import encode

@dataclasses.dataclass(frozen=True)
class EveryOther(tileattn.Mask):
    number: int
    def allows(self, b, h, q, k):
        return (q - k) % 2 == 0

with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    for mask in (EveryOther(3), EveryOther(3) & tileattn.Causal()):
        record.note(BitsJob(encode(mask, ())[0], "sm_90a"))
print(len(given), given[0].message)
record.note(BitsJob(encode(tileattn.Causal(), ())[0], "sm_90a"))
"""


def test_a_mask_of_the_main_script_is_one_warning_and_not_recorded(file: Path) -> None:
    """Its line could not be compiled: a bundle is made by another process, which has no such class."""
    output = fresh_process.run(OF_MAIN)
    assert output.startswith("1 tileattn: kernels are missing in")
    assert "EveryOther is defined in the main script: move it into a module that can be imported" in output
    assert [job.variant for job in record.read(file)] == ["Causal()"]  # type: ignore[attr-defined]


def test_a_kernel_that_is_looked_up_is_noted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes from, a bundle too: the next bundle should have it again."""
    monkeypatch.setattr(library.installed, "find", lambda facts, modules, arch: Path("kernel.so"))
    assert library.find_or_compile(KERNELS[0]) == Path("kernel.so")
    assert list(record.read(file)) == KERNELS[:1]


DAMAGED = {
    "cut off": lambda line: line[:-9],
    "a list": lambda line: "[]",
    "a number": lambda line: "3",
    "no kernel": lambda line: json.dumps({"job": 3, "modules": []}),
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
