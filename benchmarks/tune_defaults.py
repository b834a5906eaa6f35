"""Measures configurations of the Hopper schedule on this machine's GPU and writes the table of defaults.

    python benchmarks/tune_defaults.py                     # all rows; about two minutes on an H200 with 16 cores
    python benchmarks/tune_defaults.py --dims 128/128      # only these head dims; the other rows stay
    python benchmarks/tune_defaults.py --show              # what would be measured; needs no GPU

A row of the table (`src/tileattn/kernels/tilelang/forward/sm90_table.py`) is named by head dims, kind of mask and
bucket of lengths. Its candidates (`hopper_candidates`, and the row's present configuration) are compiled in parallel. A
child process checks each against the oracle on a small shape, then times them in rounds that alternate between them
(`tileattn.measure.timing`). If a candidate hangs, the process is ended, and another goes on without that candidate. A
row changes only where the best is more than 1.5 % faster than the present configuration.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tileattn import Causal, Mask, SoftCap
from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Inputs
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward import sm90_table
from tileattn.kernels.tilelang.forward.candidates import hopper_candidates
from tileattn.kernels.tilelang.forward.config import HopperConfig, is_valid
from tileattn.measure.timing import Effort, sample_ms
from tileattn.testing import assert_accurate, eager_attention, oracle_attention
from tileattn.variant.key import encode

TABLE_FILE = Path(sm90_table.__file__)
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LENGTHS = {"short": (512, 1024), "long": (4096,)}
TOKENS = 16384  # in the batch
CHANNELS = 2048  # heads * head_dim_v
KINDS: dict[str, tuple[Mask | None, tuple[SoftCap, ...]]] = {
    "full": (None, ()),
    "masked": (Causal(), ()),
    "scored": (Causal(), (SoftCap(50.0),)),
}
WIDEST_SCORED = 128  # wider ones run on the generic schedule
KEEP_WITHIN = 1.015
LINE_LENGTH = 120
EFFORT = Effort(warmup_ms=3.0, measure_ms=15.0)
ROUNDS = 3
HANGS_AFTER_S = 20.0

Name = tuple[int, int, str, str]  # head_dim, head_dim_v, kind, lengths
Table = Mapping[Name, HopperConfig]
Times = dict[HopperConfig, list[float]]  # milliseconds, one for each length


@dataclass(frozen=True)
class Row:
    """The measurement of one row of the table; the present configuration is the first candidate."""

    name: Name
    candidates: tuple[HopperConfig, ...]

    @property
    def call(self) -> AttentionCall:
        return call_of(self.name)

    def without(self, left_out: Iterable[tuple[Name, HopperConfig]]) -> Row:
        gone = {config for name, config in left_out if name == self.name}
        return Row(self.name, tuple(config for config in self.candidates if config not in gone))


def call_of(name: Name) -> AttentionCall:
    """The call that a row is measured with."""
    head_dim, head_dim_v, kind, _ = name
    variant, _ = encode(*KINDS[kind])
    return AttentionCall(torch.bfloat16, head_dim, head_dim_v, variant, return_lse=False, arch="sm_90a")


def names(dims: Iterable[tuple[int, int]] = DIMS) -> list[Name]:
    """The names of all rows of the table."""
    return [
        (head_dim, head_dim_v, kind, lengths)
        for head_dim, head_dim_v in dims
        for kind in KINDS
        if kind != "scored" or max(head_dim, head_dim_v) <= WIDEST_SCORED
        for lengths in LENGTHS
    ]


def row_of(name: Name, table: Table) -> Row:
    """The present configuration and the candidates."""
    call = call_of(name)
    present = [table[name]] if name in table and is_valid(call, table[name]) else []
    return Row(name, tuple(dict.fromkeys([*present, *hopper_candidates(call, name[3] == "short")])))


# --- Choosing and writing ---


def geometric_mean(times: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, times)) / len(times))


def choose(times: Times, present: HopperConfig | None) -> HopperConfig:
    """The fastest configuration, or the present one where it is at most 1.5 % slower."""
    best = min(times, key=lambda config: geometric_mean(times[config]))
    if present in times and geometric_mean(times[present]) <= KEEP_WITHIN * geometric_mean(times[best]):
        return present
    return best


def written(config: HopperConfig) -> str:
    """A configuration as code: the tile's two sizes, then the fields that differ from the dataclass's defaults."""
    others = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in fields(config)[2:]
        if getattr(config, field.name) != field.default
    ]
    return f"HopperConfig({', '.join([str(config.block_M), str(config.block_N), *others])})"


def _row_lines(name: Name, config: HopperConfig) -> list[str]:
    """One row, in three lines where it would be longer than the formatter allows."""
    head_dim, head_dim_v, kind, lengths = name
    key, value = f'    ({head_dim}, {head_dim_v}, "{kind}", "{lengths}"): ', written(config)
    if len(key + value) < LINE_LENGTH:
        return [f"{key}{value},"]
    opening, arguments = value.removesuffix(")").split("(", 1)
    return [f"{key}{opening}(", f"        {arguments}", "    ),"]


def render(table: Table, origin: str) -> str:
    """The file that holds a table."""
    lines = [
        '"""The Hopper schedule\'s default configurations; written by benchmarks/tune_defaults.py, not by hand."""',
        "",
        "from .config import HopperConfig",
        "",
        f'ORIGIN = "{origin}"',
        "",
        "# (head_dim, head_dim_v, kind of mask, lengths); see defaults.py",
        "TABLE = {",
        *(line for name, config in table.items() for line in _row_lines(name, config)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def origin() -> str:
    """The GPU, the date and the versions that a table was measured with."""
    import tilelang

    today = datetime.datetime.now(datetime.timezone.utc).date()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, tilelang {tilelang.__version__}"
    return f"{torch.cuda.get_device_name()}, {today}, {versions}"


# --- Compiling ---


def compile_one(job: tuple[AttentionCall, HopperConfig]) -> str | None:
    """None if the candidate compiles, else the reason why it does not."""
    try:
        launch.ensure_compiled(*job)
    except Exception as error:  # any candidate may fail in the compiler; it is left out, and said so
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return None


def compile_all(rows: Sequence[Row], processes: int) -> list[tuple[Name, HopperConfig]]:
    """Compiles all candidates into the kernel cache; returns those that do not compile."""
    jobs = list(dict.fromkeys((row.call, config) for row in rows for config in row.candidates))
    began = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_one, jobs)))
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    for (call, config), error in errors.items():
        if error:
            print(f"  {call} {written(config)}: {error}")
    return [(row.name, config) for row in rows for config in row.candidates if errors[row.call, config]]


