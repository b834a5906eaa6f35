"""`tileattn info`: prints this machine, the versions, and the calls that each backend accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tileattn import ALiBi, Bias, Causal, Documents, Mask, PrefixLM, ScoreMod, SlidingWindow, SoftCap
from tileattn.bench import environment
from tileattn.call.appending import AppendCall
from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import AttentionCall, device_arch
from tileattn.cli.choices import refuse
from tileattn.installation import pip_install
from tileattn.kernels.bundles.installed import bundles, of_architecture
from tileattn.kernels.cache.store import default_folder
from tileattn.kernels.packages import absence, any_machine
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.runtime.append_dispatch import answers_for_append
from tileattn.runtime.decoding import page_rows_of
from tileattn.runtime.dispatch import BACKENDS, Backend, answers_for_decode
from tileattn.variant.key import encode
from tileattn.variant.tree_mask import TreeMask

# What `any_machine` asks about, for readers.
INSTALLED = "it takes Triton, cuda-core and all other packages of tileattn as installed"
ONLY_BUNDLES = (
    "TileLang is not installed: a call of the column tilelang runs if an installed bundle has its kernels, and is an "
    "error otherwise (docs/bundles.md)."
)


@dataclass(frozen=True)
class Example:
    """A representative call, and its name in the table."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    head_dim_v: int = 128
    mask: Mask | None = None
    score_mods: Sequence[ScoreMod] = ()
    sink: bool = False
    aligned: bool = True
    needs_grad: bool = False
    packed: bool = False

    def call(self, arch: str) -> AttentionCall:
        """The facts of this call on an architecture."""
        variant, _ = encode(self.mask, self.score_mods)
        return AttentionCall(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            variant=variant,
            sink=self.sink,
            aligned=self.aligned,
            needs_grad=self.needs_grad,
            packed=self.packed,
            arch=arch,
        )


def examples() -> list[Example]:
    """The calls of the table: dtypes, head dims, masks, modifications, layouts, gradients."""
    ids = torch.zeros(8, dtype=torch.int32)
    slopes = torch.ones(8)
    bias = torch.zeros(1, 8, 8, 8, dtype=torch.bfloat16)
    return [
        Example("bf16, head dim 128, full"),
        Example("fp16", dtype=torch.float16),
        Example("fp32", dtype=torch.float32),
        Example("fp64", dtype=torch.float64),
        Example("fp8 (e4m3)", dtype=torch.float8_e4m3fn),
        Example("head dim 16", head_dim=16, head_dim_v=16),
        Example("head dim 80", head_dim=80, head_dim_v=80),
        Example("head dim 100", head_dim=100, head_dim_v=100),
        Example("head dim 256", head_dim=256, head_dim_v=256),
        Example("head dim 512", head_dim=512, head_dim_v=512),
        Example("head dims 192/128", head_dim=192),
        Example("Causal", mask=Causal()),
        Example("SlidingWindow", mask=SlidingWindow(1024, 0)),
        Example("PrefixLM", mask=PrefixLM(256)),
        Example("Causal & Documents", mask=Causal() & Documents(ids)),
        Example("SoftCap", score_mods=(SoftCap(50.0),)),
        Example("ALiBi", score_mods=(ALiBi(slopes),)),
        Example("Bias", score_mods=(Bias(bias),)),
        Example("sink", sink=True),
        Example("rows not aligned to 16 bytes", aligned=False),
        Example("gradients", needs_grad=True),
        Example("packed sequences", packed=True),
    ]


@dataclass(frozen=True)
class DecodeExample:
    """A representative call of `decode`, and its name in the table."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    mask: Mask | None = None  # causal
    score_mods: Sequence[ScoreMod] = ()
    sink: bool = False
    packed: bool = False
    page_size: int = 16
    fixed: int = 0

    def call(self, arch: str) -> DecodeCall:
        """The facts of this call on an architecture."""
        variant, _ = encode(self.mask or Causal(), self.score_mods)
        return DecodeCall(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            variant=variant,
            sink=self.sink,
            packed=self.packed,
            page_rows=page_rows_of(self.page_size),
            fixed=self.fixed,
            arch=arch,
        )


@dataclass(frozen=True)
class AppendExample:
    """A representative call of `append_kv`, and its name in the table."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    rotary: bool = False

    def call(self, arch: str) -> AppendCall:
        """The facts of this call on an architecture."""
        plain = AppendCall(self.dtype, 128, 128, paged=True, arch=arch)
        return replace(plain, rotary_dim=128, table_dtype=torch.float32, with_q=True) if self.rotary else plain


AnyExample = Example | DecodeExample | AppendExample


def caching_examples() -> list[DecodeExample | AppendExample]:
    """The calls on caches in the table."""
    tree = TreeMask(torch.ones(1, 8, 8, dtype=torch.bool), torch.zeros(1, dtype=torch.int32))
    return [
        DecodeExample("decode, pages of 16"),
        DecodeExample("decode, pages of 1", page_size=1),
        DecodeExample("decode, contiguous", page_size=0),
        DecodeExample("decode, packed queries", packed=True),
        DecodeExample("decode, fp32", dtype=torch.float32),
        DecodeExample("decode, head dim 100", head_dim=100),
        DecodeExample("decode, head dim 256", head_dim=256),
        DecodeExample("decode, SlidingWindow", mask=Causal() & SlidingWindow(1024, 0)),
        DecodeExample("decode, SoftCap", score_mods=(SoftCap(50.0),)),
        DecodeExample("decode, tree_mask", mask=tree),
        DecodeExample("decode, sink", sink=True),
        DecodeExample("decode, FixedSplit", fixed=1024),
        AppendExample("append_kv"),
        AppendExample("append_kv, fp32", dtype=torch.float32),
        AppendExample("append_kv with rotary embeddings", rotary=True),
    ]


