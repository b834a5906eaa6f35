"""The kernel cache loads no file that another user could have written, and works with read-only folders."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tileattn.kernels.cache import store as cache_module
from tileattn.kernels.cache import trust
from tileattn.kernels.cache.store import KernelCache, default_folder, kernel_cache

KEY, OTHER = "forward | some call", "forward | another call"
NOBODY, SOMEBODY = 65534, 54321  # users without rights; the second has no entry in the password database

pytestmark = pytest.mark.skipif(not trust.HAS_OWNERS, reason="Windows has neither owners nor modes")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be other users")


def library(path: Path) -> None:
    path.write_bytes(b"library")


def never(path: Path) -> None:
    raise AssertionError("built again")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    """No umask: files get all rights that they are created with."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """One that holds a kernel."""
    filled = KernelCache(tmp_path / "kernels")
    filled.find_or_build(KEY, library)
    return filled


def files(cache: KernelCache) -> tuple[Path, Path]:
    return cache.path(KEY), cache.path(KEY).with_suffix(".json")


# --- What is made ---


@pytest.mark.usefixtures("umask")
def test_folders_are_private_under_any_umask(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "a" / "b" / "kernels")
    cache.find_or_build(KEY, library)
    assert [mode(cache.folder), mode(cache.folder.parent), mode(tmp_path / "a")] == [0o700] * 3
    assert not any(mode(path) & 0o022 for path in files(cache))
    assert cache.find(KEY) is not None


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    """One that root makes for others, say."""
    tmp_path.chmod(0o755)
    KernelCache(tmp_path).find_or_build(KEY, library)
    assert mode(tmp_path) == 0o755


# --- What is refused ---


@pytest.mark.parametrize("bits", [0o775, 0o757, 0o777, 0o1777, 0o2770])
def test_a_folder_that_others_write_is_refused(cache: KernelCache, bits: int) -> None:
    cache.folder.chmod(bits)
    for use in (cache.find, lambda key: cache.find_or_build(key, never)):
        for key in (KEY, OTHER):
            with pytest.raises(
                PermissionError, match=f"{cache.folder} can be written by other users .*its mode is"
            ) as e:
                use(key)
            assert f"chmod go-w {cache.folder}" in str(e.value)
            assert "set TILEATTN_CACHE_DIR to a folder of your own" in str(e.value)
    assert mode(cache.folder) == bits


@pytest.mark.parametrize("bits", [0o775, 0o777, 0o720])
def test_the_users_own_folder_is_repaired(cache: KernelCache, bits: int) -> None:
    """As older versions made it under a permissive umask."""
    cache.folder.chmod(bits)
    assert KernelCache(cache.folder, repairs=True).find_or_build(KEY, never) == cache.path(KEY)
    assert mode(cache.folder) == 0o700


@pytest.mark.parametrize("bits", [0o755, 0o700, 0o750, 0o555])
def test_a_folder_that_others_only_read_is_loaded_from(cache: KernelCache, bits: int) -> None:
    cache.folder.chmod(bits)
    assert cache.find_or_build(KEY, never) == cache.path(KEY)
    assert mode(cache.folder) == bits


@pytest.mark.parametrize("which", [0, 1], ids=["library", "record"])
@pytest.mark.parametrize("repairs", [False, True])
def test_a_file_that_others_write_is_refused(cache: KernelCache, which: int, repairs: bool) -> None:
    """Also in the user's own folder, where another user may have written the file."""
    file = files(cache)[which]
    file.chmod(0o664)
    with pytest.raises(PermissionError, match=f"{file} can be written by other users .*mode is 664.*Remove it"):
        KernelCache(cache.folder, repairs=repairs).find_or_build(KEY, never)
    file.unlink()
    cache.find_or_build(KEY, library)


def owned(monkeypatch: pytest.MonkeyPatch, path: Path, user: int) -> None:
    """Makes a path look as if it belonged to this user."""
    real, place = Path.stat, os.path.realpath(path)

    def stat(self: Path, **options: bool) -> os.stat_result | SimpleNamespace:
        facts = real(self, **options)
        if os.path.realpath(self) != place:
            return facts
        return SimpleNamespace(st_uid=user, st_mode=facts.st_mode, st_size=facts.st_size)

    monkeypatch.setattr(Path, "stat", stat)


