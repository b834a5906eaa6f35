"""Gradients of packed sequences by the backward kernels' generated code for sm_80, run on the CPU by emulate()."""

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

from tilelang.language.eager.builder import Builder

from tileattn.call.dropout import Dropout, draw_seed
from tileattn.call.facts import AttentionCall, BackwardCall, Packed, sizes
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import finish, prepare
from tileattn.kernels.tilelang.backward import launch as backend
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.config import Part
from tileattn.kernels.tilelang.backward.hopper.dq_order import COLUMNS, RegisterOrder
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.backward.signature import declare_finish, declare_prepare
from tileattn.kernels.tilelang.packed import plan as packed_launch
from tileattn.kernels.tilelang.packed import work_list as records
from tileattn.kernels.tilelang.packed.plan_kernel import plan_kernel
from tileattn.runtime.run import scale_or_default
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_gradients_accurate,
    build,
    output_gradients,
    poisoned_memory,
)
from tileattn.testing.call_arguments import DROPOUT_SEED, Structure
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.testing.expected import expected_forward, expected_gradients
from tileattn.testing.packed_cases import packed_cases
from tileattn.testing.shapes import PackedShape
from tileattn.variant.key import encode
from tileattn.variant.scores import for_packed

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
    """The kernels of a call, compiled for the CPU."""

    @functools.cache
    def compiled(call: BackwardCall) -> launch.Kernels:
        own = folder / str(len(list(folder.iterdir())))
        own.mkdir()
        by_name = {name: Kernel(kernel(call, name), own) for name in launch.kernel_names(call)}
        return launch.Kernels(by_name["prepare"], by_name["main"], by_name.get("finish"), by_name.get("queries"))

    return compiled


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(plan_kernel("sm_80"), tmp_path_factory.mktemp("plan"))


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
    dropout = Dropout(arguments.dropout_p, draw_seed(q.device)) if forward.dropout else None
    given = [x if x is None else x.detach() for x in (q, k, v, arguments.sink)]
    detached = Operands([tensor.detach() for tensor in operands.tensors], operands.ints, operands.floats)
    outputs = [x if x is None else x.detach() for x in (o.to(case.dtype), lse.float(), do, dlse)]
    with poisoned_memory():
        *grads, tensors = backward(Inputs(*given, detached, dropout, packed), *outputs)
    named = dict(zip(("dq", "dk", "dv", "dsink"), grads))
    # The variant holds its tensors in another order than the case's leaves.
    of_tensors = {id(tensor): gradient for tensor, gradient in zip(operands.tensors, tensors)}
    return {name: named[name] if name in named else of_tensors[id(leaf)] for name, leaf in leaves.items()}


def _parameters() -> list[Any]:
    parameters = []
    for case, deterministic in itertools.product([QUICK, *CASES], [False, True]):
        marks = [] if case is QUICK and not deterministic else [pytest.mark.slow]
        name = f"{case.id}-deterministic" if deterministic else case.id
        parameters.append(pytest.param(case, deterministic, id=name, marks=marks))
    return parameters


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
def test_rows_of_wrong_lengths_are_unused(name: str, which: int) -> None:
    """On a GPU the host learns of wrong lengths later. All gradients are 0, and no other memory is touched."""
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


# --- What the Hopper schedule's main kernel is given and leaves, in tiles of 80 queries ---

LENGTHS_Q, LENGTHS_K, BEHIND = (100, 0, 80, 3, 165), (7, 5, 0, 9, 300), 30
TILE, HEADS, DIM = 80, 2, 128


