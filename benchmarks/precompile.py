"""Compiles the kernels of a whole run ahead of it, in parallel, so that no GPU waits for a compiler.

    python benchmarks/precompile.py suites fa fp8 variants                 # of `tileattn bench --suite fa`, ...
    python benchmarks/precompile.py suites fa --direction bwd              # the same with --direction bwd
    tileattn bench --suite random --compile only --seed 1                  # of `tileattn bench --suite random --seed 1`
    python benchmarks/precompile.py suites decode decode-ratios            # of the suites of decode
    python benchmarks/precompile.py conformance                            # of `pytest -m gpu`
    python benchmarks/precompile.py conformance --kernels long --jobs 16   # of `pytest -m gpu --kernels long`
    python benchmarks/precompile.py conformance --match 'decode|append'    # of the tests of decode alone
    python benchmarks/precompile.py transformers                           # of tests/compat/transformers/test_models.py
    python benchmarks/precompile.py parallel                               # of the tests and the suite on two GPUs
    python benchmarks/precompile.py lists                                  # of the tests of lists and any_mask.py
    python benchmarks/precompile.py suites fa --arch sm_90a --list         # what would be compiled; needs no GPU

The run's own code makes each call, on tensors without memory (device "meta"), and is stopped where it asks for its
kernel. Therefore exactly the kernels of the run are compiled, and nothing is allocated or launched. A forward pass that
is differentiated goes on to its backward pass, and is stopped where that asks for its kernels.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tileattn
from tileattn.bench import passes, problem
from tileattn.bench.baselines.own import TileAttn, TileAttnBf16
from tileattn.bench.cases import Case
from tileattn.bench.decode import ahead
from tileattn.bench.parallel import cases as parallel_cases
from tileattn.bench.parallel import implementations
from tileattn.bench.parallel.problem import Part, Source
from tileattn.bench.parallel.ranks import Ranks
from tileattn.call import appending
from tileattn.call.appending import AppendCall
from tileattn.call.facts import AttentionCall, BackwardCall, device_arch
from tileattn.call.fp8 import FP8
from tileattn.call.inputs import Inputs
from tileattn.cli import choices
from tileattn.cli.group import run_script
from tileattn.kernels.tilelang import buckets
from tileattn.kernels.tilelang.append import backend as append_backend
from tileattn.kernels.tilelang.append.job import AppendJob
from tileattn.kernels.tilelang.backward import launch as backward_backend
from tileattn.kernels.tilelang.backward.defaults import MainConfig
from tileattn.kernels.tilelang.backward.library import BackwardJob, kernel_jobs
from tileattn.kernels.tilelang.build.batch import CORES, AnyJob, Done, compile_all
from tileattn.kernels.tilelang.decode import job as decode_job
from tileattn.kernels.tilelang.decode.launch import Decoding
from tileattn.kernels.tilelang.decode.library import DecodeJob
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.config import Config
from tileattn.kernels.tilelang.forward.defaults import LONG, SHORT
from tileattn.kernels.tilelang.forward.library import Job
from tileattn.kernels.tilelang.lists.bits import bits_jobs
from tileattn.kernels.tilelang.lists.launch import lists_jobs
from tileattn.kernels.tilelang.lists.library import BitsJob, ListsJob
from tileattn.runtime import append as append_runtime
from tileattn.runtime import decoding
from tileattn.runtime import operators as ops
from tileattn.testing import Arguments, build, build_decode, conformance_cases, decode_cases, packed_cases
from tileattn.tuner.state import forget_prepared
from tileattn.variant.program import program

ROOT = Path(__file__).resolve().parent.parent

Attempt = Callable[[], Any]  # makes one call to attention


# --- Which kernels: calls are made, and stopped where they ask for one ---


class _Asked(Exception):
    """Raised where a call asks for its kernels."""


class _Requested:
    """The kernels that were asked for, each once."""

    def __init__(self) -> None:
        self.jobs: dict[str, AnyJob] = {}

    def ask(self, call: AttentionCall, config: Config) -> Any:
        """A stand-in for `forward_function`."""
        # For fp8 the forward kernel is asked for before the other.
        self._add(Job(call, config), *[Job(call, None)] * (call.dtype == FP8), *_of_lists(call, config))

    def ask_backward(self, call: BackwardCall, config: MainConfig | None = None) -> Any:
        """A stand-in for `backward_kernels`."""
        self._add(*kernel_jobs(call, config), *_of_lists(call.forward, config))

    def ask_main(self, call: BackwardCall, config: MainConfig) -> Any:
        """A stand-in for `main_kernel`, which is asked for before the other kernels."""
        with suppress(_Asked):
            self._add(BackwardJob(call, "main", config))

    def ask_decode(self, phase: Decoding, *_: Any) -> Any:
        """In place of the methods of `Decoding`, which ask for both kernels, or for none."""
        queries = phase.lines and phase.lines.queries
        self._add(*(() if phase.empty else decode_job.jobs_of(phase.call, phase.config, queries)))

    def ask_append(self, call: AppendCall) -> Any:
        """In place of `append_function`."""
        self._add(AppendJob(call))

    def _add(self, *jobs: AnyJob) -> NoReturn:
        for job in jobs:
            self.jobs.setdefault(job.key, job)
        raise _Asked


def _of_lists(call: AttentionCall, config: Config | MainConfig | None) -> tuple[ListsJob | BitsJob, ...]:
    """The kernels that make the tiles' lists that this configuration walks over, and the bits of mixed tiles."""
    bits = bits_jobs(call.variant, call.arch) if getattr(config, "bits", False) else ()
    return (*lists_jobs(call.variant, call.arch, call.packed), *bits) if getattr(config, "listed", False) else ()


