"""Compilers and headers: the ones that TileLang would take."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tileattn.kernels.tilelang.build import toolkit


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without compilers, and an environment that names none."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "CC", "TL_TEMPLATE_PATH", "TL_CUTLASS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(toolkit, "USUAL", ())

    def none(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", none)
    return monkeypatch


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_without_nvcc_it_says_what_to_install(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolkit.cuda_home() is None
    with pytest.raises(RuntimeError, match=r"there is no nvcc, not where TileLang looks for it: .* tileattn\[cuda\]"):
        toolkit.nvcc()
    nothing.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"there is no nvcc, not {tmp_path}/bin/nvcc: install a CUDA toolkit"):
        toolkit.nvcc()
    nothing.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert toolkit.cuda_home() is None


def test_the_environment_names_the_toolkit_first(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named, other = make(tmp_path / "named/bin/nvcc"), make(tmp_path / "other/bin/nvcc")
    make(tmp_path / "other/include/cuda_runtime.h")
    nothing.setattr(shutil, "which", lambda name: str(other))
    assert toolkit.nvcc() == str(other)
    nothing.setenv("CUDA_PATH", str(tmp_path / "named"))
    assert toolkit.nvcc() == str(named)
    nothing.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert toolkit.nvcc() == str(other)


@pytest.mark.parametrize("has_headers", [False, True])
def test_a_link_to_nvcc_leads_to_its_toolkit(has_headers: bool, nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, link = make(tmp_path / "toolkit/bin/nvcc"), tmp_path / "usr/bin/nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    if has_headers:
        make(tmp_path / "usr/include/cuda_runtime.h")
    nothing.setattr(shutil, "which", lambda name: str(link))
    assert toolkit.cuda_home() == tmp_path / ("usr" if has_headers else "toolkit")


def test_path_may_have_relative_folders(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make(tmp_path / "bin/nvcc")
    nothing.chdir(tmp_path / "bin")
    for found in ("nvcc", "./nvcc"):
        nothing.setattr(shutil, "which", lambda name, found=found: found)
        assert toolkit.nvcc() == str(tmp_path / "bin/nvcc")


def test_nvidias_hpc_sdk_has_its_compilers_further_down(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first folder is what TileLang takes, too; the toolkit in it is laid out as usual."""
    nvcc = make(tmp_path / "hpc_sdk/25.7/compilers/bin/nvcc")
    nothing.setattr(shutil, "which", lambda name: str(nvcc))
    assert toolkit.cuda_home() == tmp_path / "hpc_sdk/25.7"


def test_the_toolkit_of_pip(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = make(tmp_path / "nvidia/cu13/bin/nvcc")
    file = SimpleNamespace(name="nvcc", locate=lambda: nvcc)
    nothing.setattr(importlib.metadata, "files", lambda name: [SimpleNamespace(name="ptxas"), file])
    assert toolkit.nvcc() == str(nvcc)


def test_the_usual_folder_comes_last(nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = make(tmp_path / "cuda/bin/nvcc")
    nothing.setattr(toolkit, "USUAL", (tmp_path / "none", tmp_path / "cuda"))
    assert toolkit.nvcc() == str(nvcc)


def test_the_host_compiler(nothing: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"no host compiler \(g\+\+, clang\+\+, c\+\+\): install g\+\+, or set CXX"):
        toolkit.host_compiler()
    nothing.setattr(shutil, "which", {"clang++": "/bin/clang++", "c++": "/bin/c++"}.get)
    assert toolkit.host_compiler() == "/bin/clang++"
    nothing.setenv("CC", "gcc-14")
    nothing.setenv("CXX", "g++-14")
    assert toolkit.host_compiler() == "g++-14"


def test_headers_may_be_named(nothing: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    assert all(folder.is_dir() for folder in (*toolkit.headers_of_kernels(), *toolkit.headers_of_hosts()))
    nothing.setenv("TL_TEMPLATE_PATH", "/templates")
    nothing.setenv("TL_CUTLASS_PATH", "/cutlass")
    assert toolkit.headers_of_kernels() == [Path("/templates"), Path("/cutlass")]


AS_TILELANG = """
import os
from tileattn.kernels.tilelang.build import toolkit
found = [*toolkit.headers_of_kernels(), *toolkit.headers_of_hosts(), toolkit.cuda_home(), toolkit.host_compiler()]
import tilelang
from tvm.libinfo import find_include_path
from tilelang.contrib.cc import get_cplus_compiler
from tilelang.env import CUDA_HOME, CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
headers = find_include_path()[:2]
tilelangs = [TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, *headers, CUDA_HOME or None, get_cplus_compiler()]
assert [each and os.path.realpath(each) for each in found] == [each and os.path.realpath(each) for each in tilelangs]
"""


def test_it_finds_what_tilelang_finds() -> None:
    pytest.importorskip("tilelang")
    subprocess.run([sys.executable, "-c", AS_TILELANG], check=True)
