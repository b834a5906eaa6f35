"""Triton's kernels, compiled for GPUs that this machine does not have: they fit into shared memory and hardly spill."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.tools.triton_kernels.compiler import SHARED_BYTES, compiled
from tileattn.kernels.triton.tile_sizes import KERNELS

pytest.importorskip("triton")


WITHOUT_DQ: dict[str, Any] = {"head_dim": 32, "dq": False}
# The calls that tests below look at, each architecture's compiled in one process.
QUICK: dict[str, dict[str, dict[str, Any]]] = {
    "sm_90a": {
        "causal": {"head_dim": 64, "variant": "causal"},
        "empty loop": {"head_dim": 128, "variant": "function_empty_rows", "backward": False},
        "lists": {"head_dim": 128, "variant": "function_empty_rows", "backward": False, "listed": True},
    },
    "sm_80": {
        "forward": {"head_dim": 64, "backward": False},
        "without dq": WITHOUT_DQ,
    },
    "gfx942": {"forward": {"head_dim": 64, "backward": False}},
}
# And those that `make test-all` looks at only: 2 to 8 s each.
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "sm_90a": {
        "causal-128": {"head_dim": 128, "variant": "causal"},
        "without dq": WITHOUT_DQ,
        "tiles": {"head_dim": 64, "variant": "none+bias+bias_tiles_1", "backward": False},
    },
    "gfx942": {"without dq": WITHOUT_DQ},
}


@functools.cache
def quick(arch: str) -> dict[str, list[dict[str, Any]]]:
    """The reports of an architecture's calls, by their names: a forward kernel begins those of each."""
    every, by_name = compiled(arch, list(QUICK[arch].values())), {}
    begins = [at for at, report in enumerate(every) if report["kernel"] == "forward_kernel"]
    for name, begin, end in zip(QUICK[arch], begins, [*begins[1:], len(every)], strict=True):
        by_name[name] = every[begin:end]
    return by_name


def check(arch: str, name: str) -> list[dict[str, Any]]:
    """All kernels of a call."""
    if name in QUICK[arch]:
        reports, call = quick(arch)[name], QUICK[arch][name]
    else:
        call = OTHERS[arch][name]
        reports = compiled(arch, [call])
    backward = ORDER if call.get("dq", True) else ("prepare", "keys")
    names = ("forward", *backward) if call.get("backward", True) else ("forward",)
    assert [report["kernel"] for report in reports] == [f"{name}_kernel" for name in names]
    for report in reports:
        assert report["shared"] <= SHARED_BYTES[arch], report
        if arch == "sm_90a":
            assert report["spills"] <= SPILLED_BYTES, report
    return reports


ORDER = ("queries", "keys")
SPILLED_BYTES = 64  # by a version of Triton other than the one that the configurations were chosen with


def test_the_order_names_all_kernels() -> None:
    assert {"forward", *ORDER} == set(KERNELS)


@pytest.mark.slow_cases("causal-128", reason="8 s")
@pytest.mark.parametrize("name", ["causal", "causal-128"])
def test_hopper_multiplies_warpgroups_and_copies_by_tma(name: str) -> None:
    for report in check("sm_90a", name):
        assert report["wgmma"] > 0, report
        assert report["tma"] > 0, report
        assert report["mma"] == 0, report


def test_ampere_copies_asynchronously() -> None:
    for report in check("sm_80", "forward"):
        assert report["mma"] > 0, report
        assert report["cp_async"] > 0, report


def test_amd_has_matrix_instructions() -> None:
    for report in check("gfx942", "forward"):
        assert report["mma"] > 0, report


@pytest.mark.slow_except("sm_80", reason="5 s each")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_without_dq(arch: str) -> None:
    """A kernel of its own then prepares what the kernel for dq would prepare."""
    check(arch, "without dq")


