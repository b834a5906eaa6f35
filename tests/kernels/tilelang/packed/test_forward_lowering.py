"""The code that TileLang generates for packed sequences, and the tensor maps that its host code makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from tilelang.backend.module import create_backend_context
from tilelang.engine.lower import device_codegen_without_compile
from tvm import arith, tirx
from tvm.tirx import stmt_functor

from tests.kernels.tilelang.forward.test_lowering import _check_assembly, _check_barriers, _check_queue
from tests.tools.lowering import ARCHITECTURES, CALLS, SLOW_CALLS, assemble, find_nvcc, make_call, on
from tileattn import Causal
from tileattn.call.facts import AttentionCall
from tileattn.call.fp8 import FP8
from tileattn.kernels.tilelang import backend
from tileattn.kernels.tilelang.build import compile
from tileattn.kernels.tilelang.forward import defaults
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.kernel import kernel_of
from tileattn.kernels.tilelang.packed import ragged
from tileattn.kernels.tilelang.packed.library import plan_key

ASSEMBLED = ("sm_80", "sm_90a")
NVIDIA = tuple(arch for arch in ARCHITECTURES if arch.startswith("sm_"))
QUICK = ()  # 17 s each; the emulator runs one of sm_80


def _packed(call: AttentionCall) -> AttentionCall:
    return replace(call, packed=True)


def _kernels() -> list[object]:
    parameters = []
    for arch in NVIDIA:
        for name, call in (CALLS | SLOW_CALLS).items():
            if arch not in ASSEMBLED and name not in CALLS:
                continue
            call = _packed(on(arch, call))
            for number, tile in enumerate(defaults.defaults(call)):
                label = f"{arch}-{name}" + f"-{number}" * (number > 0)
                marks = [] if label in QUICK else [pytest.mark.slow]
                parameters.append(pytest.param(call, tile, id=label, marks=marks))
    return parameters


def _lower(call: AttentionCall, tile: defaults.Config) -> tuple[Any, str]:
    """The host's function and the device's source."""
    function, target = kernel_of(call, tile), compile.target_of(call.arch)
    with target, compile._pass_context(function):
        context = create_backend_context(target, None, "auto")
        host, device = compile._lower(function, context)
        (entry,) = host.functions.values()
        return entry, str(device_codegen_without_compile(device, context).inspect_source())


@pytest.mark.parametrize(("call", "tile"), _kernels())
def test_kernel(call: AttentionCall, tile: defaults.Config, tmp_path: Path) -> None:
    """One test for all that is asked of a kernel, since lowering it takes seconds."""
    host, source = _lower(call, tile)
    hopper = isinstance(tile, HopperConfig)
    assert ("tma_load(" in source) == ("tma_store(" in source) == hopper
    _check_barriers(tile, source)
    _check_queue(call, tile, source)
    _check_nothing_is_static(source)
    if hopper:
        for name in "qkvo":
            _check_map(host, name, call.head_dim if name in "qk" else call.head_dim_v)
        assert not call.return_lse or re.search(r"\blse\[", source)
    else:
        # One block for each task that there can be: it looks for its own.
        assert re.search(r"is_one = \(\(\(int\)blockIdx\.x\) < \(work\[0\] \* heads\)\)", source)
    if call.arch in ASSEMBLED:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("lowered, but not assembled: there is no nvcc (pip install 'tileattn[cuda]')")
        _check_assembly(assemble(nvcc, source, call.arch, tmp_path))


def _check_nothing_is_static(source: str) -> None:
    """Sizes, strides and the work list are parameters of the kernel."""
    signature = re.search(r"__global__ void __launch_bounds__\(\d+(?:, \d+)?\) \w+\(([^)]*)\)", source)
    assert signature is not None
    parameters = {part.split()[-1] for part in signature[1].split(",")}
    assert {"heads", "work", "rows"} <= parameters


# --- Tensor maps ---


def _check_map(host: Any, name: str, head_dim: int) -> None:
    """That of one tensor, whose steps are row, head, 1: no address lies outside of a sequence."""
    maps = {str(var): arguments for var, arguments in host.attrs["tma_descriptor_args"].items()}
    rank, pointer, *rest = list(maps[f"{name}_desc"])[3:]
    assert (int(rank), str(pointer)) == (5, name)
    heads, row, head = 4, 4 * head_dim + 64, head_dim + 8
    given = {"heads": heads, "kv_heads": heads, f"{name}_stride1": row, f"{name}_stride2": head}
    if name == "o":  # contiguous
        row, head = heads * head_dim, head_dim
    sizes, steps = [_value(x, given) for x in rest[:5]], [_value(x, given) for x in rest[5:10]]
    # TileLang puts what is copied first: (column, row of the sequence, head, end, ROWS).
    assert sizes == [head_dim, ragged.ROWS, heads, ragged.MOST, ragged.MOST]
    assert all(0 < step < 2**40 and step % 16 == 0 for step in steps[1:])
    for start, length, first in ((0, 7, 0), (1000, 128, 127), (2**30 - 5, 5, 4), (3, 2**20, 2**20 - 1)):
        place = (3, ragged.ROWS - length + first, 2, start + length, ragged.ROWS)
        assert _address(steps, place) == 2 * ((start + first) * row + 2 * head + 3)
        assert all(0 <= at < size for at, size in zip(place, sizes))
        # The row behind the sequence's last one is beyond the map.
        assert place[1] + (length - first) == sizes[1]


def _address(steps: Sequence[int], place: Sequence[int]) -> int:
    """In bytes, as hardware wraps it around; TMA takes the first step to be an element's size."""
    return sum(at * step for at, step in zip(place, [2, *steps[1:]])) % 2**64


