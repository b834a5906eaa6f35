"""The lock in the package: the kernels of the preset "default", and the source that is generated for them today."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from tileattn.bench import presets
from tileattn.kernels.bundles import lock
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.tilelang.build.job import KernelJob
from tileattn.kernels.tilelang.build.library import version

ARCH = "sm_90a"
PARTS = 64  # of the slow test; each takes some minutes
CHANGED = (
    "the source of this kernel has changed: compile the preset again, and write the lock with "
    f"`tileattn bundle --arch {ARCH} --preset default --lock {lock.path_of(ARCH)}`"
)


@functools.cache
def default() -> list[KernelJob]:
    return presets.named("default", ARCH)


def of_each_kind() -> list[KernelJob]:
    """The first kernel of each kind, without the two kinds of the backward pass that take long to generate."""
    kinds: dict[object, KernelJob] = {}
    for job in default():
        kinds.setdefault((type(job), getattr(job, "kernel", None)), job)
    return [job for (_, kernel), job in kinds.items() if kernel not in ("main", "queries")]


def check(jobs: Sequence[KernelJob]) -> None:
    from tileattn.kernels.tilelang.build.compile import sources

    digests = lock.of(ARCH).digests
    for job in jobs:
        assert sources(job.function(), ARCH).digest == digests[identity(job.name.facts)], f"{job}: {CHANGED}"


def test_the_lock_has_each_kernel_of_the_preset_and_no_other() -> None:
    assert set(lock.of(ARCH).digests) == {identity(job.name.facts) for job in default()}


def test_the_lock_names_the_tilelang_that_is_tested() -> None:
    assert lock.of(ARCH).tilelang == version("tilelang")


@pytest.mark.slow(reason="lowers a kernel of each kind, 40 s")
def test_a_kernel_of_each_kind_has_the_source_of_the_lock() -> None:
    check(of_each_kind())


@pytest.mark.slow(reason="some minutes for each part")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_has_the_source_of_the_lock(part: int) -> None:
    check(default()[part::PARTS])
