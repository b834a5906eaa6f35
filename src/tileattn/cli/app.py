"""The command line `tileattn`: its commands, in the order in which `tileattn --help` lists them.

The options of `bench`, `memory`, `tune`, `ladder` and `viz` are in bench.py, tune.py, ladder_options.py and viz.py. The
code of the commands is in run_bench.py, run_tune.py, ladder.py, run_viz.py, run_demo.py and info.py. Slow imports are
inside the commands, so that `tileattn --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tileattn.cli.bench import BASELINES_ALSO_PEERS, BENCH_EXAMPLES, MEMORY_EXAMPLES, bench, memory
from tileattn.cli.bundle import BUNDLE_EXAMPLES, RECORD_EXAMPLES, bundle, record
from tileattn.cli.group import Commands
from tileattn.cli.ladder_options import LADDER_EXAMPLES, ladder
from tileattn.cli.tune import TUNE_EXAMPLES, tune
from tileattn.cli.viz import app as viz

app = typer.Typer(
    name="tileattn",
    cls=Commands,
    help="Exact attention for PyTorch, written in TileLang.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(viz, name="viz")


def main() -> None:
    """Entry point of the console script `tileattn`."""
    app()


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print tileattn's version.")] = False,
) -> None:
    if show:
        from tileattn import __version__

        typer.echo(f"tileattn {__version__}")
        raise typer.Exit


@app.command()
def info(
    arch: Annotated[
        str | None,
        typer.Option(
            help="Ask for another architecture than this machine's: sm_80, sm_90a, gfx942, ...",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the device, the versions, the kernel cache, and what each backend accepts and why not."""
    from tileattn.cli import info

    info.show(arch)


app.command(epilog=BENCH_EXAMPLES, context_settings=BASELINES_ALSO_PEERS)(bench)
app.command(epilog=MEMORY_EXAMPLES, context_settings=BASELINES_ALSO_PEERS)(memory)
app.command(epilog=LADDER_EXAMPLES)(ladder)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn plot bench-results/quick.json -o speed.svg")
def plot(
    result: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Result file of [b]tileattn bench[/b] or [b]memory[/b].")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Picture: .png, .svg or .pdf. Default: RESULT.png, or a new name beside it.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False,
) -> None:
    """Draw the picture of a result file again."""
    from tileattn.cli import run_bench as command

    command.redraw(result, output, force)


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn warmup\n\n"
    "  tileattn warmup --head-dim 128,192/128 --variant causal,causal+softcap50 --dtype bf16,fp16\n\n"
    "  tileattn warmup --direction fwdbwd\n\n"
    "  tileattn warmup --direction decode --page-size 16,0 --variant causal,causal+window1024\n\n"
    "  tileattn warmup --model path/to/config.json --direction fwdbwd\n\n"
    "  tileattn warmup --arch sm_90a --list"
)
def warmup(
    head_dim: Annotated[
        str | None,
        typer.Option(
            "--head-dim",
            "--D",
            help="Head dims; 192/128 where q and k have another than v. Default: 64,128.",
            metavar="N,...",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Variants, as [b]tileattn bench[/b] names them. Default: full,causal; for decode causal.",
            metavar="NAME,...",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16, fp16. Default: bf16, or the model's.", metavar="NAME,...", show_default=False),
    ] = None,
    direction: Annotated[
        str,
        typer.Option(
            help="[b]fwd[/b]; for training [b]fwdbwd[/b], with the backward pass; for serving [b]decode[/b], with "
            "append_kv."
        ),
    ] = "fwd",
    page_size: Annotated[
        str | None,
        typer.Option(
            help="With decode: tokens of a page, 0 for contiguous caches. Multiples of 64 are one. Default: 16,64; "
            "with --model 0.",
            metavar="N,...",
            show_default=False,
        ),
    ] = None,
    rotary: Annotated[
        str | None,
        typer.Option(
            help="With decode: how append_kv rotates: none, halves (Llama), interleaved (GPT-J). Default: none,halves.",
            metavar="NAME,...",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="sm_80, sm_90a, ... Default: this machine's GPU.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A model's config.json, or its folder: the kernels that it asks for through transformers.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="With --model, how a batch's sequences come: plain, padded, packed (cu_seq_lens), documents "
            "(position_ids). Default: plain,padded.",
            metavar="NAME,...",
            show_default=False,
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print the kernels, and compile none.")] = False,
) -> None:
    """Compile kernels into the cache ahead of the first call.

    Sizes are no part of a kernel: batch, lengths, heads, window sizes and caps need no warming up of their own.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_bench as command

    options = choices.WarmupOptions(head_dim, variant, dtype, direction, page_size, rotary, arch, model, inputs)
    jobs, read = choices.choose_kernels(options)
    for line in read:
        typer.echo(line)
    raise typer.Exit(command.list_kernels(jobs) if only_list else command.warm_up(jobs))


app.command(epilog=BUNDLE_EXAMPLES)(bundle)
app.command(epilog=RECORD_EXAMPLES, context_settings={"ignore_unknown_options": True})(record)
app.command(epilog=TUNE_EXAMPLES)(tune)


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn demo --port 8000 --no-browser")
def demo(
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Default: the first free one from 7860 on.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.")] = "auto",
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
) -> None:
    """Show a page on this machine: choose a variant and a shape, see its tiles, error, time and memory."""
    from tileattn.cli import choices
    from tileattn.cli import run_demo as command

    command.demo(choices.resolve_device(device), port, browser)
