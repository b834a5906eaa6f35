"""A bundle's wheel, by hatchling: the package with its entry point, for one platform and any Python 3."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable
from pathlib import Path

from ...bundles.installed import GROUP
from ...bundles.manifest import Manifest

OLDEST_GLIBC = (2, 28)
VERSION = re.compile(rb"GLIBC_(\d+)\.(\d+)")

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "Ready-made kernels of tileattn for {arch}: the preset {preset}, {count} kernels."
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["tileattn", "{tvm_ffi}"]

[project.entry-points."{group}"]
{module} = "{module}"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
artifacts = ["*.so"]

[tool.hatch.build.targets.wheel.hooks.custom]
path = "hatch_build.py"
"""
HOOK = """\
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-{platform}"
"""
README = """\
# {name}

Ready-made kernels of tileattn for {arch}: the preset {preset}, {count} kernels, made with tileattn {version}, TileLang
{tilelang}{cuda}. With this package installed, tileattn needs neither TileLang nor a compiler for them.
`runtime` has TVM's runtime from TileLang's package, under the licence beside it.
"""


def module_of(manifest: str) -> str:
    """The name of the package's folder, from the distribution's name."""
    return manifest.replace("-", "_")


def build(project: Path, fill: Callable[[Path], Manifest], distribution: str, out: Path) -> Path:
    """Builds the wheel of a bundle.

    Args:
        project: an empty folder to work in.
        fill: fills the package's folder and returns the manifest.
        distribution: the package's name for pip.
        out: the folder for the wheel.

    Returns:
        The wheel's path.
    """
    module = module_of(distribution)
    package = project / module
    package.mkdir()
    (package / "__init__.py").write_text(
        f'"""Kernels of tileattn: data, found through the entry points of {GROUP}."""\n'
    )
    manifest = fill(package)
    facts = {
        "name": distribution, "module": module, "group": GROUP, "arch": manifest.arch, "preset": manifest.preset,
        "count": len(manifest.kernels), "version": manifest.versions["tileattn"],
        "tilelang": manifest.versions["tilelang"], "cuda": _cuda(manifest), "platform": _platform(package),
        "tvm_ffi": _tvm_ffi(),
    }  # fmt: skip
    for name, text in (("pyproject.toml", PROJECT), ("hatch_build.py", HOOK), ("README.md", README)):
        (project / name).write_text(text.format(**facts))
    return _wheel(project, out)


def _cuda(manifest: Manifest) -> str:
    return f" and CUDA {manifest.versions['cuda']}" if "cuda" in manifest.versions else ""


def _tvm_ffi() -> str:
    """The requirement of apache-tvm-ffi: TileLang's own, because the bundle brings TileLang's TVM runtime."""
    try:
        requirements = importlib.metadata.requires("tilelang") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    return next((each for each in requirements if re.match(r"apache-tvm-ffi\b[^;]*$", each)), "apache-tvm-ffi")


def _wheel(project: Path, out: Path) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    out.mkdir(parents=True, exist_ok=True)
    return Path(next(WheelBuilder(str(project)).build(directory=str(out), versions=["standard"])))


def _platform(package: Path) -> str:
    """The platform's tag: this machine's processor, and the newest glibc that a library asks for."""
    needed = {OLDEST_GLIBC}
    for library in package.rglob("*.so"):
        needed |= {(int(major), int(minor)) for major, minor in VERSION.findall(library.read_bytes())}
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{platform.machine()}"
