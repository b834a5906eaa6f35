"""The planning kernel of packed sequences, run on the CPU by emulate() and compared with the same plan in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tileattn.call import packed_status
from tileattn.call.facts import Packed
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.packed import plan as packed_launch
from tileattn.kernels.tilelang.packed import work_list as records
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel
from tileattn.testing.emulator.kernel import COMPILER, Kernel

LENGTHS = {
    "one": ([5], [7]),
    "skewed": ([300, 0, 1, 17, 129, 64, 0], [300, 3, 0, 40, 129, 64, 0]),
    "equal": ([100] * 40, [100] * 40),  # more than a warp
    "decoding": ([1] * 70, [(37 * i) % 91 for i in range(70)]),
    "nothing": ([0, 0], [0, 0]),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if COMPILER is None:
        pytest.skip("needs g++")
    return Kernel(plan_kernel("sm_80"), tmp_path_factory.mktemp("plan"))


@pytest.fixture
def launched(emulated: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_launch, "plan_function", lambda arch: emulated)
    monkeypatch.setattr(packed_status.STATUS, "devices", {})


@pytest.fixture
def status(launched: None) -> Tensor:
    return packed_status.status_of(torch.device("cpu"))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def model(q_lengths: list[int], k_lengths: list[int], total_q: int, total_k: int, tile: int, of_keys: bool) -> Tensor:
    """The list as it should be, for lengths that are right."""
    count = len(q_lengths)
    cu_q, cu_k = bounds(q_lengths).tolist(), bounds(k_lengths).tolist()
    rows, others = (k_lengths, q_lengths) if of_keys else (q_lengths, k_lengths)
    work_list: list[list[int]] = []

    def add(sequence: int, q_start: int, q_len: int, k_start: int, k_len: int) -> None:
        padded = [(max(x, 0) + sequence * 144) // 16 * 16 for x in (q_start, k_start)]
        record = [min(sequence, count - 1), len(work_list), q_start, q_len, k_start, k_len, *padded]
        work_list.extend([record] * -(-(k_len if of_keys else q_len) // tile))

    for i in sorted(range(count), key=lambda i: -others[i]):
        if rows[i]:
            add(i, cu_q[i], q_lengths[i], cu_k[i], k_lengths[i])
    if of_keys:
        add(count, -1, 0, cu_k[-1], total_k - cu_k[-1])
    else:
        add(count, cu_q[-1], total_q - cu_q[-1], -1, 0)
    return torch.tensor(work_list, dtype=torch.int32).reshape(-1, records.WIDTH)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("rest", [0, 1, 200], ids="rest-{}".format)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_list(lengths: tuple[list[int], list[int]], rest: int, tile: int, of_keys: bool) -> None:
    total_q, total_k = sum(lengths[0]) + rest, sum(lengths[1]) + rest
    packed = Packed(bounds(lengths[0]), bounds(lengths[1]), max(lengths[0]), max(lengths[1]))
    work = packed_launch.work_list("sm_80", packed, total_q, total_k, tile, of_keys=of_keys)
    expected = model(*lengths, total_q, total_k, tile, of_keys)
    assert work[0].tolist() == [len(expected), *[0] * 7]
    assert torch.equal(work[1 : 1 + len(expected)], expected)
    assert packed_status.status_of(work.device).tolist() == [0, 0, 0, 0]


def test_capacity_is_enough() -> None:
    for tile in (1, 3, 64):
        for lengths in ([1] * 9, [tile + 1] * 5, [0] * 4, [2 * tile - 1, 1, 0, tile]):
            for rest in (0, 1, tile + 1):
                tiles = sum(-(-rows // tile) for rows in [*lengths, rest])
                assert tiles <= records.capacity(sum(lengths) + rest, len(lengths), tile)
                padded = sum(-(-rows // 128) * 128 for rows in [*lengths, rest])
                assert padded <= records.padded_rows(sum(lengths) + rest, len(lengths))


# Cumulative lengths, and the first sequence that is wrong; tensors have 10 rows.
WRONG = {
    "not-from-zero": ([1, 4, 9], 0),
    "negative": ([-5, 4, 9], 0),
    "not-monotone": ([0, 4, 3, 9], 1),
    "huge": ([0, 2**31 - 1, -(2**31), 9], 1),
    "beyond": ([0, 4, 11], 1),
}


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("keys_wrong", [False, True], ids=["wrong-q", "wrong-k"])
@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong(case: tuple[list[int], int], keys_wrong: bool, of_keys: bool) -> None:
    """All rows are unused, and the status says why."""
    given, sequence = case
    right, wrong = torch.arange(len(given), dtype=torch.int32), torch.tensor(given, dtype=torch.int32)
    packed = Packed(*((right, wrong) if keys_wrong else (wrong, right)), 2**31 - 1, 2**31 - 1)
    status = [0, sequence + 1, 0, 0] if keys_wrong else [sequence + 1, 0, 0, 0]
    _check_unused(packed, of_keys, status)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_too_long(of_keys: bool) -> None:
    bounds = torch.tensor([0, 2, 10, 10], dtype=torch.int32)
    _check_unused(Packed(bounds, bounds, 7, 8), of_keys, [0, 0, 2, 0])
    _check_unused(Packed(bounds, bounds, 8, 7), of_keys, [0, 0, 0, 2])
    _check_unused(Packed(bounds, bounds + 3, 7, 1), of_keys, [0, 1, 2, 1])


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_lengths_far_beyond_write_nothing_behind_the_list(
    of_keys: bool, emulated: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guarded(q_bounds: Tensor, k_bounds: Tensor, work: Tensor, *rest: Any) -> None:
        larger = torch.full((len(work) + 3000, records.WIDTH), 77, dtype=torch.int32)
        emulated(q_bounds, k_bounds, larger, *rest)
        assert (larger[len(work) :] == 77).all()
        work.copy_(larger[: len(work)])

    monkeypatch.setattr(packed_launch, "plan_function", lambda arch: guarded)
    wrong = torch.tensor([0, 5000, 9000], dtype=torch.int32)
    _check_unused(Packed(wrong, wrong, 2**31 - 1, 2**31 - 1), of_keys, [2, 2, 0, 0])


@pytest.mark.usefixtures("launched")
def test_one_status_serves_all_calls(status: Tensor) -> None:
    """What is right does not take back what was wrong before."""
    bounds = torch.tensor([0, 2, 10, 10], dtype=torch.int32)
    for longest in (10, 7, 10):
        packed_launch.work_list("sm_80", Packed(bounds, bounds, longest, 10), 10, 10, 4)
    assert status.tolist() == [0, 0, 2, 0]


def _check_unused(packed: Packed, of_keys: bool, status: list[int]) -> None:
    words = packed_status.status_of(packed.cu_seqlens_q.device).zero_()
    work = packed_launch.work_list("sm_80", packed, 10, 10, 4, of_keys=of_keys)
    assert work[0].tolist() == [3, *[0] * 7]
    assert words.tolist() == status
    last = packed.cu_seqlens_q.numel() - 1
    start = [-1, 0, 0, 10] if of_keys else [0, 10, -1, 0]
    assert work[1:4].tolist() == [[last - 1, 0, *start, last * 144, last * 144]] * 3


@pytest.mark.usefixtures("launched")
def test_lists_of_one_launch() -> None:
    """Lists of queries and of keys, in tiles of different sizes, equal those of separate launches."""
    q_lengths, k_lengths = LENGTHS["skewed"]
    total_q, total_k = sum(q_lengths) + 3, sum(k_lengths)
    packed = Packed(bounds(q_lengths), bounds(k_lengths), 300, 300)
    cuts = [(64, False), (128, True), (80, False)]
    for count in (1, 2, 3):
        lists = packed_launch.work_lists("sm_80", packed, total_q, total_k, cuts[:count])
        assert len(lists) == count
        for work, (tile, of_keys) in zip(lists, cuts):
            expected = model(q_lengths, k_lengths, total_q, total_k, tile, of_keys)
            assert len(work) == 1 + records.capacity(total_k if of_keys else total_q, len(q_lengths), tile)
            assert work[0].tolist() == [len(expected), *[0] * 7]
            assert torch.equal(work[1 : 1 + len(expected)], expected)


@pytest.mark.slow(reason="lowers two kernels, 6 s")
def test_next_kernel_starts_early() -> None:
    """The instruction exists from sm_90 on."""
    early = "cudaTriggerProgrammaticLaunchCompletion"
    assert early in device_source(plan_kernel("sm_90a"), "sm_90a")
    assert early not in device_source(plan_kernel("sm_80"), "sm_80")
