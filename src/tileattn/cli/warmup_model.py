"""Parses the options of `tileattn warmup --model` into kernels, with one error for what cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from tileattn.bench import warmup, warmup_model
from tileattn.bench.model_config import LayerKind, ModelKinds, read_config
from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.decode import backend as tilelang_decode
from tileattn.runtime.dispatch import named

DEFAULT_INPUTS = "plain,padded"
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class ModelOptions:
    """The options that select the kernels of a model; None for an option that was not given."""

    path: Path
    inputs: str | None = None
    dtype: str | None = None
    direction: str = "fwd"
    page_size: str | None = None


def choose_model_kernels(
    options: ModelOptions, arch: str, refuse: Callable[[str, str], typer.BadParameter]
) -> tuple[list[AnyJob], list[str]]:
    """The kernels of a model, and lines that say what was read.

    Args:
        options: as given.
        arch: to compile for.
        refuse: makes the error of an option's bad value.
    """
    inputs = [part.strip() for part in (options.inputs or DEFAULT_INPUTS).split(",")]
    if unknown := [part for part in inputs if part not in warmup_model.INPUTS]:
        raise refuse("--inputs", f"{unknown[0]!r} is not known; accepted: {', '.join(warmup_model.INPUTS)}")
    try:
        model = read_config(options.path)
    except ValueError as error:
        raise refuse("--model", str(error)) from error
    dtypes = [part.strip() for part in (options.dtype or model.dtype or "bf16").split(",")]
    if unknown := [part for part in dtypes if part not in DTYPES]:
        whose = "" if options.dtype else f" is the dtype in {options.path}, and"
        raise refuse("--dtype", f"{unknown[0]!r}{whose} has no kernels for models; accepted: {', '.join(DTYPES)}")
    jobs = _jobs(model, inputs, dtypes, _page_sizes(options, refuse), options.direction, arch)
    return jobs, _described(model, dtypes)


def _page_sizes(options: ModelOptions, refuse: Callable[[str, str], typer.BadParameter]) -> list[int]:
    sizes = [part.strip() for part in (options.page_size or "0").split(",")]
    if wrong := [part for part in sizes if not part.isdecimal()]:
        raise refuse("--page-size", f"{wrong[0]!r} is not understood; accepted: 16, or 0 for contiguous caches")
    return [int(part) for part in sizes]


def _jobs(
    model: ModelKinds, inputs: Sequence[str], dtypes: Sequence[str], pages: Sequence[int], direction: str, arch: str
) -> list[AnyJob]:
    forward: list[AttentionCall] = []
    backward: list[BackwardCall] = []
    steps: list[DecodeCall] = []
    for dtype in dtypes:
        for kind in model.kinds:
            if direction == "decode":
                of_decode, of_forward = _generation(kind, inputs, pages, dtype, arch)
                steps += of_decode
                forward += of_forward
            elif direction == "fwdbwd":
                backward += warmup_model.training_calls(kind, inputs, dtype, arch)
            else:
                forward += warmup_model.prefill_calls(kind, inputs, dtype, arch)
    forward += [each.forward for each in backward]
    for call in forward:
        _check(call, named("tilelang").refusal(call))
    # Where the decode kernels do not run a step, its forward kernel does, for any number of keys; pages have no other.
    accepted = []
    for step in dict.fromkeys(steps):
        reason = tilelang_decode.refusal(step)
        if step.paged:
            _check(step, reason)
        accepted += [step] if reason is None else []
    jobs = warmup.jobs(list(dict.fromkeys(forward)), list(dict.fromkeys(backward)))
    jobs += warmup_model.decode_jobs(accepted)
    return list({job.key: job for job in jobs}.values())


def _generation(
    kind: LayerKind, inputs: Sequence[str], pages: Sequence[int], dtype: str, arch: str
) -> tuple[list[DecodeCall], list[AttentionCall]]:
    """The calls of steps over contiguous caches, where 0 is among the page sizes, and over pages."""
    paged = [size for size in pages if size > 0]
    steps, forward = warmup_model.paged_calls(kind, paged, dtype, arch) if paged else ([], [])
    if 0 in pages:
        of_caches, of_few_keys = warmup_model.step_calls(kind, inputs, dtype, arch)
        steps, forward = [*of_caches, *steps], [*of_few_keys, *forward]
    return steps, forward


def _check(call: Any, reason: str | None) -> None:
    if reason is not None:
        raise typer.BadParameter(f"the TileLang kernels do not run {call}: {reason}")


def _described(model: ModelKinds, dtypes: Sequence[str]) -> list[str]:
    lines = []
    for kind in model.kinds:
        dims = f"{kind.head_dim}" if kind.head_dim == kind.head_dim_v else f"{kind.head_dim}/{kind.head_dim_v}"
        facts = ["window"] * kind.window + ["soft cap"] * kind.cap + ["sinks"] * kind.sink
        text = ", ".join([f"head_dim {dims}", f"{kind.group} query heads to a key/value head", *facts])
        lines.append(f"{model.name}: {text}, {','.join(dtypes)}")
    if model.left_out:
        lines.append(f"{model.name}: no kernels are compiled for {', '.join(model.left_out)}")
    return lines
