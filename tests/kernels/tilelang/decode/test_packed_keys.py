"""The kernel that finds each sequence's packed keys, run on the CPU by emulate(): places, lengths and errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tileattn.kernels.tilelang.decode.packed_keys import packed_keys_kernel
from tileattn.kernels.tilelang.decode.records import KEYS_BOUND, KEYS_FIELDS, KEYS_LENGTH, KEYS_START
from tileattn.testing.emulator.kernel import COMPILER, Kernel

Find = Callable[..., tuple[Tensor, list[int]]]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    if COMPILER is None:
        pytest.skip("needs g++")
    kernel = Kernel(packed_keys_kernel("sm_80"), tmp_path_factory.mktemp("packed_keys"))

    def found(q: list[int], k: list[int], sizes: tuple[int, int, int, int]) -> tuple[Tensor, list[int]]:
        """What the kernel wrote, and the status."""
        result = torch.full((KEYS_FIELDS, len(q) + 3), -77, dtype=torch.int32)
        status = torch.zeros(4, dtype=torch.int32)
        kernel(*(torch.tensor(ends, dtype=torch.int32) for ends in (q, k)), result, status, *sizes)
        assert (result[:, len(q) :] == -77).all()
        return result[:, : len(q)], status.tolist()

    return found


def test_finds_the_keys_of_more_sequences_than_threads(find: Find) -> None:
    lengths = [(37 * i) % 901 for i in range(300)]
    k = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q = [2 * i for i in range(301)]
    result, status = find(q, k, (605, k[-1] + 3, 2, 900))
    assert status == [0, 0, 0, 0]
    assert result[KEYS_BOUND].tolist() == q
    assert result[KEYS_START].tolist() == k
    assert result[KEYS_LENGTH].tolist() == [*lengths, 0]


@pytest.mark.parametrize(
    ("q", "k", "field"),
    [
        ([1, 2, 3], [0, 5, 9], 0),
        ([0, 2, 1], [0, 5, 9], 0),
        ([0, 2, 5], [0, 5, 9], 0),
        ([0, 2, 3], [1, 5, 9], 1),
        ([0, 2, 3], [0, 5, 4], 1),
        ([0, 2, 3], [0, 5, 12], 1),
        ([0, 3, 4], [0, 5, 9], 2),
        ([0, 2, 3], [0, 8, 9], 3),
    ],
)
def test_wrong_lengths_leave_no_keys_and_no_queries(find: Find, q: list[int], k: list[int], field: int) -> None:
    result, status = find(q, k, (4, 11, 2, 7))
    assert (result == 0).all()
    assert status[field] > 0


def test_the_longest_are_right(find: Find) -> None:
    assert find([0, 2, 4], [0, 7, 11], (4, 11, 2, 7))[1] == [0, 0, 0, 0]
