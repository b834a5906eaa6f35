"""Gradients of packed sequences by the backward kernels' generated code for sm_80, run on the CPU by emulator.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from emulator import ARCH, COMPILER, Kernel
from tileattn.call import AttentionCall, BackwardCall, Packed, sizes
from tileattn.dropout import Dropout, draw_seed
from tileattn.kernels.tilelang import packed as packed_launch
from tileattn.kernels.tilelang.backward import backend, launch
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.sequence_plan import plan_kernel
from tileattn.run import scale_or_default
from tileattn.scores import for_packed
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_gradients_accurate,
    build,
    output_gradients,
    poisoned_memory,
)
from tileattn.testing.cases import DROPOUT_SEED, Structure
from tileattn.testing.expected import expected_forward, expected_gradients
from tileattn.testing.packed_cases import packed_cases
from tileattn.testing.shapes import PackedShape
from tileattn.variant import Operands, encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Sequences without queries, without keys, without both; rows that belong to none; two tiles, the last not full.
QUICK = ConformanceCase(
    Structure("fp16", 16, 16, "causal", (), True, True),
    PackedShape("short", 2, 1, (70, 0, 5, 0, 3), (65, 40, 0, 0, 7), behind=13, slack=(0, 9)),
)
# Those of 16 bits; beyond head dim 128 they take minutes each.
CASES = [
    case
    for case in packed_cases()
    if case.dtype.itemsize == 2 and max(case.structure.head_dim, case.structure.head_dim_v) <= 128
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def kernels(folder: Path) -> Callable[[BackwardCall], launch.Kernels]:
    """Those of a call, for the CPU."""

    @functools.cache
    def compiled(call: BackwardCall) -> launch.Kernels:
        own = folder / str(len(list(folder.iterdir())))
        own.mkdir()
        found = {name: Kernel(kernel(call, name), own) for name in launch.kernel_names(call)}
        return launch.Kernels(found["prepare"], found["main"], found.get("finish"), found.get("queries"))

    return compiled


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(plan_kernel(), tmp_path_factory.mktemp("plan"))


@pytest.fixture
def emulated(plan: Kernel, kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU."""
    monkeypatch.setattr(backend, "backward_kernels", kernels)
    monkeypatch.setattr(packed_launch, "plan_function", lambda arch: plan)


def gradients(
    case: ConformanceCase, arguments: Arguments, do: Tensor, dlse: Tensor | None, deterministic: bool = False
) -> dict[str, Tensor]:
    """As the backend's backward pass has them, from the oracle's o and lse."""
    assert arguments.packed is not None
    (o, lse), _ = expected_forward(arguments)
    return run(case, arguments, arguments.packed, do, dlse, o, lse, deterministic)


def run(
    case: ConformanceCase,
    arguments: Arguments,
    packed: Packed,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    deterministic: bool = False,
) -> dict[str, Tensor]:
    q, k, v = arguments.q, arguments.k, arguments.v
    leaves = arguments.leaves()
    variant, operands = encode(arguments.mask, for_packed(arguments.score_mods, *packed[:2]))
    aligned = case.structure.aligned
    forward = AttentionCall(
        case.dtype, q.shape[3], v.shape[3], variant, sink=arguments.sink is not None, aligned=aligned, needs_grad=True,
        arch=ARCH, dropout=arguments.dropout_p > 0, packed=True,
    )  # fmt: skip
    needs = (True, True, True, forward.sink, *(tensor.requires_grad for tensor in operands.tensors))
    call = BackwardCall(forward, needs, dlse is not None, deterministic)
    backward = backend.prepare_backward(call, *sizes(q, k, packed), scale_or_default(arguments.scale, q))
    torch.manual_seed(DROPOUT_SEED)
    pattern = {"dropout": Dropout(arguments.dropout_p, draw_seed(q.device))} if forward.dropout else {}
    given = (do, dlse, q, k, v, o.to(case.dtype), lse.float(), arguments.sink)
    inputs = [x if x is None else x.detach() for x in given]
    detached = Operands([tensor.detach() for tensor in operands.tensors], operands.ints, operands.floats)
    with poisoned_memory():
        *found, tensors = backward(*inputs, detached, packed=packed, **pattern)
    named = dict(zip(("dq", "dk", "dv", "dsink"), found))
    # The variant holds its tensors in another order than the case's leaves.
    of_tensors = {id(tensor): gradient for tensor, gradient in zip(operands.tensors, tensors)}
    return {name: named[name] if name in named else of_tensors[id(leaf)] for name, leaf in leaves.items()}


def _parameters() -> list[Any]:
    found = []
    for case, deterministic in itertools.product([QUICK, *CASES], [False, True]):
        marks = [] if case is QUICK and not deterministic else [pytest.mark.slow]
        name = f"{case.id}-deterministic" if deterministic else case.id
        found.append(pytest.param(case, deterministic, id=name, marks=marks))
    return found


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("case", "deterministic"), _parameters())
def test_gradients(case: ConformanceCase, deterministic: bool) -> None:
    arguments = build(case, "cpu")
    do, dlse = output_gradients(case, arguments)
    got = gradients(case, arguments, do, dlse, deterministic)
    for name, leaf in arguments.leaves().items():
        assert (got[name].shape, got[name].dtype) == (leaf.shape, leaf.dtype)
    assert_gradients_accurate(case.id, got, *expected_gradients(arguments, do, dlse), case.dtype)


WRONG = {"not from zero": (0, 1), "decreases": (2, 4), "negative": (2, -3), "beyond": (-1, 2**31 - 1)}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("name", WRONG)
def test_rows_of_wrong_lengths_are_nobodys(name: str, which: int) -> None:
    """On a GPU the host learns of them later: all gradients are 0, and nothing else is touched."""
    index, value = WRONG[name]
    arguments = build(QUICK, "cpu")
    assert arguments.packed is not None
    bounds = [x.clone() for x in arguments.packed[:2]]
    bounds[which][index] = value
    _, total, heads, _ = arguments.q.shape
    do, dlse = output_gradients(QUICK, arguments)
    o = torch.zeros_like(do)
    lse = torch.full((1, heads, total), -torch.inf)
    got = run(QUICK, arguments, Packed(*bounds, *arguments.packed[2:]), do, dlse, o, lse)
    assert all((gradient == 0).all() for gradient in got.values())
