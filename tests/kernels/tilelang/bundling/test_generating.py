"""Sources that are generated ahead: those that are compiled otherwise, under the digest of their files."""

from __future__ import annotations

import pytest

from tileattn.kernels.bundles import lock
from tileattn.kernels.bundles.manifest import identity
from tileattn.kernels.tilelang.build.ahead import digest_of_generators
from tileattn.kernels.tilelang.build.library import generators
from tileattn.kernels.tilelang.bundling.generating import generate_job
from tileattn.kernels.tilelang.packed.library import PlanJob

PLAN = PlanJob("sm_90a")


def test_they_are_those_of_the_lock() -> None:
    pytest.importorskip("tilelang")
    done = generate_job(PLAN)
    assert done.error is None
    assert done.generated is not None
    assert done.generated.sources.digest == lock.of("sm_90a").digests[identity(PLAN.name.facts)]
    assert done.generated.generators == digest_of_generators(*generators(PLAN.name.module))


def test_a_failure_is_told_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: PlanJob) -> None:
        raise ValueError("wrong tiles")

    monkeypatch.setattr(PlanJob, "function", fail)
    done = generate_job(PLAN)
    assert (done.error, done.generated) == ("ValueError: wrong tiles", None)
