"""The manifest of a bundle: written, read again, and every damage named by one error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tileattn.kernels.bundles.manifest import FILE, FORMAT, Entry, Manifest, ManifestError, checksum, identity, read

KEY = identity("sequence_plan | sm_90a")
MANIFEST = Manifest(
    distribution="tileattn-kernels-sm90a-cu13",
    arch="sm_90a",
    preset="default",
    versions={"tileattn": "0.1.0", "cuda": "13.0.88"},
    runtime={"libz.so": "1f", "liba.so": "2e"},
    kernels={KEY: Entry(sha256="aa", source="bb", generators="cc")},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    found = read(tmp_path)
    assert found == MANIFEST
    assert list(found.runtime) == ["libz.so", "liba.so"]  # the order in which they are loaded


def test_an_identity_is_of_the_facts_alone() -> None:
    assert re.fullmatch("[0-9a-f]{32}", KEY)
    assert identity("sequence_plan | sm_90a") == KEY != identity("sequence_plan | sm_80")


def test_a_checksum_is_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert checksum(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"{tmp_path / FILE} cannot be read")):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b"[" * 100_000, b"{}"])
def test_a_file_that_is_no_manifest_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ManifestError, match=re.escape(f"{tmp_path / FILE} is damaged")):
        read(tmp_path)


def test_every_truncated_file_is_one_error(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    text = (tmp_path / FILE).read_bytes().strip()
    for length in range(0, len(text), 7):
        (tmp_path / FILE).write_bytes(text[:length])
        with pytest.raises(ManifestError, match="is damaged"):
            read(tmp_path)


def damaged(folder: Path, change: Any) -> None:
    MANIFEST.write(folder)
    given = json.loads((folder / FILE).read_text())
    change(given)
    (folder / FILE).write_text(json.dumps(given))


CHANGES = {
    "a part is missing": lambda given: given.pop("arch"),
    "a part of a kernel is missing": lambda given: given["kernels"][KEY].pop("source"),
    "a part that no format has": lambda given: given.update(more=1),
    "kernels are a list": lambda given: given.update(kernels=[]),
    "a kernel is a text": lambda given: given["kernels"].update({KEY: "aa"}),
    "versions are a text": lambda given: given.update(versions="0.1.0"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_parts_are_damage(tmp_path: Path, change: Any) -> None:
    damaged(tmp_path, change)
    with pytest.raises(ManifestError, match="is damaged"):
        read(tmp_path)


VALUES = {
    "arch": lambda given: given.update(arch=90),
    "a version": lambda given: given["versions"].update(cuda=13.0),
    "a checksum": lambda given: given["kernels"][KEY].update(sha256=None),
    "a source": lambda given: given["kernels"][KEY].update(source=["bb"]),
    "the digest of a runtime library": lambda given: given["runtime"].update({"liba.so": 2}),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_values_are_text(tmp_path: Path, change: Any) -> None:
    damaged(tmp_path, change)
    with pytest.raises(ManifestError, match="it has values that are no text"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", "a/b", "a\\b", ".x"])
@pytest.mark.parametrize("part", ["runtime", "kernels"])
def test_names_outside_of_the_folder_are_refused(tmp_path: Path, part: str, name: str) -> None:
    def add(given: Any) -> None:
        given[part][name] = "aa" if part == "runtime" else given["kernels"][KEY]

    damaged(tmp_path, add)
    with pytest.raises(ManifestError, match="it names files outside of its folder"):
        read(tmp_path)


@pytest.mark.parametrize("other", [FORMAT + 1, 0, "1", None])
def test_another_format_is_named_whatever_else_it_holds(tmp_path: Path, other: Any) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": other, "unknown": 1}))
    expected = re.escape(f"its format is {other!r}, and this version of tileattn reads format {FORMAT}")
    with pytest.raises(ManifestError, match=expected):
        read(tmp_path)
