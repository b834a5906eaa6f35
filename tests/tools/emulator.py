"""Runs kernels that TileLang generates for sm_80 on a CPU, compiled with g++ against emulator.h.

It is slow and shows no races, but it runs the generated code itself, with its layouts, masks and ends of tiles.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from tvm import arith, tirx
from tvm.tirx import stmt_functor

from tileattn.kernels.tilelang.build.compile import device_source

ARCH = "sm_80"
COMPILER = shutil.which("g++")
_C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Kernel:
    """A TileLang function, to be called with CPU tensors and numbers as the compiled one is with those of a GPU."""

    def __init__(self, function: Any, folder: Path) -> None:
        self.function = function
        source = device_source(function, ARCH)
        signature = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\((.*?)\) \{", source)
        assert signature is not None
        self.parameters = [_type_and_name(parameter) for parameter in signature[3].split(",")]
        self.launch = _compiled(_program(source, signature), folder / f"{signature[2]}.cpp").launch
        self.grid = Grid(function)

    def __call__(self, *arguments: Any) -> None:
        values = self._values(arguments)
        passed = [
            ctypes.c_void_p(values[name].data_ptr())
            if isinstance(values[name], torch.Tensor)
            else _C_TYPES[kind](values[name])
            for kind, name in self.parameters
        ]
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        self.launch(*passed, *map(ctypes.c_int, self.grid.sizes(numbers)))

    def _values(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Values by the parameters' names; sizes and strides are the tensors', and must equal those that are fixed."""
        values: dict[str, Any] = {}
        for parameter, argument in zip(self.function.params, arguments, strict=True):
            if not isinstance(argument, torch.Tensor):
                values[parameter.name] = argument
                continue
            buffer = self.function.buffer_map[parameter]
            assert str(argument.dtype) == f"torch.{buffer.dtype}", buffer.name
            values[buffer.name] = argument
            _bind(buffer.shape, argument.shape, values)
            if all(isinstance(stride, (tirx.Var, tirx.IntImm)) for stride in buffer.strides) and len(buffer.strides):
                _bind(buffer.strides, argument.stride(), values)
            else:
                assert argument.is_contiguous(), buffer.name
        return values


def _bind(declared: Any, given: Any, values: dict[str, Any]) -> None:
    for expected, actual in zip(declared, given, strict=True):
        if isinstance(expected, tirx.Var):
            assert values.setdefault(expected.name, actual) == actual, expected
        elif isinstance(expected, tirx.IntImm):
            assert int(expected) == actual, (declared, given)


def _type_and_name(parameter: str) -> tuple[str, str]:
    """A parameter's; a name that is a keyword of C++ got a number."""
    *kind, name = parameter.replace("__restrict__", "").split()
    return kind[0], re.sub(r"^(do)_\d+$", r"\1", name)


def _program(source: str, signature: re.Match[str]) -> str:
    """The kernel with a function that runs it for all blocks."""
    threads, name, parameters = signature.groups()
    kernel = re.sub(r"^#.*$", "", source, flags=re.MULTILINE)
    # Shared memory is one array.
    kernel = re.sub(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* \2 = (\1*)shared_memory;", kernel)
    kernel = re.sub(r"__shared__ (?:__align__\(\d+\) )?", "static ", kernel)
    arguments = ", ".join(parameter.split()[-1] for parameter in parameters.split(","))
    return f"""#include "{Path(__file__).with_suffix(".h")}"
{kernel}
extern "C" void launch({parameters}, int x, int y, int z) {{
  thread_count = {threads};
  gridDim = {{x, y, z}};
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block([&] {{ {name}({arguments}); }});
}}
"""


def _compiled(program: str, path: Path) -> ctypes.CDLL:
    path.write_text(program)
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(path.with_suffix(".so")), str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return ctypes.CDLL(str(path.with_suffix(".so")))


class Grid:
    """How many blocks a function is launched with: expressions of its parameters."""

    def __init__(self, function: Any) -> None:
        self.extents: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        stmt_functor.post_order_visit(function.body, self._visit)
        assert self.extents

    def _visit(self, node: Any) -> None:
        if isinstance(node, tirx.Bind):
            self.variables[node.var.name] = node.value
        elif isinstance(node, tirx.For) and node.thread_binding is not None:
            self.extents[node.thread_binding.thread_tag] = node.extent

    def sizes(self, numbers: dict[str, int]) -> list[int]:
        """The numbers of blocks in x, y and z for these values of the parameters."""
        extents = (self.extents.get(f"blockIdx.{axis}") for axis in "xyz")
        return [1 if extent is None else self._evaluated(extent, numbers) for extent in extents]

    def _evaluated(self, expr: Any, numbers: dict[str, int]) -> int:
        constants = {}

        def visit(node: Any) -> None:
            if isinstance(node, tirx.Var):
                known = node.name in numbers
                value = numbers[node.name] if known else self._evaluated(self.variables[node.name], numbers)
                constants[node] = tirx.IntImm(str(node.dtype), value)

        stmt_functor.post_order_visit(tirx.Evaluate(expr), visit)
        return int(arith.Analyzer().simplify(stmt_functor.substitute(expr, constants)))
