"""The kernel cache on disk: concurrent processes build a kernel once, and no process reads a partial file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tileattn import folders
from tileattn.kernels.cache import trust
from tileattn.kernels.cache.store import KernelCache, default_folder

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


def test_whether_a_kernel_is_there_or_being_built(cache: KernelCache, tmp_path: Path) -> None:
    """The folder, too, is made by the first build alone."""
    own = KernelCache(tmp_path / "own")
    both = KernelCache(cache.folder, own=lambda: own.folder)

    def build(path: Path) -> None:
        assert cache.is_being_built("key")
        assert not cache.is_being_built("other")
        assert not cache.holds("key")
        path.write_bytes(b"library")

    assert not cache.is_being_built("key")
    assert not cache.holds("key")
    assert not cache.folder.exists()
    path = cache.find_or_build("key", build)
    assert cache.holds("key")
    assert not cache.is_being_built("key")
    path.write_bytes(b"")  # it is not looked into
    assert both.holds("key")
    assert not both.holds("other")


def test_a_read_only_cache_and_the_users_own_hold_kernels(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = KernelCache(tmp_path / "own", repairs=True)
    both = KernelCache(cache.folder, own=lambda: own.folder)
    cache.find_or_build("ours", lambda path: path.write_bytes(b"library") and None)
    monkeypatch.setattr(trust, "is_written_by", lambda folder: folder == own.folder)

    def build(path: Path) -> None:
        assert both.is_being_built("mine")
        path.write_bytes(b"library")

    both.find_or_build("mine", build)
    assert [(both.holds(key), own.holds(key)) for key in ("ours", "mine", "other")] == [
        (True, False), (True, True), (False, False),
    ]  # fmt: skip
    assert not both.is_being_built("mine")


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


def deep_record(library: Path, record: Path) -> None:
    record.write_text('{"key":' + "[" * 200_000)


def record_of_huge_numbers(library: Path, record: Path) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": 0})[:-2] + "9" * 10_000 + "}")


def large_record(library: Path, record: Path) -> None:
    with record.open("r+b") as file:
        file.truncate(2**40)  # sparse


def pipe_record(library: Path, record: Path) -> None:
    record.unlink()
    os.mkfifo(record)


def pipe_library(library: Path, record: Path) -> None:
    library.unlink()
    os.mkfifo(library)


def looping_library(library: Path, record: Path) -> None:
    library.unlink()
    library.symlink_to(library)


DAMAGES = [
    truncate, empty, foreign_library, record_of_another_key, binary_record,
    deep_record, record_of_huge_numbers, large_record, pipe_record, pipe_library, looping_library,
    *map(record_is, ("", "{", "null", "[]", "3", '"text"', "{}", '{"key": 3, "sha256": null}', "NaN", "1e999")),
]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_damaged_or_foreign_is_built_again(cache: KernelCache, damage: Callable[[Path, Path], None]) -> None:
    path = cache.find_or_build(KEY, Builder())
    damage(path, path.with_suffix(".json"))
    assert cache.find(KEY) is None
    again = Builder()
    with pytest.warns(UserWarning, match=f"the kernel {path} is compiled again: "):
        assert cache.find_or_build(KEY, again) == path
    assert again.calls == 1
    assert path.read_bytes() == b"library"
    cache.find_or_build(KEY, never)


@pytest.mark.parametrize("damage", [no_library, no_record], ids=lambda damage: damage.__name__)
def test_what_is_missing_is_built_without_a_word(
    cache: KernelCache, damage: Callable[[Path, Path], None], recwarn: pytest.WarningsRecorder
) -> None:
    path = cache.find_or_build(KEY, Builder())
    damage(path, path.with_suffix(".json"))
    assert cache.find(KEY) is None
    again = Builder()
    assert cache.find_or_build(KEY, again) == path
    assert not recwarn.list
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
    """The same as the test above, for tests that run as root."""

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PermissionError, match=f"{cache.folder} cannot be written .*denied.*set TILEATTN_CACHE_DIR"):
        cache.find_or_build(KEY, never)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_cannot_be_made() -> None:
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
    warned = pytest.warns(UserWarning, match="is no record") if suffix == ".json" else contextlib.nullcontext()
    with warned, pytest.raises(OSError, match=f"cache {cache.folder} cannot be written .*set TILEATTN_CACHE_DIR"):
        cache.find_or_build(KEY, Builder())
    assert (in_the_way / "mine").read_text() == "kept"
    assert cache.find(KEY) is None


# --- Full disks ---


def full_in_python(path: Path) -> None:
    path.write_bytes(b"half a lib")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/kernel.cu")


def quota(path: Path) -> None:
    raise OSError(errno.EDQUOT, "Plattenplatzbegrenzung überschritten", str(path))  # in the system's language


def full_in_a_compiler(path: Path) -> None:
    path.write_bytes(b"half a lib")
    raise RuntimeError("nvcc ended with exit status 1:\nfatal: /tmp/x.ptx: No space left on device")


def full_for_real(path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"library")


@pytest.mark.parametrize("build", [full_in_python, quota, full_in_a_compiler, full_for_real])
def test_a_full_disk_while_a_kernel_is_compiled(cache: KernelCache, build: Callable[[Path], None]) -> None:
    if build is full_for_real and not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    with pytest.raises(OSError, match=r"no space is left to compile a kernel: \d+\.\d MiB are needed in ") as raised:
        cache.find_or_build(KEY, build)
    said = str(raised.value)
    assert raised.value.errno == errno.ENOSPC
    assert all(each in said for each in (str(cache.folder), tempfile.gettempdir(), "TILEATTN_CACHE_DIR", "TMPDIR"))
    assert {path.suffix for path in cache.folder.iterdir()} <= {".lock"}
    assert cache.find_or_build(KEY, Builder()).read_bytes() == b"library"


@pytest.mark.parametrize("step", ["mkdir", "write_text"])
def test_a_full_disk_while_the_folder_is_written(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, step, full)
    with pytest.raises(OSError, match=f"no space is left to compile .* needed in {cache.folder}, .*TILEATTN_CACHE_DIR"):
        cache.find_or_build(KEY, Builder())
    monkeypatch.undo()
    assert cache.find(KEY) is None
    assert cache.find_or_build(KEY, Builder()).read_bytes() == b"library"


def test_other_errors_of_a_build_stay_as_they_are(cache: KernelCache) -> None:
    def fails(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", "g++")

    with pytest.raises(FileNotFoundError, match="g\\+\\+") as raised:
        cache.find_or_build(KEY, fails)
    assert "TILEATTN_CACHE_DIR" not in str(raised.value)


# --- Several processes ---

PROCESS = """
import sys, time, uuid
from pathlib import Path
from tileattn.kernels.cache.store import KernelCache
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
    processes = [start(tmp_path / "cache", builds, 0.5) for _ in range(2)]
    wait_for(builds, "ready-*", 2)
    (builds / "go").touch()
    assert [process.wait(timeout=60) for process in processes] == [0] * 2
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
    assert not list(cache.folder.glob(".build-*"))