AnyCall = AttentionCall | DecodeCall | AppendCall


def answers(backend: Backend, call: AnyCall) -> tuple[str | None, str | None]:
    """The reasons why a backend does not run a call, and why it runs the call only by name; None without a reason."""
    if isinstance(call, DecodeCall):
        reservation, refusal = answers_for_decode(backend)
        return refusal(call), reservation(call)
    if isinstance(call, AppendCall):
        reservation_of_append, refusal_of_append = answers_for_append(backend)
        return refusal_of_append(call), reservation_of_append(call)
    return backend.refusal(call), backend.reservation(call)


def chosen(call: AnyCall) -> str | None:
    """The name of the backend that runs the call where none is named; None where all refuse."""
    return next((backend.name for backend in BACKENDS if answers(backend, call) == (None, None)), None)


def show(arch: str | None) -> None:
    """Prints everything.

    With `arch` the table is that of a machine with such a device on which all packages are installed. Without it the
    table is that of this machine.
    """
    arch = None if arch is None else _named_arch(arch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    console.print(_machine(device))
    if arch is None:
        own = device_arch(device)
        console.print(_matrix(own))
        if of_architecture(own) and absence("tilelang", extra="compile"):
            console.print(Text(ONLY_BUNDLES, style="dim"))
        return
    with any_machine():
        console.print(_matrix(arch))
    console.print(Text(f"The table does not depend on this machine: {INSTALLED}.", style="dim"))


def _machine(device: torch.device) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [("device", f"{environment.device_name(device)} ({device_arch(device)})")]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        rows.append(("", f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"))
    rows += [*environment.versions().items(), ("nvcc", _nvcc()), ("kernels", _cache())]
    rows += [("" if place else "bundles", text) for place, text in enumerate(_bundles())]
    for name, text in rows:
        table.add_row(name, Text(text))  # a string would lose the extra in `pip install ".[cuda]"`, as markup of rich
    return table


def _nvcc() -> str:
    """Release and path of the nvcc that compiles kernels, or that there is none."""
    path = shutil.which("nvcc")
    if path is not None:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        return f"{said.split('release ')[-1].split(',')[0]} ({path})"
    try:
        return f"{version('nvidia-cuda-nvcc')} (from pip)"
    except PackageNotFoundError:
        return f"not found ({pip_install('cuda')})"


def _cache() -> str:
    """Folder of the kernel cache, and the number of kernels in it."""
    try:
        folder = default_folder()
    except FileNotFoundError as error:  # there is no home
        return str(error)
    return f"{folder} ({len(list(folder.glob('*.json')))} compiled)"


def _bundles() -> list[str]:
    """The installed bundles of kernels, a line for each, or that there is none."""
    lines = []
    for bundle in bundles():
        given = bundle.manifest
        made_by = given.versions.get("tileattn", "an unknown version")
        lines.append(
            f"{given.distribution}: {given.preset}, {len(given.kernels)} kernels for {given.arch}, made by {made_by}"
        )
    return lines or ["none installed"]


def _matrix(arch: str) -> RenderableType:
    """The table of backends and calls on an architecture, with the reasons of refusals below."""
    table = Table(box=box.SIMPLE_HEAD, title=f"What runs on {arch}", title_justify="left", pad_edge=False)
    table.add_column("call", no_wrap=True)
    for backend in BACKENDS:
        table.add_column(backend.name, justify="center")
    reasons: dict[str, int] = {}
    for example in (*examples(), *caching_examples()):
        table.add_row(example.name, *(_cell(backend, example.call(arch), reasons) for backend in BACKENDS))
    notes = [Text(f"{number}  {reason}") for reason, number in reasons.items()]
    order = Text(
        "A call runs on the first backend that says yes, from left to right. One that says by name runs it only where "
        "backend=... names it.",
        style="dim",
    )
    summaries = [Text(f"{backend.name}: {backend.summary}", style="dim") for backend in BACKENDS]
    return Group(table, *notes, *summaries, order)


def _named_arch(arch: str) -> str:
    """The name of an architecture as :class:`AttentionCall` spells it, also if no backend has kernels for it."""
    if f"{arch}a" in ARCHITECTURES:
        return f"{arch}a"
    if re.fullmatch(r"cpu|sm_\d{2,3}a?|gfx[0-9a-f]{3,4}", arch) is None:
        known = ", ".join(ARCHITECTURES)
        raise refuse("--arch", f"{arch!r} is no architecture; accepted: cpu, sm_NN and gfxNNN, such as {known}")
    return arch


def _cell(backend: Backend, call: AnyCall, reasons: dict[str, int]) -> Text:
    """ "yes", or "no" or "by name" with the number of its reason."""
    refusal, reservation = answers(backend, call)
    answer, reason, style = "no", refusal, "yellow"
    if reason is None:
        answer, reason, style = "by name", reservation, "cyan"
    if reason is None:
        return Text("yes", style="green")
    return Text(f"{answer} {reasons.setdefault(reason, len(reasons) + 1)}", style=style)
