"""A model in numpy of the Hopper kernel's barriers and stages. It computes attention and draws when what happens.

    python examples/hopper_model.py                       # the package's order of steps
    python examples/hopper_model.py --order simple        # products and softmax one after the other
    python examples/hopper_model.py --out timeline.png    # the picture; needs matplotlib

One producer and its consumers run as Python generators. They share barriers, buffers and three units: TMA, the tensor
cores and the unit for exponentials. Each unit does one thing after another. The arithmetic is real, so a wrong barrier
gives wrong numbers or a deadlock. The cycles are computed from peak rates; they are no measurement.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, KEYS, DIM = 64, 128, 128  # a consumer's queries, the keys of a tile, the head dim
# Cycles: bytes at 64 a cycle (assumed: from the L2 cache); multiply-adds at 2048; exponentials at 16.
LOAD, PRODUCT, SOFTMAX = KEYS * DIM * 2 // 64, ROWS * KEYS * DIM // 2048, ROWS * KEYS // 16

Condition = Callable[[], bool]
Program = Generator[tuple[str, Condition], None, None]


class Barrier:
    """An mbarrier: it counts arrivals. When all have come, its phase ends and the next one begins."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.come, self.phase = arrivals, 0, 0

    def arrive(self) -> None:
        self.come += 1
        if self.come == self.arrivals:
            self.come, self.phase = 0, self.phase + 1

    def ended(self, parity: int) -> bool:
        """Whether the last phase of this parity has ended. Before phase 0, a phase of parity 1 counts as ended."""
        return self.phase % 2 != parity


