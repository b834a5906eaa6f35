"""The source files on which a kernel's cache key depends: all that generate the kernel, and few others."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tileattn
from tests import fresh_process
from tileattn.call.appending import AppendCall
from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.cache import sources
from tileattn.kernels.mma import compile as mma
from tileattn.kernels.tilelang.append import library as append_library
from tileattn.kernels.tilelang.backward import library as backward_launch
from tileattn.kernels.tilelang.decode import library as decode_library
from tileattn.kernels.tilelang.decode.config import default as decode_default
from tileattn.kernels.tilelang.decode.lines import library as lines_library
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.kernels.tilelang.lists import library as lists_library
from tileattn.kernels.tilelang.packed import library as packed_library
from tileattn.variant.key import encode

PACKAGE = Path(tileattn.__file__).parent
TILELANG = "tileattn.kernels.tilelang"
CALL = AttentionCall(torch.bfloat16, 64, 64, arch="sm_90a")
APPEND = AppendCall(torch.bfloat16, 64, 64, arch="sm_90a")
DECODE = DecodeCall(torch.bfloat16, 64, 64, arch="sm_90a")
LISTED = encode(tileattn.Dilated(511, dilation=4), ())[0]
BACKWARD = BackwardCall(replace(CALL, needs_grad=True), (True, True, True, False))

# By kernel: the modules whose closure its key has, some of the files that generate it, and its key.
COMPILER = "build.compile build.nvcc architecture"
TILE = f"{COMPILER} tile.dropout tile.expressions tile.mask tile.simplify tile.softmax tile.variables tile.assume "
TILE += "tile.parameters tile.hopper tile.amd packed.work_list packed.dependent_launch packed.ragged"
FORWARD_TILE = "forward.kernel forward.config forward.generic forward.signature forward.hopper.kernel "
FORWARD_TILE += "forward.hopper.plan forward.hopper.consumer forward.hopper.producer forward.hopper.tasks packed.tasks "
FORWARD_TILE += "forward.amd.kernel forward.amd.config"
DECODE_TILE = "decode.kernel decode.config decode.generic decode.combine decode.walk decode.jobs decode.ranges "
DECODE_TILE += "decode.records decode.signature decode.packed_rows"
BACKWARD_TILE = "backward.config backward.generic backward.hopper.keys backward.hopper.config backward.hopper.queries "
BACKWARD_TILE += "backward.hopper.wide backward.kernels backward.hopper.layouts backward.operand_gradients "
BACKWARD_TILE += "backward.plan backward.hopper.plan backward.hopper.wide_plan backward.hopper.roles "
BACKWARD_TILE += "backward.hopper.loads backward.hopper.wide_loads backward.hopper.products backward.hopper.scores "
BACKWARD_TILE += "backward.hopper.stages backward.hopper.copied_tile backward.hopper.dq_sums "
BACKWARD_TILE += "backward.hopper.dq_order backward.places backward.prepare backward.finish backward.queries "
BACKWARD_TILE += "backward.signature backward.slopes backward.operand_stores backward.tile "
BACKWARD_TILE += "backward.visible backward.amd.queries backward.amd.config backward.defaults"
KERNELS: dict[str, tuple[str, str, Callable[[], str]]] = {
    "forward": (
        "forward.kernel",
        f"{TILE} {FORWARD_TILE}",
        lambda: launch.cache_key(CALL, default(CALL)),
    ),
    "transpose_fp8": (
        "forward.transpose_fp8",
        f"{COMPILER} forward.signature tile.softmax",
        lambda: launch.transpose_key(CALL),
    ),
    "sequence_plan": (
        "packed.plan_kernel",
        f"{COMPILER} packed.work_list packed.dependent_launch",
        lambda: packed_library.plan_key("sm_90a"),
    ),
    "shares": (
        "backward.shares.add",
        f"{COMPILER} backward.shares.add",
        lambda: backward_launch.SharesJob(torch.bfloat16, "sm_90a").key,
    ),
    "tile_lists": (
        "lists.kernel",
        f"{COMPILER} lists.analysis lists.emit lists.registers",
        lambda: lists_library.lists_key(LISTED, "sm_90a"),
    ),
    "mask_bits": (
        "lists.bits_kernel",
        f"{COMPILER} tile.expressions tile.mask tile.parameters",
        lambda: lists_library.bits_key(LISTED, "sm_90a"),
    ),
    "append": (
        "append.kernel",
        f"{COMPILER} append.elements append.pieces append.place packed.dependent_launch tile.assume",
        lambda: append_library.append_key(APPEND),
    ),
    "decode": (
        "decode.kernel",
        f"{COMPILER} tile.softmax tile.mask tile.simplify tile.expressions packed.dependent_launch {DECODE_TILE}",
        lambda: decode_library.decode_key(DECODE, decode_default(DECODE, 16)),
    ),
    "decode_plan": (
        "decode.plan_kernel",
        f"{COMPILER} tile.mask tile.expressions packed.dependent_launch decode.jobs decode.ranges decode.records "
        "decode.shares",
        lambda: decode_library.plan_key("sm_90a", False, ""),
    ),
    "decode_lines": (
        "decode.lines.kernel",
        f"{COMPILER} lists.analysis lists.emit lists.registers decode.lines.entries decode.records",
        lambda: lines_library.lines_key("sm_90a", False, LISTED, 1),
    ),
    "packed_keys": (
        "decode.packed_keys",
        f"{COMPILER} packed.dependent_launch decode.records",
        lambda: decode_library.packed_keys_key("sm_90a"),
    ),
    **{
        name: ("backward.kernels", f"{TILE} {BACKWARD_TILE}", functools.partial(key, *arguments))
        for name, key, *arguments in (
            (f"backward.{which}", backward_launch.cache_key, BACKWARD, which)
            for which in ("prepare", "main", "finish", "queries")
        )
    },
}
# Above what a call and its variant are: what checks, differentiates, dispatches, measures and shows.
ABOVE = {"api", "runtime", "call.validation", "measure", "folders", "tuner"}
ABOVE |= {"call.deferred_status", "call.packed_status", "call.cache_status"}
ABOVE |= {"nn", "compat", "cli", "bench", "viz", "reference", "testing", "parallel", "__main__"}
# Of TileLang's modules, those that choose, load and launch.
FOLDERS = (
    "backward",
    "backward.amd",
    "backward.hopper",
    "backward.shares",
    "build",
    "decode",
    "decode.hopper",
    "decode.lines",
    "forward",
    "forward.amd",
    "forward.hopper",
    "lists",
)
HOST = {"", *FOLDERS, "packed", "tile", "host", "backend", "buckets", "tuned", "build.batch", "build.library"}
HOST |= {"behind", "build.background", "build.collection", "build.progress", "build.worker"}
HOST |= {"build.ahead", "build.job", "build.record", "build.text"}
HOST |= {"bundling", "bundling.content", "bundling.generating", "bundling.wheel"}
HOST |= {"packed_lists", "lists.bits", "lists.launch", "lists.library"}
HOST |= {"append", "append.backend", "append.job", "append.library"}
HOST |= {"packed.library", "packed.plan", "forward.candidates", "forward.sm90_table", "forward.amd.space"}
HOST |= {f"forward.{name}" for name in ("choice", "defaults", "launch", "library", "packed", "queue", "space", "wide")}
HOST |= {"forward.windows"}
HOST |= {
    f"decode.{name}"
    for name in ("backend", "job", "launch", "library", "lines.launch", "lines.library", "lines.visits")
}
HOST |= {f"backward.{name}" for name in ("launch", "library", "space", "two_streams", "workspaces")}
HOST |= {"backward.jobs", "backward.listed", "backward.tensor_gradients"}
HOST |= {f"backward.shares.{name}" for name in ("choice", "last_wave", "order", "side_by_side", "waves")}


def modules(name: str) -> list[str]:
    return [f"{TILELANG}.{KERNELS[name][0]}", f"{TILELANG}.build.compile"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


# --- Reading imports ---


def by_ast(path: Path) -> set[str]:
    """What :func:`sources.imports` has to find, from the whole file's syntax tree and from nothing else."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            members = [f"{source}.{alias.name}" for alias in node.names]
            imported |= {member if member in FILES else source for member in members}
    return {module for module in imported if module in FILES}


