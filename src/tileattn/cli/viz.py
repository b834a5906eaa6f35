"""The commands of `tileattn viz` and their options; run_viz.py has their code. Slow imports are inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Draw what attention does: tiles, weights, the online softmax, time and memory.", no_args_is_help=True
)

Causal = Annotated[bool, typer.Option("--causal", help="A query sees keys up to its own position.")]
MaskName = Annotated[
    str | None,
    typer.Option(
        "--mask", help="window<L>, window<L>-<R>, prefix<N> or documents<N>; several joined with + hold at once."
    ),
]
SeqlenK = Annotated[int | None, typer.Option(metavar="N", help="Length of k. Default: that of q.", show_default=False)]
Softcap = Annotated[float | None, typer.Option(help="cap * tanh(score / cap).", metavar="CAP")]
Alibi = Annotated[bool, typer.Option("--alibi", help="ALiBi.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random q and k.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the picture.")]
Result = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Result file of [b]tileattn bench[/b].")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Picture: .png, .svg or .pdf. Default: a new one in ./viz-results.", show_default=False
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Picture: .png, .svg or .pdf. Default: a new one beside RESULT.", show_default=False
    ),
]


@app.command(
    epilog="[dim]Examples[/dim]\n\n  tileattn viz tiles --seqlen 4096 --causal --mask documents1024\n\n"
    "  tileattn viz tiles --seqlen 8192 --mask window1024 --arch sm_90a --head-dim 128\n\n"
    "  tileattn viz tiles --seqlen 131072 --function masks.py:dilated"
)
def tiles(
    seqlen: Annotated[int, typer.Option("--seqlen", "--N", metavar="N", help="Length of q.")] = 2048,
    seqlen_k: SeqlenK = None,
    causal: Causal = False,
    mask: MaskName = None,
    function: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Instead: a function mask(b, h, q, k), or a mask, of a Python file; the picture shows which tiles it "
            "hides, cuts through or leaves whole.",
            show_default=False,
        ),
    ] = None,
    block_m: Annotated[
        int | None, typer.Option("--block-M", metavar="N", help="Queries in a tile. Default 128.", show_default=False)
    ] = None,
    block_n: Annotated[
        int | None, typer.Option("--block-N", metavar="N", help="Keys in a tile. Default 128.", show_default=False)
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Instead: the tiles of the kernel for sm_80, sm_90a, gfx942, ...", show_default=False),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option("--head-dim", "--D", metavar="N", help="Of that kernel. Default 128.", show_default=False),
    ] = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show which tiles of the scores a mask makes a kernel visit: full, partial, skipped."""
    from tileattn.cli import run_viz as command

    if function is not None:
        options: dict[str, object] = {"--mask": mask, "--arch": arch, "--head-dim": head_dim}
        command.tiles_of_function(function, seqlen, seqlen_k, causal, (block_m, block_n), options, output, force)
        return
    command.tiles(seqlen, seqlen_k, causal, mask, (block_m, block_n), arch, head_dim, output, force)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn viz weights --seqlen 48 --heads 4 --mask window16 --alibi")
def weights(
    seqlen: Annotated[int, typer.Option("--seqlen", "--N", metavar="N", help="Length of q.")] = 32,
    seqlen_k: SeqlenK = None,
    heads: Annotated[int, typer.Option("--heads", "--H", metavar="N", help="Heads of q, a panel each.")] = 4,
    head_dim: Annotated[
        int, typer.Option("--head-dim", "--D", metavar="N", help="The smaller, the more alike the weights.")
    ] = 64,
    causal: Causal = False,
    mask: MaskName = None,
    softcap: Softcap = None,
    alibi: Alibi = False,
    seed: Seed = 0,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show the attention weights of small random inputs under a mask and score modifications."""
    from tileattn.cli import run_viz as command
    from tileattn.cli.choices import VariantOptions

    terms = VariantOptions(causal=causal, mask=mask, softcap=softcap, alibi=alibi)
    command.weights(seqlen, seqlen_k, heads, head_dim, terms, seed, output, force)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn viz softmax --seqlen 128 --block-N 16 --row 100 --causal")
def softmax(
    seqlen: Annotated[int, typer.Option("--seqlen", "--N", metavar="N", help="Length of q and k.")] = 128,
    block_n: Annotated[int, typer.Option("--block-N", metavar="N", help="Keys in a tile.")] = 16,
    row: Annotated[int, typer.Option(metavar="N", help="Which query; negative ones count from the end.")] = -1,
    head_dim: Annotated[int, typer.Option("--head-dim", "--D", metavar="N", help="Of q, k and v.")] = 64,
    causal: Causal = False,
    mask: MaskName = None,
    softcap: Softcap = None,
    alibi: Alibi = False,
    seed: Seed = 0,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show m, l and the size of o along one row of random scores, tile by tile."""
    from tileattn.cli import run_viz as command
    from tileattn.cli.choices import VariantOptions

    terms = VariantOptions(causal=causal, mask=mask, softcap=softcap, alibi=alibi)
    command.softmax(seqlen, block_n, row, head_dim, terms, seed, output, force)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn viz plan --lengths 32768,4096,4096,100 --kv-heads 8 --blocks 264")
def plan(
    lengths: Annotated[
        str, typer.Option(metavar="N,...", help="Keys of each sequence, with commas.")
    ] = "32768,8192,8192,1024,100,5000",
    kv_heads: Annotated[int, typer.Option("--kv-heads", "--KV", metavar="N", help="Heads of the cache.")] = 8,
    block_n: Annotated[int, typer.Option("--block-N", metavar="N", help="Keys in a tile.")] = 64,
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks of the kernel; on an H200 two per SM.")] = 264,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show how the plan of a decode call deals sequences to the GPU's blocks."""
    from tileattn.cli import run_viz as command

    command.plan(lengths, kv_heads, block_n, blocks, output, force)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn viz lengths bench-results/quick.json --variant causal")
def lengths(
    result: Result,
    variant: Annotated[str | None, typer.Option(help="full or causal alone.", show_default=False)] = None,
    output: Picture = None,
    force: Force = False,
) -> None:
    """Draw time and peak memory against the sequence length."""
    from tileattn.cli import run_viz as command

    command.lengths(result, variant, output, force)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn viz dashboard bench-results/quick.json")
def dashboard(result: Result, output: Picture = None, force: Force = False) -> None:
    """Draw speed, share of the ceiling, error and memory of every case of a result file."""
    from tileattn.cli import run_viz as command

    command.dashboard(result, output, force)
