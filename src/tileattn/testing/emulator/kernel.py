"""A TileLang function as a library for the CPU: its generated code for sm_80, compiled with g++ against emulator.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from tvm import arith, tirx
from tvm.tirx import stmt_functor

from ...kernels.tilelang.build.compile import device_source

ARCH = "sm_80"
COMPILER = shutil.which("g++")
OLDEST_COMPILER = 12  # the first g++ that has _Float16 in C++ on x86-64
_C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Kernel:
    """A TileLang function, to be called with CPU tensors and numbers as the compiled one is with those of a GPU."""

    def __init__(self, function: Any, folder: Path | None = None) -> None:
        """`folder` keeps the generated program and its library; None leaves no file behind."""
        self.function = function
        source = device_source(function, ARCH)
        signature = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\((.*?)\) \{", source)
        if signature is None:
            raise ValueError("emulate(): the function must contain one T.Kernel")
        self.parameters = [_type_and_name(parameter) for parameter in signature[3].split(",")]
        with tempfile.TemporaryDirectory() as temporary:  # a library that is loaded outlives its file
            path = (Path(temporary) if folder is None else folder) / f"{signature[2]}.cpp"
            self.launch = _compiled(_program(source, signature), path).launch
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
        if len(arguments) != len(self.function.params):
            raise TypeError(f"the kernel takes {len(self.function.params)} arguments, got {len(arguments)}")
        for parameter, argument in zip(self.function.params, arguments):
            if parameter not in self.function.buffer_map:
                values[parameter.name] = argument
                continue
            buffer = self.function.buffer_map[parameter]
            _check_tensor(buffer, argument)
            values[buffer.name] = argument
            _bind(buffer.name, "size", buffer.shape, argument.shape, values)
            if all(isinstance(stride, (tirx.Var, tirx.IntImm)) for stride in buffer.strides) and len(buffer.strides):
                _bind(buffer.name, "stride", buffer.strides, argument.stride(), values)
            elif not argument.is_contiguous():
                raise ValueError(f"{buffer.name} must be contiguous, got strides {tuple(argument.stride())}")
        return values


def _check_tensor(buffer: Any, argument: Any) -> None:
    if not isinstance(argument, torch.Tensor):
        raise TypeError(f"{buffer.name} must be a tensor, got {type(argument).__name__}")
    if argument.device.type != "cpu":
        raise ValueError(f"{buffer.name} must be on the CPU, where the emulator runs, got {argument.device}")
    if str(argument.dtype) != f"torch.{buffer.dtype}":
        raise ValueError(f"{buffer.name} must be torch.{buffer.dtype}, got {argument.dtype}")
    if argument.ndim != len(buffer.shape):
        raise ValueError(f"{buffer.name} must have {len(buffer.shape)} dimensions, got shape {tuple(argument.shape)}")


def _bind(name: str, what: str, declared: Any, given: Any, values: dict[str, Any]) -> None:
    """Stores the values of variables, such as a length that is known at run time; others must be as declared."""
    for dim, (expected, actual) in enumerate(zip(declared, given, strict=True)):
        if isinstance(expected, tirx.Var):
            required = values.setdefault(expected.name, actual)
        elif isinstance(expected, tirx.IntImm):
            required = int(expected)
        else:
            continue
        if required != actual:
            raise ValueError(f"{name} must have {what} {required} in dimension {dim}, got {actual}")


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
    return f"""#include "{Path(__file__).with_name("emulator.h")}"
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
    if COMPILER is None:
        raise RuntimeError(f"emulate() needs g++ {OLDEST_COMPILER} or newer, and none was found")
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(path.with_suffix(".so")), str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(_failure(result.stderr))
    return ctypes.CDLL(str(path.with_suffix(".so")))


def _failure(errors: str) -> str:
    """Why g++ failed: it is too old, or the kernel uses an instruction that emulator.h lacks."""
    assert COMPILER is not None
    version = subprocess.run([COMPILER, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) < OLDEST_COMPILER:
        return f"emulate() needs g++ {OLDEST_COMPILER} or newer, and this one is {version}"
    first = next((line.partition("error: ")[2] for line in errors.splitlines() if "error: " in line), errors[-400:])
    return f"emulate() cannot run this kernel, it uses what the emulator lacks: {first}"


class Grid:
    """How many blocks a function is launched with: expressions of its parameters."""

    def __init__(self, function: Any) -> None:
        self.extents: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        stmt_functor.post_order_visit(function.body, self._visit)
        assert self.extents, "a kernel has threads"

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
