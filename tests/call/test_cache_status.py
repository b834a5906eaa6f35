"""The errors of calls on caches that a GPU reports later: their texts, and the pause between copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tileattn.call import cache_fields, cache_status, deferred_status, packed_status
from tileattn.call.cache_status import check_caches, raise_pending, report, status_of

CPU = torch.device("cpu")
FIELDS = {
    "SEQLENS_K": "seqlens_k .* capacity",
    "PAGE_TABLE": "page_table's entries .* number of pages",
    "CU_SEQLENS_Q": "cu_seqlens_q .* total_q",
    "MAX_SEQLEN_Q": "max_seqlen_q .* longest",
    "POSITIONS": "cos and sin .* position",
}


class InstantCopy(deferred_status.Copy):
    """Arrives when it is started."""

    started = 0

    def __init__(self, fields: int) -> None:
        self.values = torch.full((fields,), -1, dtype=torch.int32)

    def start(self, status: Tensor) -> None:
        self.values.copy_(status)
        InstantCopy.started += 1

    def mark(self, status: Tensor) -> None:
        pass

    def has_arrived(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element, of a status without a device so far."""
    now = [100.0]
    InstantCopy.started = 0
    monkeypatch.setattr(deferred_status, "Copy", InstantCopy)
    monkeypatch.setattr(deferred_status.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return now


@pytest.mark.parametrize(("name", "says"), FIELDS.items(), ids=FIELDS)
@pytest.mark.usefixtures("clock")
def test_what_each_field_says(name: str, says: str) -> None:
    status_of(CPU)[getattr(cache_fields, name)] = 4
    with pytest.raises(ValueError, match=rf"{says}.* earlier call on caches was wrong at sequence 3"):
        check_caches()
    check_caches()


@pytest.mark.usefixtures("clock")
def test_every_field_has_a_text_and_a_place() -> None:
    assert sorted(getattr(cache_fields, name) for name in FIELDS) == list(range(cache_fields.FIELDS))
    assert status_of(CPU).tolist() == [0] * cache_fields.FIELDS
    assert status_of(CPU).dtype == torch.int32


def test_a_later_call_raises(clock: list[float]) -> None:
    status_of(CPU)[cache_fields.PAGE_TABLE] = 1
    raise_pending()
    report(CPU)
    with pytest.raises(ValueError, match=r"page_table.* sequence 0"):
        raise_pending()
    raise_pending()


def test_copies_are_a_pause_apart(clock: list[float]) -> None:
    status_of(CPU)
    for _ in range(3):
        report(CPU)
        raise_pending()
        clock[0] += 4e-3
    assert InstantCopy.started == 1
    report(CPU)
    assert InstantCopy.started == 2


@pytest.mark.usefixtures("clock")
def test_packed_calls_have_a_status_of_their_own() -> None:
    status_of(CPU)[cache_fields.SEQLENS_K] = 1
    packed_status.check_packed()
    with pytest.raises(ValueError, match="seqlens_k"):
        check_caches()


@pytest.mark.usefixtures("clock")
def test_a_status_made_in_inference_mode_serves_all_calls() -> None:
    with torch.inference_mode():
        status = status_of(CPU)
    status[cache_fields.PAGE_TABLE] = 1
    with pytest.raises(ValueError, match=r"page_table.* sequence 0"):
        check_caches()
    check_caches()


@pytest.mark.gpu
def test_a_copy_made_in_inference_mode_serves_all_calls() -> None:
    status = torch.arange(5, dtype=torch.int32, device="cuda")
    with torch.inference_mode():
        copy = deferred_status.Copy(5)
    copy.start(status)
    torch.cuda.synchronize()
    assert copy.has_arrived()
    assert copy.values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_another_stream_waits_for_the_zeros() -> None:
    """What was in the memory of a status before is no error."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind = deferred_status.DeferredStatus(["wrong"], "tests")
    stream, copy = torch.cuda.Stream(), deferred_status.Copy(1)
    del copy  # its pinned memory is there to be taken: new memory would be pinned when the GPU has nothing left to do
    torch.full((1,), 7, dtype=torch.int32, device=device)  # likely in the same memory
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    kind.of(device)  # zeros behind the sleep
    with torch.cuda.stream(stream):
        kind.report(device)
    assert not kind.devices[device].under_way
    torch.cuda.synchronize()
    kind.report(device)
    assert kind.devices[device].under_way
    kind.check()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    check_caches()
    status = status_of(device)
    torch.cuda._sleep(20_000_000)
    status[cache_fields.SEQLENS_K] = 5  # behind the sleep
    report(device)
    with pytest.raises(ValueError, match=r"seqlens_k .* sequence 4"):
        check_caches()
    check_caches()
