"""From a TileLang function to a shared library: lowering, a repair, and the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tilelang
from tilelang.backend.module import BackendContext, create_backend_context
from tilelang.engine.lower import (
    device_codegen,
    device_codegen_without_compile,
    host_codegen,
    lower_to_host_device_ir,
)
from tvm import arith, ir, runtime, tirx
from tvm.target import Target
from tvm.tirx import stmt_functor

PASSES = {"tl.enable_fast_math": True, "tl.disable_out_of_bound_warning": True}


def target_of(arch: str) -> Any:
    """TileLang's target for an architecture in :class:`AttentionCall`'s spelling."""
    return Target({"kind": "hip", "mcpu": arch} if arch.startswith("gfx") else {"kind": "cuda", "arch": arch})


def device_source(function: Any, arch: str) -> str:
    """The CUDA or HIP source that TileLang generates; needs neither a GPU nor a device compiler."""
    target = target_of(arch)
    with target, _pass_context():
        context = create_backend_context(target, None, "auto")
        _, device = _lower(function, context)
        return str(device_codegen_without_compile(device, context).inspect_source())


def build_library(function: Any, arch: str, path: Path) -> None:
    """Compiles the function, with nvcc or hipcc and the host's C++ compiler, into the shared library `path`."""
    target = target_of(arch)
    with target, _pass_context():
        context = create_backend_context(target, None, "auto")
        host, device = _lower(function, context)
        library = host_codegen(host, context)
        library.import_module(device_codegen(device, context))
        runtime.Executable(library).export_library(str(path))


def _pass_context() -> Any:
    return tilelang.transform.PassContext(opt_level=3, config=PASSES)


def _lower(function: Any, context: BackendContext) -> tuple[Any, Any]:
    host, device, *_ = lower_to_host_device_ir(function, context)
    for name, kernel in list(device.functions.items()):
        device.update_func(name, _constant_waits(kernel))
    return host, device


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
        if not _is_wait_group(call) or isinstance(call.args[0], tirx.IntImm):
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


def _is_wait_group(expr: Any) -> bool:
    return isinstance(expr, tirx.Call) and isinstance(expr.op, ir.Op) and expr.op.name.endswith("ptx_wait_group")
