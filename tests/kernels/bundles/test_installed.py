"""Installed bundles: which kernel is taken, and what is said of one that is not."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import fresh_process
from tests.tools import bundles as made_up
from tests.tools.bundles import ARCH, NAME, SOURCE, entry_of, forget, install, on_path, register
from tileattn.call.facts import AttentionCall
from tileattn.installation import version
from tileattn.kernels.bundles import installed, lock
from tileattn.kernels.bundles.manifest import FILE, FORMAT, RUNTIME, identity
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.build.library import find_or_compile, generators
from tileattn.kernels.tilelang.packed.library import PlanJob
from tileattn.runtime import dispatch

PLAN, SHARES = PlanJob(ARCH), SharesJob(torch.bfloat16, ARCH)
CURRENT = entry_of(PLAN)
OLDER = replace(CURRENT, generators="f" * 32)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path):
        yield tmp_path


def found(job: KernelJob = PLAN, arch: str = ARCH) -> Path | None:
    return installed.find(job.name.facts, generators(job.name.module), arch)


@contextmanager
def one_warning() -> Iterator[list[str]]:
    """Its text, as the one element of the list; exactly one is given."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in given]
    assert len(texts) == 1, texts


def library(folder: Path, job: KernelJob = PLAN) -> Path:
    return folder / "kernels" / f"{identity(job.name.facts)}.so"


def locked(job: KernelJob, source: str, tilelang: str = made_up.TILELANG) -> None:
    """Writes a lock with one kernel."""
    lock.write(lock.path_of(ARCH), lock.Lock(tilelang, {identity(job.name.facts): source}), "")


# --- What is taken ---


@pytest.mark.filterwarnings("error")
def test_a_kernel_is_found_and_its_bundle_is_not_imported(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT}, imports="raise AssertionError('imported')")
    assert found() == library(folder)
    assert found(SHARES) is None
    assert folder.name not in sys.modules
    assert find_or_compile(PLAN) == library(folder)


@pytest.mark.filterwarnings("error")
def test_a_bundle_of_another_architecture_has_nothing_for_this_one(site: Path) -> None:
    install(site, {PLAN: CURRENT}, name="tileattn-kernels-sm80-cu13", arch="sm_80")
    assert found() is None
    assert installed.of_architecture(ARCH) == ()
    assert [each.manifest.arch for each in installed.of_architecture("sm_80")] == ["sm_80"]


@pytest.mark.filterwarnings("error")
def test_the_lock_decides_before_the_generating_files_do(site: Path) -> None:
    """As after an edit of a comment: the files differ, and the source that they generate does not."""
    folder = install(site, {PLAN: OLDER})
    locked(PLAN, SOURCE)
    assert found() == library(folder)


