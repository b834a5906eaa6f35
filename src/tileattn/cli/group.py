"""How the command `tileattn` shows errors: one line that says what is wrong, and one that says where help is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

# What typer calls ClickException: newer versions of typer bring click with them under another name.
ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """A group of commands whose errors are two lines instead of a drawn box of six and more."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        _exit_with_short_errors(run)


def run_script(app: typer.Typer) -> None:
    """Runs a script's command or commands, with errors of two lines.

    `Commands` alone is not enough: typer makes no group of a single command.
    """
    _exit_with_short_errors(partial(typer.main.get_command(app).main, standalone_mode=False))


def _exit_with_short_errors(run: Callable[[], Any]) -> NoReturn:
    try:
        status = run()
    except typer.Abort:
        typer.echo("Aborted.", err=True)
        sys.exit(1)
    except ClickException as error:
        _show(error)
        sys.exit(getattr(error, "exit_code", 1))
    sys.exit(status if isinstance(status, int) else 0)


def _show(error: Any) -> None:
    context = getattr(error, "ctx", None)
    if context is None:
        typer.secho(f"tileattn: {_line(error)}", fg="red", err=True)
    elif type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help())
    else:
        typer.secho(f"{context.command_path}: {_line(error)}", fg="red", err=True)
        typer.echo(f"Try '{context.command_path} --help'.", err=True)


def _line(error: Any) -> str:
    """The message on one line, with the given value: pydantic, by which typer reads numbers, leaves it out."""
    text = " ".join(error.format_message().split())
    read = getattr(error.__cause__, "errors", None)
    return f"{text}, got {read()[0]['input']!r}" if callable(read) else text
