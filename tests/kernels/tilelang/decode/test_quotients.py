"""The divisions by floating point of the decode kernels are exact, whatever the reciprocal's last bit is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from tileattn.kernels.tilelang.decode.hopper.pages import EXACT, page_of
from tileattn.kernels.tilelang.decode.walk import query_of
from tileattn.testing.emulator.kernel import COMPILER, Kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@T.macro
def divide_all(arg):
    with T.Kernel(T.truncdiv(arg.count + 31, 32), threads=32) as block:
        i = block * 32 + T.get_thread_binding()
        if i < arg.count:
            job = SimpleNamespace(query0=0, rest=0, per_group=arg.inverses[i])
            arg.queries[i] = query_of(job, arg.numerators[i])
            pages = SimpleNamespace(page_size=arg.divisors[i])
            arg.pages[i] = page_of(pages, SimpleNamespace(per_page=arg.inverses[i]), arg.numerators[i])


@pytest.mark.slow
def test_quotients_are_exact(tmp_path: Path) -> None:
    builder = Builder()
    with builder.prim_func("divide"):
        count = T.dynamic("count")
        kinds = {
            "numerators": "int32",
            "divisors": "int32",
            "inverses": "float32",
            "queries": "int32",
            "pages": "int32",
        }
        tensors = {name: builder.prim_func_arg(name, T.Tensor([count], kind)) for name, kind in kinds.items()}
        divide_all(SimpleNamespace(count=count, **tensors))
    divide = Kernel(builder.get(), tmp_path)
    divisors = torch.tensor([1, 2, 3, 5, 7, 12, 16, 48, 63, 64, 111, 128, 256, 1000, 1024], dtype=torch.int32)
    groups, pages = [], []
    for divisor in divisors.tolist():
        rows = torch.arange(divisor + 64, dtype=torch.int32)  # of a tile, behind the rest of a query's
        # Keys at both ends of pages, up to where page_of divides integers, and behind.
        starts = torch.linspace(0, EXACT // divisor, 99).int() * divisor
        keys = torch.cat([starts, starts + divisor - 1, torch.tensor([EXACT - 1, EXACT, EXACT + 1, 2**31 - 2])])
        groups.append(torch.stack([rows, torch.full_like(rows, divisor)]))
        pages.append(torch.stack([keys.int(), torch.full_like(keys.int(), divisor)]))
    for pairs, result in ((torch.cat(groups, 1), "queries"), (torch.cat(pages, 1), "pages")):
        numerators, denominators = pairs.contiguous()
        exact = 1 / denominators.float()
        for neighbour in (exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(2.0))):
            found = {name: torch.full_like(numerators, -1) for name in ("queries", "pages")}
            divide(numerators, denominators, neighbour, *found.values())
            assert torch.equal(found[result], numerators // denominators)