@pytest.mark.parametrize("name", FILES)
def test_imports_are_read_as_pythons_parser_reads_them(name: str) -> None:
    path = FILES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = sources.imports(path.read_bytes(), package)
    assert by_ast(path) <= imported
    if name.startswith((TILELANG, "tileattn.kernels.mma")):  # text in strings counts as well: there is none here
        assert imported == by_ast(path)


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("from . import backend", {"backend"}),
        ("from .backend import prepare as x, space", {"backend"}),
        ("def f():\n    from .backward import tile", {"backward.tile"}),
        ("from .backward import (  # (a remark)\n    tile,\n    queries,\n)", {"backward.tile", "backward.queries"}),
        ("from .backward import \\\n    tile", {"backward.tile"}),
        (f"import {TILELANG}.host\nimport {TILELANG}.tuned as s, math", {"host", "tuned"}),
        (f"import math, {TILELANG}.host", {"host"}),
        (f"from {TILELANG} import host", {"host"}),
        ("try:\n    from . import host\nexcept ImportError: pass", {"host"}),
        ("if TYPE_CHECKING:\n    from .forward import x\n\n    from .batch import y\nfrom . import host", {"host"}),
        ("import tilelang\nfrom tileattn_other import x\nfrom typing import Any", set()),
    ],
)
def test_imports_in_every_form(source: str, imported: set[str]) -> None:
    assert sources.imports(source.encode(), TILELANG) == {f"{TILELANG}.{name}" for name in imported}


