"""Gradients of packed sequences by the backward kernels' generated code for sm_80, run on the CPU by emulator.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from emulator import ARCH, COMPILER, Kernel
from tileattn.call import AttentionCall, BackwardCall, sizes
from tileattn.dropout import Dropout, draw_seed
from tileattn.kernels.tilelang import packed as packed_launch
from tileattn.kernels.tilelang.backward import backend, launch
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.sequence_plan import plan_kernel
from tileattn.run import scale_or_default
from tileattn.scores import for_packed
from tileattn.testing import Arguments, ConformanceCase, assert_gradients_accurate, build, output_gradients
from tileattn.testing.cases import DROPOUT_SEED
from tileattn.testing.expected import expected_forward, expected_gradients
from tileattn.testing.packed_cases import packed_cases
from tileattn.variant import Operands, encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Those of 16 bits; beyond head dim 128 they take minutes each.
CASES = {
    case.id: case
    for case in packed_cases()
    if case.dtype.itemsize == 2 and max(case.structure.head_dim, case.structure.head_dim_v) <= 128
}
QUICK = next(name for name in CASES if name.startswith("fp16-d16-"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(plan_kernel(), tmp_path_factory.mktemp("plan"))


@pytest.fixture
def emulated(plan: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels run on the CPU."""

    def kernels(call: BackwardCall) -> launch.Kernels:
        found = {name: Kernel(kernel(call, name), tmp_path) for name in launch.kernel_names(call)}
        return launch.Kernels(found["prepare"], found["main"], found.get("finish"), found.get("queries"))

    monkeypatch.setattr(backend, "backward_kernels", kernels)
    monkeypatch.setattr(packed_launch, "plan_function", lambda arch: plan)


def gradients(
    case: ConformanceCase, arguments: Arguments, do: Tensor, dlse: Tensor | None, deterministic: bool
) -> dict[str, Tensor]:
    """As the backend's backward pass has them, from the oracle's o and lse; memory is full of NaN before."""
    q, k, v, packed = arguments.q, arguments.k, arguments.v, arguments.packed
    assert packed is not None
    (o, lse), _ = expected_forward(arguments)
    leaves = arguments.leaves()
    variant, operands = encode(arguments.mask, for_packed(arguments.score_mods, *packed[:2]))
    aligned = case.structure.aligned
    forward = AttentionCall(
        case.dtype, q.shape[3], v.shape[3], variant, sink=arguments.sink is not None, aligned=aligned, needs_grad=True,
        arch=ARCH, dropout=arguments.dropout_p > 0, packed=True,
    )  # fmt: skip
    needs = (True, True, True, forward.sink, *(tensor.requires_grad for tensor in operands.tensors))
    call = BackwardCall(forward, needs, dlse is not None, deterministic)
    run = backend.prepare_backward(call, *sizes(q, k, packed), scale_or_default(arguments.scale, q))
    torch.manual_seed(DROPOUT_SEED)
    pattern = {"dropout": Dropout(arguments.dropout_p, draw_seed(q.device))} if forward.dropout else {}
    inputs = [
        x if x is None else x.detach() for x in (do, dlse, q, k, v, o.to(case.dtype), lse.float(), arguments.sink)
    ]
    detached = Operands([tensor.detach() for tensor in operands.tensors], operands.ints, operands.floats)
    *found, tensors = run(*inputs, detached, packed=packed, **pattern)
    named = dict(zip(("dq", "dk", "dv", "dsink"), found))
    # The variant holds its tensors in another order than the case's leaves.
    of_tensors = {id(tensor): gradient for tensor, gradient in zip(operands.tensors, tensors)}
    return {name: named[name] if name in named else of_tensors[id(leaf)] for name, leaf in leaves.items()}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name != QUICK)) for name, case in CASES.items()]
)
def test_gradients(case: ConformanceCase, deterministic: bool) -> None:
    arguments = build(case, "cpu")
    do, dlse = output_gradients(case, arguments)
    got = gradients(case, arguments, do, dlse, deterministic)
    for name, leaf in arguments.leaves().items():
        assert (got[name].shape, got[name].dtype) == (leaf.shape, leaf.dtype)
    assert_gradients_accurate(case.id, got, *expected_gradients(arguments, do, dlse), case.dtype)
