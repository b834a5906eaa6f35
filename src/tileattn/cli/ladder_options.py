"""The options of `tileattn ladder`; ladder.py has its code.

A command has one positional argument for each option, because typer reads the options from its signature.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LADDER_EXAMPLES = (
    "[dim]Examples[/dim]\n\n"
    "  tileattn ladder --B 1 --H 8 --N 8192 --D 64 --iters 10\n\n"
    "  tileattn ladder --H 48 --causal --dtype bf16 --plot climb.png"
)


def ladder(
    batch: Annotated[int, typer.Option("--batch", "--B", metavar="N", help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option("--heads", "--H", metavar="N", help="Heads.")] = 8,
    seqlen: Annotated[int, typer.Option("--seqlen", "--N", metavar="N", help="Length of q, k and v.")] = 8192,
    head_dim: Annotated[int, typer.Option("--head-dim", "--D", metavar="N", help="Head dim.")] = 64,
    iters: Annotated[int, typer.Option(metavar="N", help="Timed calls of each step, in each of three rounds.")] = 10,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of q, k and v.", min=0)] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="A query sees keys up to its own position.")] = False,
    dtype: Annotated[str, typer.Option(help="fp16, which also runs with float16 accumulation, or bf16.")] = "fp16",
    plot: Annotated[Path | None, typer.Option(help="Draw the climb: .png, .svg or .pdf.", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option(help="Result file.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite result file and picture.")] = False,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Every candidate of the tiles instead of every option.", hidden=True)
    ] = False,
) -> None:
    """Climb the ladder of mma kernels: each rung's first values, time, TFLOPS and gain, FlashAttention-2 beside it."""
    from tileattn.cli import ladder

    case = ladder.case_of(batch, heads, seqlen, head_dim, causal, dtype)
    raise typer.Exit(ladder.climb(case, iters, seed, tiles, json, plot, force))
