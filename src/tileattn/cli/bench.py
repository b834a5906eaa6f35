"""The options of `tileattn bench` and `tileattn memory`; run_bench.py has their code.

A command has one positional argument for each option, because typer reads the options from its signature.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SHAPE, VARIANT, DRAWN = "One case: its shape", "One case: its variant", "Random cases"
COMPARE, OUTPUT = "What is compared", "What is written"

BENCH_EXAMPLES = (
    "[dim]Examples[/dim]\n\n"
    "  tileattn bench\n\n"
    "  tileattn bench --suite fa --baselines fa2,cudnn --plot speed.png\n\n"
    "  tileattn bench --suite fa --direction bwd\n\n"
    "  tileattn bench --B 4 --H 32 --KV 8 --N 1024,4096,16384 --D 128 --causal\n\n"
    "  tileattn bench --seqlen 16384 --mask window1024 --softcap 50 --baselines flex\n\n"
    "  tileattn bench --suite random --seed 1 --cases 40 --direction bwd\n\n"
    "  tileattn bench --suite decode --rows 'pages=16,contiguous context=1k,8k' --json decode.json"
)
MEMORY_EXAMPLES = (
    "[dim]Examples[/dim]\n\n"
    "  tileattn memory\n\n"
    "  tileattn memory --seqlen 1024,8192,65536 --causal --baselines eager,efficient --plot memory.png"
)

# `--peers`, which recorded commands use, is read as `--baselines`.
BASELINES_ALSO_PEERS = {"token_normalize_func": lambda name: "baselines" if name == "peers" else name}

# The options of `tileattn bench`: in a signature they would hide the arguments.
Suite = Annotated[
    str | None,
    typer.Option(
        help="A named set of cases: [b]quick[/b] (default; a few shapes sized by the device), [b]fa[/b] (the "
        "FlashAttention papers' grid), [b]variants[/b] (every mask and score modification), [b]varlen[/b] (packed "
        "sequences), [b]fp8[/b] (fp8 beside bf16), [b]decode[/b] (one query per sequence over caches), "
        "[b]decode-ratios[/b] (what options of decode cost), [b]random[/b] (shapes drawn by --seed), [b]modules[/b] "
        "(the modules of tileattn.nn beside naive attention; --seqlen, --batch, --heads and --head-dim choose its "
        "shape), [b]parallel[/b] (several GPUs, by torchrun).",
        show_default=False,
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", "--B", metavar="N", help="Default 1.", rich_help_panel=SHAPE)]
Heads = Annotated[
    int | None,
    typer.Option("--heads", "--H", metavar="N", help="Heads of q. Default 8.", rich_help_panel=SHAPE),
]
KvHeads = Annotated[
    int | None,
    typer.Option(
        "--kv-heads", "--KV", metavar="N", help="Heads of k and v. Default: as many as q.", rich_help_panel=SHAPE
    ),
]
Seqlen = Annotated[
    str | None,
    typer.Option(
        "--seqlen",
        "--N",
        help="Length of q; several with commas. Default 1024.",
        metavar="N,...",
        rich_help_panel=SHAPE,
    ),
]
SeqlenK = Annotated[
    int | None,
    typer.Option(metavar="N", help="Length of k and v. Default: that of q.", rich_help_panel=SHAPE),
]
HeadDim = Annotated[
    int | None, typer.Option("--head-dim", "--D", metavar="N", help="Default 64.", rich_help_panel=SHAPE)
]
HeadDimV = Annotated[
    int | None,
    typer.Option(
        "--head-dim-v", "--Dv", metavar="N", help="Head dim of v. Default: that of q and k.", rich_help_panel=SHAPE
    ),
]
Packing = Annotated[
    str | None,
    typer.Option(
        help="Packed sequences, as many as --batch says: [b]uniform[/b], all of --seqlen, or [b]skewed[/b], "
        "log-normal with that mean.",
        metavar="NAME",
        show_default=False,
        rich_help_panel=SHAPE,
    ),
]
Causal = Annotated[
    bool, typer.Option("--causal", help="A query sees keys up to its own position.", rich_help_panel=VARIANT)
]
Mask = Annotated[
    str | None,
    typer.Option(
        help="[b]window<L>[/b] (causal window), [b]window<L>-<R>[/b], [b]prefix<N>[/b] or [b]documents<N>[/b]; "
        "several joined with + hold at once.",
        rich_help_panel=VARIANT,
    ),
]
Softcap = Annotated[float | None, typer.Option(help="cap * tanh(score / cap).", metavar="CAP", rich_help_panel=VARIANT)]
Alibi = Annotated[bool, typer.Option("--alibi", help="ALiBi.", rich_help_panel=VARIANT)]
Bias = Annotated[bool, typer.Option("--bias", help="A bias per head, q, k.", rich_help_panel=VARIANT)]
Sink = Annotated[bool, typer.Option("--sink", help="A sink per head.", rich_help_panel=VARIANT)]
Variant = Annotated[
    str | None,
    typer.Option(
        help="The variant by its name in tables, instead of the above: [b]causal+bias-b1[/b], [b]userscore[/b], "
        "[b]bias+dbias[/b] (with the bias's gradient).",
        metavar="NAME",
        show_default=False,
        rich_help_panel=VARIANT,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="bf16, fp16, fp32 or fp8. Default: bf16 on a GPU, fp32 on a CPU.", show_default=False),
]
Direction = Annotated[
    str,
    typer.Option(
        help="What is measured: [b]fwd[/b]; [b]bwd[/b], the gradients of q, k and v by autograd, without the "
        "forward; or [b]fwdbwd[/b], both."
    ),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.", rich_help_panel=COMPARE)
]
Backend = Annotated[
    str | None,
    typer.Option(help="tileattn's backend. Default: its own choice per case.", rich_help_panel=COMPARE),
]
Baselines = Annotated[
    str | None,
    typer.Option(
        help="Implementations beside tileattn, with commas: eager, sdpa (PyTorch's choice), fa2, cudnn, efficient "
        "(SDPA's kernels), fa4, flex, tileattn-bf16 (beside fp8), tileattn-deterministic (of gradients), triton "
        "(tileattn's), triton-tutorial (the file that TILEATTN_TRITON_TUTORIAL names); of packed sequences "
        "fa2-varlen (PyTorch's), fa4 and tileattn-dense; or none. Default: fa2,cudnn on a GPU, sdpa,eager on a "
        "CPU, tileattn-bf16 for fp8; fa2-varlen,fa4,tileattn-dense for packed sequences. Of the suite decode: fa3, "
        "flashinfer, xqa (of the folder that DECODE_PEERS names), fa2, cudnn, sdpa, tileattn-fixed (FixedSplit(1024)); "
        "default: fa3,fa2,cudnn,flashinfer,xqa on a GPU, sdpa on a CPU. Of parallel: cudnn, fa2, flex, flex-ptrr "
        "(PyTorch's context_parallel; default), tileattn-gather, tileattn-ulysses, tileattn-ring.",
        metavar="NAME,...",
        show_default=False,
        rich_help_panel=COMPARE,
    ),
]
Rounds = Annotated[
    int,
    typer.Option(metavar="N", help="Rounds of timing, all implementations in each.", rich_help_panel=COMPARE),
]
Rows = Annotated[
    str | None,
    typer.Option(
        help="Of the suite decode: only rows that agree with all terms, such as "
        "[b]'pages=16,contiguous batch=1 context=1k,8k heads=32/8'[/b]. Default: all rows with pages of 16 and "
        "contiguous caches, then a quarter of the others. Of parallel: only rows with these words, such as "
        "[b]'32k,128k 32/8 causal'[/b], [b]documents[/b] or [b]1M[/b].",
        metavar="TERMS",
        show_default=False,
        rich_help_panel=COMPARE,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Of random, parallel and the suites of decode: go on from the file of --json, without its rows.",
        rich_help_panel=OUTPUT,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of the suite random: what the shapes are drawn from. Default: the first 8 digits of the commit.",
        metavar="N",
        show_default=False,
        rich_help_panel=DRAWN,
    ),
]
Cases = Annotated[
    int | None,
    typer.Option(
        help="Of the suite random: cases of a draw. Default 40.",
        metavar="N",
        show_default=False,
        rich_help_panel=DRAWN,
    ),
]
Draws = Annotated[
    int | None,
    typer.Option(
        help="Of the suite random: draws; each has the next seed. Default 1.",
        metavar="N",
        show_default=False,
        rich_help_panel=DRAWN,
    ),
]
Compile = Annotated[
    str | None,
    typer.Option(
        help="Of the suite random on a GPU: [b]ahead[/b] compiles all kernels before the first case, also FA-4's; "
        "[b]only[/b] does nothing else; [b]no[/b] leaves it out. Default: ahead.",
        metavar="NAME",
        show_default=False,
        rich_help_panel=DRAWN,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        help="Result file. Default: a new one in ./bench-results.", show_default=False, rich_help_panel=OUTPUT
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Picture: .png, .svg or .pdf. Default: beside the result file.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite the files of --json and --plot.", rich_help_panel=OUTPUT)
]
Commit = Annotated[
    str | None,
    typer.Option(help="Commit to record, instead of what git says of the code.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only failures and the files' names.", rich_help_panel=OUTPUT)
]


def bench(
    context: typer.Context,
    suite: Suite = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    seqlen: Seqlen = None,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    packing: Packing = None,
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
    baselines: Baselines = None,
    rounds: Rounds = 5,
    rows: Rows = None,
    resume: Resume = False,
    seed: Seed = None,
    cases: Cases = None,
    draws: Draws = None,
    compile: Compile = None,
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
    commit: Commit = None,
    quiet: Quiet = False,
) -> None:
    """Measure speed, memory and error of attention on this machine, beside PyTorch's own.

    Without options: a few representative shapes on the GPU, or on the CPU in about a minute.

    Prints a table, and saves a result file and a picture in ./bench-results.
    """
    from tileattn.bench.decode import ahead
    from tileattn.bench.draws import shapes
    from tileattn.cli import choices, decode_bench, module_bench, parallel_bench, random_bench
    from tileattn.cli import run_bench as command

    files = command.FileOptions(json, plot, force, commit, quiet)
    if suite in ahead.SUITES:
        decode_bench.refuse_others(context, suite)
        decode_options = decode_bench.DecodeOptions(dtype, backend, baselines, rounds, rows, resume)
        raise typer.Exit(decode_bench.bench(suite, decode_options, choices.resolve_device(device), files))
    if suite == module_bench.MODULES:
        module_bench.refuse_others(context)
        shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, None, head_dim)
        where = choices.resolve_device(device)
        chosen_modules = module_bench.choose(shape, dtype, direction, where)
        raise typer.Exit(module_bench.bench(*chosen_modules, where, rounds, files))
    if suite == shapes.SUITE:
        random_bench.refuse_others(context)
        random_options = random_bench.RandomOptions(
            seed, cases, draws, compile, dtype, direction, backend, baselines, rounds, resume
        )
        raise typer.Exit(random_bench.bench(random_options, choices.resolve_device(device), files))
    if suite == parallel_bench.PARALLEL:
        of_passes = parallel_bench.checked(context, direction)
        parallel_options = parallel_bench.ParallelOptions(
            seqlen, head_dim, dtype, of_passes, device, backend, baselines, rounds, rows, resume
        )
        raise typer.Exit(parallel_bench.bench(parallel_options, files))
    of_random = {"--seed": seed, "--cases": cases, "--draws": draws, "--compile": compile}
    choices.refuse_of_suites(of_random, rows, resume)
    shape = choices.ShapeOptions(batch, heads, kv_heads, seqlen, seqlen_k, head_dim, head_dim_v, packing)
    terms = choices.VariantOptions(causal, mask, softcap, alibi, bias, sink, variant)
    where = choices.resolve_device(device)
    chosen = choices.choose_cases(
        suite,
        shape,
        terms,
        dtype,
        direction,
        where,
        (*ahead.SUITES, module_bench.MODULES, shapes.SUITE, parallel_bench.PARALLEL),
    )
    implementations = choices.choose_implementations(backend, baselines, where, chosen)
    raise typer.Exit(command.bench(chosen, implementations, where, rounds, files))


def memory(
    seqlen: Annotated[
        str | None,
        typer.Option(
            "--seqlen",
            "--N",
            help="Lengths, with commas. Default: 1024 to 131072 on a GPU, 256 to 2048 on a CPU.",
            metavar="N,...",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "--B", metavar="N", help="Default 1.", show_default=False)
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", "--H", metavar="N", help="Heads. Default 8.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            "--kv-heads", "--KV", metavar="N", help="Heads of k and v. Default: as many as q.", show_default=False
        ),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", "--D", metavar="N", help="Default 128.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A query sees keys up to its own position.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 on a GPU, fp32 on a CPU.", show_default=False)
    ] = None,
    direction: Annotated[str, typer.Option(help="What is measured: fwd or fwdbwd, forward and backward.")] = "fwdbwd",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the GPU if there is one.")] = "auto",
    backend: Annotated[
        str | None, typer.Option(help="tileattn's backend. Default: its own choice.", show_default=False)
    ] = None,
    baselines: Annotated[
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
    implementations = choices.choose_implementations(backend, baselines, where, chosen)
    files = command.FileOptions(json, plot, force, commit, quiet)
    raise typer.Exit(command.bench(chosen, implementations, where, 1, files))
