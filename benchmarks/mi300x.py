"""The forward pass on an MI300X in one run: tunes, verifies and times it, as AMD's article about TileLang does.

    python benchmarks/mi300x.py                                  # the article's shape: (1, 4096, 8, 128), float16
    python benchmarks/mi300x.py --H 16 --kv-heads 2 --causal     # another one
    python benchmarks/mi300x.py --lower-only                     # on any machine: no GPU, nothing is run

On an MI300X (gfx942) with ROCm:

1. Every candidate is compiled, compared with the default, and timed (`tileattn.tuner.search`).
2. The fastest is verified twice: against plain PyTorch with rtol and atol 0.01, as in the article; and by the rule of
   `tileattn.testing`, against float64.
3. The fastest, the default and the article's fastest configuration are timed beside plain PyTorch (the article's
   reference), PyTorch's scaled_dot_product_attention and our Triton kernels, in rounds that alternate between them.

With --lower-only, the HIP source of each candidate is generated, and the article's fastest configuration is compiled to
a gfx942 code object where clang and ROCm's headers are installed. The columns of times then say "not run".

The candidates are named in `src/tileattn/kernels/tilelang/forward/amd/space.py`, with the source of each value.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tileattn import Causal
from tileattn.bench import environment, problem, results
from tileattn.bench.baselines import BASELINES, Implementation, Prepared
from tileattn.bench.baselines.own import variant_key
from tileattn.bench.cases import Case
from tileattn.bench.runner import Run
from tileattn.call.facts import AttentionCall, device_arch
from tileattn.call.inputs import Inputs
from tileattn.cli.choices import refuse
from tileattn.cli.group import run_script
from tileattn.kernels.tilelang.forward import launch
from tileattn.kernels.tilelang.forward.amd.config import AmdConfig
from tileattn.kernels.tilelang.forward.amd.space import (
    amd_candidates,
    distinct,
    example_space,
    is_article_best,
    valid_article_space,
)
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.measure import timing
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention
from tileattn.tuner.progress import Bar
from tileattn.tuner.search import SearchResult, search
from tileattn.tuner.session import flat, written

ROOT = Path(__file__).resolve().parent.parent
ARCH, NOT_RUN = "gfx942", "not run"
SPACES = ("article", "example", "best", "all")
ARTICLE_TOLERANCE = 0.01  # rtol and atol of the article's check
# The article's names: its reference is plain PyTorch.
BESIDE = ("eager", "sdpa", "triton")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    batch: Annotated[int, typer.Option("--batch", "--B", min=1)] = 1,
    heads: Annotated[int, typer.Option("--heads", "--H", min=1)] = 8,
    kv_heads: Annotated[int, typer.Option("--kv-heads", "--KV", help="0: as many as --H.", min=0)] = 0,
    seqlen: Annotated[int, typer.Option("--seqlen", "--N", min=1)] = 4096,
    head_dim: Annotated[int, typer.Option("--head-dim", "--D", min=1)] = 128,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "fp16",
    space: Annotated[str, typer.Option(help="article, example, best (the article's fastest) or all.")] = "article",
    lower_only: Annotated[bool, typer.Option("--lower-only", help="Generate code; run nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Result file (JSON).")] = None,
) -> None:
    """One run."""
    if dtype not in ("fp16", "bf16"):
        raise refuse("--dtype", f"{dtype!r} is not known; accepted: fp16, bf16")
    if space not in SPACES:
        raise refuse("--space", f"{space!r} is not known; accepted: {', '.join(SPACES)}")
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise refuse("--kv-heads", f"{kv_heads} is no divisor of the {heads} heads")
    case = Case(
        batch, seqlen, seqlen, heads, kv_heads, head_dim, head_dim, "causal" if causal else "full", dtype
    )  # fmt: skip
    configs = candidates(case, space)
    if not configs:
        raise refuse("--space", f"no configuration of {space!r} fits head dim {head_dim}")
    if not lower_only:
        _check_device()
    report = lower_all(case, configs) if lower_only else measure(case, configs, torch.device("cuda"))
    Console(width=None if sys.stdout.isatty() else 150).print(table(case, report))
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    raise typer.Exit(int(bool(report["wrong"])))


def _check_device() -> None:
    arch = device_arch(torch.device("cuda")) if torch.cuda.is_available() else "no GPU"
    if arch != ARCH:
        typer.echo(
            f"this script measures on an MI300X ({ARCH}), and PyTorch finds {arch}; --lower-only needs none", err=True
        )
        raise typer.Exit(2)


def call_of(case: Case, arch: str = ARCH) -> AttentionCall:
    """What a kernel is compiled for."""
    facts = variant_key(problem.build(case, "meta"))
    return AttentionCall(case.value_dtype, case.head_dim, case.head_dim_v, facts, arch=arch)


def candidates(case: Case, space: str, arch: str = ARCH) -> list[AmdConfig]:
    """The valid configurations of a named space; those that launch the same code once."""
    call = call_of(case, arch)
    own = amd_candidates(call)
    published = set(example_space())
    known = {
        "article": lambda: valid_article_space(call),
        "example": lambda: [each for each in own if replace(each, k_pack=2) in published],
        "best": lambda: [each for each in own if is_article_best(each)],
        "all": lambda: own,
    }
    return distinct(known[space](), case.seqlen_q)


# --- Without the machine ---


def lower_all(case: Case, configs: Sequence[AmdConfig]) -> dict[str, Any]:
    """HIP source for each kernel, and the code object of the article's fastest configuration."""
    call, sources = call_of(case), {}
    report = _begin(case, "lower-only")
    for config in configs:
        row: dict[str, Any] = {"config": written(config), "ms": NOT_RUN, "tflops": NOT_RUN}
        began = time.monotonic()
        try:
            if config.kernel_text not in sources:
                sources[config.kernel_text] = hip_source(call, config)
        except Exception as error:  # reported, and the exit code says so: the others are lowered all the same
            row["lowered"] = f"{type(error).__name__}: {error}"
            report["wrong"].append(f"{config} was not lowered: {error}")
        else:
            row["lowered"], row["seconds"] = len(sources[config.kernel_text]), round(time.monotonic() - began, 1)
            if is_article_best(config):
                row["assembled"] = assembled(sources[config.kernel_text])
        report["rows"].append(row)
    return report


