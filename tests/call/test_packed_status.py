"""The errors of packed calls that a GPU reports later: the host's side, on a stand-in for copies and events."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn.call import deferred_status, packed_status
from tileattn.call.packed_status import check_packed, raise_pending, report, status_of

CPU = torch.device("cpu")


class FakeCopy(deferred_status.Copy):
    """Arrives when it is told to."""

    made: list[FakeCopy] = []  # noqa: RUF012

    def __init__(self, fields: int) -> None:
        self.values = torch.full((fields,), -1, dtype=torch.int32)
        self.arrived, self.started = False, 0
        self.made.append(self)

    def start(self, status: Tensor) -> None:
        self.source, self.arrived = status.clone(), False
        self.started += 1

    def mark(self, status: Tensor) -> None:
        self.source, self.arrived = status.clone(), False

    def arrive(self) -> None:
        self.values.copy_(self.source)
        self.arrived = True

    def has_arrived(self) -> bool:
        return self.arrived


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[FakeCopy]:
    FakeCopy.made = []
    monkeypatch.setattr(deferred_status, "Copy", FakeCopy)
    monkeypatch.setattr(packed_status.STATUS, "devices", {})
    monkeypatch.setattr(packed_status.STATUS, "pause", 0.0)  # test_cache_status.py has the pause
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return FakeCopy.made


def call(*wrong: int) -> None:
    """What a packed call does, whose kernel finds the sequences in `wrong`, by field."""
    raise_pending()
    status = status_of(CPU)
    for field, sequence in enumerate(wrong):
        if sequence:
            status[field] = sequence
    report(CPU)


def test_nothing_is_raised_before_a_copy_has_arrived(copies: list[FakeCopy]) -> None:
    call(0, 3, 0, 0)
    call()
    copies[0].arrive()
    with pytest.raises(ValueError, match=r"cu_seqlens_k must .* earlier call .* wrong at sequence 2"):
        call()
    call()
    copies[0].arrive()
    call()


@pytest.mark.parametrize(
    ("field", "says"),
    enumerate(
        ("cu_seqlens_q .* total_q", "cu_seqlens_k .* total_k", "max_seqlen_q .* longest", "max_seqlen_k .* longest")
    ),
)
def test_what_each_field_says(copies: list[FakeCopy], field: int, says: str) -> None:
    call(*(7 * (i == field) for i in range(4)))
    with pytest.raises(ValueError, match=says) as raised:
        tileattn.check_packed()
    assert "sequence 6" in str(raised.value)


def test_check_packed_knows_what_no_copy_has_seen(copies: list[FakeCopy]) -> None:
    call()
    call(1, 0, 0, 0)
    assert copies[0].started == 1
    with pytest.raises(ValueError, match=r"cu_seqlens_q .* at sequence 0"):
        check_packed()
    check_packed()
    raise_pending()


def test_an_error_is_raised_once(copies: list[FakeCopy]) -> None:
    call(1, 0, 2, 0)
    copies[0].arrive()
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        raise_pending()
    raise_pending()
    call()
    copies[0].arrive()
    call()
    check_packed()


def test_no_copy_starts_before_the_error_is_cleared(copies: list[FakeCopy]) -> None:
    """Another stream's copy could have the same error again, and a correct call would raise it."""
    call(1, 0, 0, 0)
    copies[0].arrive()
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        call()
    call()
    assert copies[0].started == 1
    copies[0].arrive()
    call()
    assert copies[0].started == 2


def test_one_copy_is_under_way_at_a_time(copies: list[FakeCopy]) -> None:
    for _ in range(5):
        call()
    assert (len(copies), copies[0].started) == (1, 1)
    copies[0].arrive()
    call()
    assert (len(copies), copies[0].started) == (1, 2)


def test_a_capture_copies_nothing_and_asks_for_nothing(copies: list[FakeCopy], monkeypatch: pytest.MonkeyPatch) -> None:
    call(1, 0, 0, 0)
    copies[0].arrive()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call()
    assert copies[0].started == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        raise_pending()


def test_nothing_to_check(copies: list[FakeCopy]) -> None:
    check_packed()
    raise_pending()
    report(CPU)
    assert not copies


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    check_packed()
    status = status_of(device)
    assert status_of(device) is status
    torch.cuda._sleep(20_000_000)
    status[3] = 5  # behind the sleep
    report(device)
    with pytest.raises(ValueError, match=r"max_seqlen_k .* sequence 4"):
        check_packed()
    check_packed()
    status[1] = 1
    report(device)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"cu_seqlens_k .* sequence 0"):
        raise_pending()
    check_packed()