def _going_on(run: Callable[..., Any], trace: Callable[..., Any]) -> Callable[..., Any]:
    """One half of a call with gradients, which asks for its kernel and then returns tensors that hold nothing.

    Operators on "meta" compute shapes alone.
    """

    def both(*arguments: Any) -> Any:
        with suppress(_Asked):
            run(*arguments)
        return trace(*arguments)

    return both


_append_call = appending.make_append_call
_run_forward, _run_backward = ops.run_forward, ops.run_backward


@contextmanager
def _pretending(arch: str) -> Iterator[_Requested]:
    """Inside, tensors on "meta" count as tensors on a GPU of this architecture."""
    requested = _Requested()
    forget_prepared()  # packed calls are prepared before they ask for a kernel
    with (
        mock.patch.object(ops, "_has_no_values", return_value=False),
        mock.patch.object(ops, "_asks_for_alignment", return_value=True),
        mock.patch.object(ops, "device_arch", return_value=arch),
        mock.patch("tileattn.api.attention.is_plain", return_value=False),  # prepared calls do not pass run_forward
        mock.patch("tileattn.api.varlen.is_plain", return_value=False),
        mock.patch.object(ops, "run_forward", _going_on(ops.run_forward, ops.trace_forward)),
        mock.patch.object(ops, "run_backward", _going_on(ops.run_backward, ops.trace_backward)),
        mock.patch.object(forward_launch, "forward_function", requested.ask),
        mock.patch.object(backward_backend, "backward_kernels", requested.ask_backward),
        mock.patch.object(backward_backend, "main_kernel", requested.ask_main),
        mock.patch.object(backward_backend, "add_shares"),  # among the jobs of a split kernel
        mock.patch.object(append_backend, "append_function", requested.ask_append),
        mock.patch.object(append_runtime, "make_append_call", functools.partial(_append_call, on_gpu=True)),
        mock.patch.object(appending, "device_arch", return_value=arch),
        mock.patch.dict(append_runtime._PREPARED, clear=True),  # of other architectures
        mock.patch.object(append_runtime, "check_overlap"),  # by addresses, which are all 0
        mock.patch.object(decoding, "_asks_for_alignment", return_value=True),
        mock.patch.object(decoding, "device_arch", return_value=arch),
        mock.patch.object(Decoding, "plan", lambda *arguments: requested.ask_decode(*arguments)),
        mock.patch.object(Decoding, "__call__", lambda *arguments: requested.ask_decode(*arguments)),
    ):
        yield requested
    forget_prepared()  # those of "meta" would outlive another `default`


