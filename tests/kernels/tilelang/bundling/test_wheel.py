"""A bundle as a wheel: built, installed, and loaded where neither TileLang nor a compiler can be started."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tileattn
from tileattn.kernels.bundles.manifest import Manifest
from tileattn.kernels.cache.store import VARIABLE
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.bundling import content, wheel
from tileattn.kernels.tilelang.packed.library import PlanJob

ARCH = "sm_90a"
JOBS = [PlanJob(ARCH), SharesJob(torch.bfloat16, ARCH)]


@pytest.mark.parametrize(
    ("content_of", "platform"),
    [(b"GLIBC_2.17 GLIBC_2.3.4", "manylinux_2_28_"), (b"GLIBC_2.34\0GLIBC_2.4", "manylinux_2_34_")],
)
def test_the_platform_has_the_newest_glibc_that_is_needed(tmp_path: Path, content_of: bytes, platform: str) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "x.so").write_bytes(content_of)
    assert wheel._platform(tmp_path).startswith(platform)


@pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling")
def test_a_wheel_has_its_name_its_entry_point_and_its_libraries(tmp_path: Path) -> None:
    project, name = tmp_path / "project", "tileattn-kernels-gfx942"
    project.mkdir()

    def fill(package: Path) -> Manifest:
        (package / "kernels").mkdir()
        (package / "kernels" / "ab.so").write_bytes(b"kernel")
        versions = {"tileattn": "0.1.0", "tilelang": "0.1.15"}
        manifest = Manifest(name, "gfx942", "sample", versions, {}, {})
        manifest.write(package)
        return manifest

    path = wheel.build(project, fill, name, tmp_path / "dist")
    assert path.name.startswith("tileattn_kernels_gfx942-0.1.0-py3-none-manylinux_2_28_")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        info = "tileattn_kernels_gfx942-0.1.0.dist-info"
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    package = {f"tileattn_kernels_gfx942/{each}" for each in ("__init__.py", "manifest.json", "kernels/ab.so")}
    assert package <= names
    assert points.split() == ["[tileattn.kernels]", "tileattn_kernels_gfx942", "=", "tileattn_kernels_gfx942"]
    assert "Requires-Dist: tileattn\n" in metadata
    assert re.search(r"^Requires-Dist: apache-tvm-ffi\b", metadata, re.MULTILINE)


@pytest.mark.parametrize(
    ("requirements", "found"),
    [
        (["torch", "apache-tvm-ffi<0.1.13,>=0.1.11"], "apache-tvm-ffi<0.1.13,>=0.1.11"),
        (["apache-tvm-ffi>=9; platform_system == 'Darwin'"], "apache-tvm-ffi"),
        (None, "apache-tvm-ffi"),
    ],
)
def test_tvms_interface_is_that_of_the_runtime(
    requirements: list[str] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle brings a runtime that is linked to it: TileLang says which versions that may be."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    assert wheel._tvm_ffi() == found


# Loads the kernels as a call does. Nothing may be started, and neither TileLang nor Triton may be imported.
LOADED = """
import sys
site, source = sys.argv[1:3]
sys.path[:0] = [site, source]
import torch, tvm_ffi
sys.modules["tilelang"] = None
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"):
        raise SystemExit(f"{event} {arguments}")
    if event == "import" and arguments[0].partition(".")[0] in ("tilelang", "triton", "tvm"):
        raise SystemExit(f"import {arguments[0]}")
sys.addaudithook(watch)
import tileattn
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.build.library import find_or_compile, load
from tileattn.kernels.tilelang.packed.library import PlanJob
assert tileattn.__file__.startswith(source), tileattn.__file__
for job, function in ((PlanJob("sm_90a"), "plan"), (SharesJob(torch.bfloat16, "sm_90a"), "add")):
    path = find_or_compile(job)
    assert str(path).startswith(site), path
    kernel = load(path)[function]
    try:
        kernel()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # the host part of the kernel refuses
        assert str(error)
    else:
        raise SystemExit("called without arguments")
    print("loaded", job)
"""


@pytest.mark.slow(reason="compiles two kernels and builds, installs and loads a wheel, a minute")
@pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang, which compiles the kernels")
@pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling, which builds the wheel")
@pytest.mark.skipif(shutil.which("nvcc") is None or shutil.which("g++") is None, reason="needs nvcc and g++")
def test_an_installed_wheel_is_loaded_without_tilelang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    for job in JOBS:
        job.compile()
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    name = content.distribution_of(ARCH)
    path = wheel.build(project, lambda package: content.fill(package, JOBS, ARCH, "two"), name, tmp_path / "dist")
    assert path.name.startswith("tileattn_kernels_sm90a_cu")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    installed = subprocess.run([*pip, str(path)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    source = str(Path(tileattn.__file__).parents[1])
    environment = {**os.environ, VARIABLE: str(tmp_path / "empty")}
    arguments = [sys.executable, "-c", LOADED, str(site), source]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"loaded {job}" for job in JOBS]
    assert not (tmp_path / "empty").exists()