def _places(plan: Kernel, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[tuple[int, int, int]], int]:
    """A work list of tiles of queries; of each run the first row, how many, and the first in workspaces; their size."""
    monkeypatch.setattr(packed_launch, "plan_function", lambda arch: plan)
    ends = [[0, *itertools.accumulate(lengths)] for lengths in (LENGTHS_Q, LENGTHS_K)]
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(each, dtype=torch.int32) for each in ends)
    total = ends[0][-1] + BEHIND
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max(LENGTHS_Q), max(LENGTHS_K))
    work = packed_launch.work_list(ARCH, packed, total, ends[1][-1], TILE)
    runs = {tuple(record) for record in work[1 : 1 + int(work[0, records.COUNT])].tolist()}
    places = [(run[records.Q_START], run[records.Q_LEN], run[records.PADDED_Q]) for run in runs]
    return work, places, records.padded_rows(total, len(LENGTHS_Q))


def test_what_is_prepared_for_hopper(plan: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lse2, delta and zeros for whole tiles of each sequence, and of unused tail rows, and nothing elsewhere."""
    work, places, padded = _places(plan, monkeypatch)
    total = sum(LENGTHS_Q) + BEHIND
    call = AttentionCall(torch.bfloat16, DIM, DIM, arch=ARCH, packed=True)
    builder = Builder()
    with builder.prim_func("prepare"):
        prepare.body(call, True, True, Part(TILE))(declare_prepare(builder, call, True, True))
    random = torch.Generator().manual_seed(0)
    o, do = (torch.randn(1, total, HEADS, DIM, generator=random).bfloat16() for _ in range(2))
    lse, dlse = (torch.randn(1, HEADS, total, generator=random) for _ in range(2))
    lse[..., 50] = -torch.inf
    lse2, delta = (torch.full((1, HEADS, padded), torch.nan) for _ in range(2))
    sums = torch.full((1, HEADS, padded, DIM), torch.nan)
    Kernel(builder.get(), tmp_path)(work, o, do, lse, dlse, lse2, delta, sums)
    expected_delta = (o.float() * do.float()).sum(-1).transpose(1, 2) - dlse
    written = 0
    for start, length, first in places:
        rows, whole = slice(start, start + length), -(-length // TILE) * TILE
        expected = torch.where(lse[..., rows] == -torch.inf, torch.inf, lse[..., rows] * 1.4426950408889634)
        torch.testing.assert_close(lse2[..., first : first + length], expected)
        torch.testing.assert_close(delta[..., first : first + length], expected_delta[..., rows])
        assert (lse2[..., first + length : first + whole] == torch.inf).all()
        assert (delta[..., first + length : first + whole] == 0).all()
        assert (sums[:, :, first : first + whole] == 0).all()
        written += whole
    assert written == sum(-(-length // TILE) * TILE for length in (*LENGTHS_Q, BEHIND))
    assert all(int(x[0, 0].isfinite().sum()) == written for x in (delta, sums[..., 0]))


def test_what_hopper_leaves_is_finished(plan: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """dq's sums in the order of the registers, tile by tile from each sequence's place on."""
    work, places, padded = _places(plan, monkeypatch)
    total, order = sum(LENGTHS_Q) + BEHIND, RegisterOrder(TILE, DIM)
    call = AttentionCall(torch.bfloat16, DIM, DIM, arch=ARCH, packed=True)
    builder = Builder()
    with builder.prim_func("finish"):
        finish.body(call, order, Part(TILE))(declare_finish(builder, call, True))
    expected = torch.randn(1, total, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    sums = torch.full((1, HEADS, padded * DIM), torch.nan)
    i, j = torch.meshgrid(*map(torch.arange, order.shape), indexing="ij")
    q, d = (j, i) if order.transposed else (i, j)
    for start, length, first in places:
        for tile in range(-(-length // TILE)):
            # Rows behind the sequence's last hold something, too.
            row = (start + tile * TILE + q).clamp(max=total - 1)
            sums[0, :, (first + tile * TILE) * DIM + order.offset(i, j)] = expected[0, row, :, d].permute(2, 0, 1)
    dq = torch.full((1, total, HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    Kernel(builder.get(), tmp_path)(work, dq, sums.view(1, HEADS, -1, COLUMNS), 0.5)
    assert torch.equal(dq, (expected * 0.5).bfloat16())