class Machine:
    """The clock, the units, and the programs that wait. `log` has (unit, label, start, end) of all that was done."""

    def __init__(self) -> None:
        self.now, self.log = 0, []
        self._free: dict[str, int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = count()

    def start(self, unit: str, label: str, cycles: int, effect: Callable[[], None]) -> Condition:
        """Starts an asynchronous operation: its effect happens at its end. Returns the condition to wait for."""
        begin = max(self.now, self._free.get(unit, 0))
        self._free[unit] = begin + cycles
        self.log.append((unit, label, begin, begin + cycles))
        done = [False]

        def end() -> None:
            effect()
            done[0] = True

        heapq.heappush(self._events, (begin + cycles, next(self._number), end))
        return lambda: done[0]

    def run(self, programs: dict[str, Program]) -> None:
        """Runs all programs to their ends; RuntimeError if they wait for each other."""
        waiting = {name: ("its start", lambda: True) for name in programs}
        while waiting:
            ready = [name for name, (_, condition) in waiting.items() if condition()]
            for name in ready:
                try:
                    waiting[name] = next(programs[name])
                except StopIteration:
                    del waiting[name]
            if not ready:
                if not self._events:
                    waits = ", ".join(f"{name} waits for {what}" for name, (what, _) in waiting.items())
                    raise RuntimeError(f"deadlock after {self.now} cycles: {waits}")
                self.now, _, end = heapq.heappop(self._events)
                end()


class Ring:
    """`stages` buffers for one of K and V, with the barriers of each."""

    def __init__(self, name: str, stages: int, consumers: int) -> None:
        self.name, self.stages = name, stages
        self.tiles = np.full((stages, KEYS, DIM), np.nan)
        self.ready = [Barrier(1) for _ in range(stages)]  # TMA arrives when the data has come
        self.free = [Barrier(consumers) for _ in range(stages)]  # each consumer arrives when it has read the data

    def place(self, n: int) -> tuple[int, int]:
        """The n-th tile's buffer, and how often this buffer was filled before."""
        return n % self.stages, n // self.stages

    def load(self, machine: Machine, n: int, tile: np.ndarray) -> Iterator[tuple[str, Condition]]:
        """The producer's part: wait for the buffer to be free, start the copy, go on."""
        stage, turn = self.place(n)
        yield f"{self.name}.free[{stage}]", lambda: self.free[stage].ended((turn + 1) % 2)

        def effect() -> None:
            self.tiles[stage] = tile
            self.ready[stage].arrive()

        machine.start("TMA", f"{self.name}{n}", LOAD, effect)

    def wait(self, n: int) -> tuple[str, Condition]:
        """What a consumer waits for before it reads the n-th tile."""
        stage, turn = self.place(n)
        return f"{self.name}.ready[{stage}]", lambda: self.ready[stage].ended(turn % 2)


def produce(machine: Machine, k: Ring, v: Ring, keys: np.ndarray, values: np.ndarray) -> Program:
    """The producer warp."""
    for n in range(len(keys) // KEYS):
        yield from k.load(machine, n, keys[n * KEYS : (n + 1) * KEYS])
        yield from v.load(machine, n, values[n * KEYS : (n + 1) * KEYS])


class Consumer:
    """A consumer warpgroup: its queries, and the state of the online softmax of its rows."""

    def __init__(self, name: str, machine: Machine, k: Ring, v: Ring, q: np.ndarray) -> None:
        self.name, self.machine, self.k, self.v, self.q = name, machine, k, v, q
        self.m, self.l = np.full((ROWS, 1), -np.inf), np.zeros((ROWS, 1))
        self.o, self.alpha = np.zeros((ROWS, DIM)), np.ones((ROWS, 1))

    def start_qk(self, n: int) -> Condition:
        def effect() -> None:
            stage, _ = self.k.place(n)
            self.s = self.q @ self.k.tiles[stage].T / DIM**0.5
            self.k.free[stage].arrive()

        return self.machine.start("tensor cores", f"{self.name}: S{n}", PRODUCT, effect)

    def start_softmax(self, n: int) -> Condition:
        def effect() -> None:
            m = np.maximum(self.m, self.s.max(1, keepdims=True))
            self.alpha, self.m = np.exp(self.m - m), m
            self.p = np.exp(self.s - m)
            self.l = self.l * self.alpha + self.p.sum(1, keepdims=True)

        return self.machine.start("exponentials", f"{self.name}: P{n}", SOFTMAX, effect)

    def start_pv(self, n: int) -> Condition:
        weights = self.p  # in registers of its own: the next softmax does not change it

        def effect() -> None:
            stage, _ = self.v.place(n)
            self.o += weights @ self.v.tiles[stage]
            self.v.free[stage].arrive()

        return self.machine.start("tensor cores", f"{self.name}: O{n}", PRODUCT, effect)

    def simple(self, tiles: int) -> Program:
        """Product, softmax, product: each waits for the one before."""
        for n in range(tiles):
            yield self.k.wait(n)
            yield "S", self.start_qk(n)
            yield "P", self.start_softmax(n)
            self.o *= self.alpha
            yield self.v.wait(n)
            yield "O", self.start_pv(n)

    def overlapped(self, tiles: int) -> Program:
        """S of the next tile is started before O of this one, so that its softmax runs under that product."""
        yield self.k.wait(0)
        yield "S", self.start_qk(0)
        yield "P", self.start_softmax(0)
        for n in range(1, tiles):
            yield self.k.wait(n)
            next_s = self.start_qk(n)
            yield self.v.wait(n - 1)
            this_o = self.start_pv(n - 1)
            yield "S", next_s
            yield "P", self.start_softmax(n)
            yield "O", this_o
            self.o *= self.alpha
        yield self.v.wait(tiles - 1)
        yield "O", self.start_pv(tiles - 1)


def attention(order: str, stages: int, tiles: int, consumers: int = 2) -> tuple[Machine, float]:
    """Runs a block of threads; the machine with its log, and the largest error of o."""
    random = np.random.default_rng(0)
    q, keys, values = (random.standard_normal((rows, DIM)) for rows in (consumers * ROWS, tiles * KEYS, tiles * KEYS))
    machine, k, v = Machine(), Ring("K", stages, consumers), Ring("V", stages, consumers)
    groups = [Consumer(name, machine, k, v, q[i * ROWS :][:ROWS]) for i, name in enumerate("ABC"[:consumers])]
    programs = {"producer": produce(machine, k, v, keys, values)}
    machine.run(programs | {f"consumer {each.name}": getattr(each, order)(tiles) for each in groups})
    o = np.concatenate([each.o / each.l for each in groups])
    weights = np.exp(q @ keys.T / DIM**0.5)
    return machine, float(np.abs(o - weights / weights.sum(1, keepdims=True) @ values).max())


def draw(machine: Machine, path: str) -> None:
    """Write the timeline as a picture; the path's suffix chooses the format."""
    figure(machine).savefig(path, dpi=160)


def figure(machine: Machine) -> Figure:
    """Draw the timeline."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.6, 2.2), layout="constrained")
    axes = drawn.subplots()
    units = ["exponentials", "tensor cores", "TMA"]
    for unit, label, begin, end in machine.log:
        color = "tab:gray" if unit == "TMA" else {"A": "tab:blue", "B": "tab:orange", "C": "tab:green"}[label[0]]
        axes.barh(units.index(unit), end - begin, left=begin, color=color, edgecolor="white")
        axes.text(
            (begin + end) / 2,
            units.index(unit),
            label.split(": ")[-1],
            ha="center",
            va="center",
            color="white",
            fontsize=8.5,
        )
    axes.set(yticks=range(3), yticklabels=units, xlabel="cycles (gray: loads; blue: consumer A; orange: B; green: C)")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--order", choices=("overlapped", "simple"), default="overlapped", help="of a consumer's steps")
    parser.add_argument("--stages", type=int, default=2, help="buffers for each of K and V (default: 2)")
    parser.add_argument("--tiles", type=int, default=8, help="tiles of keys (default: 8)")
    parser.add_argument("--consumers", type=int, choices=(1, 2, 3), default=2, help="consumer warpgroups (default: 2)")
    parser.add_argument("--out", help="a picture of the timeline, such as timeline.png")
    options = parser.parse_args()
    for name in ("stages", "tiles"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    machine, error = attention(options.order, options.stages, options.tiles, options.consumers)
    for unit in ("TMA", "tensor cores", "exponentials"):
        busy = sum(end - begin for each, _, begin, end in machine.log if each == unit)
        print(f"{unit:13} busy {busy / machine.now:4.0%} of {machine.now} cycles")
    print(f"largest error of o: {error:.1e}")
    if options.out:
        draw(machine, options.out)


if __name__ == "__main__":
    main()
