"""Times sparse masks that users write, beside FlexAttention, whose block mask is made ahead; a GPU, sm_90a.

    python benchmarks/precompile.py lists --arch sm_90a                  # the kernels, ahead, anywhere
    python benchmarks/any_mask.py --json any-mask.json                   # all
    python benchmarks/any_mask.py --json any-mask.json --resume          # what that file lacks
    python benchmarks/any_mask.py --json some.json --names dilated,loaded-ids --seqlens 16384 --head-dims 64
    python benchmarks/any_mask.py --json makes.json --only making        # how long masks take to make, at 128k
    python benchmarks/any_mask.py --json bits.json --without-flex --without-bits  # mixed tiles with bits and without

Nine patterns (tileattn.bench.sparse_masks), batch 1, bfloat16, forward pass (with lse) and backward pass. Beside the
times stand the tiles that our kernels visit and evaluate the mask in, FlexAttention's, which are the fewest of 128 by
128, and the efficiency: TFLOPS on visited tiles as a share of the TFLOPS without a mask, at the same sizes.

FlexAttention compiles for each pattern, size and pass; that happens first, in processes with a time limit, which
leave their results in Inductor's cache. What fails there is left out, with the reason in the row.
"""

from __future__ import annotations

import functools
import itertools
import json as json_module
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tileattn
from tileattn.bench import results
from tileattn.bench.sparse_masks import NAMES, Pattern, pattern
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.cli.group import run_script
from tileattn.kernels.tile_lists import Cut, Sizes
from tileattn.kernels.tilelang.backward import launch as backward_launch
from tileattn.kernels.tilelang.forward.choice import chosen
from tileattn.kernels.tilelang.lists import bits as mixed_bits
from tileattn.kernels.tilelang.lists.launch import make as make_lists
from tileattn.measure.rounds import order
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file as a module of benchmarks
import any_mask_more

PASSES = ("forward", "backward")
HEADS = {16384: 16, 65536: 4}  # as much memory and, without a mask, four times the work
LONGEST, PLANES = 131072, (1, 32)
TOTAL_WORK = {"forward": 4, "backward": 10}  # floating-point operations for each score and element of a head
PLAIN = "none"
WITHOUT_BITS = "without bits"  # of mixed tiles: tileattn evaluates the mask in each head

console = Console()


class Case(NamedTuple):
    """One pattern, or `PLAIN`, at one size."""

    name: str
    seqlen: int
    heads: int
    head_dim: int


@dataclass
class Row:
    """The times of a case and pass in milliseconds, of each implementation; tiles are those of all heads.

    Attributes:
        tiles: how many tiles there are, of the kernel's own size; `visited` and `mixed` are among them.
        share: visited scores as a share of all.
        flex_visited, flex_mixed: of 128 by 128, which no list of tiles can undercut; None without FlexAttention.
        efficiency: TFLOPS on the visited tiles, as a share of what the same pass has without a mask.
    """

    name: str
    seqlen: int
    heads: int
    head_dim: int
    work: str
    ms: dict[str, float]
    tiles: int = 0
    visited: int = 0
    mixed: int = 0
    share: float = 1.0
    flex_visited: int | None = None
    flex_mixed: int | None = None
    tflops: float = 0.0
    efficiency: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.seqlen, self.heads, self.head_dim, self.work


# --- The calls ---


def tensors(case: Case, device: str = "cuda") -> tuple[Tensor, ...]:
    """q, k, v, which want gradients, and the gradient of o: (1, seqlen, heads, head_dim)."""
    shape = (1, case.seqlen, case.heads, case.head_dim)
    made = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4)]
    return (*(x.requires_grad_() for x in made[:3]), made[3])


def of_case(case: Case, device: str = "cuda") -> Pattern | None:
    return None if case.name == PLAIN else pattern(case.name, case.seqlen, case.heads, device)


def ours(case: Case, given: Sequence[Tensor], of: Pattern | None) -> dict[str, Callable[[], Any]]:
    """Both passes by tileattn."""
    q, k, v, do = given

    def forward() -> Tensor:
        return tileattn.attention(q, k, v, mask=of and of.mask, backend="tilelang")

    return _passes(forward, (q, k, v), do)


