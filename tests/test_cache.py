"""The kernel cache on disk: built once by whoever comes first, and never half a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tileattn.kernels.cache import KernelCache, default_folder

KEY = "forward | some call | some config"


class Builder:
    """Writes a library, and counts how often."""

    def __init__(self, content: bytes = b"library") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def never(path: Path) -> None:
    raise AssertionError("built again")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "deep" / "kernels")


def test_a_kernel_is_built_once(cache: KernelCache) -> None:
    assert cache.find(KEY) is None
    path = cache.find_or_build(KEY, Builder())
    assert path == cache.path(KEY) == cache.find(KEY)
    assert path.read_bytes() == b"library"
    assert cache.find_or_build(KEY, never) == path
    assert KernelCache(cache.folder).find_or_build(KEY, never) == path


def test_keys_do_not_share_a_file(cache: KernelCache) -> None:
    paths = {cache.find_or_build(f"key {i}", Builder(bytes([i]))) for i in range(10)}
    assert len(paths) == 10
    assert all(cache.path(f"key {i}").read_bytes() == bytes([i]) for i in range(10))


def truncate(library: Path, record: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


def empty(library: Path, record: Path) -> None:
    library.write_bytes(b"")


def foreign_library(library: Path, record: Path) -> None:
    library.write_bytes(b"foreign")


def no_library(library: Path, record: Path) -> None:
    library.unlink()


def no_record(library: Path, record: Path) -> None:
    record.unlink()


def record_of_another_key(library: Path, record: Path) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | {"key": "another"}))


def record_is(text: str) -> Callable[[Path, Path], None]:
    def damage(library: Path, record: Path) -> None:
        record.write_text(text)

    damage.__name__ = f"record_{text}"
    return damage


def binary_record(library: Path, record: Path) -> None:
    record.write_bytes(b"\xff\xfe\x00")


DAMAGES = [
    truncate, empty, foreign_library, no_library, no_record, record_of_another_key, binary_record,
    *map(record_is, ("", "{", "null", "[]", "3", '"text"', "{}", '{"key": 3, "sha256": null}')),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_damaged_or_foreign_is_built_again(cache: KernelCache, damage: Callable[[Path, Path], None]) -> None:
    path = cache.find_or_build(KEY, Builder())
    damage(path, path.with_suffix(".json"))
    assert cache.find(KEY) is None
    again = Builder()
    assert cache.find_or_build(KEY, again) == path
    assert again.calls == 1
    assert path.read_bytes() == b"library"
    cache.find_or_build(KEY, never)


def test_other_files_are_left_alone(cache: KernelCache) -> None:
    cache.folder.mkdir(parents=True)
    (cache.folder / "notes.txt").write_text("mine")
    (cache.folder / ".build-mine").mkdir()
    other = cache.find_or_build("another key", Builder(b"another"))
    before = {path: path.read_bytes() for path in cache.folder.iterdir() if path.is_file()}
    cache.find_or_build(KEY, Builder())
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (cache.folder / ".build-mine").is_dir()
    assert other.read_bytes() == b"another"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_build_leaves_nothing_and_may_be_repeated(cache: KernelCache, error: type[BaseException]) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half a lib")
        raise error("compiler")

    with pytest.raises(error, match="compiler"):
        cache.find_or_build(KEY, fails)
    assert cache.find(KEY) is None
    assert {path.suffix for path in cache.folder.iterdir()} <= {".lock"}
    assert cache.find_or_build(KEY, Builder()).read_bytes() == b"library"


def test_a_build_that_writes_nothing_is_an_error(cache: KernelCache) -> None:
    with pytest.raises(FileNotFoundError):
        cache.find_or_build(KEY, lambda path: None)
    assert cache.find(KEY) is None


# --- Folders that cannot be written ---


@pytest.mark.parametrize("below", [(), ("deeper",)], ids=["file", "below a file"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, below: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path.joinpath("file", *below)
    with pytest.raises(OSError, match=f"the kernel cache {folder} cannot be written .*set TILEATTN_CACHE_DIR"):
        KernelCache(folder).find_or_build(KEY, never)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(
        PermissionError, match=f"the kernel cache {tmp_path} cannot be written .*set TILEATTN_CACHE_DIR"
    ):
        KernelCache(tmp_path).find_or_build(KEY, never)


def test_permission_denied_by_the_system(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for tests that run as root."""

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PermissionError, match=f"{cache.folder} cannot be written .*denied.*set TILEATTN_CACHE_DIR"):
        cache.find_or_build(KEY, never)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_nobody_can_make() -> None:
    with pytest.raises(OSError, match="the kernel cache /proc/self/kernels cannot be written"):
        KernelCache(Path("/proc/self/kernels")).find_or_build(KEY, never)


