"""The rows that small backward passes keep for the next one of their thread on their stream."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch

from tileattn.kernels.tilelang.backward import workspaces
from tileattn.kernels.tilelang.backward.hopper.dq_order import COLUMNS
from tileattn.kernels.tilelang.backward.workspaces import Rows, rows_of

Q = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16)
SHAPE = (1, 2, 64)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Where passes run, by its last element, as on a GPU."""
    places: list[Hashable] = ["here"]
    monkeypatch.setattr(workspaces, "_place", lambda device: places[-1])
    monkeypatch.setattr(workspaces, "_kept", {})
    return places


def test_the_next_pass_of_a_place_has_the_same_rows(place: list[Hashable]) -> None:
    rows = rows_of(Q, SHAPE, 64, True)
    assert rows_of(Q, SHAPE, 64, True) is rows
    place.append("elsewhere")
    others = rows_of(Q, SHAPE, 64, True)
    assert not shared(rows, others)
    place.append("here")
    assert rows_of(Q, SHAPE, 64, True) is rows


@pytest.mark.parametrize(
    "other", [((1, 2, 128), 64, True), (SHAPE, 128, True), (SHAPE, 64, False), (SHAPE, None, True)]
)
def test_a_pass_of_another_shape_has_its_own(
    place: list[Hashable], other: tuple[tuple[int, int, int], int, bool]
) -> None:
    rows = rows_of(Q, SHAPE, 64, True)
    q_rows, dq_dim, own_order = other
    lse2, delta, sums, ordered = rows_of(Q, q_rows, dq_dim, own_order)
    assert lse2.shape == delta.shape == q_rows
    assert [x.shape for x in sums] == [(*q_rows, dq_dim)] * (dq_dim is not None)
    assert [x.shape[-1] for x in ordered] == [COLUMNS if own_order else dq_dim] * (dq_dim is not None)
    assert not shared(rows, Rows(lse2, delta, sums, ordered))
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (lse2, delta, *sums, *ordered))


def test_large_passes_and_captures_keep_nothing(place: list[Hashable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "MOST_KEPT", 4 * 2 * 64 * 64 - 1)
    assert not shared(rows_of(Q, SHAPE, 64, True), rows_of(Q, SHAPE, 64, True))
    place.append(None)
    assert not shared(rows_of(Q, SHAPE, 32, True), rows_of(Q, SHAPE, 32, True))
    assert not workspaces._kept


def test_few_places_are_kept(place: list[Hashable]) -> None:
    for number in range(3 * workspaces.PLACES):
        place.append(number)
        rows_of(Q, SHAPE, 64, True)
        assert len(workspaces._kept) <= workspaces.PLACES


def test_a_cpu_is_no_place() -> None:
    assert workspaces._place(Q.device) is None


def shared(x: Rows, y: Rows) -> bool:
    addresses = [{t.data_ptr() for t in (rows.lse2, rows.delta, *rows.sums)} for rows in (x, y)]
    return bool(addresses[0] & addresses[1])