def test_another_digest_in_the_lock_refuses_equal_generating_files(site: Path) -> None:
    install(site, {PLAN: CURRENT})
    locked(PLAN, "1" * 32)
    with one_warning():
        assert found() is None


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_the_lock_lacks_is_judged_by_its_generating_files(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    locked(SHARES, "1" * 32)
    assert found() == library(folder)


# --- What is not ---


def test_another_version_is_one_warning_that_names_both(site: Path) -> None:
    folder = install(site, {PLAN: OLDER, SHARES: replace(entry_of(SHARES), generators="e" * 32)})
    with one_warning() as texts:
        assert found() is None
        assert found() is None
        assert found(SHARES) is None
    text = texts[0]
    assert f"{NAME} in {folder} was made by tileattn 0.0.1." in text
    assert f"This is tileattn {version()}," in text
    assert f"pip install --upgrade {NAME}" in text


def test_kernels_that_are_generated_the_same_are_taken_from_another_version(site: Path) -> None:
    folder = install(site, {PLAN: OLDER, SHARES: entry_of(SHARES)})
    with one_warning():
        assert found() is None
        assert found(SHARES) == library(folder, SHARES)


def test_a_damaged_library_is_one_warning(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    library(folder).write_bytes(made_up.LIBRARY[:-1])
    with one_warning() as texts:
        assert found() is None
        assert found() is None
    assert f"{library(folder)} is not loaded: its checksum is not the one in the manifest" in texts[0]
    assert f"pip install --force-reinstall {NAME}" in texts[0]


def test_a_missing_library_is_one_warning(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    library(folder).unlink()
    with one_warning() as texts:
        assert found() is None
    assert f"{library(folder)} is not loaded: it cannot be read" in texts[0]


@pytest.mark.parametrize("damage", ["library", "version"])
def test_the_next_bundle_has_it(site: Path, damage: str) -> None:
    """Whatever the order of the entry points: the other one is always damaged."""
    install(site, {PLAN: CURRENT}, name="tileattn-kernels-a")
    install(site, {PLAN: CURRENT}, name="tileattn-kernels-b")
    first, second = (each.folder for each in installed.bundles())
    if damage == "library":
        library(first).write_bytes(b"")
    else:
        text = (first / FILE).read_text()
        (first / FILE).write_text(text.replace(CURRENT.generators, OLDER.generators))
    forget()
    with one_warning():
        assert found() == library(second)


def test_a_damaged_library_is_compiled_instead(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tileattn.kernels.tilelang.build import library as build

    folder = install(site, {PLAN: CURRENT})
    library(folder).write_bytes(b"")
    asked = []

    class Cache:
        def find_or_build(self, key: str, build: object, noted: object) -> Path:
            asked.append(key)
            return Path("compiled.so")

    monkeypatch.setattr(build, "kernel_cache", Cache)
    monkeypatch.setattr(build, "tilelang_libraries", lambda: site)
    with one_warning():
        assert find_or_compile(PLAN) == Path("compiled.so")
    assert asked == [PLAN.key]


def test_a_newer_format_is_not_used(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    (folder / FILE).write_text(json.dumps({"format": FORMAT + 1, "else": 0}))
    with one_warning() as texts:
        assert found() is None
        assert found(SHARES) is None
    module = folder.name
    assert f"the bundle of kernels {module} ({module}) is not used: its format is {FORMAT + 1}" in texts[0]


def test_a_bundle_without_its_package_is_not_used(site: Path) -> None:
    good = install(site, {PLAN: CURRENT})
    register(site, "tileattn-kernels-gone", "tileattn_kernels_gone")
    with one_warning() as texts:
        assert found() == library(good)
    assert "tileattn_kernels_gone (tileattn_kernels_gone) is not used: its package is not found" in texts[0]


def test_a_runtime_that_is_damaged_is_not_loaded(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    assert installed.runtime() is installed.bundles()[0]
    (folder / RUNTIME / "libtvm_runtime.so").write_bytes(b"else")
    forget()
    with one_warning() as texts:
        assert installed.runtime() is None
    assert "libtvm_runtime.so is not loaded: its checksum" in texts[0]


# --- Another TileLang, another toolkit ---

OTHER_TILELANG = {**made_up.VERSIONS, "tilelang": "0.0.9"}


@pytest.mark.parametrize("in_lock", [False, True])
def test_a_kernel_of_another_tilelang_than_the_installed_one_is_not_taken(
    site: Path, in_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its headers are compiled with the source, and no digest covers them."""
    monkeypatch.setattr(installed, "_tilelang", lambda: "0.1.16")
    folder = install(site, {PLAN: CURRENT, SHARES: entry_of(SHARES)}, versions=OTHER_TILELANG)
    if in_lock:
        locked(PLAN, SOURCE, "0.0.9")
    with one_warning() as texts:
        assert found() is None
        assert found(SHARES) is None
    assert f"{NAME} in {folder} was compiled by TileLang 0.0.9, and TileLang 0.1.16 is needed here" in texts[0]


def test_without_tilelang_the_version_in_the_lock_decides(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_tilelang", lambda: None)
    folder = install(site, {PLAN: CURRENT, SHARES: entry_of(SHARES)}, versions=OTHER_TILELANG)
    locked(PLAN, SOURCE, "0.1.15")
    with one_warning() as texts:
        assert found() is None
    assert "was compiled by TileLang 0.0.9, and TileLang 0.1.15 is needed here" in texts[0]
    assert found(SHARES) == library(folder, SHARES)  # the lock lacks it
    locked(PLAN, SOURCE, "0.0.9")
    lock.of.cache_clear()
    assert found() == library(folder)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("cuda", "first"), [("12.8", "cu12"), ("13.0", "cu13")])
def test_of_two_bundles_the_one_of_pytorchs_toolkit_is_first(
    site: Path, cuda: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for major in ("12", "13"):
        versions = {**made_up.VERSIONS, "cuda": f"{major}.0.1"}
        install(site, {PLAN: CURRENT}, name=f"tileattn-kernels-sm90a-cu{major}", versions=versions)
    taken = found()
    assert taken is not None
    assert taken.parent.parent.name.endswith(first)


# --- Other packages that are damaged ---

DAMAGED_POINTS = {"no value": b"[group]\nname\n", "no text": b"\xff\xfe[group]\nname = module\n"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("content", DAMAGED_POINTS.values(), ids=DAMAGED_POINTS)
def test_damaged_metadata_of_another_package_does_not_matter(site: Path, content: bytes) -> None:
    folder = install(site, {PLAN: CURRENT})
    info = site / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(content)
    with pytest.raises(Exception, match=r".+"):  # so it is damaged
        importlib.metadata.entry_points(group=installed.GROUP)
    assert found() == library(folder)


def test_a_hook_of_imports_that_raises_is_one_warning(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, {PLAN: CURRENT})

    class Hook:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("tileattn_kernels"):
                raise RuntimeError("no such thing")

    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    with one_warning() as texts:
        assert found() is None
    assert "is not used: its package is not found (RuntimeError: no such thing)" in texts[0]


@pytest.mark.parametrize("value", ["os.path", "tileattn_kernels:name", "!"])
def test_what_names_no_package_of_the_top_level_is_one_warning(site: Path, value: str) -> None:
    """To find a package inside of another one would import that one."""
    register(site, "tileattn-kernels-odd", "tileattn_kernels_odd")
    points = site / "tileattn_kernels_odd-0.0.1.dist-info" / "entry_points.txt"
    points.write_text(f"[{installed.GROUP}]\nodd = {value}\n")
    with one_warning() as texts:
        assert found() is None
    assert f"the bundle of kernels odd ({value}) is not used: it names no package of the top level" in texts[0]


# --- Without TileLang ---


@pytest.fixture
def without_tilelang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "tilelang", None)  # type: ignore[arg-type] # None: it is not found
    dispatch._select.cache_clear()
    yield
    dispatch._select.cache_clear()


CALL = AttentionCall(torch.bfloat16, 64, 64, arch=ARCH)


@pytest.mark.usefixtures("without_tilelang", "site")
def test_without_a_bundle_the_backend_refuses() -> None:
    with pytest.raises(NotImplementedError) as error:
        dispatch.select(CALL, "tilelang")
    text = str(error.value)
    assert "tilelang: tilelang is not installed (pip install" in text
    assert "[compile]" in text
    assert f"nor is a bundle of kernels for {ARCH}" in text


@pytest.mark.usefixtures("without_tilelang")
def test_with_a_bundle_the_backend_accepts(site: Path) -> None:
    install(site, {PLAN: CURRENT})
    assert dispatch.select(CALL, "tilelang").name == "tilelang"
    with pytest.raises(NotImplementedError, match="nor is a bundle of kernels for sm_80"):
        dispatch.select(replace(CALL, arch="sm_80"), "tilelang")


@pytest.mark.usefixtures("without_tilelang")
def test_a_kernel_that_no_bundle_has_is_one_error(site: Path) -> None:
    folder = install(site, {PLAN: CURRENT})
    assert find_or_compile(PLAN) == library(folder)
    with pytest.raises(RuntimeError) as error:
        find_or_compile(SHARES)
    text = str(error.value)
    for part in (str(SHARES), f"{NAME} in {folder}", "[compile]", "tileattn record", 'backend="torch"'):
        assert part in text


# --- In a new process ---

IMPORTED = """
import importlib.metadata, sys
sys.path.insert(0, {site!r})
asked = []
of_library = importlib.metadata.entry_points
def entry_points(*args, **kwargs):
    asked.append(kwargs.get("group"))
    return of_library(*args, **kwargs)
importlib.metadata.entry_points = entry_points
import tileattn
import tileattn.kernels.tilelang.backend
print(asked.count({group!r}))
from tileattn.kernels.bundles import lock
lock.FOLDER = lock.FOLDER / "none"  # the package's lock has other digests than a made-up bundle
from tileattn.kernels.tilelang.build.library import find_or_compile
from tileattn.kernels.tilelang.packed.library import PlanJob
print(find_or_compile(PlanJob({arch!r})), find_or_compile(PlanJob({arch!r})))
print(asked.count({group!r}), {module!r} in sys.modules, "tilelang" in sys.modules)
"""


def test_entry_points_are_read_once_and_at_the_first_kernel(tmp_path: Path) -> None:
    folder = install(tmp_path, {PLAN: CURRENT})
    code = IMPORTED.format(site=str(tmp_path), group=installed.GROUP, arch=ARCH, module=folder.name)
    path = library(folder)
    assert fresh_process.run(code).splitlines() == ["0", f"{path} {path}", "1 False False"]