def hip_source(call: AttentionCall, config: AmdConfig) -> str:
    """The HIP source of a kernel."""
    from tileattn.kernels.tilelang.build.compile import device_source
    from tileattn.kernels.tilelang.forward.kernel import kernel_of

    return device_source(kernel_of(call, config), call.arch)


def assembled(source: str) -> dict[str, int] | str:
    """Registers and scratch memory of the code object that clang makes; or why there is none."""
    sys.path.append(str(ROOT))
    from tests.tools import hip

    if hip.MISSING:
        return f"not assembled: {hip.REASON}"
    with tempfile.TemporaryDirectory() as folder:
        return asdict(hip.compile_hip(source, Path(folder)))


# --- On it ---


@dataclass(frozen=True)
class Configured:
    """The TileLang backend with one configuration, as an implementation of the benchmark."""

    name: str
    config: AmdConfig

    def refusal(self, given: problem.Problem) -> str | None:
        return None

    def prepare(self, given: problem.Problem) -> Prepared:
        forward = prepared(given, self.config)
        inputs = Inputs(given.q, given.k, given.v)
        return Prepared(lambda: forward(inputs)[0], chosen=str(self.config))


def prepared(given: problem.Problem, config: AmdConfig) -> Any:
    """The forward pass of a problem with a configuration."""
    call = call_of(given.case, device_arch(given.q.device))
    return launch.prepare_with(config, call, given.q.shape, given.k.shape, given.scale)


