"""`make fuzz`: random calls of tileattn's public functions until the time is over; exit status 1 where one was wrong.

make fuzz                                                  ten minutes on two cores
make fuzz ARGS="--seconds 60 --seed 7 --backend torch"
make fuzz ARGS="--call '{...}'"                            one call again, as a failure shows it
python -m fuzz --device cuda --structures 300 --leg-seconds 500 --state fuzz.json      a leg on a GPU
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
BACKENDS = ("torch", "triton")


@app.command()
def fuzz(
    seconds: Annotated[float, typer.Option(help="How long calls are made.")] = 600,
    seed: Annotated[
        int | None, typer.Option(help="Of all that is random; default: the time.", show_default=False)
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="On a CPU: torch, triton (in its interpreter).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: 2, on a GPU 10.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    structures: Annotated[
        int | None,
        typer.Option(help="Drawn, and compiled, before their sizes; default: 300 on a GPU.", show_default=False),
    ] = None,
    leg_seconds: Annotated[float | None, typer.Option(help="The same as --seconds.", show_default=False)] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where counts and failures are kept; a leg goes on with it.")
    ] = None,
    call: Annotated[str | None, typer.Option(help="Make this call alone and say what is wrong.")] = None,
    calls: Annotated[int | None, typer.Option(help="Stop after so many.", show_default=False)] = None,
    most_failures: Annotated[int, typer.Option(help="Stop after so many.")] = 20,
) -> None:
    """Random calls of tileattn's public functions beside an independent oracle."""
    began = time.time()
    chosen = tuple(backend or BACKENDS)
    unknown = [name for name in chosen if name not in BACKENDS]
    if unknown or device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{unknown or device}: backends are {', '.join(BACKENDS)}, devices cpu, cuda")
    if device == "cpu" and "triton" in chosen:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    if call is not None:
        raise typer.Exit(_again(call, device))
    from .run import Run

    run = Run(
        seed=int(began) if seed is None else seed,
        device=device,
        backends=[None if name == "torch" else name for name in chosen],
        end=began + (leg_seconds or seconds),
        workers=workers or (2 if device == "cpu" else 10),
        structures=(300 if device == "cuda" else 0) if structures is None else structures,
        state=state,
        most_failures=most_failures,
        most_calls=calls,
    )
    raise typer.Exit(run.run())


def _again(text: str, device: str) -> int:
    from .report import sketch
    from .spec import Call
    from .trial import detail, failure

    call = Call.from_json(text)
    typer.echo(sketch(call))
    wrong = failure(call, device)
    typer.echo(wrong or "right")
    if wrong:
        typer.echo(detail(call, device))
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(app())