def left_over(cache: KernelCache, name: str, days: float = 0.0) -> Path:
    """A folder of a build that was killed."""
    folder = cache.folder / name
    folder.mkdir(parents=True)
    (folder / "library.so").write_bytes(b"half")
    then = time.time() - days * 24 * 3600
    os.utime(folder, (then, then))
    return folder


def test_what_killed_builds_have_left_is_removed(cache: KernelCache) -> None:
    mine, other = cache.path(KEY).stem, cache.path("another key").stem
    gone = [
        left_over(cache, f".build-{mine}-abcd_123"),  # of this key, whose lock is held
        left_over(cache, f".build-{other}-abcd_123", days=1.1),
        left_over(cache, ".build-abcd_123", days=1.1),  # of an older version
    ]
    kept = [
        left_over(cache, f".build-{other}-abcd_124", days=0.9),  # somebody may be building it
        left_over(cache, ".build-abcd_124"),
        left_over(cache, ".build-notes", days=9.0),
        left_over(cache, "build-abcd_123", days=9.0),
    ]
    cache.find_or_build(KEY, Builder())
    assert [folder.exists() for folder in gone] == [False] * len(gone)
    assert [folder.exists() for folder in kept] == [True] * len(kept)


def test_a_link_in_place_of_a_left_over_folder_is_not_followed(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    cache.folder.mkdir(parents=True)
    (cache.folder / f".build-{cache.path(KEY).stem}-abcd_123").symlink_to(tmp_path / "mine")
    cache.find_or_build(KEY, Builder())
    assert (tmp_path / "mine" / "notes").read_text() == "kept"


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


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "~/x")
    assert default_folder() == tmp_path / "x"
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "~nobody-has-this-name/x")
    with pytest.raises(FileNotFoundError, match=r"TILEATTN_CACHE_DIR='~nobody-has-this-name/x' begins with a home"):
        default_folder()


def no_home(*names: str) -> Path:
    raise RuntimeError("Could not determine home directory.")


def literal_home(*names: str) -> Path:
    return Path("~", ".cache", *names)


@pytest.mark.parametrize("stand_in", [None, no_home, literal_home])
def test_without_a_home_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., Path] | None
) -> None:
    """What `~` is is not known, neither by HOME nor by the password database; versions of platformdirs differ."""
    for variable in ("TILEATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    if stand_in is not None:
        monkeypatch.setattr(folders.platformdirs, "user_cache_path", stand_in)
    with pytest.raises(FileNotFoundError, match=r"has no home directory, .* Set TILEATTN_CACHE_DIR \(or HOME\)"):
        default_folder()
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "/somewhere")
    assert default_folder() == Path("/somewhere")