# --- Measuring, in a child process ---


def tensors(call: AttentionCall, batch: int, seqlen: int, heads: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, seqlen, heads)
    return tuple(
        torch.randn(*shape, size, device="cuda", dtype=call.dtype, generator=generator)
        for size in (call.head_dim, call.head_dim, call.head_dim_v)
    )


def runner(
    call: AttentionCall, config: HopperConfig, qkv: tuple[torch.Tensor, ...], operands: Any
) -> Callable[[], Any]:
    """A function that runs one configuration on these tensors."""
    q, k, v = qkv
    forward = forward_launch.prepare_with(config, call, q.shape, k.shape, call.head_dim**-0.5)
    return functools.partial(forward, Inputs(q, k, v, None, operands))


def measure_row(row: Row, report: Callable[..., None]) -> Times:
    """Milliseconds of each candidate that is right. `report` is called before each step with its candidate."""
    call, (mask, mods) = row.call, KINDS[row.name[2]]
    _, operands = encode(mask, mods)
    small = tensors(call, 2, 333, 2)
    oracle, _ = oracle_attention(*small, mask, mods)
    eager, _ = eager_attention(*small, mask, mods)
    right = []
    for config in row.candidates:
        report("checking", row.name, config)
        try:
            o, _ = runner(call, config, small, operands)()
            assert_accurate("o", o, oracle, eager)
        except AssertionError as error:  # any other ends this process, whose GPU context may be broken
            report("wrong", row.name, config, str(error)[:300])
        else:
            right.append(config)
    times: Times = {config: [] for config in right}
    for seqlen in LENGTHS[row.name[3]]:
        qkv = tensors(call, TOKENS // seqlen, seqlen, max(CHANNELS // call.head_dim_v, 1))
        runners = {config: runner(call, config, qkv, operands) for config in right}
        samples: dict[HopperConfig, list[float]] = {config: [] for config in right}
        for _ in range(ROUNDS):
            for config in right:
                report("timing", row.name, config)
                samples[config] += sample_ms(runners[config], qkv[0].device, EFFORT)
        for config in right:
            times[config].append(median(samples[config]))
    return times


def measure_here(rows: Sequence[Row], connection: Connection) -> None:
    """Runs in the child process: measures rows and sends the results."""
    for row in rows:
        connection.send(("row", row.name, measure_row(row, lambda *message: connection.send(message))))
    connection.send(("end",))


def measure(rows: Sequence[Row], target: Callable[..., None] = measure_here) -> dict[Name, Times]:
    """Times of all rows, without candidates that crash or whose turn takes longer than `HANGS_AFTER_S`."""
    context = multiprocessing.get_context("spawn")
    times: dict[Name, Times] = {}
    left_out: list[tuple[Name, HopperConfig]] = []
    while True:
        pending = [row.without(left_out) for row in rows if row.name not in times]
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=target, args=(pending, there), daemon=True)
        child.start()
        there.close()
        turn: tuple[Name, HopperConfig] | None = None
        try:
            # The first turn begins after torch has been imported and a context has been made.
            while here.poll(HANGS_AFTER_S if turn else 120.0):
                what, *rest = here.recv()
                if what == "end":
                    return times
                if what == "row":
                    times[rest[0]] = rest[1]
                elif what == "wrong":
                    print(f"  wrong: {rest[0]} {written(rest[1])}: {rest[2]}", flush=True)
                else:
                    turn = (rest[0], rest[1])
        except EOFError:
            pass
        finally:
            child.kill()
            child.join()
        if turn is None:
            raise RuntimeError("the measuring process ended before its first candidate")
        print(f"  hangs or crashes: {turn[0]} {written(turn[1])}", flush=True)
        left_out.append(turn)