def jobs_of(attempts: Iterable[Attempt], arch: str) -> list[AnyJob]:
    """The kernels that these calls need, each once, those that probably take longest first.

    Calls that the kernels refuse, and calls with nothing to compute, need none.
    """
    with _pretending(arch) as requested, torch.no_grad():
        for attempt in attempts:
            with suppress(NotImplementedError, _Asked):
                attempt()
    return sorted(requested.jobs.values(), key=_weight, reverse=True)


def _weight(job: AnyJob) -> float:
    """Larger for a kernel that takes longer to compile; largest for a transposition, which others wait for."""
    if isinstance(job, Job) and job.config is None:
        return float("inf")
    if not isinstance(job, BackwardJob | DecodeJob | Job):
        return 1.0
    if isinstance(job, BackwardJob):
        call = job.call.forward
        # Small kernels that read and write, and kernels of up to five products.
        tile = 0 if job.kernel in ("prepare", "finish") else 2 * 128 * (128 + call.head_dim + call.head_dim_v)
    else:
        # Scores and weights of a thread, and its part of O.
        call, tile = job.call, job.config.block_M * (job.config.block_N + job.call.head_dim_v)
    traced = program(call.variant)
    # A mask has a loop of its own, a modification is in both.
    return tile * (1 + (traced.allows is not None) + 2 * (traced.score is not None)) * (1.0 + len(traced.tensors) / 2)


def suite_attempts(names: Sequence[str], direction: str = "fwd") -> Iterator[Attempt]:
    """The calls of tileattn that `tileattn bench --suite NAME --direction DIRECTION` makes on a GPU."""
    for name in names:
        chosen = choices.choose_cases(
            name, choices.ShapeOptions(), choices.VariantOptions(), None, direction, torch.device("cuda")
        )
        for case in chosen.cases:
            yield from _case_attempts(case, direction)
            if not case.terms.plain:  # what the modification's cost is measured against (`bench.cost`)
                plain = "causal" if case.terms.mask.name == "causal" else "full"
                yield from _case_attempts(replace(case, variant=plain), direction)


def _case_attempts(case: Case, direction: str) -> Iterator[Attempt]:
    given = problem.build(case, "meta", direction=direction)

    @torch.set_grad_enabled(direction != "fwd")
    def attempt() -> Any:
        return passes.start(direction, TileAttn("tilelang").prepare(given), given)()

    yield attempt
    if case.dtype == "fp8":
        yield lambda: TileAttnBf16().prepare(given).call()


