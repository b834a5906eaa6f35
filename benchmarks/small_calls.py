"""Times small calls, in which the host takes longer than the GPU: tileattn, FlashAttention-2 and cuDNN in turns.

    python benchmarks/small_calls.py --json small-calls.json     # a GPU; a minute
    python benchmarks/small_calls.py --seqlens 64 --calls 3      # a CPU: beside PyTorch's own function

Three times of each call. `host`: until the call returns, the GPU being behind. `done`: until the GPU has finished,
with five calls one after the other. `graph`: the same in a CUDA graph, which is the GPU's part alone. FlashAttention-2
and cuDNN are PyTorch's function with that kernel forced; tensors are given in the layout that each takes as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tileattn
from tileattn.bench import results
from tileattn.cli.group import run_script
from tileattn.measure.rounds import order

OURS = "tileattn"
PEERS: dict[str, SDPBackend | None] = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa": None,  # PyTorch's choice
}
FORWARD, BOTH = "forward", "forward + backward"
SHORT = 128  # tokens of the calls whose forward pass is timed alone
BEHIND = 5  # calls that follow each other without a wait

Run = Callable[[], object]
console = Console()


class Settings(NamedTuple):
    """The sizes of all calls, batch 1, and how often they are made."""

    device: str
    dtype: str
    heads: int = 8
    head_dim: int = 128
    rounds: int = 24
    calls: int = 20


@dataclass(frozen=True)
class Row:
    """One implementation of one call: medians over all rounds, in microseconds; `graph` is None without a GPU."""

    work: str
    variant: str
    seqlen: int
    implementation: str
    host: float
    done: float
    graph: float | None


# --- The calls ---


def forward_calls(settings: Settings) -> Iterator[tuple[str, dict[str, Run]]]:
    """Forward passes of short sequences: their names, and each implementation's call."""
    q, k, v = _tensors(settings, SHORT, 3)
    for causal in (False, True):
        yield (
            _name(causal),
            {
                OURS: lambda causal=causal: tileattn.attention(q, k, v, causal=causal),
                **{name: _sdpa(name, (q, k, v), causal) for name in peers(settings.device)},
            },
        )
    ids = torch.arange(SHORT, dtype=torch.int32, device=settings.device) // 50
    keep = torch.arange(SHORT, device=settings.device)[None] < 100
    masks = {
        "window": tileattn.SlidingWindow(64, 0),
        "documents": tileattn.Documents(ids),
        "key padding": tileattn.KeyPadding(keep),
    }
    for name, mask in masks.items():
        yield name, {OURS: lambda mask=mask: tileattn.attention(q, k, v, mask=mask)}
    of_packed = q[0], k[0], v[0]
    bounds = torch.tensor([0, 50, SHORT], dtype=torch.int32, device=settings.device)
    longest = SHORT - 50
    yield (
        "packed causal",
        {OURS: lambda: tileattn.varlen_attention(*of_packed, bounds, bounds, longest, longest, causal=True)},
    )


def both_calls(settings: Settings, seqlen: int) -> Iterator[tuple[str, dict[str, Run]]]:
    """Forward and backward passes, as `torch.autograd.grad` makes them."""
    q, k, v, do = _tensors(settings, seqlen, 4)
    wanted = [x.requires_grad_() for x in (q, k, v)]
    for causal in (False, True):

        def ours(causal: bool = causal) -> object:
            return torch.autograd.grad(tileattn.attention(q, k, v, causal=causal), wanted, do)

        yield (
            _name(causal),
            {OURS: ours, **{name: _sdpa(name, (q, k, v), causal, do) for name in peers(settings.device)}},
        )


def peers(device: str) -> list[str]:
    """What is measured beside tileattn."""
    return ["fa2", "cudnn"] if device.startswith("cuda") else ["sdpa"]


def _sdpa(name: str, tensors: tuple[Tensor, ...], causal: bool, do: Tensor | None = None) -> Run:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(do is not None) for x in tensors)
    of_o = None if do is None else do.transpose(1, 2)

    def run() -> object:
        o = scaled_dot_product_attention(q, k, v, is_causal=causal)
        return o if of_o is None else torch.autograd.grad(o, (q, k, v), of_o)

    return run


def _tensors(settings: Settings, seqlen: int, count: int) -> list[Tensor]:
    shape, dtype = (1, seqlen, settings.heads, settings.head_dim), getattr(torch, settings.dtype)
    return [torch.randn(shape, dtype=dtype, device=settings.device) for _ in range(count)]


