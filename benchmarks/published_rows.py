"""Measures the shapes of two works that tileattn grew out of, for result files that are not committed yet.

    python benchmarks/published_rows.py --list                  # the commands and their files; needs no GPU
    python benchmarks/published_rows.py --folder rows           # on an H200: all of them, each into a file of its own
    python benchmarks/published_rows.py tilelang --folder rows  # of one work

`tilelang`: the forward pass of TileLang's examples/flash_attention: batch 8, 32 heads, 4096 tokens, head dim 128, and a
call with 4096 queries and 8192 keys. Beside it run PyTorch's FlashAttention-2 (`fa2`), cuDNN (`cudnn`) and, where it is
installed, FlashAttention-4 (`fa4`). The flash-attn package is measured by its own script, where it can be built.

`ladder`: flash-attention-mma (LeetCUDA): (1, 8192, 8) at head dim 32, and (2, 4096, 2) at head dim 64, as (batch,
seqlen, heads).

Files go into `benchmarks/results/NAME`, with a line in `benchmarks/results/README.md`; those of the ladder also into
`SOURCES` of `benchmarks/make_ladder.py`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tileattn.cli.choices import refuse
from tileattn.cli.group import run_script

TILELANG = "--batch 8 --heads 32 --head-dim 128 --dtype fp16 --baselines fa2,cudnn,fa4"


@dataclass(frozen=True)
class Entry:
    """A command of `tileattn`, without --json, and its result file below `benchmarks/results`."""

    work: str
    file: str
    command: str


ROWS = (
    Entry("tilelang", "forward/tilelang-full-h200.json", f"bench {TILELANG} --seqlen 4096"),
    Entry("tilelang", "forward/tilelang-causal-h200.json", f"bench {TILELANG} --seqlen 4096 --causal"),
    Entry("tilelang", "forward/tilelang-4096x8192-full-h200.json", f"bench {TILELANG} --seqlen 4096 --seqlen-k 8192"),
    Entry(
        "tilelang",
        "forward/tilelang-4096x8192-causal-h200.json",
        f"bench {TILELANG} --seqlen 4096 --seqlen-k 8192 --causal",
    ),
    Entry("ladder", "ladder/d32-h200.json", "ladder --B 1 --H 8 --N 8192 --D 32 --iters 10"),
    Entry("ladder", "ladder/d64-b2-h200.json", "ladder --B 2 --H 2 --N 4096 --D 64 --iters 10"),
)
WORKS = tuple(dict.fromkeys(row.work for row in ROWS))

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    works: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(WORKS)}; all by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the files are written; its folders are made.")] = Path("rows"),
    show: Annotated[bool, typer.Option("--list", help="Print the commands and measure nothing.")] = False,
) -> None:
    """Runs the commands one after another; the exit code is 1 if any of them failed."""
    for work in works or ():
        if work not in WORKS:
            raise refuse("WORKS", f"{work!r} is not known; accepted: {', '.join(WORKS)}")
    failed = []
    for row in ROWS:
        if works and row.work not in works:
            continue
        file = folder / row.file
        line = [*shlex.split(row.command), "--json", str(file)]
        typer.echo(f"tileattn {shlex.join(line)}")
        if not show and subprocess.run([sys.executable, "-m", "tileattn", *line], check=False).returncode:
            failed.append(str(file))
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    run_script(app)