def test_a_module_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tileattn\.nothing is not a module of"):
        sources.closure(["tileattn.nothing"])


# --- What is in a closure ---


@pytest.mark.parametrize("name", KERNELS)
def test_a_closure_has_the_files_that_generate_its_kernel(name: str) -> None:
    closure = set(sources.closure(modules(name)))
    assert {f"{TILELANG}.{file}" for file in KERNELS[name][1].split()} <= closure


@pytest.mark.parametrize("name", KERNELS)
def test_a_closure_has_nothing_that_launches_or_lies_above(name: str) -> None:
    closure = {module.removeprefix("tileattn").lstrip(".") for module in sources.closure(modules(name))}
    assert "" not in closure
    assert not {module for module in closure for above in ABOVE if f"{module}.".startswith(f"{above}.")}
    of_kernels = {module for module in closure if module.startswith("kernels")}
    assert all(module.startswith("kernels.tilelang") for module in of_kernels)
    assert not {module.removeprefix("kernels.tilelang").lstrip(".") for module in of_kernels} & HOST


def test_what_lies_above_is_there() -> None:
    """Otherwise the test above would check nothing."""
    assert {f"tileattn.{name}" for name in ABOVE} - set(FILES) <= {"tileattn.parallel"}  # comes with work of its own
    assert {f"{TILELANG}.{name}".rstrip(".") for name in HOST} <= set(FILES)


def test_every_file_of_the_backend_generates_a_kernel_or_is_known_not_to() -> None:
    every = {name.removeprefix(TILELANG).lstrip(".") for name in FILES if f"{name}.".startswith(f"{TILELANG}.")}
    generating = {module for name in KERNELS for module in sources.closure(modules(name))}
    assert every - HOST == {name.removeprefix(f"{TILELANG}.") for name in generating if name.startswith(TILELANG)}


def test_the_ladders_kernels_have_their_device_code_and_what_compiles_it() -> None:
    assert {"tileattn.kernels.mma.compile", "tileattn.kernels.mma.rungs"} <= set(sources.closure([mma.__name__]))


# --- What else is in a key ---

OTHER_FACTS: dict[str, Any] = {
    "dtype": torch.float16, "head_dim": 128, "head_dim_v": 128, "variant": "Causal()", "sink": True, "aligned": False,
    "return_lse": False, "arch": "sm_80", "dropout": True, "packed": True,
}  # fmt: skip


def test_every_fact_of_a_call_that_a_kernel_depends_on_is_in_its_key() -> None:
    """The configuration is fixed: the defaults of different calls may differ anyway."""
    config = default(CALL)
    keys = {name: launch.cache_key(replace(CALL, **{name: value}), config) for name, value in OTHER_FACTS.items()}
    assert set(keys) == {field.name for field in dataclasses.fields(AttentionCall)} - {"needs_grad"}
    assert len({launch.cache_key(CALL, config), *keys.values()}) == 1 + len(keys)
    assert launch.cache_key(replace(CALL, needs_grad=True), config) == launch.cache_key(CALL, config)


