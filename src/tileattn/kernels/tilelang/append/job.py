"""The kernel of an append call as a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....call.appending import AppendCall
from ..build.job import KernelJob, Name


@dataclass(frozen=True)
class AppendJob(KernelJob):
    """The kernel of a call."""

    call: AppendCall

    @property
    def arch(self) -> str:
        return self.call.arch

    @property
    def name(self) -> Name:
        return Name(str(self.call), "append.kernel")

    def function(self) -> Any:
        from .kernel import append_kernel

        return append_kernel(self.call)

    def __str__(self) -> str:
        return str(self.call)
