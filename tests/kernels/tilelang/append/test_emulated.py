"""append_kv's kernel in the generated code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.tools.append_cases import CASES, AppendCase, Built, check, inputs_of
from tileattn.call import cache_fields, cache_status
from tileattn.call.appending import AppendCall, make_append_call
from tileattn.kernels.tilelang.append import backend
from tileattn.kernels.tilelang.append.kernel import append_kernel
from tileattn.testing import poisoned_memory
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")
QUICK = ("packed",)  # whose kernel other tests here run as well
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
    """Runs the kernel, with a batch element that packed tensors get in the runtime."""
    inputs, interleaved = inputs_of(built)
    call = replace(make_append_call(inputs, interleaved, on_gpu=True), arch=ARCH)
    assert backend.refusal(call) is None
    with poisoned_memory():
        rotated = backend.prepare(call)(inputs)
    return rotated[0] if built.case.packed and rotated is not None else rotated


@pytest.mark.parametrize(
    "case",  # a kernel takes some seconds
    [pytest.param(case, id=case.id, marks=[] if case.id in QUICK else pytest.mark.slow) for case in CASES],
)
def test_case(case: AppendCase) -> None:
    built = Built(case)
    check(built, append(built))
    assert status() == [0] * cache_fields.FIELDS


WRONG = {
    "too long": (cache_fields.SEQLENS_K, lambda built: built.seqlens_k[3:].fill_(2**31 - 1), 3),
    "negative": (cache_fields.SEQLENS_K, lambda built: built.seqlens_k[1:2].fill_(-(2**31)), 1),
    "page": (cache_fields.PAGE_TABLE, lambda built: built.table[1].fill_(-(2**31)), 1),
    "page beyond": (cache_fields.PAGE_TABLE, lambda built: built.table[1].fill_(built.k_cache.shape[0]), 1),
    "start": (cache_fields.CU_SEQLENS_Q, lambda built: built.cu_seqlens_q[:1].fill_(-7), 0),
    "decrease": (cache_fields.CU_SEQLENS_Q, lambda built: built.cu_seqlens_q[2:3].fill_(-(10**6)), 1),
    "total": (cache_fields.CU_SEQLENS_Q, lambda built: built.cu_seqlens_q[4:].fill_(10**6), 3),
    "angles": (cache_fields.POSITIONS, lambda built: None, 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_recorded(name: str) -> None:
    """Nothing is written outside of the caches, which lie in one buffer between NaN; the sequence's number is told."""
    field, change, sequence = WRONG[name]
    built = Built(PACKED)
    if name == "angles":
        assert built.cos is not None
        assert built.sin is not None
        built.cos, built.sin = built.cos[:69], built.sin[:69]
    around = torch.full((3, *built.k_cache.shape), torch.nan, dtype=built.case.dtype)
    built.k_cache = around[1]
    change(built)
    append(built)
    found = status()
    assert found[field] == sequence + 1
    # Positions beyond the cache have no angles, either.
    others = (cache_fields.POSITIONS,) if name == "too long" else ()
    assert [at for at, other in enumerate(found) if other and at not in (field, *others)] == []
    assert around[::2].isnan().all()


def test_other_sequences_are_written() -> None:
    built = Built(PACKED)
    assert built.table is not None
    built.table[1].fill_(-1)
    append(built)
    page, token = int(built.table[3, 0]), 8
    assert torch.equal(built.v_cache[page, token], built.v[68])


@pytest.mark.slow(reason="lowers and compiles a kernel, 3 s")
@pytest.mark.parametrize("empty", ["pages", "table"])
def test_empty_caches(empty: str) -> None:
    """Padding entries need no page; a token without one is recorded."""
    built = Built(replace(PACKED, new=1, rotary_dim=0, seqlens=(0, 0), head_dim=8))
    if empty == "pages":
        built.k_cache, built.v_cache = built.k_cache[:0], built.v_cache[:0]
    else:
        built.table = torch.zeros(2, 0, dtype=torch.int32)
    append(built)
    assert status() == [0] * cache_fields.FIELDS
    assert built.k_before.isnan().all()
    built.seqlens_k.fill_(1)
    append(built)
    assert status()[cache_fields.SEQLENS_K]


def test_aligned_rows_are_copied_16_bytes_at_a_time() -> None:
    """Else the cases would not test what runs."""
    by_id = {case.id: Built(case) for case in CASES}

    def is_aligned(name: str) -> bool:
        return make_append_call(*inputs_of(by_id[name]), on_gpu=True).aligned

    assert is_aligned("halves-pages")
    assert is_aligned("partial")
    assert not is_aligned("unaligned")
