"""The kernels for dk and dv, and for dq, beside each other: which calls, in which order, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tileattn import Causal, SlidingWindow, SoftCap
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch, two_streams
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.library import Kernels, kernel_names
from tileattn.kernels.tilelang.backward.two_streams import LEAST_WORK, launch_beside, runs_beside
from tileattn.variant.key import encode

GPU = torch.device("cuda", 0)


def call_of(
    mask: Any = None, dims: tuple[int, int] = (192, 192), deterministic: bool = False, mods: Any = (), **facts: Any
) -> BackwardCall:
    variant, _ = encode(mask, mods)
    forward = AttentionCall(torch.bfloat16, *dims, variant, **{"arch": "sm_90a", "needs_grad": True, **facts})
    return BackwardCall(forward, (True, True, True, False), deterministic=deterministic)


def pays_for(call: BackwardCall, seqlen_q: int = 4096, seqlen_k: int = 4096, heads: int = 16) -> bool:
    dim = call.forward.head_dim
    return runs_beside(
        call, default(call), torch.Size((1, seqlen_q, heads, dim)), torch.Size((1, seqlen_k, heads, dim))
    )


# --- Which calls ---


def test_calls_whose_work_is_known() -> None:
    for known in (
        call_of(),
        call_of(Causal()),
        call_of(dims=(192, 128)),
        call_of(dims=(64, 64), deterministic=True),
        call_of(mods=(SoftCap(30.0),)),
    ):
        assert pays_for(known)
    for other in (call_of(packed=True), call_of(SlidingWindow(100, 0)), call_of(arch="sm_80")):
        assert not pays_for(other)
    assert isinstance(default(call_of(arch="sm_80")), BackwardConfig)


@pytest.mark.parametrize("dims", [(192, 192), (192, 128)])
def test_small_passes_stay_on_one_stream(dims: tuple[int, int]) -> None:
    """Seven products: S and dP twice, dQ, dK, dV."""
    call, causal = call_of(dims=dims), call_of(Causal(), dims)
    of_score = 2 * (4 * dims[0] + 3 * dims[1])
    least = int(-(-LEAST_WORK // (of_score * 1000)))  # keys for 1000 queries of one head
    assert pays_for(call, 1000, least, 1)
    assert not pays_for(call, 1000, least - 1, 1)
    # Under a causal mask the first of 1000 queries sees 999 keys less than the last.
    assert not pays_for(causal, 1000, least + 498, 1)
    assert pays_for(causal, 1000, least + 500, 1)
    assert pays_for(causal, 2**20, least + 500, 1) == (of_score * (least + 500) * (least + 501) / 2 >= LEAST_WORK)


# --- Streams, by stand-ins ---


@dataclass(frozen=True)
class Stream:
    """A stream that notes what it waits for."""

    cuda_stream: int
    log: list[Any]
    device_index: int = 0
    device: torch.device = GPU

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.cuda_stream, "waits for", other.cuda_stream))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream


class Streams:
    """A GPU's streams. pool: those that are given out, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: tuple[int, ...] = (7, 8, 9)) -> None:
        self.log: list[Any] = []
        self.pool = iter(pool * 50)
        self.current = Stream(3, self.log)
        self.fails: str = ""
        monkeypatch.setattr(two_streams, "_seconds", {})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(self.pool), self.log))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, name: str) -> None:
        if name == self.fails:
            raise RuntimeError(f"{name} fails")
        self.log.append((self.current.cuda_stream, "launches", name))

    def beside(self) -> list[Any]:
        self.log.clear()
        launch_beside(lambda: self.launch("dq"), lambda: self.launch("dk, dv"), GPU)
        return list(self.log)


def expected(here: int, there: int) -> list[Any]:
    return [
        (there, "waits for", here),
        (here, "launches", "dq"),
        (there, "launches", "dk, dv"),
        (here, "waits for", there),
    ]


def test_both_come_after_what_was_before_and_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    assert streams.beside() == expected(3, 7)
    assert streams.current.cuda_stream == 3


def test_each_stream_and_thread_has_a_second_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    assert streams.beside() == streams.beside() == expected(3, 7)
    with streams.on(Stream(4, streams.log)):
        assert streams.beside() == expected(4, 8)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(streams.beside()))
    other.start()
    other.join()
    assert found == expected(3, 9)
    assert streams.beside() == expected(3, 7)


def test_the_second_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Streams(monkeypatch, pool=(3, 4)).beside() == expected(3, 4)


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    for number in range(100, 100 + 3 * two_streams.PLACES):
        with streams.on(Stream(number, streams.log)):
            streams.beside()
        assert len(two_streams._seconds) <= two_streams.PLACES


def test_what_was_launched_is_waited_for_if_another_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are freed while the error passes."""
    streams = Streams(monkeypatch)
    streams.fails = "dk, dv"
    with pytest.raises(RuntimeError, match="dk, dv fails"):
        streams.beside()
    assert streams.log[-1] == (3, "waits for", 7)


def test_a_cpu_has_no_streams() -> None:
    ran: list[str] = []
    launch_beside(lambda: ran.append("dq"), lambda: ran.append("dk, dv"), torch.device("cpu"))
    assert ran == ["dq", "dk, dv"]


# --- The launches of a pass ---


def launches(call: BackwardCall, worth: bool, shares: int = 1) -> list[str]:
    """What a pass launches; in brackets what is launched beside each other."""
    dim, dim_v = call.forward.head_dim, call.forward.head_dim_v
    q, k, v, do = (torch.zeros(1, 70, h, d).bfloat16() for h, d in ((4, dim), (2, dim), (2, dim_v), (4, dim_v)))
    seen: list[str] = []

    def kernel(name: str) -> Any:
        return lambda *arguments: seen.append(name)

    def beside(here: Any, there: Any, device: torch.device) -> None:
        assert device == q.device
        for function in (lambda: seen.append("["), here, lambda: seen.append("|"), there, lambda: seen.append("]")):
            function()

    kernels = Kernels(*(kernel(n) if n in kernel_names(call) else None for n in Kernels._fields))  # type: ignore[arg-type]
    with (
        mock.patch.object(launch, "backward_kernels", return_value=kernels),
        mock.patch.object(launch, "add_shares", return_value=kernel("add")),
        mock.patch.object(launch, "launch_beside", beside),
        mock.patch.object(two_streams, "LEAST_WORK", 0 if worth else 1e30),
    ):
        run = launch.prepare_backward_with(None, call, q.shape, k.shape, 0.25, shares)
        run(Inputs(q, k, v, operands=Operands()), do, torch.zeros(1, 4, 70), do, None)
    return seen


def test_the_launches_of_a_pass() -> None:
    beside = ["prepare", "[", "queries", "|", "main", "]"]
    for call in (call_of(), call_of(Causal(), (192, 128)), call_of(dims=(64, 64), deterministic=True)):
        assert launches(call, worth=True) == beside
        assert launches(call, worth=False) == ["prepare", "main", "queries"]
    assert launches(call_of(dims=(64, 64)), worth=True) == ["prepare", "main", "finish"]


def test_shares_are_added_up_on_the_stream_of_their_kernel() -> None:
    call = call_of(dims=(64, 64), deterministic=True)
    assert launches(call, worth=True, shares=2) == ["prepare", "[", "queries", "|", "main", "add", "]"]
    assert launches(call, worth=False, shares=2) == ["prepare", "main", "add", "queries"]