def _name(causal: bool) -> str:
    return "causal" if causal else "full"


# --- Measurement ---


def measure(settings: Settings, seqlens: list[int]) -> list[Row]:
    """All calls; the implementations of each take turns."""
    found = []
    with torch.no_grad():
        for variant, runs in forward_calls(settings):
            found += _rows(FORWARD, variant, SHORT, runs, settings)
    for seqlen in seqlens:
        for variant, runs in both_calls(settings, seqlen):
            found += _rows(BOTH, variant, seqlen, runs, settings)
    return found


def _rows(work: str, variant: str, seqlen: int, runs: dict[str, Run], settings: Settings) -> list[Row]:
    names = list(runs)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:  # compiles
        with _forced(name):
            runs[name]()
    for number in range(settings.rounds):
        for index in order(len(names), number):
            with _forced(names[index]):
                samples[names[index]] += _sample(runs[names[index]], settings)
    found = []
    for name in names:
        host, done = (median(each) * 1e6 for each in zip(*samples[name]))
        found.append(Row(work, variant, seqlen, name, host, done, _graph(name, runs[name], settings)))
    return found


def _forced(name: str) -> Any:
    kernel = PEERS.get(name)
    return nullcontext() if kernel is None else sdpa_kernel(kernel)


def _sample(run: Run, settings: Settings) -> list[tuple[float, float]]:
    """Seconds of a call, of some stretches of calls: of the host, and until the GPU has finished."""
    run()
    found = []
    for _ in range(-(-settings.calls // BEHIND)):
        _wait(settings)
        begin = time.perf_counter()
        for _ in range(BEHIND):
            run()
        host = time.perf_counter() - begin
        _wait(settings)
        found.append((host / BEHIND, (time.perf_counter() - begin) / BEHIND))
    return found


def _graph(name: str, run: Run, settings: Settings) -> float | None:
    """Microseconds of a call in a CUDA graph, with inputs in the L2 cache."""
    if not settings.device.startswith("cuda"):
        return None
    graph, events = torch.cuda.CUDAGraph(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with _forced(name), torch.cuda.stream(torch.cuda.Stream()):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
    graph.replay()
    events[0].record()
    for _ in range(settings.calls):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / settings.calls * 1e3


def _wait(settings: Settings) -> None:
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize()


# --- What a run shows ---


def table(rows: list[Row]) -> Table:
    """A table for the terminal, in microseconds."""
    shown = Table("work", "variant", "tokens", "", "host", "done", "graph")
    for row in rows:
        graph = "" if row.graph is None else f"{row.graph:.1f}"
        shown.add_row(
            row.work, row.variant, str(row.seqlen), row.implementation, f"{row.host:.1f}", f"{row.done:.1f}", graph
        )
    return shown


def save(rows: list[Row], settings: Settings, commit: str | None, path: Path) -> None:
    """Writes the rows with device, versions, commit and date, as in files of `tileattn bench`."""
    run = results.begin(torch.device(settings.device), commit, " ".join(["small_calls.py", *sys.argv[1:]]))
    content = {**results.origin(run), "settings": settings._asdict(), "rows": [asdict(row) for row in rows]}
    results.write(content, path)


def main(
    seqlens: Annotated[str, typer.Option(help="Tokens of the calls with a backward pass.")] = "512,1024,2048",
    rounds: Annotated[int, typer.Option(min=1)] = 24,
    calls: Annotated[int, typer.Option(min=1, help="Of each implementation in each round.")] = 20,
    json: Annotated[Path | None, typer.Option(help="Where the rows go, too.", show_default=False)] = None,
    commit: Annotated[
        str | None, typer.Option(help="To record in --json, instead of what git says of the code.", show_default=False)
    ] = None,
) -> None:
    """Measure small calls of attention."""
    lengths = seqlens.split(",")
    wrong = [each for each in lengths if not each.isdigit() or int(each) == 0]
    if wrong:
        raise typer.BadParameter(f"--seqlens: {wrong[0]!r} is no length; accepted: positive integers with commas")
    if json is not None and json.exists():
        raise typer.BadParameter(f"--json {json} exists")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(device, "bfloat16" if device == "cuda" else "float32", rounds=rounds, calls=calls)
    torch.manual_seed(0)
    rows = measure(settings, [int(each) for each in lengths])
    console.print(table(rows))
    if json is not None:
        save(rows, settings, commit, json)
        console.print(f"The rows are in {json}.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_script(app)
