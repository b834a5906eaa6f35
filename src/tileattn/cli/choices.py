"""Parses options into devices, cases, implementations and calls.

A bad value raises one error. It names the option, the given value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer

from tileattn.bench import cases, variants, warmup
from tileattn.bench.baselines import BASELINES, Implementation, TileAttn
from tileattn.bench.cases import Case
from tileattn.call.facts import device_arch
from tileattn.cli.warmup_model import ModelOptions, choose_model_kernels
from tileattn.kernels.tilelang.append import backend as tilelang_append
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.decode import backend as tilelang_decode
from tileattn.runtime.dispatch import BACKENDS, named

DEFAULT_BASELINES = {"cuda": "fa2,cudnn", "cpu": "sdpa,eager"}
# What an fp8 case is compared with: no baseline takes fp8.
FP8_BASELINES = "tileattn-bf16"
# And packed sequences: most baselines want a batch of one length.
PACKED_BASELINES = {"cuda": "fa2-varlen,fa4,tileattn-dense", "cpu": "tileattn-dense"}
DEFAULT_DTYPE = {"cuda": "bf16", "cpu": "fp32"}
# What `tileattn memory` measures: lengths, by device, and what its result files call their suite.
MEMORY_LENGTHS = {"cuda": "1024,2048,4096,8192,16384,32768,65536,131072", "cpu": "256,512,1024,2048"}
MEMORY = "memory"
# And those of `tileattn ladder`.
LADDER = "ladder"
MOST = 2**31 - 1  # of anything that is counted: kernels count positions with 32 bits
# The letters of the papers, beside the long names of all commands.
SHORT_NAMES = {
    "--batch": "--B",
    "--heads": "--H",
    "--kv-heads": "--KV",
    "--seqlen": "--N",
    "--head-dim": "--D",
    "--head-dim-v": "--Dv",
}
SMALLEST_CAP, LARGEST_CAP = 1e-3, 1e9  # of scores: beyond these float32 has few of its digits left, or all scores are 0


@dataclass(frozen=True)
class ShapeOptions:
    """The options of one case's shape; None for an option that was not given."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seqlen: str | None = None
    seqlen_k: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    packing: str | None = None


@dataclass(frozen=True)
class VariantOptions:
    """The options of one case's variant; None or False for an option that was not given."""

    causal: bool = False
    mask: str | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    sink: bool = False
    variant: str | None = None


@dataclass(frozen=True)
class Chosen:
    """The cases to run, the name of their suite ("custom" for a case from options), and a key of `cases.DIRECTIONS`."""

    suite: str
    cases: Sequence[Case]
    direction: str = "fwd"


def refuse(option: str, message: str) -> typer.BadParameter:
    """The error of a bad option value. The message names the given value and the accepted ones.

    An option that has a short name is shown with both, because the user may have written either.
    """
    both = [f"{name} / {SHORT_NAMES[name]}" if name in SHORT_NAMES else name for name in option.split(", ")]
    return typer.BadParameter(message, param_hint=", ".join(both))


def refuse_of_suites(of_random: Mapping[str, object], rows: str | None, resume: bool) -> None:
    """Refuses options that only some suites have, for the others. of_random: None where an option was not given."""
    if resume:
        raise refuse("--resume", "only random, parallel and the suites of decode have it")
    if rows is not None:
        raise refuse("--rows", "only decode and parallel have it")
    if given := [name for name, value in of_random.items() if value is not None]:
        raise refuse(given[0], "only the suite random has it")


