"""The command line `tileattn`: what each command takes. What they do is in run_bench.py, info.py and
run_tune.py.

Everything slow is imported inside the commands, so that `tileattn --help` answers at once. `tileattn viz` is in
`cli.viz`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tileattn.cli.viz import app as viz

app = typer.Typer(
    name="tileattn",
    help="Exact attention for PyTorch, written in TileLang.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(viz, name="viz")

# The short names of `tileattn tune`, beside the long ones that all commands have.
TUNE_NAMES = {
    "--batch": "--B",
    "--heads": "--H",
    "--kv-heads": "--KV",
    "--seqlen": "--N",
    "--head-dim": "--D",
    "--head-dim-v": "--Dv",
}
SHAPE, VARIANT, COMPARE, OUTPUT = "One case: its shape", "One case: its variant", "What is compared", "What is written"


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


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn bench\n\n"
    "  tileattn bench --suite fa --peers fa2,cudnn --plot speed.png\n\n"
    "  tileattn bench --suite fa --direction bwd\n\n"
    "  tileattn bench --batch 4 --heads 32 --kv-heads 8 --seqlen 1024,4096,16384 --head-dim 128 --causal\n\n"
    "  tileattn bench --seqlen 16384 --mask window1024 --softcap 50 --peers flex"
)
def bench(
    suite: Annotated[
        str | None,
        typer.Option(
            help="A named set of cases: [b]quick[/b] (default; a few shapes sized by the device), [b]fa[/b] (the "
            "FlashAttention papers' grid), [b]variants[/b] (every mask and score modification), [b]varlen[/b] (packed "
            "sequences), [b]fp8[/b] (fp8 beside bf16).",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Default 1.", rich_help_panel=SHAPE)] = None,
    heads: Annotated[
        int | None, typer.Option(metavar="N", help="Heads of q. Default 8.", rich_help_panel=SHAPE)
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Heads of k and v. Default: as many as q.", rich_help_panel=SHAPE),
    ] = None,
    seqlen: Annotated[
        str | None,
        typer.Option(help="Length of q; several with commas. Default 1024.", metavar="N,...", rich_help_panel=SHAPE),
    ] = None,
    seqlen_k: Annotated[
        int | None,
        typer.Option(metavar="N", help="Length of k and v. Default: that of q.", rich_help_panel=SHAPE),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Default 64.", rich_help_panel=SHAPE)] = None,
    head_dim_v: Annotated[
        int | None,
        typer.Option(metavar="N", help="Head dim of v. Default: that of q and k.", rich_help_panel=SHAPE),
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(
            help="Packed sequences, as many as --batch says: [b]uniform[/b], all of --seqlen, or [b]skewed[/b], "
            "log-normal with that mean.",
            metavar="NAME",
            show_default=False,
            rich_help_panel=SHAPE,
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="A query sees keys up to its own position.", rich_help_panel=VARIANT)
    ] = False,
    mask: Annotated[
        str | None,
        typer.Option(
            help="[b]window<L>[/b] (causal window), [b]window<L>-<R>[/b], [b]prefix<N>[/b] or [b]documents<N>[/b]; "
            "several joined with + hold at once.",
            rich_help_panel=VARIANT,
        ),
    ] = None,
    softcap: Annotated[
        float | None, typer.Option(help="cap * tanh(score / cap).", metavar="CAP", rich_help_panel=VARIANT)
    ] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi.", rich_help_panel=VARIANT)] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias per head, q, k.", rich_help_panel=VARIANT)] = False,
    sink: Annotated[bool, typer.Option("--sink", help="A sink per head.", rich_help_panel=VARIANT)] = False,
    variant: Annotated[
        str | None,
        typer.Option(
            help="The variant by its name in tables, instead of the above: [b]causal+bias-b1[/b], [b]userscore[/b], "
            "[b]bias+dbias[/b] (with the bias's gradient).",
            metavar="NAME",
            show_default=False,
            rich_help_panel=VARIANT,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16, fp16, fp32 or fp8. Default: bf16 on a GPU, fp32 on a CPU.", show_default=False),
    ] = None,
    direction: Annotated[
        str,
        typer.Option(
            help="What is measured: [b]fwd[/b]; [b]bwd[/b], the gradients of q, k and v by autograd, without the "
            "forward; or [b]fwdbwd[/b], both."
        ),
    ] = "fwd",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.", rich_help_panel=COMPARE)
    ] = "auto",
    backend: Annotated[
        str | None,
        typer.Option(help="tileattn's backend. Default: its own choice per case.", rich_help_panel=COMPARE),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Implementations beside tileattn, with commas: eager, sdpa (PyTorch's choice), fa2, cudnn, efficient "
            "(SDPA's kernels), fa4, flex, tileattn-bf16 (beside fp8), tileattn-deterministic (of gradients), triton "
            "(tileattn's), triton-tutorial (the file that TILEATTN_TRITON_TUTORIAL names); of packed sequences "
            "fa2-varlen (PyTorch's), fa4 and tileattn-dense; or none. Default: fa2,cudnn on a GPU, sdpa,eager on a "
            "CPU, tileattn-bf16 for fp8; fa2-varlen,fa4,tileattn-dense for packed sequences.",
            metavar="NAME,...",
            show_default=False,
            rich_help_panel=COMPARE,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(metavar="N", help="Rounds of timing, all implementations in each.", rich_help_panel=COMPARE),
    ] = 5,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Result file. Default: a new one in ./bench-results.", show_default=False, rich_help_panel=OUTPUT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Picture: .png, .svg or .pdf. Default: beside the result file.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the files of --json and --plot.", rich_help_panel=OUTPUT)
    ] = False,
    commit: Annotated[
        str | None,
        typer.Option(help="Commit to record, instead of what git says of the code.", rich_help_panel=OUTPUT),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only failures and the files' names.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Measure speed, memory and error of attention on this machine, beside PyTorch's own.

    Without options: a few representative shapes on the GPU, or on the CPU in about a minute.

    Prints a table, and saves a result file and a picture in ./bench-results.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_bench as command

    shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, seqlen_k, head_dim, head_dim_v, packing)
    terms = choices.VariantOptions(causal, mask, softcap, alibi, bias, sink, variant)
    files = command.FileOptions(json, plot, force, commit, quiet)
    where = choices.resolve_device(device)
    chosen = choices.choose_cases(suite, shape, terms, dtype, direction, where)
    implementations = choices.choose_implementations(backend, peers, where, chosen)
    raise typer.Exit(command.bench(chosen, implementations, where, rounds, files))


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn memory\n\n"
    "  tileattn memory --seqlen 1024,8192,65536 --causal --peers eager,efficient --plot memory.png"
)
def memory(
    seqlen: Annotated[
        str | None,
        typer.Option(
            help="Lengths, with commas. Default: 1024 to 131072 on a GPU, 256 to 2048 on a CPU.",
            metavar="N,...",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Default 1.", show_default=False)] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Heads. Default 8.", show_default=False)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", help="Heads of k and v. Default: as many as q.", show_default=False)
    ] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Default 128.", show_default=False)] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A query sees keys up to its own position.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 on a GPU, fp32 on a CPU.", show_default=False)
    ] = None,
    direction: Annotated[str, typer.Option(help="What is measured: fwd or fwdbwd, forward and backward.")] = "fwdbwd",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.")] = "auto",
    backend: Annotated[
        str | None, typer.Option(help="tileattn's backend. Default: its own choice.", show_default=False)
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Beside tileattn, as for [b]tileattn bench[/b]; or none.", metavar="NAME,...")
    ] = "eager",
    json: Annotated[
        Path | None, typer.Option(help="Result file. Default: a new one in ./bench-results.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture: .png, .svg or .pdf. Default: beside the result file.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files of --json and --plot.")] = False,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record, instead of what git says of the code.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only failures and the files' names.")] = False,
) -> None:
    """Measure the peak memory of forward and backward against the sequence length, beside naive attention.

    Prints the table of [b]tileattn bench[/b], and saves a result file and a picture in ./bench-results.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_bench as command

    where = choices.resolve_device(device)
    shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, None, head_dim)
    chosen = choices.choose_memory(shape, causal, dtype, direction, where)
    implementations = choices.choose_implementations(backend, peers, where, chosen)
    files = command.FileOptions(json, plot, force, commit, quiet)
    raise typer.Exit(command.bench(chosen, implementations, where, 1, files))


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn ladder --B 1 --H 8 --N 8192 --D 64 --iters 10\n\n"
    "  tileattn ladder --H 48 --causal --dtype bf16 --plot climb.png"
)
def ladder(
    batch: Annotated[int, typer.Option("--B", metavar="N", help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option("--H", metavar="N", help="Heads.")] = 8,
    seqlen: Annotated[int, typer.Option("--N", metavar="N", help="Length of q, k and v.")] = 8192,
    head_dim: Annotated[int, typer.Option("--D", metavar="N", help="Head dim.")] = 64,
    iters: Annotated[int, typer.Option(metavar="N", help="Timed calls of each step, in each of three rounds.")] = 10,
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
    raise typer.Exit(ladder.climb(case, iters, tiles, json, plot, force))


@app.command(epilog="[dim]Example[/dim]\n\n  tileattn plot bench-results/quick.json -o speed.svg")
def plot(
    result: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Result file of [b]tileattn bench[/b] or [b]memory[/b].")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Picture: .png, .svg or .pdf. Default: RESULT.png.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False,
) -> None:
    """Draw the picture of a result file again."""
    from tileattn.cli import run_bench as command

    command.redraw(result, output or result.with_suffix(".png"), force)


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn warmup\n\n"
    "  tileattn warmup --head-dim 128,192/128 --variant causal,causal+softcap50 --dtype bf16,fp16\n\n"
    "  tileattn warmup --direction fwdbwd\n\n"
    "  tileattn warmup --arch sm_90a"
)
def warmup(
    head_dim: Annotated[
        str, typer.Option(help="Head dims; 192/128 where q and k have another than v.", metavar="N,...")
    ] = "64,128",
    variant: Annotated[
        str, typer.Option(help="Variants, as [b]tileattn bench[/b] names them.", metavar="NAME,...")
    ] = "full,causal",
    dtype: Annotated[str, typer.Option(help="bf16, fp16.", metavar="NAME,...")] = "bf16",
    direction: Annotated[
        str, typer.Option(help="[b]fwd[/b], or for training [b]fwdbwd[/b]: the kernels of the backward pass as well.")
    ] = "fwd",
    arch: Annotated[
        str | None, typer.Option(help="sm_80, sm_90a, ... Default: this machine's GPU.", show_default=False)
    ] = None,
) -> None:
    """Compile kernels into the cache ahead of the first call.

    Sizes are no part of a kernel: batch, lengths, heads, window sizes and caps need no warming up of their own.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_bench as command

    raise typer.Exit(command.warm_up(choices.choose_kernels(head_dim, variant, dtype, direction, arch)))


@app.command(
    epilog="[dim]Examples[/dim]\n\n"
    "  tileattn tune --B 4 --H 32 --KV 8 --N 1024,4096 --D 128 --causal\n\n"
    "  tileattn tune --suite quick\n\n"
    "  tileattn tune --B 1 --H 16 --N 16384 --D 128 --mask window1024 --softcap 50 --direction bwd\n\n"
    "  tileattn tune --show"
)
def tune(
    ctx: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="A named set of cases, as for [b]tileattn bench[/b].", show_default=False)
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "--B", metavar="N", help="Default 1.", rich_help_panel=SHAPE)
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", "--H", metavar="N", help="Heads of q. Default 8.", rich_help_panel=SHAPE),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            "--kv-heads", "--KV", metavar="N", help="Heads of k and v. Default: as many as q.", rich_help_panel=SHAPE
        ),
    ] = None,
    seqlen: Annotated[
        str | None,
        typer.Option(
            "--seqlen",
            "--N",
            help="Length of q; several with commas. Default 1024.",
            metavar="N,...",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    seqlen_k: Annotated[
        int | None,
        typer.Option(metavar="N", help="Length of k and v. Default: that of q.", rich_help_panel=SHAPE),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", "--D", metavar="N", help="Default 64.", rich_help_panel=SHAPE)
    ] = None,
    head_dim_v: Annotated[
        int | None,
        typer.Option(
            "--head-dim-v", "--Dv", metavar="N", help="Head dim of v. Default: that of q and k.", rich_help_panel=SHAPE
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="A query sees keys up to its own position.", rich_help_panel=VARIANT)
    ] = False,
    mask: Annotated[
        str | None,
        typer.Option(help="As for [b]tileattn bench[/b]: window<L>, prefix<N>, ...", rich_help_panel=VARIANT),
    ] = None,
    softcap: Annotated[
        float | None, typer.Option(help="cap * tanh(score / cap).", metavar="CAP", rich_help_panel=VARIANT)
    ] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi.", rich_help_panel=VARIANT)] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias per head, q, k.", rich_help_panel=VARIANT)] = False,
    sink: Annotated[bool, typer.Option("--sink", help="A sink per head.", rich_help_panel=VARIANT)] = False,
    variant: Annotated[
        str | None,
        typer.Option(
            help="The variant by its name in tables, instead of the above.",
            metavar="NAME",
            show_default=False,
            rich_help_panel=VARIANT,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16, fp16, fp32 or fp8. Default: bf16 on a GPU, fp32 on a CPU.", show_default=False),
    ] = None,
    direction: Annotated[
        str, typer.Option(help="What is tuned: [b]fwd[/b], the forward pass; [b]bwd[/b] or [b]fwdbwd[/b], both.")
    ] = "fwd",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.")] = "auto",
    backend: Annotated[
        str | None, typer.Option(help="tileattn's backend. Default: its own choice per case.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure cases that have a result already, too.")] = False,
    show: Annotated[bool, typer.Option("--show", help="List the results that are kept, and stop.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all results, after asking, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only failures and the file's name.")] = False,
) -> None:
    """Find the fastest configuration of the kernels for a case on this machine, and keep it for later calls.

    Measures all that fit, each checked against the default, in about a minute per case. Later calls of the same kind,
    of sizes in the same powers of two, use the result: in this and in other processes.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_tune as command

    if show or clear:
        if show and clear:
            raise choices.refuse("--show", "give either it or --clear")
        alone = {"--show"} if show else {"--clear", "--yes"}
        if unused := [option for option in _given(ctx) if option not in alone]:
            raise choices.refuse("--show" if show else "--clear", f"it takes no other option, got {', '.join(unused)}")
        command.show() if show else command.clear(yes)
        return
    if yes:
        raise choices.refuse("--yes", "it goes with --clear")
    shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, seqlen_k, head_dim, head_dim_v)
    terms = choices.VariantOptions(causal, mask, softcap, alibi, bias, sink, variant)
    where = choices.resolve_device(device)
    with choices.both_names(TUNE_NAMES):
        chosen = choices.choose_cases(suite, shape, terms, dtype, direction, where)
    raise typer.Exit(command.tune(chosen, choices.own_implementation(backend), where, again, quiet))


def _given(ctx: typer.Context) -> list[str]:
    """The options that were written, by their first names."""
    sources = {each.opts[0]: ctx.get_parameter_source(each.name or "") for each in ctx.command.params}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


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
