"""append_kv's kernel in the generated code for sm_80, run on the CPU by emulator.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.tools.append_cases import CASES, AppendCase, Built, check
from tests.tools.emulator import ARCH, COMPILER, Kernel
from tileattn.call import cache_fields, cache_status
from tileattn.call.appending import AppendCall, AppendInputs, make_append_call
from tileattn.kernels.tilelang.append import backend
from tileattn.kernels.tilelang.append.kernel import append_kernel
from tileattn.testing import poisoned_memory

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")
PACKED = next(case for case in CASES if case.id == "packed")


@pytest.fixture(scope="module")
def kernel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[AppendCall], Kernel]:
    """The emulated kernel of a call, made when it is first asked for."""
    compiled: dict[AppendCall, Kernel] = {}

    def find(call: AppendCall) -> Kernel:
        if call not in compiled:
            compiled[call] = Kernel(append_kernel(call), tmp_path_factory.mktemp("kernel"))
        return compiled[call]

    return find


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernel_of: Callable[[AppendCall], Kernel]) -> None:
    """Kernels run on the CPU; nothing is copied to the host, as it is there."""
    monkeypatch.setattr(backend, "append_function", kernel_of)
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    monkeypatch.setattr(cache_status, "report", lambda device: None)


def status() -> list[int]:
    return cache_status.status_of(CPU).tolist()


def append(built: Built) -> Tensor | None:
    """Runs the kernel; packed tensors get a batch element, as the runtime gives them."""
    places, options = built.arguments
    interleaved = options.pop("interleaved")
    inputs = AppendInputs(*places, **options)
    if built.case.packed:
        rows = {name: getattr(inputs, name) for name in ("k", "v", "q", "positions", "q_positions")}
        inputs = inputs._replace(**{name: x[None] for name, x in rows.items() if x is not None})
    call = replace(make_append_call(inputs, interleaved, on_gpu=True), arch=ARCH)
    assert backend.refusal(call) is None
    with poisoned_memory():
        rotated = backend.prepare(call)(inputs)
    return rotated[0] if built.case.packed and rotated is not None else rotated


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: AppendCase) -> None:
    built = Built(case)
    check(built, append(built))
    assert status() == [0] * cache_fields.FIELDS


def test_aligned_rows_are_copied_16_bytes_at_a_time() -> None:
    """Else the cases would not test what runs."""
    by_id = {case.id: Built(case) for case in CASES}

    def is_aligned(name: str) -> bool:
        places, options = by_id[name].arguments
        interleaved = options.pop("interleaved")
        return make_append_call(AppendInputs(*places, **options), interleaved, on_gpu=True).aligned

    assert is_aligned("halves-pages")
    assert is_aligned("partial")
    assert not is_aligned("unaligned")