def test_a_readable_cache_needs_no_writing(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled into an image, say, that is mounted read-only."""
    path = cache.find_or_build(KEY, Builder())
    monkeypatch.setattr(Path, "mkdir", never)
    assert cache.find_or_build(KEY, never) == path


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_directory_in_place_of_a_file(cache: KernelCache, suffix: str) -> None:
    in_the_way = cache.path(KEY).with_suffix(suffix)
    in_the_way.mkdir(parents=True)
    (in_the_way / "mine").write_text("kept")
    assert cache.find(KEY) is None
    with pytest.raises(OSError, match=f"the kernel cache {cache.folder} cannot be written .*set TILEATTN_CACHE_DIR"):
        cache.find_or_build(KEY, Builder())
    assert (in_the_way / "mine").read_text() == "kept"
    assert cache.find(KEY) is None


# --- Several processes ---

PROCESS = """
import sys, time, uuid
from pathlib import Path
from tileattn.kernels.cache import KernelCache
folder, builds = Path(sys.argv[1]), Path(sys.argv[2])
def build(path):
    path.write_bytes(b"half")
    (builds / uuid.uuid4().hex).touch()
    time.sleep(float(sys.argv[3]))
    path.write_bytes(b"library" * 1000)
(builds / ("ready-" + uuid.uuid4().hex)).touch()
while not (builds / "go").exists():
    time.sleep(0.005)
path = KernelCache(folder).find_or_build("key", build)
assert path.read_bytes() == b"library" * 1000
"""


def start(folder: Path, builds: Path, seconds: float) -> subprocess.Popen[bytes]:
    builds.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, "-c", PROCESS, str(folder), str(builds), str(seconds)])


def wait_for(builds: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(builds.glob(pattern))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


BUILD_MARK = "[0-9a-f]" * 32


def test_processes_that_need_one_kernel_build_it_once(tmp_path: Path) -> None:
    builds = tmp_path / "builds"
    processes = [start(tmp_path / "cache", builds, 0.5) for _ in range(4)]
    wait_for(builds, "ready-*", 4)
    (builds / "go").touch()
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert len(list(builds.glob(BUILD_MARK))) == 1


def test_a_killed_builder_leaves_no_half_library_and_no_lock(tmp_path: Path) -> None:
    builds, cache = tmp_path / "builds", KernelCache(tmp_path / "cache")
    process = start(cache.folder, builds, 60.0)
    (builds / "go").touch()
    wait_for(builds, BUILD_MARK, 1)
    process.kill()
    process.wait(timeout=60)
    assert cache.find("key") is None
    assert not cache.path("key").exists()
    began = time.monotonic()
    assert cache.find_or_build("key", Builder()).read_bytes() == b"library"
    assert time.monotonic() - began < 30  # the lock of a dead process is free


# --- Which folder ---


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"


@pytest.mark.parametrize("value", [None, ""])
def test_without_it_the_users_cache_is_taken(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("TILEATTN_CACHE_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("TILEATTN_CACHE_DIR", value)
    folder = default_folder()
    assert folder.is_absolute()
    assert "tileattn" in folder.parts
