"""The cost of importing tileattn, and the direction of imports between its modules: they point down."""

from __future__ import annotations

import ast
import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import tileattn

PACKAGE = Path(tileattn.__file__).parent


# --- What is imported with it ---


def modules_after(*statements: str) -> list[set[str]]:
    """All modules that are loaded after each of them, one after the other in one process: torch takes seconds."""
    lines = (f"{statement}\nprint(json.dumps(sorted(sys.modules)))" for statement in statements)
    code = "\n".join(["import json, sys", *lines])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


STEPS = {
    "torch": "import torch",
    "tileattn": "import tileattn",
    "call": "x = torch.zeros(1, 4, 2, 16); tileattn.attention(x, x, x, causal=True)",
    "cli": "import tileattn.cli.app",
    "pages": "import tileattn.viz, tileattn.measure.profiling, tileattn.viz.demo.measure, tileattn.viz.demo.page",
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    return dict(zip(STEPS, modules_after(*STEPS.values()), strict=True))


@pytest.fixture(scope="module")
def added(loaded: dict[str, set[str]]) -> set[str]:
    """Modules that `import tileattn` loads beyond those of `import torch`."""
    return loaded["tileattn"] - loaded["torch"]


def inside(modules: set[str], *packages: str) -> set[str]:
    return {module for module in modules if any(f"{module}.".startswith(f"{package}.") for package in packages)}


def test_neither_compilers_nor_what_only_some_need(added: set[str]) -> None:
    heavy = ("tilelang", "tvm", "tvm_ffi", "triton", "transformers", "matplotlib", "gradio", "numpy", "rich", "typer")
    assert inside(added, *heavy) == set()


def test_no_part_of_torch_that_torch_itself_leaves_out(added: set[str]) -> None:
    """Dynamo and Inductor cost a second and more."""
    assert inside(added, "torch._dynamo", "torch._inductor", "torch._export", "sympy") == set()
    assert len(inside(added, "torch")) <= 3


def test_only_the_parts_of_tileattn_that_a_call_needs(added: set[str]) -> None:
    assert (
        inside(
            added,
            *(f"tileattn.{name}" for name in ("bench", "compat", "nn", "reference", "testing", "viz", "__main__")),
        )
        == set()
    )
    assert not [module for module in added if module.endswith((".forward.kernel", ".tilelang.build.compile"))]
    assert "tileattn.api.attention" in added


def test_little_is_imported_beside_it(added: set[str]) -> None:
    """What remains: filelock, platformdirs, and modules of the standard library."""
    others = {module.split(".")[0] for module in added} - set(sys.stdlib_module_names)
    assert others <= {"tileattn", "filelock", "platformdirs", "torch"} | {m for m in others if m.startswith("_")}


def test_a_call_on_a_cpu_imports_no_compiler(loaded: dict[str, set[str]]) -> None:
    assert inside(loaded["call"], "tilelang", "triton", "torch._dynamo") == set()


def test_pictures_and_profiles_import_their_packages_when_they_are_used(loaded: dict[str, set[str]]) -> None:
    """`tileattn --help` does not import what its commands import, either."""
    assert inside(loaded["pages"], "matplotlib", "gradio", "tilelang", "triton") == set()
    assert inside(loaded["cli"], "tileattn.viz", "tileattn.reference") == set()


def test_every_public_name_is_there() -> None:
    assert all(hasattr(tileattn, name) for name in tileattn.__all__)
    assert len(set(tileattn.__all__)) == len(tileattn.__all__)


def test_importing_all_leaves_pythons_math_alone() -> None:
    names: dict[str, object] = {}
    exec("import math\nfrom tileattn import *", names)
    assert names["math"] is math
    assert tileattn.math is not math


# --- Arrows ---


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path) -> set[str]:
    """All that a file imports, inside functions as well; absolute names, of tileattn's modules and their members."""
    imported = set()
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            imported |= {f"{source}.{alias.name}" for alias in node.names}
    return imported


def tileattn_imports(path: Path) -> set[str]:
    """In names below the package: `variant.masks.Causal`, `kernels.cache.store.kernel_cache`."""
    return {name.removeprefix("tileattn.") for name in imports_of(path) if name.startswith("tileattn.")}


