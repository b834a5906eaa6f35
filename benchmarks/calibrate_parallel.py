"""Measures what the cost model of tileattn.parallel needs to know of a machine with two GPUs, in under 40 seconds.

    torchrun --nproc-per-node 2 benchmarks/calibrate_parallel.py                # writes calibration-h200.json, or h100
    torchrun --nproc-per-node 2 benchmarks/calibrate_parallel.py --tiny --out /tmp/c.json    # on a CPU, to try it
    python benchmarks/calibrate_parallel.py --adopt FILE.json

Measured are, on all ranks at once and with the slowest rank's time:

- `forward` and `backward`: FLOP/s of long causal attention, for a second each, so that GPUs are as warm as in use;
- `call`: what a call more costs: eight calls of a part of the heads each, beside one call of all;
- `fast` and `transfer`: the rate of a link each way while both ways are in use, and the time of a transfer of 4 KB.

`--adopt` measures nothing. It makes a file the source of the defaults of `tileattn.parallel.Topology`
(`parallel/prediction/rates.py`), and puts it into the index of result files. Then write the page again:
`python benchmarks/make_scale_page.py`, and `make pictures`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tileattn
from tileattn.bench import results
from tileattn.parallel.prediction import rates
from tileattn.parallel.prediction.topology import FORMAT, MEASURED

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RATES_FILE = Path(rates.__file__)
COMMAND = "torchrun --nproc-per-node 2 benchmarks/calibrate_parallel.py"


@dataclass(frozen=True)
class Sizes:
    """What is measured. tokens: of the rates; split: of the cost of a call; seconds: for which a rate is measured."""

    tokens: int = 65536
    split: int = 16384
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    seconds: float = 1.0
    transfers: tuple[int, ...] = (4 << 10, 8 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20)


TINY = Sizes(512, 256, 4, 2, 32, 0.02, (4 << 10, 64 << 10))


# --- Times ---


def agreed(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def seconds_of(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of a call on the slowest rank, the mean of calls that follow each other; all ranks begin together."""
    dist.barrier()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        spent = begin.elapsed_time(end) / 1e3
    else:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - start
    return agreed(spent, device) / calls