def _value(expr: Any, given: dict[str, int]) -> int:
    if isinstance(expr, int):
        return expr
    known = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Var):
            known[node] = tirx.IntImm(str(node.dtype), given[node.name])

    stmt_functor.post_order_visit(tirx.Evaluate(expr), visit)
    return int(arith.Analyzer().simplify(stmt_functor.substitute(expr, known)))


def test_a_tile_is_where_its_map_says() -> None:
    """A tile of a run without rows on that side lies outside the tensor."""
    tensor = tirx.decl_buffer([1, 50, 2, 16], "float16", "x")
    region = ragged.tile(ragged.ragged(tensor), 30, 10, 4, 8, 1, slice(0, 16))
    begins, extents = ([int(getattr(side, name)) for side in region.region] for name in ("min", "extent"))
    assert begins == [ragged.ROWS, 30, ragged.ROWS - 10 + 4, 1, 0]
    assert extents == [1, 1, 8, 1, 16]
    nowhere = ragged.tile(ragged.ragged(tensor), -1, 0, 0, 8, 1, slice(0, 16))
    assert int(nowhere.region[1].min) == -1
    assert int(nowhere.region[2].min) == ragged.ROWS


# --- Which kernels there are ---


def test_packed_calls_have_kernels_of_their_own() -> None:
    call = make_call(Causal())
    config = defaults.default(call)
    assert "packed" not in launch.cache_key(call, config)
    assert launch.cache_key(_packed(call), config).split(" | ")[2:4] == launch.cache_key(call, config).split(" | ")[2:4]
    keys = {launch.cache_key(call, config), launch.cache_key(_packed(call), config), plan_key(call.arch)}
    assert len(keys) == 3
    assert plan_key("sm_80") not in keys


def test_blocks_share_keys_where_lengths_are_similar_only() -> None:
    call = _packed(make_call())
    clusters = [tile.cluster for tile in defaults.defaults(call) if isinstance(tile, HopperConfig)]
    assert clusters == [1, 2, 1]
    assert all(config.cluster == 1 for config in map(defaults.for_skewed_lengths, defaults.defaults(call)))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(dtype=FP8), "packed sequences must be float16 or bfloat16, not float8_e4m3fn"),
        (make_call(arch="gfx942"), "packed sequences run on NVIDIA GPUs only, not gfx942"),
        (make_call(dim=20), "head_dim must be a multiple of 8 from 16 to 256, not 20"),
        (make_call(dtype=torch.float32), "dtype must be float16, bfloat16 or float8_e4m3fn, not torch.float32"),
    ],
)
def test_refusals(call: AttentionCall, reason: str) -> None:
    assert backend.refusal(_packed(call)) == reason


def test_the_tuner_leaves_packed_calls_alone() -> None:
    call, shape = _packed(make_call()), torch.Size((2, 300, 4, 128))
    assert forward_launch.space(call, shape, shape, 1.0) is None