# --- Editing ---


@pytest.mark.slow_cases(
    "backward.main",
    "backward.finish",
    "backward.queries",
    reason="2 s each; the preparing kernel's closure is as large",
)
@pytest.mark.parametrize("name", KERNELS)
def test_each_generating_file_changes_the_digest(name: str) -> None:
    before = sources.closure(modules(name))

    def digest(edited: str) -> str:
        def read(path: Path) -> bytes:
            return path.read_bytes() + b"\n" * (path == FILES[edited])

        return sources.digest_of(sources.closure(modules(name), read))

    assert digest("tileattn.api.attention") == sources.digest_of(before) == sources.digest(*modules(name))
    assert len({digest(module) for module in before} | {digest("tileattn.api.attention")}) == len(before) + 1


def test_a_digest_knows_which_file_has_which_content() -> None:
    assert sources.digest_of({"a": b"12", "b": b"3"}) != sources.digest_of({"a": b"1", "b": b"23"})
    assert sources.digest_of({"a": b"1", "b": b"2"}) != sources.digest_of({"a": b"2", "b": b"1"})
    assert sources.digest_of({"a": b"1", "b": b"2"}) == sources.digest_of({"b": b"2", "a": b"1"})


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package's sources, of which keys are made."""
    root = tmp_path / "tileattn"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "ROOT", root)
    forget()
    yield root
    monkeypatch.undo()
    forget()


def forget() -> None:
    for function in (sources.digest, sources._file):
        function.cache_clear()


# (edited file, kernels whose keys change): among them what no list of files had named.
EDITS = [
    ("forward/hopper/plan.py", {"forward"}),
    ("forward/hopper/kernel.py", {"forward"}),
    ("tile/hopper.py", {"forward", "backward", "decode"}),
    ("backward/hopper/wide.py", {"backward"}),
    ("packed/plan_kernel.py", {"sequence_plan"}),
    ("forward/transpose_fp8.py", {"transpose_fp8"}),
    ("packed/work_list.py", {"forward", "backward", "sequence_plan", "tile_lists", "transpose_fp8"}),
    (
        "build/nvcc.py",
        {
            "append",
            "forward",
            "backward",
            "sequence_plan",
            "transpose_fp8",
            "decode",
            "decode_plan",
            "decode_lines",
            "packed_keys",
            "shares",
            "tile_lists",
            "mask_bits",
        },
    ),
    ("lists/emit.py", {"tile_lists", "decode_lines"}),
    ("lists/bits_kernel.py", {"mask_bits"}),
    ("tile/mixed_bits.py", {"forward", "backward", "transpose_fp8"}),
    ("lists/launch.py", set()),
    ("../../variant/intervals/integers.py", {"tile_lists", "decode_lines"}),
    ("backward/shares/add.py", {"shares"}),
    ("backward/places.py", {"backward"}),
    ("backward/shares/waves.py", set()),
    ("append/place.py", {"append"}),
    ("decode/jobs.py", {"decode", "decode_plan"}),
    ("decode/combine.py", {"decode"}),
    ("decode/packed_keys.py", {"packed_keys"}),
    ("decode/launch.py", set()),
    ("decode/lines/entries.py", {"decode", "decode_plan", "decode_lines"}),
    ("decode/lines/kernel.py", {"decode_lines"}),
    ("decode/lines/visits.py", set()),
    ("tile/amd.py", {"forward", "backward"}),
    ("forward/library.py", set()),
    ("../../runtime/operators.py", set()),
    (
        "../../variant/expression.py",
        {"forward", "backward", "transpose_fp8", "decode", "decode_plan", "decode_lines", "tile_lists", "mask_bits"},
    ),
]


@pytest.mark.parametrize(("file", "changed"), EDITS, ids=[file for file, _ in EDITS])
def test_an_edit_changes_the_keys_of_the_kernels_that_it_generates(copied: Path, file: str, changed: set[str]) -> None:
    before = {name: key() for name, (_, _, key) in KERNELS.items()}
    path = copied / "kernels" / "tilelang" / file
    path.write_text(path.read_text() + "# edited\n")
    forget()
    after = {name: key() for name, (_, _, key) in KERNELS.items()}
    assert {name.partition(".")[0] for name in KERNELS if before[name] != after[name]} == changed
    assert {name.partition(".")[0] for name in KERNELS if before[name] == after[name]}.isdisjoint(changed)


