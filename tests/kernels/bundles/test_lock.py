"""The lock: a file of digests for each architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileattn.kernels.bundles import lock

FOUND = lock.Lock("0.1.15", {"ff": "01", "0a": "02"})


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "sm_90a.txt"
    lock.write(path, FOUND, "made by\na test")
    assert path.read_text() == "# made by\n# a test\ntilelang 0.1.15\n0a 02\nff 01\n"
    assert lock.read(path) == FOUND


def test_an_architecture_has_the_digests_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    lock.of.cache_clear()
    lock.write(lock.path_of("sm_90a"), FOUND, "")
    assert lock.of("sm_90a") == FOUND
    assert lock.of("sm_80") == (None, {})
    lock.of.cache_clear()