def conformance_attempts() -> Iterator[Attempt]:
    """The calls that the tests for a GPU make: forward passes and, from the same cases, backward passes."""
    from tests.api import (
        test_decode_gpu,
        test_decode_identities,
        test_decode_invariance,
        test_server_day,
        test_varlen_cache,
    )
    from tests.compat import test_torch_sdpa_gpu as test_gpu_sdpa
    from tests.compat.engines import test_engines
    from tests.compat.flash_attn import test_block_table, test_kvcache
    from tests.compat.flash_attn import test_functions as test_flash_attn
    from tests.examples import test_serve_tiny
    from tests.kernels.tilelang.backward import test_gpu as test_gpu_backward
    from tests.kernels.tilelang.backward import test_two_streams_gpu
    from tests.kernels.tilelang.backward.hopper import test_query_words_gpu, test_unpadded_gpu
    from tests.kernels.tilelang.forward import test_gpu
    from tests.kernels.tilelang.packed import test_backward_gpu as test_gpu_varlen_backward
    from tests.kernels.tilelang.packed import test_forward_gpu as test_gpu_varlen
    from tests.kernels.tilelang.tile import test_dropout_gpu as test_gpu_dropout
    from tests.runtime import test_few_queries_gpu
    from tests.tools import conformance_call, decode_call

    for case in conformance_cases("full") + packed_cases("full"):
        arguments = build(case, "meta")
        yield lambda arguments=arguments: conformance_call.run(arguments, "tilelang")  # type: ignore[misc]
        yield functools.partial(_training, arguments, conformance_call.run)
    for decode_case in decode_cases("full"):
        of_decode = build_decode(decode_case, "meta")
        yield lambda of_decode=of_decode: decode_call.run_decode(of_decode, "tilelang")  # type: ignore[misc]
    with mock.patch.object(test_decode_gpu, "DEVICE", "meta"):
        yield from test_decode_gpu.calls()
    for module in (
        test_decode_invariance,
        test_decode_identities,
        test_server_day,
        test_varlen_cache,
        test_kvcache,
        test_block_table,
        test_engines,
        test_serve_tiny,
        test_few_queries_gpu,
    ):
        yield from module.calls()
    for shape in (test_gpu.SHAPES | test_gpu.DIFFERING).values():
        for return_lse in (False, True):
            yield _attention(return_lse, **shape.tensors(device="meta"))
    # The single tests make plain calls in bfloat16; and that of torch.compile, whose operator always asks for lse.
    for head_dim in (64, 128, 256):
        for seqlen in (SHORT, LONG):
            q = torch.empty(1, seqlen, 1, head_dim, dtype=torch.bfloat16, device="meta")
            for return_lse in (False, True):
                yield _attention(return_lse, q, q, q)
                yield _attention(return_lse, q, q, q, causal=True)
    q = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16, device="meta")
    for return_lse in (False, True):
        mask, score_mod = tileattn.SlidingWindow(64, 0), tileattn.SoftCap(30.0)
        yield _attention(return_lse, q, q, q, mask=mask, score_mod=score_mod)
    with mock.patch.object(test_gpu_varlen, "DEVICE", "meta"):
        yield from test_gpu_varlen.calls()
        yield from map(torch.enable_grad(), test_gpu_varlen_backward.calls())
    with mock.patch.object(test_gpu_backward, "DEVICE", "meta"):
        yield from map(torch.enable_grad(), test_gpu_backward.calls())
        with mock.patch.object(test_gpu_varlen, "DEVICE", "meta"):
            yield from map(torch.enable_grad(), test_query_words_gpu.calls())
        for of_backward in (test_gpu_dropout, test_unpadded_gpu, test_two_streams_gpu):
            yield from map(torch.enable_grad(), of_backward.calls())
    with mock.patch.object(test_gpu_sdpa, "DEVICE", "meta"):
        yield from map(torch.enable_grad(), test_gpu_sdpa.compiled_calls())
    yield from map(torch.enable_grad(), test_flash_attn.compiled_calls())
    yield from _listed_test_calls()


def _listed_test_calls() -> Iterator[Attempt]:
    """The calls of the tests of lists of tiles, blocks of a model among them."""
    from tests.kernels.tilelang import test_mixed_bits_gpu, test_tile_lists_gpu
    from tests.kernels.tilelang.packed import test_listed_gpu
    from tests.variant import test_blocks_gpu

    for module in (test_tile_lists_gpu, test_mixed_bits_gpu, test_listed_gpu, test_blocks_gpu):
        with mock.patch.object(module, "DEVICE", "meta"):
            yield from map(torch.enable_grad(), module.calls())


def lists_attempts() -> Iterator[Attempt]:
    """The calls of these tests and of benchmarks/any_mask.py."""
    any_mask = importlib.import_module("benchmarks.any_mask")
    yield from _listed_test_calls()
    yield from map(torch.enable_grad(), any_mask.calls())


def transformers_attempts() -> Iterator[Attempt]:
    """The calls that the tests of transformers' models make on a GPU; needs transformers."""
    from tests.tools.transformers import calls as of_models

    yield from of_models.calls()


def parallel_attempts() -> Iterator[Attempt]:
    """The calls that ranks make on two GPUs, in the tests and in the suite. This process plays one after the other.

    A plan asks masks which keys they reach, so conformance cases have values, on a CPU, which counts as a GPU here.
    What TileLang refuses runs by kernels that are compiled in the tests.
    """
    from tests.parallel.two_gpus import ranks_two_gpus, test_two_gpus
    from tests.tools.ranks.one import playing

    def asking(attempt: Attempt, rank: int) -> None:
        with (
            playing(rank, 2),
            torch.enable_grad(),
            mock.patch.object(ops, "run_forward", _going_on(_by_tilelang(_run_forward), _empty_outputs)),
            mock.patch.object(ops, "run_backward", _going_on(_by_tilelang(_run_backward), _empty_gradients)),
            mock.patch.object(ranks_two_gpus, "DEVICE", "meta"),
        ):
            attempt()

    for rank in (0, 1):
        with playing(rank, 2):
            attempts = [*test_two_gpus.calls(), *ranks_two_gpus.calls(), *_parallel_suite_calls(rank, 2)]
        for attempt in attempts:
            yield functools.partial(asking, attempt, rank)