def measure(case: Case, configs: Sequence[AmdConfig], device: torch.device) -> dict[str, Any]:
    """Tunes, verifies and times. The device may be any GPU for which the configurations are valid."""
    given = problem.build(case, device)
    found = tune(given, configs)
    report = _begin(case, environment.device_name(device))
    report["best"], report["left_out"] = written(found.best), {str(c): why for c, why in found.rejected.items()}
    report["verified"] = {name: verify(given, found.best, name) for name in ("article", "rule")}
    report["wrong"] += [f"{name}: {text}" for name, text in report["verified"].items() if text != "passed"]
    named = {"tuned": found.best, "default": _default(given), **_article_best(configs)}
    implementations: list[Implementation] = [Configured(name, config) for name, config in named.items()]
    implementations += [BASELINES[name] for name in BESIDE]
    measured = Run("mi300x", [case], implementations, device, results.begin(device, None, "benchmarks/mi300x.py"))()
    for row in measured.rows:
        config = written(named[row.backend]) if row.backend in named else {}
        report["rows"].append(
            {"name": row.backend, "config": config, "ms": row.ms, "tflops": row.tflops, "error": row.error}
        )
    for each in (*measured.refused, *measured.failed):
        report["rows"].append({"name": each.backend, "config": {}, "ms": each.reason, "tflops": NOT_RUN})
    return report


def tune(given: problem.Problem, configs: Sequence[AmdConfig]) -> SearchResult:
    """The fastest of the configurations whose outputs agree with the default's."""
    call = call_of(given.case, device_arch(given.q.device))
    space = launch.space(call, given.q.shape, given.k.shape, given.scale)
    assert space is not None
    first = _default(given)
    space = replace(space, default=first, candidates=lambda: [each for each in configs if each != first])
    inputs, bar = Inputs(given.q, given.k, given.v), Bar(quiet=False)
    try:
        found = search(
            space,
            lambda forward: flat(forward(inputs)),
            lambda run, calls: timing.time_calls(run, given.q.device, calls),
            bar,
            dtype=given.q.dtype,
        )
    finally:
        bar.end()
        timing.release()
    return found


def verify(given: problem.Problem, config: AmdConfig, check: str) -> str:
    """ "passed", or what is wrong: by the article's check, or by the rule of `tileattn.testing`."""
    mask = Causal() if given.case.causal else None
    got = prepared(given, config)(Inputs(given.q, given.k, given.v))
    eager = eager_attention(given.q, given.k, given.v, mask)
    try:
        if check == "rule":
            assert_forward_accurate("mi300x", got, oracle_attention(given.q, given.k, given.v, mask), eager)
        else:
            tolerance = ARTICLE_TOLERANCE
            torch.testing.assert_close(got[0], eager[0][0].to(got[0].dtype), rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return str(error)
    return "passed"


def _default(given: problem.Problem) -> AmdConfig:
    """The configuration without tuning; gfx942's also where another GPU runs the schedule."""
    config = default(call_of(given.case))
    assert isinstance(config, AmdConfig)
    return config


def _article_best(configs: Sequence[AmdConfig]) -> dict[str, AmdConfig]:
    """The article's fastest configuration by its name in the report; nothing where it is no candidate."""
    best = next(filter(is_article_best, configs), None)
    return {} if best is None else {"article": best}


# --- What both write ---


def _begin(case: Case, what: str) -> dict[str, Any]:
    return {
        "case": case.name,
        "dtype": case.dtype,
        "machine": what,
        "arch": ARCH,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.commit(),
        "versions": environment.versions(),
        "rows": [],
        "wrong": [],
    }


def table(case: Case, report: dict[str, Any]) -> Table:
    """A line for each configuration or implementation; what was not run says so."""
    lines = Table(title=f"{case.name}, {case.dtype}, {report['machine']}", title_justify="left", pad_edge=False)
    for heading in ("", "configuration", "HIP source", "code object", "ms", "TFLOPS"):
        lines.add_column(heading, overflow="fold")
    for row in report["rows"]:
        config = {name: value for name, value in row["config"].items() if name != "schedule"}
        best = "article's fastest" if config and is_article_best(AmdConfig(**config)) else ""
        lines.add_row(
            row.get("name", best),
            " ".join(f"{name}={value}" for name, value in config.items()),
            _cell(row.get("lowered", "")),
            _cell(row.get("assembled", "")),
            _cell(row["ms"]),
            _cell(row["tflops"]),
        )
    lines.caption = "\n".join(
        [*(f"verified, {k}: {v}" for k, v in report.get("verified", {}).items()), *report["wrong"]]
    )
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return f"{value} characters" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    run_script(app)