def resolve_device(name: str) -> torch.device:
    """The device of `--device`."""
    if name == "auto":
        return _indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kind, _, index = name.partition(":")
    accepted = "auto, cpu" + (f", cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "")
    known = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    numbered = not index or (kind == "cuda" and index.isdecimal() and int(index) < torch.cuda.device_count())
    if not (known and numbered):
        raise refuse("--device", f"{name!r} is not a device here; accepted: {accepted}")
    return _indexed(torch.device(name))


def _indexed(device: torch.device) -> torch.device:
    """The device with its index: "cuda" is the current GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def choose_cases(
    suite: str | None,
    shape: ShapeOptions,
    variant: VariantOptions,
    dtype: str | None,
    direction: str,
    device: torch.device,
    other_suites: Sequence[str] = (),
) -> Chosen:
    """The cases of a named suite, or one case from options at each of its lengths.

    other_suites: Names that the command accepts beside these suites, for the error.
    """
    if direction not in cases.DIRECTIONS:
        raise refuse("--direction", f"{direction!r} is not known; accepted: {', '.join(cases.DIRECTIONS)}")
    if suite == "fp8" and dtype not in (None, "fp8"):
        raise refuse("--dtype", f"the suite fp8 is in fp8, beside bf16; {dtype} is not measured there")
    dtype = dtype or ("fp8" if suite == "fp8" else DEFAULT_DTYPE[device.type])
    if dtype not in cases.DTYPES:
        raise refuse("--dtype", f"{dtype!r} is not known; accepted: {', '.join(cases.DTYPES)}")
    if dtype == "fp8" and direction != "fwd":
        raise refuse("--direction", f"{direction!r} is not measured in fp8, which has no backward pass; accepted: fwd")
    own = shape != ShapeOptions() or variant != VariantOptions()
    if own and suite is not None:
        raise refuse("--suite", "a suite brings its own shapes and variants; give either it or the options of one case")
    if own:
        name = variant_name(variant)
        if variants.parse(name).dbias and direction == "fwd":
            raise refuse("--variant", f"{name!r} asks for the gradient of the bias: give --direction bwd or fwdbwd")
        if shape.packing is not None:
            _check_packing(shape, name, dtype)
        return Chosen("custom", _own_cases(shape, name, dtype), direction)
    suite = suite or "quick"
    if suite not in cases.SUITES:
        raise refuse("--suite", f"{suite!r} is not known; accepted: {', '.join((*cases.SUITES, *other_suites))}")
    return Chosen(suite, cases.suite(suite, dtype, device.type, direction), direction)


def _check_packing(shape: ShapeOptions, variant: str, dtype: str) -> None:
    accepted = cases.PACKINGS[1:]
    if shape.packing not in accepted:
        raise refuse("--packing", f"{shape.packing!r} is not known; accepted: {', '.join(accepted)}")
    if shape.seqlen_k is not None:
        raise refuse("--packing", "packed sequences have as many keys as queries: leave --seqlen-k out")
    terms = variants.parse(variant)
    if dtype == "fp8" or terms.bias is not None or terms.documents is not None:
        raise refuse("--packing", f"packed sequences are not measured in fp8, with a bias or documents; got {variant}")


def choose_memory(shape: ShapeOptions, causal: bool, dtype: str | None, direction: str, device: torch.device) -> Chosen:
    """The cases of `tileattn memory`: one shape at each of its lengths."""
    shape = replace(shape, seqlen=shape.seqlen or MEMORY_LENGTHS[device.type], head_dim=shape.head_dim or 128)
    return replace(choose_cases(None, shape, VariantOptions(causal=causal), dtype, direction, device), suite=MEMORY)


def at_least_one(option: str, value: int | None) -> None:
    """Refuses a count below 1 or above `MOST`; accepts None, an option that was not given."""
    if value is not None and value < 1:
        raise refuse(option, f"{value} is too few; accepted: an integer of at least 1")
    if value is not None and value > MOST:
        raise refuse(option, f"{value} is too many; accepted: an integer of at most {MOST}")


def _own_cases(shape: ShapeOptions, variant: str, dtype: str) -> list[Case]:
    for name in ("batch", "heads", "kv_heads", "seqlen_k", "head_dim", "head_dim_v"):
        at_least_one(f"--{name.replace('_', '-')}", getattr(shape, name))
    heads, head_dim = shape.heads or 8, shape.head_dim or 64
    kv_heads = shape.kv_heads or heads
    if heads % kv_heads:
        raise refuse("--kv-heads", f"{kv_heads} does not divide the {heads} heads of q")
    base = cases.square(shape.batch or 1, 1, heads, head_dim, variant, dtype)
    base = replace(base, kv_heads=kv_heads, head_dim_v=shape.head_dim_v or head_dim, packing=shape.packing or "")
    lengths = lengths_of(shape.seqlen or "1024")
    return [replace(base, seqlen_q=length, seqlen_k=shape.seqlen_k or length) for length in lengths]


def lengths_of(text: str) -> list[int]:
    """The lengths that `--seqlen` names, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise refuse("--seqlen", f"{text!r} is not understood; accepted: positive integers with commas between")
    return list(dict.fromkeys(map(int, parts)))


def variant_name(options: VariantOptions) -> str:
    """The name of the variant: of `--variant`, or composed from the other options."""
    if options.variant is not None:
        if options != VariantOptions(variant=options.variant):
            raise refuse("--variant", "it names the whole variant; give either it or --causal, --mask, --softcap, ...")
        return _known_variant("--variant", options.variant)
    if options.mask is not None:
        _check_mask(options.mask)
    terms = ["causal"] if options.causal else []
    terms += [options.mask] if options.mask not in (None, "full") else []
    if options.softcap is not None:
        if not SMALLEST_CAP <= options.softcap <= LARGEST_CAP:
            accepted = f"a number from {SMALLEST_CAP:g} to {LARGEST_CAP:.0f}"
            raise refuse("--softcap", f"{options.softcap:g} is not a cap; accepted: {accepted}")
        terms.append(f"softcap{variants.written_out(options.softcap)}")
    terms += [name for name in ("alibi", "bias", "sink") if getattr(options, name)]
    return _known_variant("--mask", "+".join(terms) or "full")


def _check_mask(name: str) -> None:
    for term in name.split("+"):
        if not variants.is_mask(term.strip()):
            raise refuse("--mask", f"{term!r} is no mask; accepted: {variants.ACCEPTED_MASKS}")


def _known_variant(option: str, name: str) -> str:
    try:
        return variants.parse(name.strip()).name
    except ValueError as error:
        raise refuse(option, str(error)) from error


def choose_implementations(
    backend: str | None, baselines: str | None, device: torch.device, chosen: Chosen
) -> list[Implementation]:
    """The implementations to measure: tileattn, then the baselines."""
    names = _default_baselines(device, chosen.cases) if baselines is None else baselines
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in BASELINES]:
        raise refuse(
            "--baselines", f"{', '.join(map(repr, unknown))}: not known; accepted: none, {', '.join(BASELINES)}"
        )
    return [own_implementation(backend), *(BASELINES[name] for name in dict.fromkeys(wanted))]