@pytest.mark.slow(reason="8 s each")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float32_is_multiplied_by_the_tensor_cores(arch: str) -> None:
    reports = compiled(arch, [{"head_dim": 64, "dtype": "float32"}])
    assert [report["kernel"] for report in reports] == [f"{name}_kernel" for name in ("forward", "prepare", *ORDER)]
    forward, prepare, queries, keys = reports
    instruction = "wgmma" if arch == "sm_90a" else "mma"
    assert all(report[instruction] > 0 for report in (forward, queries, keys)), reports
    # The kernel for dk and dv spills more; with the rows prepared in it, the one for dq did, too.
    assert all(report["spills"] <= SPILLED_BYTES for report in (prepare, queries)), reports


def test_a_loop_that_never_turns_does_not_kill_the_assembler() -> None:
    check("sm_90a", "empty loop")


@pytest.mark.slow(reason="8 s")
def test_tiles_that_scores_are_read_from_fit() -> None:
    check("sm_90a", "tiles")


def test_lists_of_tiles_are_walked_as_ranges_are() -> None:
    walk_alike(check("sm_90a", "lists"), check("sm_90a", "empty loop"))


def walk_alike(listed: list[dict[str, Any]], ranges: list[dict[str, Any]]) -> None:
    """Loops over lists begin as many copies ahead as one over a range, and need as much shared memory.

    A user's function has one loop by ranges, with the mask; with lists it has two.
    """
    for of_lists, of_ranges in zip(listed, ranges, strict=True):
        once = 2 if of_lists["kernel"] == "forward_kernel" else 0  # copies by TMA outside of loops: q and o
        assert of_lists["shared"] <= of_ranges["shared"] + 1024, (of_lists, of_ranges)
        assert of_ranges["tma"] > once, of_ranges
        assert of_lists["tma"] - once == 2 * (of_ranges["tma"] - once), (of_lists, of_ranges)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", ["loaded-ids", "windows-by-head"])
def test_lists_in_both_passes(variant: str, head_dim: int) -> None:
    call = {"head_dim": head_dim, "variant": variant, "dtype": "bfloat16"}
    walk_alike(compiled("sm_90a", [call | {"listed": True}]), compiled("sm_90a", [call]))


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True])
def test_ranges_of_64_bits(listed: bool) -> None:
    """Bounds of a neighborhood are products of positions, and a copy by TMA takes coordinates of 32 bits."""
    assert compiled("sm_90a", [{"head_dim": 64, "variant": "neighborhood", "listed": listed}])


SLOW = [
    (arch, call)
    for arch in ("sm_90a", "sm_80", "gfx942")
    for call in (
        {"head_dim": 64, "variant": "causal"},
        {"head_dim": 64, "variant": "prefix|window+alibi+softcap", "group": 4},
        {"head_dim": 128, "variant": "documents+bias_tiles_fp16_bh", "dtype": "bfloat16"},
        {"head_dim": 192, "head_dim_v": 128, "variant": "causal"},
        {"head_dim": 256, "variant": "causal"},
        {"head_dim": 80, "aligned": False},
        {"head_dim": 128, "dtype": "float32"},
        {"head_dim": 256, "dtype": "float32", "variant": "causal+bias"},
        {"head_dim": 64, "variant": "function_empty_rows+bias+bias_tiles_1"},
        {"head_dim": 128, "variant": "function+bias_bh+user"},
        {"head_dim": 256, "variant": "causal&documents+bias_b+bias_tiles"},
        {"head_dim": 248, "variant": "function_tensor+softcap", "aligned": False},
        {"head_dim": 64, "head_dim_v": 128, "variant": "function_empty_rows+user_tensor"},
        {"head_dim": 128, "variant": "window_left+user_tiles_tensor"},
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "call"), SLOW, ids=lambda value: value if isinstance(value, str) else str(value))
def test_other_calls(arch: str, call: dict[str, Any]) -> None:
    """They fit into shared memory. Registers may spill in float32, and where scores are modified."""
    for report in compiled(arch, [call]):
        assert report["shared"] <= SHARED_BYTES[arch], report