def test_a_new_import_joins_the_closure(copied: Path) -> None:
    """An import inside a function, of a new file, counts as well."""
    before = packed_library.plan_key("sm_90a")
    folder = copied / "kernels" / "tilelang"
    (folder / "new.py").write_text("x = 1\n")
    assert packed_library.plan_key("sm_90a") == before
    with (folder / "packed" / "plan_kernel.py").open("a") as file:
        file.write("\n\ndef later():\n    from ..new import x\n\n    return x\n")
    forget()
    second = packed_library.plan_key("sm_90a")
    (folder / "new.py").write_text("x = 2\n")
    forget()
    assert len({before, second, packed_library.plan_key("sm_90a")}) == 3


# --- While a kernel is made ---

TRACED = """
import sys
import torch
from dataclasses import replace
from tileattn import ALiBi, Bias, Causal, Dilated, Documents, FunctionMask, SoftCap
from tileattn.call.appending import AppendCall
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.decoding import DecodeCall
from tileattn.kernels.tilelang.build import compile
from tileattn.kernels.tilelang.decode import config as decode_config, kernel as decode_kernels
from tileattn.kernels.tilelang.decode import packed_keys
from tileattn.kernels.tilelang.decode import plan_kernel as decode_plan
from tileattn.kernels.tilelang.decode.lines.kernel import lines_kernel
from tileattn.kernels.tilelang.forward import defaults, kernel, transpose_fp8
from tileattn.call.appending import AppendCall
from tileattn.kernels.tilelang.append.kernel import append_kernel
from tileattn.kernels.tilelang.packed import plan_kernel as sequence_plan
from tileattn.kernels.tilelang.backward import kernels, library as launch
from tileattn.kernels.tilelang.backward.defaults import default as backward_default
from tileattn.kernels.tilelang.backward.shares.add import add_kernel
from tileattn.kernels.tilelang.lists.analysis import analysis
from tileattn.kernels.tilelang.lists.bits_kernel import bits_kernel
from tileattn.kernels.tilelang.lists.kernel import lists_kernel
from tileattn.kernels.tilelang.lists.library import dtypes_of, read_by_mask
from tileattn.variant.key import encode
from tileattn.variant.program import program, with_alignment

BIAS, TILES = torch.ones(1, 4, 9, 9), torch.ones(2, 4, 16, 16, dtype=torch.bfloat16)
VARIANTS = {
    "plain": (None, ()),
    "composed": (Documents(torch.arange(9) // 4) & Causal(), (ALiBi(torch.ones(4)), Bias(BIAS), SoftCap(3.0))),
    "tiles": (Causal(), (Bias(TILES),)),
    "function": (FunctionMask(lambda b, h, q, k: (q + k) % 3 != 0), (lambda s, b, h, q, k: s + q - k,)),
}

def call(variant, dim, arch, **flags):
    text, operands = encode(*VARIANTS[variant])
    text = with_alignment(text, operands.tensors)
    return AttentionCall(torch.bfloat16, dim, dim, text, arch=arch, **flags)

def made(kernel, make):
    print("kernel", kernel)
    known = set(sys.modules)
    files = set()
    sys.setprofile(lambda frame, event, _: event == "call" and files.add(frame.f_code.co_filename))
    try:
        function = make()
    finally:
        sys.setprofile(None)
    for name in set(sys.modules) - known:
        print("module", name)
    for name in files:
        print("file", name)
    return function

FORWARD = [
    call("plain", 64, "sm_90a"), call("plain", 256, "sm_80", aligned=False), call("composed", 64, "gfx942"),
    call("tiles", 64, "sm_90a"), call("function", 64, "sm_90a", packed=True),
    call("composed", 64, "sm_80", packed=True), replace(call("plain", 128, "sm_90a"), dtype=torch.float8_e4m3fn),
]
for each in FORWARD:
    tiles = defaults.default(each)
    made("forward", lambda: kernel.kernel_of(each, tiles))
made("transpose_fp8", lambda: transpose_fp8.transpose_kernel(FORWARD[0]))
small = made("sequence_plan", lambda: sequence_plan.plan_kernel("sm_90a"))
made("sequence_plan", lambda: compile.device_source(small, "sm_90a"))
made("packed_keys", lambda: packed_keys.packed_keys_kernel("sm_90a"))
new = AppendCall(torch.bfloat16, 64, 64, 64, table_dtype=torch.float32, paged=True, packed=True, arch="sm_90a")
made("append", lambda: append_kernel(new))
for variant in VARIANTS:
    text = call(variant, 64, "sm_80").variant
    packed = dict(packed=True, packed_keys=variant == "plain")
    for arch, flags in (("sm_80", dict(page_rows=16, sink=True)), ("sm_90a", packed)):
        each = DecodeCall(torch.bfloat16, 64, 64, text, arch=arch, **flags)
        made("decode", lambda: decode_kernels.decode_kernel(each, decode_config.default(each, 16)))
    made("decode_plan", lambda: decode_plan.plan_kernel("sm_90a", variant == "plain", program(text)))
BACKWARD = [
    (call("plain", 64, "sm_90a"), True), (call("composed", 64, "sm_90a"), False), (call("plain", 256, "sm_90a"), True),
    (call("composed", 64, "sm_80"), True), (call("plain", 64, "gfx942"), True),
    (call("plain", 64, "sm_80", packed=True), False), (call("plain", 64, "sm_90a", packed=True, dropout=True), True),
]
for forward, deterministic in BACKWARD:
    needs = (True, True, True, False, *(t.dtype.is_floating_point for t in program(forward.variant).tensors))
    backward = BackwardCall(replace(forward, needs_grad=True), needs, deterministic=deterministic)
    tiles = backward_default(backward)
    for name in launch.kernel_names(backward):
        made("backward." + name, lambda: kernels.kernel_of(backward, name, tiles))
made("shares", lambda: add_kernel(torch.bfloat16))
IDS = torch.arange(9)
for mask in (Dilated(511, dilation=4), FunctionMask(lambda b, h, q, k: IDS[q] == IDS[k]), Documents(IDS) | Causal()):
    text = encode(mask, ())[0]
    dtypes = dtypes_of(text)  # traces the mask
    made("tile_lists", lambda: lists_kernel(analysis(text), dtypes))
    read = read_by_mask(program(text))
    made("mask_bits", lambda: bits_kernel(program(text), read))
    made("decode_lines", lambda: lines_kernel(analysis(text, (0, 63)), dtypes, True))
"""


