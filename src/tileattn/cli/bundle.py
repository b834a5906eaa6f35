"""The options of `tileattn bundle` and `tileattn record`; run_bundle.py has their code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BUNDLE_EXAMPLES = (
    "[dim]Examples[/dim]\n\n"
    "  tileattn bundle --arch sm_90a --preset default --out dist\n\n"
    "  tileattn bundle --arch sm_90a --preset default --list\n\n"
    "  tileattn bundle --preset kernels.jsonl"
)
RECORD_EXAMPLES = "[dim]Example[/dim]\n\n  tileattn record --output kernels.jsonl -- python app.py"


def bundle(
    arch: Annotated[
        str | None, typer.Option(help="sm_80, sm_90a, ... Default: this machine's GPU.", show_default=False)
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="The set of kernels: [b]default[/b], [b]all[/b], [b]first[/b], [b]sample[/b], or a file that "
            "[b]tileattn record[/b] wrote."
        ),
    ] = "default",
    out: Annotated[Path, typer.Option(help="The folder for the wheel.", file_okay=False)] = Path("dist"),
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Compilers at a time. Default: one for each core.", show_default=False
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print the kernels, and compile nothing.")] = False,
    lock: Annotated[
        Path | None,
        typer.Option(
            help="Write the digests of the generated sources into this file, and no wheel. For developers of tileattn: "
            "src/tileattn/kernels/bundles/locks/ARCH.txt.",
            show_default=False,
        ),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(
            help="Write the generated sources into this file, and no wheel. For developers of tileattn: "
            "src/tileattn/kernels/tilelang/build/generated/ARCH.json.xz, with the preset first.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compile a set of kernels into a wheel, for machines without a compiler.

    The wheel is a package of its own, such as tileattn-kernels-sm90a-cu13. With it installed, these kernels need
    neither TileLang nor nvcc. Kernels that the cache holds are not compiled again.
    """
    from tileattn.cli import run_bundle

    raise typer.Exit(run_bundle.bundle(arch, preset, out, jobs, only_list, lock, sources))


def record(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments, behind [b]--[/b].", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; what it holds is kept.")] = Path(
        "kernels.jsonl"
    ),
) -> None:
    """Run a program, and note every kernel that it asks for: tileattn bundle --preset FILE makes a bundle of them."""
    from tileattn.cli import run_bundle

    raise typer.Exit(run_bundle.record(command, output))
