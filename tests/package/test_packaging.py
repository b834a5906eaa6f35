"""The installed package: the declared ranges, the pins, the wheel's contents, and the documents about them."""

import importlib
import importlib.metadata
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tools import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCUMENTS = [path for name in ("README.md", "CONTRIBUTING.md", "docs/install.md") if (path := ROOT / name).exists()]
PYTHONS = [
    text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.fullmatch(r"Programming Language .* 3\.\d+", text)
]


def declared() -> Iterator[Requirement]:
    """Every requirement of tileattn and its extras, without the extras that name other extras."""
    for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]:
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            yield requirement


def pins(python: str) -> dict[str, Version]:
    """The version of each package that constraints.txt asks for on this Python."""
    version_of: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"not a pin: {line}"
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in version_of, f"{pin.name} is pinned twice for Python {python}"
            version_of[canonicalize_name(pin.name)] = Version(specifier.version)
    return version_of


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_lie_in_the_declared_ranges(python: str) -> None:
    pinned = pins(python)
    for requirement in declared():
        if requirement.name == "cuda-toolkit":  # torch pins it; constraints.txt pins the nvcc that it brings
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin for Python {python}"
        assert version in requirement.specifier, f"{requirement} does not allow the pinned {version}"


def test_extras_name_extras_that_exist() -> None:
    for extra, texts in EXTRAS.items():
        for requirement in map(Requirement, texts):
            if requirement.name == PROJECT["name"]:
                assert requirement.extras <= EXTRAS.keys(), f"{extra} names an unknown extra: {requirement}"


def test_ci_runs_the_oldest_python_and_the_oldest_torch() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (torch,) = (requirement for requirement in declared() if requirement.name == "torch")
    for name, specifiers in [("python", SpecifierSet(PROJECT["requires-python"])), ("torch", torch.specifier)]:
        (oldest,) = (Version(s.version) for s in specifiers if s.operator == ">=")
        tested = {Version(version) for version in re.findall(rf'{name}: "([\d.]+)"', workflow)}
        assert oldest == min(tested), f"CI tests {name} from {min(tested)}, pyproject.toml allows {oldest}"


def test_installed_version_is_the_declared_one() -> None:
    try:
        installed = importlib.metadata.version("tileattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tileattn is not installed: this run imports it from src")
    assert Version(installed).release >= (0, 1), "install again: pip install -e ."
    assert importlib.import_module("tileattn").__version__ == installed


@pytest.mark.parametrize("target", PROJECT["scripts"].values())
def test_scripts_can_be_called(target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_wheel_holds_every_file_of_the_package() -> None:
    # Not only Python: py.typed, CUDA sources. A careless line in .gitignore is enough to lose one.
    wheel = pytest.importorskip("hatchling.builders.wheel")
    builder = wheel.WheelBuilder(str(ROOT))
    with builder.config.set_build_data({"artifacts": [], "force_include": {}, "build_hooks": ()}):
        packed = {file.distribution_path for file in builder.recurse_included_files()}
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "tileattn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "tileattn/py.typed" in files
    assert packed == files
    # "Installs in seconds": nothing to compile, and no larger than docs/install.md says, but for
    # what a release adds.
    assert re.fullmatch(r"py[\d.py]*-none-any", builder.get_default_tag())
    files -= {file for file in files if "/build/generated/" in file and "sm_90a" not in file}
    compressed = sum(len(zlib.compress(path.read_bytes())) for file in files if (path := source / file)) / 1e6
    (said,) = re.findall(r"wheel\*\* is about ([\d.]+) MB", (ROOT / "docs/install.md").read_text())
    assert abs(compressed - float(said)) <= 0.15


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_extras_and_make_targets_that_exist(path: Path) -> None:
    text = path.read_text()
    extras = {name.strip() for names in re.findall(r"(?:tileattn|\.)\[([a-z, ]+)\]", text) for name in names.split(",")}
    assert extras <= EXTRAS.keys(), f"{path.name} names extras that do not exist"
    commands = re.findall(r"(?:`|^\s*\$?\s*)make ([a-z-]+)", text, flags=re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(commands) <= set(targets), f"{path.name} names make targets that do not exist"