@functools.cache
def traced() -> dict[str, set[str]]:
    """For each kernel, the modules of tileattn that were imported, or ran a function, while it was generated."""
    modules_by_text: dict[str, set[str]] = {}
    names = {str(path): name for name, path in FILES.items()}
    for line in fresh_process.run(TRACED).splitlines():
        kind, _, text = line.partition(" ")
        if kind == "kernel":
            current = modules_by_text.setdefault(text, set())
        elif kind == "file" and text in names:
            current.add(names[text])
        elif kind == "module" and text in FILES:
            current.add(text)
    return modules_by_text


@pytest.mark.slow(reason="generates every kernel under a trace, 35 s")
@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("name", KERNELS)
def test_what_runs_while_a_kernel_is_made_is_in_its_closure(name: str) -> None:
    ran = traced()[name]
    assert f"{TILELANG}.{KERNELS[name][0]}" in ran
    assert ran <= set(sources.closure(modules(name)))


@pytest.mark.slow(reason="generates every kernel under a trace, 35 s")
def test_the_trace_sees_every_schedule() -> None:
    """Otherwise the test above would check too little."""
    ran = {module.removeprefix(f"{TILELANG}.") for modules_of in traced().values() for module in modules_of}
    forward = "forward.generic forward.hopper.kernel forward.hopper.plan forward.amd.kernel"
    backward = "backward.generic backward.hopper.keys backward.hopper.wide backward.hopper.queries backward.queries"
    others = "backward.amd.queries packed.ragged packed.tasks build.compile"
    assert set(f"{forward} {backward} {others}".split()) <= ran
