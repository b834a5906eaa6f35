"""Generates the sources of kernels without compiling them, for the file in a release (`build/ahead.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..build.ahead import Generated, digest_of_generators
from ..build.batch import AnyJob, Done
from ..build.collection import collection_paused
from ..build.job import KernelJob
from ..build.library import generators


@dataclass(frozen=True)
class DoneWithSources(Done):
    """The result of a job whose sources were generated; None if that failed."""

    generated: Generated | None = None


def generate_job(job: AnyJob) -> DoneWithSources:
    """Generates the sources of a kernel. Needs TileLang, and no compiler."""
    kernel = cast("KernelJob", job)
    try:
        with collection_paused():
            from ..build.compile import sources

            found = sources(kernel.function(), kernel.arch)
        return DoneWithSources(job, generated=Generated(found, digest_of_generators(*generators(kernel.name.module))))
    except Exception as failure:
        return DoneWithSources(job, error=f"{type(failure).__name__}: {failure}")
