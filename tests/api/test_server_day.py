"""A server's day: thousands of steps on one paged cache, each beside a plain reference (tests/tools/server_day.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tileattn
from tests.tools.cached_sequences import Cache, Heads, Rows, decoded, draw
from tests.tools.server_day import Counts, Day, Server
from tileattn import FixedSplit, SlidingWindow

SMALL = Day(
    Heads(4, 2, 16, 24, torch.bfloat16, "cpu"),
    backend="torch", steps=120, page_size=4, pages=44, running=5, capacity=90, prompt=40, chunk=20,
)  # fmt: skip
LARGE = Day(
    Heads(8, 2, 64, 64, torch.bfloat16, "cuda"),
    backend="tilelang", steps=300, page_size=16, pages=500, running=16, capacity=1400, prompt=700, chunk=130,
)  # fmt: skip
DAYS = {
    "plain": {},
    "crowded": {"pages": 25, "seed": 6},
    "window": {"window": 23, "seed": 1},
    "fixed": {"splits": FixedSplit(128), "seed": 2},
    "pages of 1": {"page_size": 1, "pages": 170, "seed": 3},
    "pages of 3": {"page_size": 3, "pages": 60, "seed": 4},
}


def check_the_day(day: Day) -> Counts:
    """Runs a day; it must have had everything in it."""
    counts = Server(day).run()
    assert min(counts.arrivals, counts.ends, counts.shared, counts.reused, counts.rejected, counts.dense) > 2, counts
    assert counts.packed > day.steps // 3, counts
    assert counts.longest > day.capacity // 2, counts
    assert counts.given_back > 3 or day.window is None, counts
    return counts


@pytest.mark.slow_except("window", "fixed", "pages of 3", reason="1.3 s each")
@pytest.mark.parametrize("name", DAYS)
def test_a_day_on_a_cpu(name: str) -> None:
    counts = check_the_day(replace(SMALL, **DAYS[name]))
    assert counts.preempted > 2 or name != "crowded"


@pytest.mark.slow  # some minutes: Triton's interpreter
def test_a_day_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    day = replace(SMALL, backend="triton", steps=60, window=23)
    Server(day).run()


OF_GPUS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 200, "seed": 14},
    "fixed": {"splits": FixedSplit(128), "seed": 2},
    "pages of 1": {"page_size": 1, "pages": 8000, "seed": 3},
    "pages of 64": {"page_size": 64, "pages": 130, "seed": 4},
    "128": {"sizes": Heads(32, 4, 128, 128, torch.bfloat16, "cuda"), "seed": 5},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_GPUS)
@pytest.mark.parametrize("backend", ["tilelang", "triton"])
def test_a_day_on_a_gpu(backend: str, name: str) -> None:
    check_the_day(replace(LARGE, backend=backend, **OF_GPUS[name]))


@pytest.mark.gpu
@pytest.mark.slow  # minutes: 10,000 steps
@pytest.mark.parametrize(("backend", "window"), [("tilelang", None), ("tilelang", 300), ("triton", None)])
def test_ten_thousand_steps(backend: str, window: int | None) -> None:
    check_the_day(replace(LARGE, backend=backend, window=window, steps=10_000, seed=7))


# --- The reference sees what goes wrong ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.roll(1, 0).clamp(0, 43), "lse of step|are NaN|written token changed"),
        (lambda table: table.clamp(min=0) % 44, None),
    ],
    ids=["other pages", "entries that are not followed"],
)
def test_wrong_tables_are_seen(change: Any, says: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of other sequences fail; entries behind a sequence's pages may be any."""
    real = tileattn.decode

    def changed(*arguments: Any, page_table: torch.Tensor, **named: Any) -> Any:
        return real(*arguments, page_table=change(page_table), **named)

    monkeypatch.setattr(tileattn, "decode", changed)
    monkeypatch.setattr(tileattn, "decode_plan", lambda *arguments, **named: None)
    day = replace(SMALL, steps=40)
    if says is None:
        Server(day).run()
    else:
        with pytest.raises(AssertionError, match=says):
            Server(day).run()


def test_a_stray_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a page that nobody has."""
    server = Server(replace(SMALL, steps=5))
    server.k_cache[server.free[0], 0, 0, 0] = 0.0
    with pytest.raises(AssertionError, match="a page of nobody was written"):
        server.check_cache()


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""
    for changes in (*OF_GPUS.values(), {"window": 300}):
        day = replace(LARGE, **changes)
        sizes = replace(day.sizes, device="meta")
        mask = None if day.window is None else SlidingWindow(day.window, 0)
        for packed, q_len in ((False, 1), (True, 3), (True, day.chunk)):
            rows = [Rows(draw(sizes, 150, seed), 4, q_len) for seed in (0, 1)]
            cache = Cache(day.page_size, packed)
            yield functools.partial(decoded, rows, cache, mask=mask, splits=day.splits, backend="tilelang")