def _parallel_suite_calls(rank: int, count: int) -> Iterator[Attempt]:
    """What a rank calls in `tileattn bench --suite parallel`, of the ideal and of tileattn; both passes."""
    ranks = Ranks(rank, count, torch.device("meta"), None)
    for case in parallel_cases.suite("cuda"):
        source = _Shapes(case, ranks.device, torch.bfloat16)
        for entrant in (implementations.Ideal("tilelang"), implementations.TileAttn(backend="tilelang")):
            if entrant.refusal(case, ranks) is None:
                prepared = entrant.prepare(source, ranks)
                yield prepared.step
                yield prepared.forward


class _Shapes(Source):
    """The tensors of a case of several GPUs, without values."""

    def _drawn(self, name: str, part: Part) -> torch.Tensor:
        heads = part.kv_heads if name in ("k", "v") else part.heads
        every = self.case.kv_heads if name in ("k", "v") else self.case.heads
        rows = self.case.seqlen if part.tokens is None else len(part.tokens)
        count = every if heads is None else heads.stop - heads.start
        return torch.empty(1, rows, count, self.case.head_dim, dtype=self.dtype, device=self.device)


def _by_tilelang(run: Callable[..., Any]) -> Callable[..., Any]:
    def named(options: ops.Options, *arguments: Any) -> Any:
        with suppress(NotImplementedError):
            return run(options._replace(backend="tilelang"), *arguments)

    return named


def _empty_outputs(options: ops.Options, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = inputs.q, inputs.v
    o = q.new_empty(*q.shape[:3], v.shape[3])
    return o, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))


def _empty_gradients(options: ops.Options, inputs: Inputs, needs: Sequence[bool], *_: Any) -> list[torch.Tensor]:
    given = (inputs.q, inputs.k, inputs.v, inputs.sink, *inputs.operands.tensors)
    return [x.new_empty(x.shape) for x, need in zip(given, needs) if need and x is not None]


