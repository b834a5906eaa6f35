"""The digest of a kernel's generated source: the same in each process, and another one with another instruction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tileattn

PACKAGE = Path(tileattn.__file__).parent

pytestmark = [
    pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang"),
    pytest.mark.slow(reason="each process imports TileLang and lowers kernels, 5 to 30 s"),
]

PLAN = """
from tileattn.kernels.tilelang.build.compile import sources
from tileattn.kernels.tilelang.packed.library import PlanJob
print(sources(PlanJob("sm_90a").function(), "sm_90a").digest)
"""
MAIN = """
from dataclasses import replace
import torch
from tileattn import Causal
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.library import kernel_jobs
from tileattn.kernels.tilelang.build.compile import sources
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.variant.key import encode
call = AttentionCall(torch.bfloat16, 64, 64, encode(Causal(), ())[0], arch="sm_90a")
backward = BackwardCall(replace(call, needs_grad=True), (True, True, True, False))
main = next(job for job in kernel_jobs(backward) if job.kernel == "main")
for job in (Job(call, default(call)), main):
    print(sources(job.function(), job.arch).digest)
"""
NAMES = """
from collections import Counter
from dataclasses import replace
import torch
import tilelang  # which makes tvm importable
from tvm import tirx
from tvm.tirx import stmt_functor
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.library import kernel_jobs
from tileattn.kernels.tilelang.build import compile
call = AttentionCall(torch.bfloat16, 64, 64, arch="sm_90a", needs_grad=True)
main = next(job for job in kernel_jobs(BackwardCall(call, (True, True, True, False))) if job.kernel == "main")
function = main.function()

def shared():
    found = []
    def take(node):
        if isinstance(node, tirx.SBlock):
            found.extend(each.name for each in node.alloc_buffers if each.scope().startswith("shared"))
    stmt_functor.post_order_visit(function.body, take)
    return found

before = shared()
compile._name_apart(function)
print(*(max(Counter(names).values()) for names in (before, shared())), len(before) == len(shared()))
"""
# An instruction of packed/plan_kernel.py.
OLD, NEW = 'T.alloc_var("int32", init=-1)', 'T.alloc_var("int32", init=-2)'


def run(code: str, source: Path = PACKAGE.parent, seed: str = "0") -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.split()


def test_digests_are_the_same_in_each_process() -> None:
    first = run(MAIN, seed="1")
    assert len(set(first)) == 2
    assert run(MAIN, seed="2") == first


def test_a_comment_leaves_the_digest_and_an_instruction_changes_it(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "tileattn", ignore=shutil.ignore_patterns("__pycache__"))
    before = run(PLAN)
    assert run(PLAN, tmp_path) == before  # wherever the package lies
    generator = tmp_path / "tileattn/kernels/tilelang/packed/plan_kernel.py"
    text = generator.read_text()
    generator.write_text(f"# A comment.\n\n{text}\n# Another one.\n")
    assert run(PLAN, tmp_path) == before
    assert text.count(OLD) == 1
    generator.write_text(text.replace(OLD, NEW))
    assert run(PLAN, tmp_path) != before


def test_shared_buffers_of_equal_names_are_numbered() -> None:
    most_before, most_after, as_many = run(NAMES)
    assert int(most_before) > 1
    assert int(most_after) == 1
    assert as_many == "True"