FILES = {module_name(path).removeprefix("tileattn."): path for path in sorted(PACKAGE.rglob("*.py"))}
BACKENDS = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/backend.py"))
KERNELS = [
    name
    for name in FILES
    if name.split(".")[:1] == ["kernels"] and name.split(".")[1:2] != ["cache"] and len(name.split(".")) > 1
]
CORE = [f"variant.{name}" for name in ("masks", "scores", "expression", "math", "key")] + ["call.facts"]


def test_the_files_are_found() -> None:
    """Otherwise the tests below would check nothing."""
    assert set(CORE) <= set(FILES)
    assert {"tilelang", "torch"} <= set(BACKENDS)
    assert "variant.masks.FunctionMask" in tileattn_imports(FILES["variant.key"])
    assert "kernels.cache.store.kernel_cache" in tileattn_imports(FILES["kernels.tilelang.build.library"])
    assert "kernels.tilelang.forward.kernel.kernel_of" in tileattn_imports(FILES["kernels.tilelang.forward.library"])


@pytest.mark.parametrize("name", CORE)
def test_the_core_knows_nothing_above_it(name: str) -> None:
    above = ("kernels", "runtime", "api", "call.validation", "reference", "testing", "bench")
    assert inside(tileattn_imports(FILES[name]), *above) == set()


@pytest.mark.parametrize("name", KERNELS)
def test_a_backend_imports_no_other_and_nothing_above_it(name: str) -> None:
    mine = name.split(".")[1]
    others = [f"kernels.{backend}" for backend in BACKENDS if backend != mine]
    above = ("runtime", "api", "call.validation", "reference", "testing", "bench")
    assert inside(tileattn_imports(FILES[name]), *others, *above) == set()


def test_the_library_imports_no_benchmark() -> None:
    """What measures for the library, as the tuner does, is in `measure`."""
    above = ("bench", "cli", "viz", "__main__", "tileattn")  # and the package, whose lazy attribute is viz
    library = [name for name in FILES if name.split(".")[0] not in above]
    assert {"measure.timing", "tuner.session", "runtime.dispatch"} <= set(library)
    for name in library:
        assert inside(tileattn_imports(FILES[name]), *above[:-1]) == set(), name


def test_the_reference_imports_no_backend() -> None:
    reference = [name for name in FILES if name.split(".")[0] == "reference"]
    assert reference
    for name in reference:
        assert inside(tileattn_imports(FILES[name]), "kernels", "runtime", "api", "testing") == set(), name


def test_modules_lie_above_the_api() -> None:
    """They call attention() as a user does; only the package's own lazy attribute and their benchmark know of them.

    The package names that attribute to type checkers. What it imports is seen above.
    """
    modules = [name for name in FILES if name.split(".")[0] == "nn"]
    assert modules
    for name, path in FILES.items():
        if name in ("tileattn", "bench.modules.run"):
            continue
        forbidden = (
            ("kernels", "runtime.dispatch", "runtime.operators", "testing", "bench") if name in modules else ("nn",)
        )
        assert inside(tileattn_imports(path), *forbidden) == set(), name


def test_compat_lies_above_the_api() -> None:
    """The registry's entry in the package itself imports it by name, when it is activated."""
    assert any(name.startswith("compat.") for name in FILES)
    for name, path in FILES.items():
        inner = name.split(".")[0] == "compat"
        forbidden = ("kernels", "runtime.dispatch", "testing", "bench", "reference", "nn") if inner else ("compat",)
        assert inside(tileattn_imports(path), *forbidden) == set(), name


def test_operators_and_dispatch_lie_below_the_api() -> None:
    for name in ("runtime.operators", "runtime.dispatch", "call.validation"):
        assert inside(tileattn_imports(FILES[name]), "api") == set(), name
    assert inside(tileattn_imports(FILES["api.attention"]), "kernels", "reference", "testing", "bench") == set()
    assert inside(tileattn_imports(FILES["runtime.dispatch"]), "runtime.operators") == set()
