"""The sources in the package: of the preset "first", those that the lock names, and of today's files."""

from __future__ import annotations

import functools

import pytest

from tileattn.bench import presets
from tileattn.kernels.bundles import lock
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.tilelang.build import ahead
from tileattn.kernels.tilelang.build.library import generators, version

ARCH = "sm_90a"


@functools.cache
def kernels() -> dict[str, ahead.Generated]:
    return ahead.read(ahead.path_of(ARCH)).kernels


def test_they_are_of_the_tilelang_that_is_tested() -> None:
    assert ahead.read(ahead.path_of(ARCH)).tilelang == version("tilelang")


def test_each_kernel_of_the_preset_is_there_and_no_other() -> None:
    assert set(kernels()) == {identity(job.name.facts) for job in presets.named("first", ARCH)}


def test_they_are_the_sources_of_the_lock() -> None:
    digests = lock.of(ARCH).digests
    assert [key for key, each in kernels().items() if each.sources.digest != digests[key]] == []


@pytest.mark.slow(reason="only a release has to have them of its own files")
def test_they_are_of_todays_files() -> None:
    stale = [
        str(job)
        for job in presets.named("first", ARCH)
        if kernels()[identity(job.name.facts)].generators != ahead.digest_of_generators(*generators(job.name.module))
    ]
    command = f"tileattn bundle --arch {ARCH} --preset first --sources {ahead.path_of(ARCH)}"
    assert stale == [], f"TileLang generates these anew at a first call: write the file again, `{command}`"
