"""The options of `tileattn tune`; run_tune.py has its code.

A command has one positional argument for each option, because typer reads the options from its signature.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tileattn.cli.bench import (
    VARIANT,
    Alibi,
    Batch,
    Bias,
    Causal,
    Dtype,
    HeadDim,
    HeadDimV,
    Heads,
    KvHeads,
    Seqlen,
    SeqlenK,
    Sink,
    Softcap,
)

TUNE_EXAMPLES = (
    "[dim]Examples[/dim]\n\n"
    "  tileattn tune --B 4 --H 32 --KV 8 --N 1024,4096 --D 128 --causal\n\n"
    "  tileattn tune --suite quick\n\n"
    "  tileattn tune --B 1 --H 16 --N 16384 --D 128 --mask window1024 --softcap 50 --direction bwd\n\n"
    "  tileattn tune --show"
)

# The options of `tileattn tune` that `tileattn bench` has in other words, or not at all.
Suite = Annotated[
    str | None, typer.Option(help="A named set of cases, as for [b]tileattn bench[/b].", show_default=False)
]
Mask = Annotated[
    str | None,
    typer.Option(help="As for [b]tileattn bench[/b]: window<L>, prefix<N>, ...", rich_help_panel=VARIANT),
]
Variant = Annotated[
    str | None,
    typer.Option(
        help="The variant by its name in tables, instead of the above.",
        metavar="NAME",
        show_default=False,
        rich_help_panel=VARIANT,
    ),
]
Direction = Annotated[
    str, typer.Option(help="What is tuned: [b]fwd[/b], the forward pass; [b]bwd[/b] or [b]fwdbwd[/b], both.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.")]
Backend = Annotated[
    str | None, typer.Option(help="tileattn's backend. Default: its own choice per case.", show_default=False)
]
Again = Annotated[bool, typer.Option("--again", help="Measure cases that have a result already, too.")]
Show = Annotated[bool, typer.Option("--show", help="List the results that are kept, and stop.")]
Clear = Annotated[bool, typer.Option("--clear", help="Remove all results, after asking, and stop.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="With --clear: do not ask.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only failures and the file's name.")]


def tune(
    ctx: typer.Context,
    suite: Suite = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    seqlen: Seqlen = None,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    causal: Causal = False,
    mask: Mask = None,
    softcap: Softcap = None,
    alibi: Alibi = False,
    bias: Bias = False,
    sink: Sink = False,
    variant: Variant = None,
    dtype: Dtype = None,
    direction: Direction = "fwd",
    device: Device = "auto",
    backend: Backend = None,
    again: Again = False,
    show: Show = False,
    clear: Clear = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Find the fastest configuration of the kernels for a case on this machine, and keep it for later calls.

    Measures all that fit, each checked against the default, in about a minute per case. Later calls of the same kind,
    of sizes in the same powers of two, use the result: in this and in other processes.
    """
    from tileattn.cli import choices
    from tileattn.cli import run_tune as command

    if show or clear:
        _show_or_clear(ctx, show, clear, yes)
        return
    if yes:
        raise choices.refuse("--yes", "it goes with --clear")
    shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, seqlen_k, head_dim, head_dim_v)
    terms = choices.VariantOptions(causal, mask, softcap, alibi, bias, sink, variant)
    where = choices.resolve_device(device)
    chosen = choices.choose_cases(suite, shape, terms, dtype, direction, where)
    raise typer.Exit(command.tune(chosen, choices.own_implementation(backend), where, again, quiet))


def _show_or_clear(ctx: typer.Context, show: bool, clear: bool, yes: bool) -> None:
    """Runs --show or --clear, each of which allows no other option."""
    from tileattn.cli import choices
    from tileattn.cli import run_tune as command

    if show and clear:
        raise choices.refuse("--show", "give either it or --clear")
    alone = {"--show"} if show else {"--clear", "--yes"}
    if unused := [option for option in _given(ctx) if option not in alone]:
        raise choices.refuse("--show" if show else "--clear", f"it takes no other option, got {', '.join(unused)}")
    command.show() if show else command.clear(yes)


def _given(ctx: typer.Context) -> list[str]:
    """The options that the user gave, by their first names."""
    sources = {each.opts[0]: ctx.get_parameter_source(each.name or "") for each in ctx.command.params}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