def _dims(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SystemExit(f"--dims: {text!r} is not understood; accepted: head dims such as 128 or 192/128")
    return int(parts[0]), int(parts[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="*", help="head dims, such as 192/128; all unless given")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile at the same time")
    parser.add_argument("--output", type=Path, default=TABLE_FILE)
    parser.add_argument("--show", action="store_true", help="list the candidates and stop")
    options = parser.parse_args()
    dims = list(map(_dims, options.dims)) if options.dims else DIMS
    wanted = [name for name in names(dims) if name[2] in options.kinds]  # type: ignore[arg-type]
    rows = [row_of(name, sm90_table.TABLE) for name in wanted]
    if options.show:
        for row in rows:
            print(" ".join(map(str, row.name)), *map(written, row.candidates), sep="\n    ")
        return
    failed = compile_all(rows, options.processes)
    began = time.monotonic()
    times = measure([row.without(failed) for row in rows])
    print(f"measured in {time.monotonic() - began:.0f} s")
    table = dict(sm90_table.TABLE)
    for name, measured in times.items():
        if not measured:
            print(f"{name}: no candidate runs")
            continue
        present = table.get(name)
        table[name] = choose(measured, present)
        print(*name)
        for config in sorted(measured, key=lambda config: geometric_mean(measured[config])):
            marks = " present" * (config == present) + " chosen" * (config == table[name])
            print(f"    {' '.join(f'{ms:8.4f}' for ms in measured[config])} ms  {written(config)}{marks}")
    order = {name: number for number, name in enumerate(names())}
    options.output.write_text(
        render(dict(sorted(table.items(), key=lambda row: order.get(row[0], len(order)))), origin())
    )


if __name__ == "__main__":
    main()
