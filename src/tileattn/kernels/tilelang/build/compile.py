"""Compiles a TileLang function to a shared library: lowering, two repairs, hints to ptxas, and the export."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.backend.module import BackendContext, create_backend_context
from tilelang.engine.lower import (
    device_codegen,
    device_codegen_without_compile,
    host_codegen,
    lower_to_host_device_ir,
)
from tvm import arith, ir, runtime, tirx
from tvm.runtime import _ffi_api
from tvm.script.ir_builder import IRBuilder
from tvm.target import Target
from tvm.tirx import stmt_functor

from ..architecture import PRODUCER_THREADS
from . import link
from .sources import HOST_OPTIONS, Sources

WARP, WARPGROUP = 32, 128

PASSES = {"tl.enable_fast_math": True, "tl.disable_out_of_bound_warning": True}
OWN_BARRIERS = "tileattn.own_barriers"  # attribute of functions in which TileLang must not place barriers
OWN_BOUNDS = "tileattn.own_bounds"  # attribute of functions that access no element outside of a tensor
# Attribute of functions whose loops have more matrix descriptors than there are registers to keep them in.
DESCRIPTORS_IN_LOOPS = "tileattn.descriptors_in_loops"
# Attribute of functions whose products leave out columns of their tiles' padding: the width of tiles, the columns that
# are used, another width, ...
USED_COLUMNS = "tileattn.used_columns"
STEP = 16  # columns that one product of 16-bit operands adds up


def target_of(arch: str) -> Any:
    """TileLang's target for an architecture in :class:`AttentionCall`'s spelling."""
    return Target({"kind": "hip", "mcpu": arch} if arch.startswith("gfx") else {"kind": "cuda", "arch": arch})


def device_source(function: Any, arch: str) -> str:
    """The CUDA or HIP source that TileLang generates; needs neither a GPU nor a device compiler."""
    return sources(function, arch).device


def sources(function: Any, arch: str) -> Sources:
    """The generated sources; needs neither a GPU nor a device compiler."""
    target = target_of(arch)
    with target, _pass_context(function):
        context = create_backend_context(target, None, "auto")
        host, device = _lower(function, context)
        of_device = device_codegen_without_compile(device, context)
        library = host_codegen(host, context)
        texts = str(of_device.inspect_source()), str(library.inspect_source())
        return Sources(*texts, b"" if arch.startswith("gfx") else _image(library, of_device))


def build_library(function: Any, arch: str, path: Path) -> str:
    """Compiles the function, with nvcc or hipcc and the host's C++ compiler, into the shared library `path`.

    Returns:
        The digest of the sources (:attr:`Sources.digest`).
    """
    if arch.startswith("gfx"):
        return _build_for_amd(function, arch, path)
    generated = sources(function, arch)
    link.build_library(generated, arch, path)
    return generated.digest


def _image(library: Any, device: Any) -> bytes:
    """What TVM adds to a library for its loader; the code is the word "ptx", as nothing has compiled it."""
    library.import_module(device)
    text = str(_ffi_api.ModulePackImportsToC(library, False, ""))
    return bytes(int(byte, 16) for byte in re.findall(r"0x([0-9a-f]{2})\b", text))


def _build_for_amd(function: Any, arch: str, path: Path) -> str:
    target = target_of(arch)
    with target, _pass_context(function):
        context = create_backend_context(target, None, "auto")
        host, device = _lower(function, context)
        of_device = str(device_codegen_without_compile(device, context).inspect_source())
        library = host_codegen(host, context)
        of_host = str(library.inspect_source())
        library.import_module(device_codegen(device, context))
        runtime.Executable(library).export_library(str(path), options=HOST_OPTIONS)
    return Sources(of_device, of_host).digest


def _pass_context(function: Any) -> Any:
    own_barriers, own_bounds = (bool(function.attrs.get(name, False)) for name in (OWN_BARRIERS, OWN_BOUNDS))
    own = {"tl.disable_thread_storage_sync": own_barriers, "tl.disable_safe_memory_legalize": own_bounds}
    return tilelang.transform.PassContext(opt_level=3, config=PASSES | own)


def _lower(function: Any, context: BackendContext) -> tuple[Any, Any]:
    _name_apart(function)
    host, device, *_ = lower_to_host_device_ir(function, context)
    for name, kernel in list(device.functions.items()):
        kernel = _uniform_warpgroups(_one_producer_warp(_constant_waits(kernel)))
        if bool(function.attrs.get(DESCRIPTORS_IN_LOOPS, False)):
            kernel = _descriptors_in_loops(kernel)
        if USED_COLUMNS in function.attrs:
            numbers = [int(number) for number in function.attrs[USED_COLUMNS]]
            kernel = _without_padding(kernel, dict(zip(numbers[::2], numbers[1::2], strict=True)))
        device.update_func(name, kernel)
    return host, device


def _name_apart(function: Any) -> None:
    """Numbers the shared buffers of equal names, in the order in which the kernel allocates them.

    TileLang 0.1.15 gives buffers of equal size their places in the order of their names. Buffers that are made in a
    call, as the fields of a value, are all called "v", and then the order was that of addresses: the same kernel had
    another source in each process.
    """
    buffers: list[Any] = []

    def take(node: Any) -> None:
        if isinstance(node, tirx.SBlock):
            buffers.extend(each for each in node.alloc_buffers if each.scope().startswith("shared"))

    stmt_functor.post_order_visit(function.body, take)
    counts = Counter(each.name for each in buffers)
    for number, buffer in enumerate(buffers):
        if counts[buffer.name] > 1:
            IRBuilder.name(f"{buffer.name or 'shared'}_{number:02d}", buffer)


def _one_producer_warp(kernel: Any) -> Any:
    """Leaves the waiting and copying to the first warp of the producer warpgroup.

    TileLang 0.1.15 lets all four warps wait for a free stage although only the first one issues copies. No barrier
    waits for the other three: a warp that falls two turns behind takes the parity of a later turn for its own, misses
    its turn, and at last waits for a turn that never comes. Two blocks on one multiprocessor are enough to hang (seen
    on an H200). All four warps still give back their registers, as setmaxnreg asks.
    """
    return kernel.with_body(stmt_functor.ir_transform(kernel.body, None, _rewrite_producer, ["tirx.IfThenElse"]))


def _rewrite_producer(branch: Any) -> Any:
    condition = branch.condition
    if branch.else_case is None or not isinstance(condition, tirx.LT) or not _calls(branch.then_case, "tma_load"):
        return None
    if not isinstance(condition.b, tirx.IntImm) or int(condition.b) != PRODUCER_THREADS:
        return None
    if _stores(branch.then_case):
        raise NotImplementedError("a producer warpgroup that stores by itself needs all of its warps")
    statements = list(branch.then_case.seq) if isinstance(branch.then_case, tirx.SeqStmt) else [branch.then_case]
    registers = [stmt for stmt in statements if _is_call(stmt, "set_max_nreg")]
    rest = [stmt for stmt in statements if not _is_call(stmt, "set_max_nreg")]
    first_warp = tirx.IfThenElse(condition.a < WARP, tirx.SeqStmt(rest) if len(rest) > 1 else rest[0], None)
    producer = tirx.SeqStmt([*registers, first_warp]) if registers else first_warp
    return tirx.IfThenElse(condition, producer, branch.else_case)


def _uniform_warpgroups(kernel: Any) -> Any:
    """Tells ptxas that ``thread // 128``, the warpgroup's number, is the same in all threads of a warp.

    ptxas keeps values derived from a shuffle's result in uniform registers. Without this, each descriptor of a first
    operand in shared memory took two vector registers, and two ``R2UR`` before each product: 32 of 232
    registers at head dim 256.
    """
    if not _calls(kernel.body, "ptx_wgmma_ss"):
        return kernel
    group = tirx.Var("warpgroup", "int32")

    def bind(attr: Any) -> Any:
        if attr.attr_key != "thread_extent" or attr.node.thread_tag != "threadIdx.x":
            return None
        thread = attr.node.var

        def replace(division: Any) -> Any:
            number = isinstance(division.b, tirx.IntImm) and int(division.b) == WARPGROUP
            return group if number and division.a.same_as(thread) else None

        body = stmt_functor.ir_transform(attr.body, None, replace, ["tirx.FloorDiv"])
        same = tirx.Bind(group, T.shfl_sync(thread // WARPGROUP, 0))
        return tirx.AttrStmt(attr.node, attr.attr_key, attr.value, tirx.SeqStmt([same, body]))

    return kernel.with_body(stmt_functor.ir_transform(kernel.body, None, bind, ["tirx.AttrStmt"]))


def _descriptors_in_loops(kernel: Any) -> Any:
    """Makes nvcc compute the descriptors of matrices in shared memory where they are used.

    Otherwise nvcc computes those that do not change once, in front of the loop: one for each 16 columns of each
    operand, in registers, or in local memory (440 bytes per thread for dq at head dim 256). Here each has a zero added
    that comes from a shuffle, and so, as far as the compiler can tell, is another one in each iteration.
    """

    def rewrite(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.SERIAL or not _calls(loop.body, "initialize_wgmma_descriptor"):
            return None
        zero = tirx.Var("zero", "int32")

        def move(stmt: Any) -> Any:
            if not _is_call(stmt, "initialize_wgmma_descriptor"):
                return None
            moved = tirx.Call("handle", ir.Op.get("tl.increase_descriptor_offset"), [stmt.value.args[0], zero])
            return tirx.SeqStmt([stmt, tirx.Evaluate(moved)])

        body = stmt_functor.ir_transform(loop.body, None, move, ["tirx.Evaluate"])
        body = tirx.SeqStmt([tirx.Bind(zero, T.shfl_sync(tirx.IntImm("int32", 0), 0)), body])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)

    return kernel.with_body(stmt_functor.ir_transform(kernel.body, None, rewrite, ["tirx.For"]))


def _without_padding(kernel: Any, used: dict[int, int]) -> Any:
    """Makes products leave out padding of the head dim, which is 0 in all tiles.

    A product over the head dim (both operands with the head dim in rows' direction, from shared memory) takes fewer
    steps of 16 columns. One whose columns are the head dim (the first operand from registers) has fewer columns: the
    registers of the others keep their zeros. TileLang would do this for slices of the tiles, but choose other layouts
    for them: swizzles of 32 bytes, for which TMA copies 16 columns at a time.
    """

    def shorten(loop: Any) -> Any:
        steps = {width // STEP: columns // STEP for width, columns in used.items()}
        call = loop.body.value if isinstance(loop.body, tirx.Evaluate) else None
        if call is None or not _is_call(call, "ptx_wgmma_ss") or not (bool(call.args[1]) and bool(call.args[2])):
            return None
        extent = steps.get(int(loop.extent))
        if extent is None:
            return None
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body, loop.thread_binding, loop.annotations)

    def narrow(stmt: Any) -> Any:
        if not _is_call(stmt, "ptx_wgmma_rs"):
            return None
        call = stmt.value
        shapes = {f"m64n{width}k{STEP}": f"m64n{columns}k{STEP}" for width, columns in used.items()}
        shape = shapes.get(call.args[0].value)
        if shape is None:
            return None
        return tirx.Evaluate(tirx.Call(call.dtype, call.op, [tirx.StringImm(shape), *call.args[1:]]))

    body = stmt_functor.ir_transform(kernel.body, None, shorten, ["tirx.For"])
    return kernel.with_body(stmt_functor.ir_transform(body, None, narrow, ["tirx.Evaluate"]))


def _is_call(stmt: Any, name: str) -> bool:
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else stmt
    return isinstance(call, tirx.Call) and isinstance(call.op, ir.Op) and call.op.name.endswith(name)


def _calls(stmt: Any, name: str) -> bool:
    matches: list[Any] = []
    stmt_functor.post_order_visit(stmt, lambda node: matches.append(node) if _is_call(node, name) else None)
    return bool(matches)


def _stores(stmt: Any) -> bool:
    matches: list[Any] = []
    stmt_functor.post_order_visit(
        stmt, lambda node: matches.append(node) if isinstance(node, tirx.BufferStore) else None
    )
    return bool(matches)


def _constant_waits(kernel: Any) -> Any:
    """Makes the counts of ``cp.async.wait_group`` constants, as the instruction needs.

    TileLang 0.1.15 drains a pipeline whose length is dynamic in an unrolled loop over ``i`` with counts such as
    ``3 - 2 * i``, and its code generator then fails on them. Each becomes a choice among the constants for each ``i``,
    which the compiler resolves when it unrolls the loop.
    """
    return kernel.with_body(stmt_functor.ir_transform(kernel.body, None, _rewrite_loop, ["tirx.For"]))


def _rewrite_loop(loop: Any) -> Any:
    if not isinstance(loop.extent, tirx.IntImm):
        return None

    def rewrite(stmt: Any) -> Any:
        call = stmt.value
        if not _is_call(call, "ptx_wait_group") or isinstance(call.args[0], tirx.IntImm):
            return None
        choice = None
        for index in reversed(range(int(loop.extent))):
            count = stmt_functor.substitute(call.args[0], {loop.loop_var: loop.min + index})
            wait = tirx.Evaluate(tirx.Call(call.dtype, call.op, [arith.Analyzer().simplify(count)]))
            choice = wait if choice is None else tirx.IfThenElse(loop.loop_var == loop.min + index, wait, choice)
        return choice

    body = stmt_functor.ir_transform(loop.body, None, rewrite, ["tirx.Evaluate"])
    if body.same_as(loop.body):
        return None
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