def flex(case: Case, given: Sequence[Tensor], of: Pattern) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Both passes by FlexAttention, compiled for these shapes, and its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it stops recompiling after eight shapes
    q, k, v, do = (x.detach().transpose(1, 2).requires_grad_(i < 3) for i, x in enumerate(given))
    heads = case.heads if of.by_head else None
    mask = create_block_mask(of.mask_mod, None, heads, case.seqlen, case.seqlen, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return _passes(lambda: compiled(q, k, v, block_mask=mask), (q, k, v), do.detach()), mask


def _passes(forward: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor) -> dict[str, Callable[[], Any]]:
    of_backward: list[Tensor] = []

    def backward() -> Any:
        if not of_backward:
            of_backward.append(forward())
        return torch.autograd.grad(of_backward[0], leaves, do, retain_graph=True)

    return {"forward": forward, "backward": backward}


@contextmanager
def bits_of_mixed_tiles(wanted: bool) -> Iterator[None]:
    """Inside, calls have bits of their mixed tiles where they would, or none has."""
    if wanted:
        yield
        return
    forget_prepared()  # what was prepared has its kernel
    with mock.patch.object(mixed_bits, "FEWEST_SHARING", 2**40):
        yield
    forget_prepared()


def with_bits_or_without(run: Callable[[], Any], wanted: bool) -> Any:
    """A call in one of the two ways."""
    with bits_of_mixed_tiles(wanted):
        return run()


def calls() -> Iterator[Callable[[], Any]]:
    """Our calls at the usual sizes, on "meta", for benchmarks/precompile.py."""
    for case in cases((*NAMES, PLAIN), list(HEADS), [64, 128]):
        of, given = of_case(case, "meta"), tensors(case, "meta")
        for wanted in (True, False):
            yield functools.partial(with_bits_or_without, ours(case, given, of)["backward"], wanted)


def cases(names: Sequence[str], seqlens: Sequence[int], head_dims: Sequence[int]) -> list[Case]:
    return [
        Case(name, seqlen, HEADS.get(seqlen, 8), dim)
        for seqlen, dim, name in itertools.product(seqlens, head_dims, names)
    ]


# --- Tiles ---


def cuts(case: Case, of: Pattern) -> dict[str, Cut]:
    """How our kernels cut the scores in each pass."""
    shape = torch.Size((1, case.seqlen, case.heads, case.head_dim))
    key = encode(of.mask, ())[0]
    call = AttentionCall(torch.bfloat16, case.head_dim, case.head_dim, key, needs_grad=True, arch="sm_90a")
    forward = chosen(call, shape, shape)
    backward = BackwardCall(call, (True, True, True, False))
    main, _ = backward_launch.configured(backward, shape, shape)
    assert main is not None
    return {
        "forward": Cut(forward.block_M, forward.block_N),
        "backward": Cut(main.block_M, main.block_N, by_keys=True, masks_queries=True),
    }


def count_tiles(case: Case, of: Pattern, cut: Cut, device: str = "cuda") -> tuple[int, int, int]:
    """All tiles of all heads, those that are visited, and those in which the mask is evaluated."""
    key, operands = encode(of.mask, ())
    sizes = Sizes(1, case.heads, case.seqlen, case.seqlen)
    lists = make_lists(key, operands, sizes, cut, torch.device(device))
    each = case.heads if lists.head_step == 0 else 1
    mixed, visited = lists.counts.sum(0, dtype=torch.int64).tolist()
    return lists.tiles.numel() * each, visited * each, mixed * each


def _flex_tiles(mask: Any, case: Case, of: Pattern) -> tuple[int, int]:
    each = 1 if of.by_head else case.heads
    mixed, whole = int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())
    return (mixed + whole) * each, mixed * each


# --- Measurement ---


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The GPU's time of a call, the median."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for begin, end in zip(events[::2], events[1::2]):
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2]))