def sustained(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of a call over some time; before, it runs twice: to compile, and to be estimated."""
    call()
    return seconds_of(call, device, max(2, math.ceil(seconds / seconds_of(call, device, 1))))


# --- Kernels ---


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> list[Tensor]:
    """q, k, v and do."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drawn = [torch.randn(1, tokens, each, head_dim, device=device, dtype=dtype) for each in (heads, kv_heads, kv_heads)]
    return [*(x.requires_grad_() for x in drawn), torch.randn_like(drawn[0])]


def passes(parts: Sequence[list[Tensor]]) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward and the backward pass of several calls, one behind the other."""

    def forward() -> object:
        with torch.no_grad():
            return [tileattn.attention(q, k, v, causal=True) for q, k, v, _ in parts]

    outputs = [tileattn.attention(q, k, v, causal=True) for q, k, v, _ in parts]
    leaves = [x for part in parts for x in part[:3]]

    def backward() -> object:
        return torch.autograd.grad(outputs, leaves, [part[3] for part in parts], retain_graph=True)

    return forward, backward


def kernel_rates(sizes: Sizes, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds and FLOP/s of both passes."""
    shape = sizes.tokens, sizes.heads, sizes.kv_heads, sizes.head_dim
    flops = 2.0 * sizes.tokens**2 * sizes.heads * sizes.head_dim  # half of all pairs, two products
    found = {}
    for name, call, factor in zip(("forward", "backward"), passes([inputs(*shape, device)]), (1.0, 2.5)):
        seconds = sustained(call, device, sizes.seconds)
        found[name] = {"ms": 1e3 * seconds, "flops_per_s": factor * flops / seconds}
    return found


def call_costs(sizes: Sizes, device: torch.device) -> dict[str, dict[str, float]]:
    """Of both passes: milliseconds of one call and of as many as key/value heads, and the seconds of a call more."""
    calls = sizes.kv_heads
    shape = sizes.split, sizes.heads // calls, 1, sizes.head_dim
    whole = [inputs(sizes.split, sizes.heads, calls, sizes.head_dim, device)]
    split = [inputs(*shape, device) for _ in range(calls)]
    found = {}
    for name, one, several in zip(("forward", "backward"), passes(whole), passes(split)):
        a, b = (sustained(call, device, sizes.seconds / 4) for call in (one, several))
        found[name] = {"one_ms": 1e3 * a, "split_ms": 1e3 * b, "call_s": max(0.0, b - a) / (calls - 1)}
    return found


# --- Links ---


def transfers(sizes: Sizes, device: torch.device) -> list[dict[str, float]]:
    """Seconds of an all-to-all in which each rank sends so many bytes to others, and in which only rank 0 does."""
    rows = []
    all_to_all(sizes.transfers[-1], range(dist.get_world_size()), device)()  # the first one connects the ranks
    for count in sizes.transfers:
        row: dict[str, float] = {"bytes": count}
        for name, senders in (("both_ways", range(dist.get_world_size())), ("one_way", range(1))):
            row[f"{name}_s"] = sustained(all_to_all(count, senders, device), device, sizes.seconds / 10)
            row[f"{name}_bytes_per_s"] = count / row[f"{name}_s"]
        rows.append(row)
    return rows


def all_to_all(count: int, senders: range, device: torch.device) -> Callable[[], object]:
    """A transfer in which each sender sends `count` bytes, shared evenly by the other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = count // (ranks - 1)
    outgoing = [part if rank in senders and other != rank else 0 for other in range(ranks)]
    incoming = [part if other in senders and other != rank else 0 for other in range(ranks)]
    packed = torch.zeros(sum(outgoing), dtype=torch.uint8, device=device)
    landed = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
    return lambda: dist.all_to_all_single(landed, packed, incoming, outgoing)


def calibrate(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """All measurements, and the arguments of `Topology` that follow from them."""
    moved = transfers(sizes, device)
    costs = call_costs(sizes, device)
    kernels = kernel_rates(sizes, device)
    small, large = moved[0], moved[-1]
    topology = {
        "forward": kernels["forward"]["flops_per_s"],
        "backward": kernels["backward"]["flops_per_s"],
        "call": sum(each["call_s"] for each in costs.values()) / len(costs),
        "fast": large["bytes"] / max(large["both_ways_s"] - small["both_ways_s"], large["both_ways_s"] / 2),
        "transfer": small["both_ways_s"],
    }
    return {
        "topology": topology,
        "sizes": asdict(sizes),
        "kernels": kernels,
        "calls": costs,
        "transfers": moved,
    }


# --- Files ---


def short_name(gpu: str, device: torch.device) -> str:
    """As files are named: h200 for "NVIDIA H200"."""
    found = re.search(r"[A-Z]+\d+\w*", gpu)
    return found[0].lower() if found is not None and device.type == "cuda" else "cpu"


def measure(sizes: Sizes, out: Path | None, commit: str | None) -> None:
    """One rank's part of the measurement; rank 0 writes the file."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    torch.manual_seed(dist.get_rank())
    begin = time.perf_counter()
    found = calibrate(sizes, device)
    if dist.get_rank() == 0:
        run = results.begin(device, commit, COMMAND)
        origin = {"device": run.device, **results.origin(run)}
        content = {"format": FORMAT, **origin, "ranks": dist.get_world_size(), **found}
        path = out or RESULTS / "parallel"
        if not path.suffix:
            path /= f"calibration-{short_name(run.gpu, device)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write(content, path)
        for name, value in found["topology"].items():
            print(f"{name:9} {value:.4g}")
        print(f"{path}, in {time.perf_counter() - begin:.0f} s")
    dist.barrier()
    dist.destroy_process_group()


# --- Adopting ---


def adopted(text: str, topology: dict[str, float], source: str) -> str:
    """rates.py with other figures."""
    for name in MEASURED:
        line = f'    "{name}": Figure({rounded(topology[name])!r}, True, "{source}"),'
        text, count = re.subn(rf'^    "{name}": Figure\(.*\),$', line, text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def rounded(value: float) -> float:
    """To three digits: more is noise."""
    return float(f"{value:.3g}")


def indexed(text: str, name: str, date: str, commit: str) -> str:
    """The index of result files with a line for a calibration, in place of an older one."""
    claim = "[Predictions](../../docs/parallel-scale.md#the-rates): the rates of kernels and links"
    line = f"| [`{name}`](parallel/{name}) | {claim} | {date[:10]}, {commit[:12]} | `{COMMAND}` |"
    text = re.sub(rf"^\| \[`{re.escape(name)}`\].*\n", "", text, flags=re.MULTILINE)
    before, heading, after = text.partition("### parallel\n")
    if not heading:
        raise SystemExit("the index has no section parallel")
    head, rule, rows = after.partition("|---|---|---|---|\n")
    return f"{before}{heading}{head}{rule}{line}\n{rows}"


def adopt(path: Path) -> None:
    """Makes a file the source of the defaults."""
    content = json.loads(path.read_text())
    if content.get("format") != FORMAT or content["device"] == "cpu" or path.resolve().parent != RESULTS / "parallel":
        raise SystemExit(f"{path} is no calibration of GPUs in {RESULTS / 'parallel'}")
    source = path.resolve().relative_to(ROOT).as_posix()
    RATES_FILE.write_text(adopted(RATES_FILE.read_text(), content["topology"], source))
    index = RESULTS / "README.md"
    index.write_text(indexed(index.read_text(), path.name, content["date"], content["commit"] or ""))
    print(f"{RATES_FILE.name} and {index.name} name {source}")


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file to write, or its folder")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try it")
    parser.add_argument("--commit", help="to record, instead of what git says")
    parser.add_argument("--adopt", type=Path, metavar="FILE", help="make this file the source of Topology's defaults")
    options = parser.parse_args()
    if options.adopt:
        adopt(options.adopt)
    else:
        measure(TINY if options.tiny else Sizes(), options.out, options.commit)


if __name__ == "__main__":
    main()