@pytest.mark.parametrize("place", ["folder", "library", "record"])
def test_what_belongs_to_another_user_is_refused(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = {"folder": cache.folder, "library": files(cache)[0], "record": files(cache)[1]}[place]
    owned(monkeypatch, path, SOMEBODY)
    with pytest.raises(PermissionError, match=f"{path} belongs to user {SOMEBODY}, and this is .*root own it"):
        KernelCache(cache.folder, repairs=True).find_or_build(KEY, never)


def test_what_belongs_to_root_is_loaded(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may load it."""
    for path in (cache.folder, *files(cache)):
        owned(monkeypatch, path, 0)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert cache.find(KEY) == cache.path(KEY)


def test_links_are_judged_by_what_they_lead_to(cache: KernelCache, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache.folder)
    linked = KernelCache(tmp_path / "link")
    assert linked.find(KEY) is not None
    cache.folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{cache.folder} can be written by other users"):
        linked.find(KEY)


def test_a_linked_library_is_judged_with_its_folder(cache: KernelCache, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path = files(cache)[0]
    path.rename(elsewhere / "library.so")
    path.symlink_to(elsewhere / "library.so")
    assert cache.find(KEY) is not None
    elsewhere.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{elsewhere} can be written by other users"):
        cache.find(KEY)


def test_without_owners_nothing_is_checked(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no owners."""
    cache.folder.chmod(0o777)
    monkeypatch.setattr(trust, "HAS_OWNERS", False)
    assert cache.find_or_build(KEY, never) == cache.path(KEY)
    cache.find_or_build(OTHER, library)


# --- Read-only caches, in processes of another user ---


def run_as(user: int, work: Callable[[], object]) -> str:
    """What a function raises in a process of another user, "" for nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCache]:
    """A cache that root has made and others may read, with $TILEATTN_CACHE_DIR, and a home for NOBODY."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tileattn-trust-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o755)
        (base / "kernels").mkdir(mode=0o755)
        (base / "home").mkdir(mode=0o700)
        os.chown(base / "home", NOBODY, NOBODY)
        monkeypatch.setenv("TILEATTN_CACHE_DIR", str(base / "kernels"))
        monkeypatch.setenv("HOME", str(base / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        made = kernel_cache()
        made.find_or_build(KEY, library)
        yield made


def listing(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_mtime_ns) for path in (folder, *folder.iterdir())}


@as_root
def test_what_root_has_built_is_loaded_and_nothing_is_written(shared: KernelCache) -> None:
    before = listing(shared.folder)

    def work() -> None:
        assert kernel_cache().find_or_build(KEY, never) == shared.path(KEY)
        assert kernel_cache().find(KEY) == shared.path(KEY)

    assert run_as(NOBODY, work) == ""
    assert listing(shared.folder) == before
    assert not list((shared.folder.parent / "home").iterdir())


@as_root
def test_what_is_missing_is_built_in_the_users_own_folder(shared: KernelCache) -> None:
    before, home = listing(shared.folder), shared.folder.parent / "home"

    def work() -> None:
        os.umask(0)
        assert kernel_cache().find(OTHER) is None
        built = kernel_cache().find_or_build(OTHER, library)
        assert home in built.parents
        assert mode(built.parent) == 0o700
        assert kernel_cache().find_or_build(OTHER, never) == built == kernel_cache().find(OTHER)
        assert kernel_cache().find_or_build(KEY, never) == shared.path(KEY)

    assert run_as(NOBODY, work) == ""
    assert listing(shared.folder) == before


@as_root
def test_a_damaged_library_of_a_read_only_cache_is_built_in_the_users_own(shared: KernelCache) -> None:
    shared.path(KEY).write_bytes(b"foreign")
    before = listing(shared.folder)

    def work() -> None:
        assert shared.folder not in kernel_cache().find_or_build(KEY, library).parents

    assert run_as(NOBODY, work) == ""
    assert listing(shared.folder) == before


@as_root
def test_a_user_without_a_home_loads_and_is_told_where_to_build(
    shared: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    assert run_as(SOMEBODY, lambda: kernel_cache().find_or_build(KEY, never)) == ""
    said = run_as(SOMEBODY, lambda: kernel_cache().find_or_build(OTHER, never))
    assert said.startswith(f"FileNotFoundError: user {SOMEBODY} has no home directory")
    assert "Set TILEATTN_CACHE_DIR (or HOME)" in said


@as_root
def test_a_cache_that_cannot_be_read_is_an_error(shared: KernelCache) -> None:
    """Without the error, every user would silently compile all kernels."""
    shared.folder.chmod(0o700)
    said = run_as(NOBODY, lambda: kernel_cache().find_or_build(KEY, never))
    assert said.startswith("PermissionError: ")
    assert f"the kernel cache {shared.folder} cannot be read" in said
    assert "chmod -R a+rX" in said


@as_root
def test_another_users_cache_is_refused_by_root_and_by_others(shared: KernelCache) -> None:
    os.chown(shared.folder, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"{shared.folder} belongs to .*{NOBODY}.*, and this is root"):
        kernel_cache().find(KEY)
    assert "belongs to" in run_as(SOMEBODY, lambda: kernel_cache().find(KEY))
    assert run_as(NOBODY, lambda: kernel_cache().find_or_build(KEY, never)) == ""


@as_root
def test_a_folder_of_root_that_others_write_is_refused(shared: KernelCache) -> None:
    shared.folder.chmod(0o1777)
    assert "can be written by other users" in run_as(NOBODY, lambda: kernel_cache().find(KEY))
    assert "can be written by other users" in run_as(NOBODY, lambda: kernel_cache().find_or_build(OTHER, never))


def test_a_read_only_cache_without_root(cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as above on any machine: the system says that the folder cannot be written."""
    monkeypatch.setattr(trust, "is_written_by", lambda path: path != cache.folder)
    before = listing(cache.folder)
    read_only = KernelCache(cache.folder, own=lambda: tmp_path / "own")
    assert read_only.find_or_build(KEY, never) == cache.path(KEY)
    assert not (tmp_path / "own").exists()
    assert read_only.find(OTHER) is None
    built = read_only.find_or_build(OTHER, library)
    assert built.parent == tmp_path / "own"
    assert read_only.find(OTHER) == built
    assert listing(cache.folder) == before


def test_a_folder_that_is_not_there_yet_is_made_not_gone_around(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels", own=lambda: tmp_path / "own")
    assert cache.find_or_build(KEY, library).parent == tmp_path / "kernels"


def test_the_named_folder_comes_first_and_is_not_repaired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    assert (kernel_cache().folder, kernel_cache().repairs) == (tmp_path, False)
    assert kernel_cache().own is cache_module.user_folder
    monkeypatch.delenv("TILEATTN_CACHE_DIR")
    assert (kernel_cache().folder, kernel_cache().repairs) == (default_folder(), True)
    assert kernel_cache(".cubin").suffix == ".cubin"


def test_nothing_is_said_of_what_is_as_it_should_be(cache: KernelCache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.find_or_build(KEY, never)
        cache.find_or_build(OTHER, library)