@torch.enable_grad()
def _training(arguments: Arguments, run: Callable[[Arguments, str], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A call and its backward pass, with both outputs' gradients."""
    leaves = list(arguments.leaves().values())
    outputs = run(arguments, "tilelang")
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


def _attention(return_lse: bool, *tensors: torch.Tensor, **named: Any) -> Attempt:
    return lambda: tileattn.attention(*tensors, **named, return_lse=return_lse, backend="tilelang")


def conformance_jobs(kernels: str | None, arch: str) -> list[AnyJob]:
    """The kernels of the tests for a GPU; `kernels` as `pytest --kernels`."""
    sys.path.insert(0, str(ROOT))
    with nullcontext() if kernels is None else buckets.only(kernels):
        return jobs_of(conformance_attempts(), arch)


# --- The command line ---

app = typer.Typer(
    help=(__doc__ or "").split("\n\n")[0],
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one a core.", show_default=False)]
Arch = Annotated[str | None, typer.Option(help="sm_90a, sm_80, ... Default: this machine's GPU.", show_default=False)]
Match = Annotated[str, typer.Option(help="Only kernels whose line of --list this regular expression matches.")]
List = Annotated[bool, typer.Option("--list", help="Print the kernels, and compile none.")]


@app.command()
def suites(
    names: Annotated[
        list[str], typer.Argument(help="Suites of [b]tileattn bench[/b]: fa, fp8, heads, variants, quick.")
    ],
    direction: Annotated[str, typer.Option(help="fwd, bwd or fwdbwd, as [b]tileattn bench --direction[/b].")] = "fwd",
    jobs: Jobs = CORES,
    arch: Arch = None,
    match: Match = "",
    only_list: List = False,
) -> None:
    """The kernels of benchmark suites."""
    of_decode = [name for name in names if name in ahead.SUITES]
    found = jobs_of(suite_attempts([name for name in names if name not in of_decode], direction), _arch(arch))
    found += [job for job in ahead.suite_jobs(of_decode, _arch(arch)) if job.key not in {each.key for each in found}]
    raise typer.Exit(run([job for job in found if re.search(match, str(job))], jobs, only_list))


@app.command()
def conformance(
    kernels: Annotated[
        str | None, typer.Option(help="long, short or wide, as [b]pytest --kernels[/b].", show_default=False)
    ] = None,
    match: Match = "",
    jobs: Jobs = CORES,
    arch: Arch = None,
    only_list: List = False,
) -> None:
    """The kernels of the tests for a GPU: test_conformance.py, test_conformance_decode.py and the test_gpu files."""
    if kernels not in (None, *buckets.BUCKETS):
        raise choices.refuse("--kernels", f"{kernels!r} is not known; accepted: {', '.join(buckets.BUCKETS)}")
    found = [job for job in conformance_jobs(kernels, _arch(arch)) if re.search(match, str(job))]
    raise typer.Exit(run(found, jobs, only_list))


@app.command()
def transformers(jobs: Jobs = CORES, arch: Arch = None, only_list: List = False) -> None:
    """The kernels of the tests with models of transformers, which `conformance` leaves out."""
    sys.path.insert(0, str(ROOT))
    raise typer.Exit(run(jobs_of(transformers_attempts(), _arch(arch)), jobs, only_list))


@app.command()
def parallel(match: Match = "", jobs: Jobs = CORES, arch: Arch = None, only_list: List = False) -> None:
    """The kernels of the tests on two GPUs, the test_two_gpus files, and of `tileattn bench --suite parallel`."""
    sys.path.insert(0, str(ROOT))
    found = [job for job in jobs_of(parallel_attempts(), _arch(arch)) if re.search(match, str(job))]
    raise typer.Exit(run(found, jobs, only_list))


@app.command()
def lists(match: Match = "", jobs: Jobs = CORES, arch: Arch = None, only_list: List = False) -> None:
    """The kernels of test_tile_lists_gpu.py, test_listed_gpu.py, test_blocks_gpu.py and benchmarks/any_mask.py."""
    sys.path.insert(0, str(ROOT))
    found = [job for job in jobs_of(lists_attempts(), _arch(arch)) if re.search(match, str(job))]
    raise typer.Exit(run(found, jobs, only_list))


def _arch(name: str | None) -> str:
    if name is None and not torch.cuda.is_available():
        raise choices.refuse("--arch", "there is no GPU here to compile for; name an architecture, such as sm_90a")
    return name or device_arch(torch.device("cuda"))


def run(jobs: Sequence[AnyJob], processes: int, only_list: bool) -> int:
    """Print or compile the kernels; the exit code is 1 if one could not be compiled."""
    if only_list:
        for job in jobs:
            typer.echo(str(job))
        typer.echo(f"{len(jobs)} kernels")
        return 0
    began = time.perf_counter()
    done = _with_progress(jobs, processes)
    failures = [each for each in done if each.error is not None]
    for each in failures:
        typer.echo(f"FAILED {each.job}: {each.error}", err=True)
    there = sum(each.was_there for each in done)
    compiled = len(done) - there - len(failures)
    took = time.perf_counter() - began
    typer.echo(f"{compiled} compiled, {there} in the cache, {len(failures)} failed, in {took:.0f} s")
    if slowest := sorted((each for each in done if each.seconds), key=lambda each: -each.seconds)[:3]:
        typer.echo("slowest: " + "; ".join(f"{each.seconds:.0f} s {each.job}" for each in slowest))
    return int(bool(failures))


def _with_progress(jobs: Sequence[AnyJob], processes: int) -> list[Done]:
    """Compiles, with a bar on a terminal and a line for each kernel elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    compiled = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=len(jobs))
        for done in compile_all(jobs, processes):
            compiled.append(done)
            bar.update(task, advance=1, description=str(done.job))
            if not console.is_terminal:
                what = "FAILED" if done.error else "was in the cache" if done.was_there else f"{done.seconds:.1f} s"
                typer.echo(f"[{len(compiled)}/{len(jobs)}] {done.job}: {what}", err=True)
    return compiled


if __name__ == "__main__":
    run_script(app)
