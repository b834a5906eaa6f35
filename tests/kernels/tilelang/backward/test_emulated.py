"""Gradients by the backward kernels' generated code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

import tileattn
from tests.kernels.tilelang.backward import test_gpu as gpu
from tests.kernels.tilelang.backward.test_gpu import CASES, Case, Problem
from tileattn import Causal
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import launch as backend
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.testing import oracle_attention
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

LONGEST = 150  # two tiles or three, the last of them not full
# tile/test_dropout_emulated.py and packed/test_backward_emulated.py run the same kernels in `make test`.
QUICK = ()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors are on the CPU, and kernels run there."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")

    def kernels(call: BackwardCall) -> launch.Kernels:
        by_name = {name: Kernel(kernel(call, name), tmp_path) for name in launch.kernel_names(call)}
        return launch.Kernels(by_name["prepare"], by_name["main"], by_name.get("finish"), by_name.get("queries"))

    monkeypatch.setattr(backend, "backward_kernels", kernels)


@pytest.fixture
def problem(request: pytest.FixtureRequest, emulated: None) -> Problem:
    return shortened(request.param)


def shortened(name: str) -> Problem:
    """One of the GPU tests' cases, of which the CPU takes no minutes."""
    case: Case = CASES[name]
    return Problem(case._replace(lengths=tuple(min(length, LONGEST) for length in case.lengths)))  # type: ignore[arg-type]


def gradients(problem: Problem, deterministic: bool) -> dict[str, Tensor]:
    """As the backend's backward pass has them, from the oracle's o and lse."""
    case, leaves = problem.case, problem.leaves()
    o, lse = (x.detach() for x in oracle_attention(*problem.standard()))
    dlse = None if problem.dlse is None else torch.where(lse == -torch.inf, 0.0, problem.dlse).float()
    variant, operands = encode(problem.mask, problem.mods)
    forward = AttentionCall(
        case.dtype, *case.head_dims, variant, sink=case.sink, aligned=case.aligned, needs_grad=True, arch=ARCH
    )
    needs = (True, True, True, case.sink, *(tensor.requires_grad for tensor in operands.tensors))
    call = BackwardCall(forward, needs, dlse=dlse is not None, deterministic=deterministic)
    scale = case.head_dims[0] ** -0.5 if case.scale is None else case.scale
    run = backend.prepare_backward(call, problem.q.shape, problem.k.shape, scale)
    detached = Operands([tensor.detach() for tensor in operands.tensors], operands.ints, operands.floats)
    inputs: list[Any] = [leaves[name].detach() if name in leaves else None for name in ("q", "k", "v", "sink")]
    given = Inputs(*inputs, detached)
    *grads, tensors = run(given, o.to(case.dtype).contiguous(), lse.float(), problem.do, dlse)
    named = dict(zip(("q", "k", "v", "sink"), grads))
    # The variant holds its tensors in another order than the case made them.
    named |= {
        name: next(grad for tensor, grad in zip(operands.tensors, tensors) if tensor is leaf)
        for name, leaf in leaves.items()
        if name not in named
    }
    return named


def _cases(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in names]


@pytest.mark.parametrize("problem", _cases(CASES), indirect=True)
def test_gradients(problem: Problem, request: pytest.FixtureRequest) -> None:
    gpu.check(request.node.name, problem, gradients(problem, deterministic=False))


@pytest.mark.parametrize("problem", _cases(gpu.DETERMINISTIC), indirect=True)
def test_deterministic_gradients(problem: Problem, request: pytest.FixtureRequest) -> None:
    gpu.check(request.node.name, problem, gradients(problem, deterministic=True))


@pytest.mark.parametrize("seqlen_k", [pytest.param(17, marks=pytest.mark.slow), 0])
def test_nan_in_rows_without_keys_reaches_the_sinks_gradient(seqlen_k: int, emulated: None) -> None:
    """Also that of a sink of -inf, which has no probability, as in the torch backend."""
    problem = Problem(Case((21, seqlen_k), (4, 2), mask=Causal(), sink=True))
    assert problem.sink is not None
    with torch.no_grad():
        problem.sink[:2] = -torch.inf
    problem.do[:, 0, ::2] = torch.nan
    o, lse = tileattn.attention(
        problem.q, problem.k, problem.v, causal=True, sink=problem.sink, return_lse=True, backend="torch"
    )
    expected = problem.gradients(o, lse)["sink"].isnan()
    assert expected.tolist() == [True, False] * 2
    assert torch.equal(gradients(problem, deterministic=False)["sink"].isnan(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_slopes_of_hidden_scores_do_not_show(deterministic: bool, emulated: None) -> None:
    """Autograd has NaN for them; so the oracle takes a modification that is finite there."""
    shape = Case((120, 150), (4, 2), mask=Causal())
    rising, finite = (
        Problem(shape._replace(mods=lambda case, random, mod=mod: [mod])) for mod in (gpu.rising, gpu.rising_where_seen)
    )
    gpu.check("rising", finite, gradients(rising, deterministic))