def measure(
    case: Case,
    rounds: int,
    repeats: int,
    failed: str | None,
    plain: dict[str, float],
    without_bits: bool = False,
    more: Sequence[str] = (),
) -> list[Row]:
    """Both passes of a case; implementations take turns.

    Args:
        failed: why FlexAttention does not run.
        plain: the TFLOPS of each pass without a mask.
        more: of `any_mask_more.MORE`.
    """
    of, given = of_case(case), tensors(case)
    runs, mask, reasons = {"tileattn": ours(case, given, of)}, None, {}
    if of is not None and without_bits:
        runs[WITHOUT_BITS] = ours(case, given, of)
    if of is not None and failed is None:
        try:
            runs["flex"], mask = flex(case, given, of)
            for run in runs["flex"].values():
                run()
        except Exception as error:  # whatever Inductor raises; the other rows go on
            runs.pop("flex", None)
            failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    if of is not None and failed is not None:
        reasons["flex"] = failed
    for name in more if mask is not None else ():
        if name == "flex-fa4" or case.name == "blocks":
            made = any_mask_more.runs_of(name, given, mask, _passes)
            runs[name], why = any_mask_more.those_that_run(name, made)
            reasons |= why
    rows = []
    for work in PASSES:
        row = Row(*case, work, {}, reasons=dict(reasons))
        names = [name for name, passes in runs.items() if work in passes]
        samples: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for index in order(len(names), number):
                name = names[index]
                with bits_of_mixed_tiles(name != WITHOUT_BITS):
                    for _ in range(3 if number == 0 else 1):
                        runs[name][work]()
                    samples[name].append(milliseconds(runs[name][work], repeats))
        row.ms = {name: median(times) for name, times in samples.items()}
        if of is not None:
            row.tiles, row.visited, row.mixed = count_tiles(case, of, cuts(case, of)[work])
            row.share = row.visited / row.tiles
            if mask is not None:
                row.flex_visited, row.flex_mixed = _flex_tiles(mask, case, of)
        scores = case.heads * case.seqlen**2 * row.share
        row.tflops = TOTAL_WORK[work] * case.head_dim * scores / row.ms["tileattn"] / 1e9
        row.efficiency = row.tflops / plain[work] if of is not None and work in plain else None
        rows.append(row)
    return rows


def making(name: str, planes: int, repeats: int) -> dict[str, Any]:
    """Milliseconds and bytes of a mask at `LONGEST`: our lists, and FlexAttention's block mask made in two ways."""
    from torch.nn.attention.flex_attention import create_block_mask

    of = pattern(name, LONGEST, planes, "cuda")
    key, operands = encode(of.mask, ())
    sizes, device = Sizes(1, planes, LONGEST, LONGEST), torch.device("cuda")
    make = functools.partial(
        create_block_mask, of.mask_mod, None, planes if of.by_head else None, LONGEST, LONGEST, device="cuda"
    )
    ways: dict[str, Callable[[], Any]] = {
        "tileattn": lambda: make_lists(key, operands, sizes, Cut(128, 128), device),
        "tileattn, with bits": lambda: make_lists(key, operands, sizes, Cut(128, 128, bits=True), device),
        "flex, compiled": lambda: make(_compile=True),
        "flex, eager": lambda: make(),
    }
    row: dict[str, Any] = {"name": name, "planes": planes}
    for way, run in ways.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            made = run()
            torch.cuda.synchronize()
            kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
            del made
            times = [milliseconds(run, 1) for _ in range(repeats)]
            row[way] = {"ms": median(times), "bytes": kept, "peak": peak}
        except torch.OutOfMemoryError:
            row[way] = {"error": "out of memory"}
    return row


# --- FlexAttention's compilation, ahead ---


