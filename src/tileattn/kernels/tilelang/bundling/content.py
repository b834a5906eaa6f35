"""The folder of a bundle: libraries of kernels from the cache, those that load them, and the manifest."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from ...bundles import runtime
from ...bundles.manifest import KERNELS, RUNTIME, Entry, Manifest, checksum, identity
from ...cache.sources import digest
from ...cache.store import kernel_cache
from ..build import toolkit
from ..build.batch import AnyJob, Done
from ..build.job import KernelJob
from ..build.library import SOURCE, compile_into_cache, generators, version

# TVM's runtime, after the libraries of TileLang that it is linked to.
OF_TVM = (*(f"libstub_{name}.so" for name in ("cuda", "cudart", "hip", "ascendcl")), "libtvm_runtime.so")
TENSOR_MAPS_SOURCE = Path(runtime.__file__).with_name("tensor_maps.c")


class Kept(NamedTuple):
    """A compiled kernel: its library in the cache, and the digest of the source that it was compiled from."""

    library: Path
    source: str


def compile_job(job: AnyJob) -> Done:
    """Compiles a kernel into the cache, also where an installed bundle has it: a new bundle is made from the cache.

    A kernel whose record lacks the digest of its source is compiled again.
    """
    start = time.perf_counter()
    try:
        compile_into_cache(cast("KernelJob", job), SOURCE)
    except Exception as failure:
        return Done(job, error=f"{type(failure).__name__}: {failure}")
    return Done(job, seconds=time.perf_counter() - start)


def cached(job: KernelJob) -> Kept | None:
    """A kernel of the cache, or None where it is missing, or was compiled before sources were recorded."""
    cache = kernel_cache()
    library = cache.find(job.key, SOURCE)
    source = None if library is None else cache.record(library).get(SOURCE)
    return None if library is None or not isinstance(source, str) else Kept(library, source)


def distribution_of(arch: str) -> str:
    """The name of a bundle's package: of the architecture and, for NVIDIA's, the toolkit's major version."""
    name = f"tileattn-kernels-{arch.replace('_', '')}"
    return name if arch.startswith("gfx") else f"{name}-cu{cuda_version().partition('.')[0]}"


@functools.cache
def cuda_version() -> str:
    """The version that nvcc prints, such as "13.0.88".

    Raises:
        RuntimeError: there is no nvcc, or it prints none.
    """
    text = subprocess.run([toolkit.nvcc(), "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if match is None:
        raise RuntimeError(f"nvcc --version prints no version: {text!r}")
    return match[1]


def fill(folder: Path, jobs: Iterable[KernelJob], arch: str, preset: str) -> Manifest:
    """Copies kernels of the cache and what loads them into an empty folder, and writes the manifest.

    Args:
        folder: of the package; it exists.
        jobs: kernels that the cache holds.
        arch: of all of them.
        preset: the set's name.

    Raises:
        LookupError: the cache does not hold a kernel.
    """
    (folder / KERNELS).mkdir()
    entries = {}
    for job in jobs:
        kept = cached(job)
        if kept is None:
            raise LookupError(f"the cache does not hold {job}")
        key = identity(job.name.facts)
        copied = shutil.copyfile(kept.library, folder / KERNELS / f"{key}.so")
        entries[key] = Entry(checksum(Path(copied)), kept.source, digest(*generators(job.name.module)))
    versions = {name: version(name) for name in ("tileattn", "tilelang", "apache-tvm-ffi")}
    if not arch.startswith("gfx"):
        versions["cuda"] = cuda_version()
    manifest = Manifest(
        distribution=distribution_of(arch),
        arch=arch,
        preset=preset,
        versions=versions,
        runtime={} if arch.startswith("gfx") else _fill_runtime(folder / RUNTIME),
        kernels=dict(sorted(entries.items())),
    )
    manifest.write(folder)
    return manifest


def _fill_runtime(folder: Path) -> dict[str, str]:
    """Copies TVM's runtime from TileLang's package, with its licence, and compiles what tensor maps need."""
    folder.mkdir()
    libraries = runtime.tilelang_libraries()
    assert libraries is not None
    for name in OF_TVM:
        shutil.copyfile(libraries / name, folder / name)
    for file in importlib.metadata.files("tilelang") or ():
        if "licenses" in file.parts:
            shutil.copyfile(Path(str(file.locate())), folder / f"TILELANG-{file.name}")
    _compile(TENSOR_MAPS_SOURCE, folder / runtime.TENSOR_MAPS)
    return {name: checksum(folder / name) for name in (OF_TVM[-1], runtime.TENSOR_MAPS)}


def _compile(source: Path, library: Path) -> None:
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.origin is not None
    headers = Path(spec.origin).parent / "include"
    command: Sequence[str] = [
        "g++",
        "-x",
        "c",
        "-O2",
        "-shared",
        "-fPIC",
        f"-I{headers}",
        str(source),
        "-o",
        str(library),
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError("g++ is not installed, which compiles the library that loads a bundle's kernels") from error
    if run.returncode != 0:
        raise RuntimeError(f"g++ ended with exit status {run.returncode}:\n{run.stderr}\n{' '.join(command)}")