def _default_baselines(device: torch.device, measured: Sequence[Case]) -> str:
    if all(case.dtype == "fp8" for case in measured):
        return FP8_BASELINES
    return (PACKED_BASELINES if all(case.packing for case in measured) else DEFAULT_BASELINES)[device.type]


def own_implementation(backend: str | None) -> TileAttn:
    """The implementation of tileattn, with the backend of `--backend`."""
    names = [each.name for each in BACKENDS]
    if backend is not None and backend.partition(":")[0] not in names:
        raise refuse("--backend", f"{backend!r} is not known; accepted: {', '.join(names)}")
    try:
        return TileAttn(None if backend is None else named(backend).name)
    except ValueError as error:
        raise refuse("--backend", str(error)) from error


@dataclass(frozen=True)
class WarmupOptions:
    """The options of `tileattn warmup` that select kernels; None for an option that was not given."""

    head_dim: str | None = None
    variant: str | None = None
    dtype: str | None = None
    direction: str = "fwd"
    page_size: str | None = None
    rotary: str | None = None
    arch: str | None = None
    model: Path | None = None
    inputs: str | None = None


# What `tileattn warmup` compiles where nothing is given; variants by direction.
WARM_HEAD_DIMS, WARM_DTYPE = "64,128", "bf16"
WARM_VARIANTS = {"fwd": "full,causal", "fwdbwd": "full,causal", "decode": "causal"}
WARM_PAGES, WARM_ROTARY = "16,64", "none,halves"
ROTARY = ("none", "halves", "interleaved")