def compile_flex(wanted: Sequence[Case], processes: int, limit: float) -> dict[Case, str]:
    """Compiles it for these cases, several at a time; those that fail, with the reason."""

    def one(case: Case) -> str | None:
        command = [sys.executable, __file__, "--flex", ",".join(map(str, case))]
        try:
            run = subprocess.run(command, timeout=limit, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return f"FlexAttention was not compiled within {limit:.0f} s"
        return None if run.returncode == 0 else (run.stderr.strip().splitlines() or ["failed"])[-1][:300]

    with ThreadPoolExecutor(processes) as pool:
        found = zip(wanted, pool.map(one, wanted))
        return {case: reason for case, reason in found if reason is not None}


def _compile_one(text: str) -> None:
    name, *numbers = text.split(",")
    case = Case(name, *map(int, numbers))
    of = of_case(case)
    assert of is not None
    for run in flex(case, tensors(case), of)[0].values():
        run()
    torch.cuda.synchronize()


# --- What a run shows ---


def table(rows: Sequence[Row]) -> Table:
    of_tiles = "visited", "mixed", "fewest", "TFLOPS", "share"
    shown = Table("pass", "tokens", "D", "mask", "ms", "no bits", "Flex", "times", *of_tiles)
    for row in sorted(rows, key=lambda row: (row.work, row.seqlen, row.head_dim)):
        ms, without, other = (row.ms.get(name) for name in ("tileattn", WITHOUT_BITS, "flex"))
        assert ms is not None
        fewest = "" if row.flex_visited is None else f"{row.flex_visited} ({row.flex_mixed})"
        shown.add_row(
            row.work, str(row.seqlen), str(row.head_dim), row.name, f"{ms:.3f}",
            "" if without is None else f"{without:.3f}",
            row.reasons.get("flex", "")[:30] if other is None else f"{other:.3f}",
            "" if other is None else f"{other / ms:.2f}", str(row.visited), str(row.mixed), fewest,
            f"{row.tflops:.0f}", "" if row.efficiency is None else f"{row.efficiency:.2f}",
        )  # fmt: skip
    return shown


def save(rows: Sequence[Row], made: Sequence[dict[str, Any]], commit: str | None, path: Path) -> None:
    run = results.begin(torch.device("cuda"), commit, " ".join(["any_mask.py", *sys.argv[1:]]))
    results.write({**results.origin(run), "rows": [asdict(row) for row in rows], "making": list(made)}, path)


def main(
    json: Annotated[Path, typer.Option(help="Where the rows go, after each case.")] = Path("any-mask.json"),
    names: Annotated[str, typer.Option(help="Patterns, with commas.")] = ",".join(NAMES),
    seqlens: Annotated[str, typer.Option(help="Tokens, with commas.")] = "16384,65536",
    head_dims: Annotated[str, typer.Option(help="With commas.")] = "64,128",
    only: Annotated[str, typer.Option(help="passes or making: half of the run.")] = "",
    without_flex: Annotated[bool, typer.Option("--without-flex", help="tileattn alone.")] = False,
    without_bits: Annotated[bool, typer.Option("--without-bits", help="tileattn without bits, too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows of --json, and measure the others.")] = False,
    more: Annotated[str, typer.Option(help="flex-fa4, fa4: FA-4's kernels, too (any_mask_more.py).")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each implementation in each round.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="That compile FlexAttention; each has threads of its own.")] = 3,
    limit: Annotated[float, typer.Option(help="Seconds for compiling one case of FlexAttention.")] = 180.0,
    commit: Annotated[str | None, typer.Option(help="To record.", show_default=False)] = None,
    flex: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure sparse masks."""
    if flex:
        _compile_one(flex)
        return
    wanted_names = names.split(",")
    if wrong := [name for name in wanted_names if name not in NAMES]:
        raise typer.BadParameter(f"--names: {wrong[0]!r} is no pattern; accepted: {', '.join(NAMES)}")
    if only not in ("", "passes", "making"):
        raise typer.BadParameter(f"--only: {only!r} is not known; accepted: passes, making")
    wanted_more = [name for name in more.split(",") if name]
    if wrong := [name for name in wanted_more if name not in any_mask_more.MORE]:
        raise typer.BadParameter(f"--more: {wrong[0]!r} is not known; accepted: {', '.join(any_mask_more.MORE)}")
    if json.exists() and not resume:
        raise typer.BadParameter(f"--json {json} exists; --resume goes on with it")
    rows, made = _found(json) if json.exists() else ([], [])
    torch.manual_seed(0)
    if only != "making":
        wanted = cases([PLAIN, *wanted_names], *([int(x) for x in each.split(",")] for each in (seqlens, head_dims)))
        there = {row.key for row in rows}
        wanted = [case for case in wanted if not all((*case, work) in there for work in PASSES)]
        masked = [case for case in wanted if case.name != PLAIN]
        failed = dict.fromkeys(masked, "left out") if without_flex else compile_flex(masked, processes, limit)
        for case in wanted:
            plain = {row.work: row.tflops for row in rows if row.key[:4] == (PLAIN, *case[1:])}
            rows += measure(
                case, rounds, repeats, failed.get(case), plain, without_bits, [name for name in more.split(",") if name]
            )
            save(rows, made, commit, json)
            console.print(f"{' '.join(map(str, case))}: {rows[-2].ms} {rows[-1].ms}")
        console.print(table(rows))
    if only != "passes":
        there_made = {(row["name"], row["planes"]) for row in made}
        for name, planes in (("dilated", 1), ("loaded-ids", 1), ("windows-by-head", 32), ("loaded-windows", 32)):
            if (name, planes) not in there_made:
                made.append(making(name, planes, rounds))
                save(rows, made, commit, json)
                console.print(made[-1])


def _found(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    content = json_module.loads(path.read_text())
    return [Row(**row) for row in content["rows"]], content["making"]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_script(app)
