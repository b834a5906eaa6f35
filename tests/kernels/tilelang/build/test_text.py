"""Kernels as JSON: every kernel that the package compiles survives it, and nothing outside of the package is made."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.tools import ROOT
from tileattn.kernels.tilelang.backward.library import SharesJob
from tileattn.kernels.tilelang.build import text
from tileattn.kernels.tilelang.packed.library import PlanJob
from tileattn.variant.key import CLASSES

sys.path.insert(0, str(ROOT / "benchmarks"))

import precompile

ARCH = "sm_90a"


def through_json(value: Any) -> Any:
    return text.decode(json.loads(json.dumps(text.encode(value))))


@pytest.mark.slow(reason="lists every kernel of the conformance suite")
def test_every_kernel_of_the_tests_survives() -> None:
    jobs = [
        *precompile.conformance_jobs(None, ARCH),
        *precompile.jobs_of(precompile.lists_attempts(), ARCH),
    ]
    assert len({type(job) for job in jobs}) > 5
    for job in jobs:
        again = through_json(job)
        assert type(again) is type(job)
        assert again == job
        assert again.name == job.name


@pytest.mark.parametrize("job", [PlanJob(ARCH), SharesJob(torch.bfloat16, ARCH)], ids=str)
def test_a_kernel_survives(job: Any) -> None:
    again = through_json(job)
    assert type(again) is type(job)
    assert again == job


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text", (1, (2, "3")), torch.float8_e4m3fn])
def test_a_field_survives(value: Any) -> None:
    assert through_json(value) == value


@dataclass(frozen=True)
class Foreign:
    number: int = 1


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "tileattn.cli.app:app", "tileattn.callers:x", f"{__name__}:Foreign", ""]
)
@pytest.mark.parametrize("rest", [{"fields": {}}, {"items": []}, {"value": 1}], ids=["fields", "items", "value"])
def test_classes_from_elsewhere_are_refused(name: str, rest: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is no class of tileattn's kernels"):
        text.decode({"class": name, **rest})


INSIDE = (
    "tileattn.kernels.tilelang.bundling.content:fill",  # a function
    "tileattn.kernels.tilelang.build.record:Path",  # imported there
    "tileattn.kernels.tilelang.build.job:KernelJob",  # its fields are not known
)


@pytest.mark.parametrize("name", INSIDE)
def test_what_only_lies_in_the_package_is_no_class_of_values(name: str) -> None:
    with pytest.raises(ValueError, match="is no class of tileattn's kernels"):
        text.decode({"class": name, "items": []})


def test_what_is_no_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'compile' is no dtype"):
        text.decode({"dtype": "compile"})


def test_modules_are_of_whole_names() -> None:
    """A class whose name only ends like another's is not that one, whose module would have to be importable."""
    named = {CLASSES[name] for name in ("And", "Causal", "SlidingWindow")}
    assert set(text._classes_of("And(Causal(),SlidingWindow(i,-))")) == named
    assert text._classes_of("NotCausal()") == []


def test_what_is_encoded_of_a_foreign_class_is_refused() -> None:
    with pytest.raises(ValueError, match="is no class of tileattn's kernels"):
        through_json(Foreign())


def test_a_value_without_a_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="has no form in JSON"):
        text.encode({1, 2})
