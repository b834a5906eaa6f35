"""The errors of packed calls that a GPU reports later: the host's side, on a stand-in for copies and events."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import packed_status
from tileattn.packed_status import check_packed, raise_pending, report


class FakeCopy(packed_status._Copy):
    """Arrives when it is told to, or waited for."""

    made: list[FakeCopy] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.values = torch.full((4,), -1, dtype=torch.int32)
        self.arrived = False
        self.made.append(self)

    def start(self, status: Tensor) -> None:
        self.device, self.source, self.arrived = status.device, status, False

    def arrive(self) -> None:
        self.values.copy_(self.source)
        self.arrived = True

    def has_arrived(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrive()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[FakeCopy]:
    FakeCopy.made = []
    monkeypatch.setattr(packed_status, "_Copy", FakeCopy)
    monkeypatch.setattr(packed_status, "_reports", packed_status._Reports())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return FakeCopy.made


def status(*fields: int) -> Tensor:
    return torch.tensor(fields, dtype=torch.int32)


RIGHT = status(0, 0, 0, 0)


def test_nothing_is_raised_before_the_status_has_arrived(copies: list[FakeCopy]) -> None:
    raise_pending()
    report(status(0, 3, 0, 0))
    raise_pending()
    copies[0].arrive()
    with pytest.raises(ValueError, match=r"cu_seqlens_k must .* earlier call .* wrong at sequence 2"):
        raise_pending()
    raise_pending()


@pytest.mark.parametrize(
    ("field", "says"),
    enumerate(
        ("cu_seqlens_q .* total_q", "cu_seqlens_k .* total_k", "max_seqlen_q .* longest", "max_seqlen_k .* longest")
    ),
)
def test_what_each_field_says(copies: list[FakeCopy], field: int, says: str) -> None:
    report(status(*(7 * (i == field) for i in range(4))))
    with pytest.raises(ValueError, match=says) as raised:
        tileattn.check_packed()
    assert "sequence 6" in str(raised.value)


def test_check_packed_waits_for_all_and_forgets_them(copies: list[FakeCopy]) -> None:
    for each in (RIGHT, status(1, 0, 0, 0), RIGHT, status(0, 0, 2, 0)):
        report(each)
    with pytest.raises(ValueError, match=r"cu_seqlens_q .* at sequence 0"):
        check_packed()
    check_packed()
    raise_pending()


def test_each_error_is_raised_once_in_order(copies: list[FakeCopy]) -> None:
    for each in (status(1, 0, 0, 0), RIGHT, status(0, 0, 2, 0)):
        report(each)
    for copy in copies:
        copy.arrive()
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        raise_pending()
    with pytest.raises(ValueError, match="max_seqlen_q"):
        raise_pending()
    raise_pending()


def test_copies_are_used_again(copies: list[FakeCopy]) -> None:
    for _ in range(5):
        raise_pending()
        report(RIGHT)
        copies[0].arrive()
    assert len(copies) == 1
    report(RIGHT)
    assert len(copies) == 2


def test_a_captured_graph_is_left_alone(copies: list[FakeCopy], monkeypatch: pytest.MonkeyPatch) -> None:
    report(status(1, 0, 0, 0))
    copies[0].arrive()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    report(RIGHT)
    raise_pending()
    assert len(copies) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        raise_pending()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_packed()
    for each in (RIGHT, status(0, 0, 0, 5)):
        report(each.cuda())
    with pytest.raises(ValueError, match=r"max_seqlen_k .* sequence 4"):
        check_packed()
    check_packed()


@pytest.mark.gpu
def test_a_copy_waits_for_the_stream() -> None:
    """The status is what the kernels before have made of it."""
    check_packed()
    on_device = RIGHT.cuda()
    torch.cuda._sleep(20_000_000)
    on_device[1] = 1
    report(on_device)
    with pytest.raises(ValueError, match=r"cu_seqlens_k .* sequence 0"):
        check_packed()
