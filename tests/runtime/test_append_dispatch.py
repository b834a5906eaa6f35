"""Which backend runs an append call: every backend's `refusal` beside what it must run, written by hand."""

from __future__ import annotations

import itertools

import pytest

from tests.tools.support_table import AMD, ANY, BF16, FP16, FP32, FP64, NVIDIA, possible
from tileattn.call.appending import AppendCall
from tileattn.runtime import append_dispatch
from tileattn.runtime.append_dispatch import PHASES, prepare_append

KERNELS = (FP16, BF16, FP32)  # the dtypes that GPU kernels take
MUST_RUN = {
    "tilelang": ((*NVIDIA, "gfx942"), KERNELS),
    "triton": ((*NVIDIA, *AMD, "cpu"), KERNELS),
    "torch": (ANY, (*KERNELS, FP64)),
}
FLAGS: list[dict[str, bool]] = [{}, {"packed": True, "paged": True}, {"aligned": False, "aligned_tables": False}]


def calls(arch: str) -> list[AppendCall]:
    """Every dtype of rows and of tables, head dims of all kinds, and flags."""
    rotations = [(0, None), *((2, table) for table in (*KERNELS, FP64))]
    return [
        AppendCall(dtype, dim, dim_v, rotary_dim, table_dtype=table, arch=arch, **flags)
        for dtype, (dim, dim_v), (rotary_dim, table), flags in itertools.product(
            (*KERNELS, FP64), ((2, 1), (64, 64), (100, 300)), rotations, FLAGS
        )
    ]


def must_run(name: str, call: AppendCall) -> bool:
    archs, dtypes = MUST_RUN[name]
    return call.arch in archs and call.dtype in dtypes and call.table_dtype in (None, *dtypes)


def test_every_backend_has_a_row() -> None:
    assert [phase.name for phase in PHASES] == list(MUST_RUN)


@pytest.mark.parametrize("arch", ANY)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_backend_runs_what_it_must_and_nothing_else(phase: append_dispatch.AppendPhase, arch: str) -> None:
    if not possible(phase.name, arch):
        pytest.skip(f"this process has not what {phase.name} needs on {arch}")
    for call in calls(arch):
        reason = phase.refusal(call)
        assert (reason is None) == must_run(phase.name, call), (call, reason)


@pytest.mark.parametrize("arch", ANY)
def test_dispatch_chooses_the_first_that_must_run(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not all(possible(name, arch) for name in ("tilelang", "triton")):
        pytest.skip("tilelang or triton is not installed")
    chosen: list[str] = []
    phases = [
        append_dispatch.AppendPhase(
            phase.name, phase.refusal, phase.reservation, lambda call, name=phase.name: chosen.append(name)
        )
        for phase in PHASES
    ]
    monkeypatch.setattr(append_dispatch, "PHASES", tuple(phases))
    append_dispatch._prepare_append.cache_clear()
    for call in calls(arch):
        prepare_append(call, None)
        # Triton's interpreter must be named.
        names = [name for name in MUST_RUN if must_run(name, call) and (name, arch) != ("triton", "cpu")]
        assert chosen.pop() == names[0], call
    append_dispatch._prepare_append.cache_clear()


def test_a_refusal_names_the_backend_and_its_reason() -> None:
    with pytest.raises(NotImplementedError, match=r"'triton' does not run .*append float64 d64 cpu.*dtype must be"):
        prepare_append(AppendCall(FP64, 64, 64), "triton")
    with pytest.raises(NotImplementedError, match="tilelang: cos and sin must be float16, bfloat16 or float32, not"):
        prepare_append(AppendCall(BF16, 64, 64, 64, table_dtype=FP64, arch="sm_90a"), "tilelang")