def choose_kernels(options: WarmupOptions) -> tuple[list[AnyJob], list[str]]:
    """The kernels that `tileattn warmup` compiles, and lines that say what was read of a model."""
    direction, arch = options.direction, options.arch
    if direction not in WARM_VARIANTS:
        raise refuse("--direction", f"{direction!r} is not known; accepted: {', '.join(WARM_VARIANTS)}")
    for option, given in (("--page-size", options.page_size), ("--rotary", options.rotary)):
        if given is not None and direction != "decode":
            raise refuse(option, "it is for --direction decode")
    if arch is None and not torch.cuda.is_available():
        raise refuse("--arch", "there is no GPU here to compile for; name an architecture, such as sm_90a")
    arch = arch or device_arch(torch.device("cuda"))
    if options.model is not None:
        return _model_kernels(options, options.model, arch)
    if options.inputs is not None:
        raise refuse("--inputs", "it is for --model")
    dtypes = [name.strip() for name in (options.dtype or WARM_DTYPE).split(",")]
    if unknown := [name for name in dtypes if name not in cases.DTYPES]:
        raise refuse("--dtype", f"{unknown[0]!r} is not known; accepted: {', '.join(cases.DTYPES)}")
    names = [_known_variant("--variant", name) for name in (options.variant or WARM_VARIANTS[direction]).split(",")]
    head_dims = [_head_dims(part) for part in (options.head_dim or WARM_HEAD_DIMS).split(",")]
    if direction == "decode":
        return _decode_kernels(options, head_dims, names, dtypes, arch), []
    facts = head_dims, names, dtypes, arch
    wanted = warmup.calls(*facts)
    backward = warmup.backward_calls(*facts) if direction == "fwdbwd" else []
    tilelang = named("tilelang")
    for call in [*wanted, *(each.forward for each in backward)]:
        if (reason := tilelang.refusal(call)) is not None:
            raise typer.BadParameter(f"the TileLang kernels do not run {call}: {reason}")
    return warmup.jobs(wanted, backward), []


def _model_kernels(options: WarmupOptions, path: Path, arch: str) -> tuple[list[AnyJob], list[str]]:
    """The kernels of a model, whose configuration decides what other options would."""
    for option, given in (("--head-dim", options.head_dim), ("--variant", options.variant)):
        if given is not None:
            raise refuse(option, "the model's config.json decides it: leave it or --model out")
    if options.rotary is not None:
        raise refuse("--rotary", "models of transformers rotate by themselves: leave it or --model out")
    asked = ModelOptions(path, options.inputs, options.dtype, options.direction, options.page_size)
    return choose_model_kernels(asked, arch, refuse)


def _decode_kernels(
    options: WarmupOptions, head_dims: list[tuple[int, int]], names: list[str], dtypes: list[str], arch: str
) -> list[AnyJob]:
    """The kernels of `decode` and `append_kv`."""
    sizes = [part.strip() for part in (WARM_PAGES if options.page_size is None else options.page_size).split(",")]
    if wrong := [part for part in sizes if not part.isdecimal()]:
        raise refuse("--page-size", f"{wrong[0]!r} is not understood; accepted: 16, or 0 for contiguous caches")
    rotary = [part.strip() for part in (WARM_ROTARY if options.rotary is None else options.rotary).split(",")]
    if unknown := [part for part in rotary if part not in ROTARY]:
        raise refuse("--rotary", f"{unknown[0]!r} is not known; accepted: {', '.join(ROTARY)}")
    pages = [int(part) for part in sizes]
    wanted = warmup.decode_calls(head_dims, names, dtypes, pages, arch)
    appending = warmup.append_calls(head_dims, dtypes, pages, rotary, arch)
    refusals = [(call, tilelang_decode.refusal(call)) for call in wanted]
    refusals += [(call, tilelang_append.refusal(call)) for call in appending]  # type: ignore[misc]
    for call, reason in refusals:
        if reason is not None:
            raise typer.BadParameter(f"the TileLang kernels do not run {call}: {reason}")
    return warmup.decode_jobs(wanted, appending)


def _head_dims(text: str) -> tuple[int, int]:
    """(head_dim, head_dim_v) of "128" or "192/128"."""
    parts = text.strip().split("/")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise refuse("--head-dim", f"{text!r} is not understood; accepted: 128, or 192/128 where v has another")
    return int(parts[0]), int(parts[-1])
