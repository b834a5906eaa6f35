"""Dropout in the kernels' generated code for sm_80, run on the CPU by emulate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tilelang")

from tests.kernels.tilelang.backward import test_gpu as gpu
from tests.kernels.tilelang.tile import test_dropout_gpu as gpu_dropout
from tests.kernels.tilelang.tile.test_dropout_gpu import CASES, LENGTHS, SEED, Problem
from tileattn.call.dropout import Dropout, Place, draw_seed, keep_mask
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.call.inputs import Inputs, Operands
from tileattn.kernels.tilelang.backward import defaults
from tileattn.kernels.tilelang.backward import launch as backward_backend
from tileattn.kernels.tilelang.backward import library as launch
from tileattn.kernels.tilelang.backward.config import BackwardConfig
from tileattn.kernels.tilelang.backward.kernels import kernel
from tileattn.kernels.tilelang.forward import launch as forward_launch
from tileattn.kernels.tilelang.forward.config import ForwardConfig
from tileattn.kernels.tilelang.forward.kernel import forward_kernel
from tileattn.testing.emulator.kernel import ARCH, COMPILER, Kernel
from tileattn.variant.key import encode

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

LONGEST = 150  # two tiles or three, the last of them not full
QUICK = "full-16"  # and its forward pass alone: four kernels for both take 45 s


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors are on the CPU, and kernels run there."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    compiled: dict[Any, Any] = {}

    def compiled_once(key: Any, make: Any) -> Any:
        if key not in compiled:
            folder = tmp_path / str(len(compiled))
            folder.mkdir()
            compiled[key] = Kernel(make(), folder)
        return compiled[key]

    def kernels(call: BackwardCall) -> launch.Kernels:
        config = (defaults.default(call), defaults.queries_default(call))
        by_name = {
            name: compiled_once((call, name, config), lambda name=name: kernel(call, name))
            for name in launch.kernel_names(call)
        }
        return launch.Kernels(by_name["prepare"], by_name["main"], by_name.get("finish"), by_name.get("queries"))

    def forward(call: AttentionCall, config: Any) -> Kernel:
        return compiled_once((call, config), lambda: forward_kernel(call, config))

    monkeypatch.setattr(backward_backend, "backward_kernels", kernels)
    monkeypatch.setattr(forward_launch, "forward_function", forward)


class Call:
    """One call of a problem's, with its operands."""

    def __init__(self, problem: Problem) -> None:
        case, self.problem = problem.case, problem
        variant, operands = encode(problem.mask, problem.mods)
        self.operands = Operands([tensor.detach() for tensor in operands.tensors], operands.ints, operands.floats)
        self.leaves = operands.tensors
        self.forward = AttentionCall(
            case.dtype, *case.head_dims, variant, sink=case.sink, aligned=case.aligned, needs_grad=True, arch=ARCH,
            dropout=True,
        )  # fmt: skip
        self.scale = case.head_dims[0] ** -0.5 if case.scale is None else case.scale
        given = [None if x is None else x.detach() for x in (problem.q, problem.k, problem.v, problem.sink)]
        self.inputs = Inputs(*given, self.operands, Dropout(problem.p, problem.seed()))

    def run(self) -> tuple[Tensor, Tensor]:
        """o and lse."""
        prepared = forward_launch.prepare(self.forward, self.problem.q.shape, self.problem.k.shape, self.scale)
        return prepared(self.inputs)

    def gradients(self, deterministic: bool) -> dict[str, Tensor]:
        problem = self.problem
        o, lse = self.run()
        dlse = None if problem.dlse is None else torch.where(lse == -torch.inf, 0.0, problem.dlse).float()
        needs = (True, True, True, problem.case.sink, *(tensor.requires_grad for tensor in self.leaves))
        call = BackwardCall(self.forward, needs, dlse=dlse is not None, deterministic=deterministic)
        run = backward_backend.prepare_backward(call, problem.q.shape, problem.k.shape, self.scale)
        *grads, tensors = run(self.inputs, o, lse, problem.do, dlse)
        named = dict(zip(("q", "k", "v", "sink"), grads))
        # The variant holds its tensors in another order than the case made them.
        return named | {
            name: next(grad for tensor, grad in zip(self.leaves, tensors) if tensor is leaf)
            for name, leaf in problem.leaves().items()
            if name not in named
        }


def _shortened(name: str) -> Problem:
    case, p = CASES[name]
    return Problem(case._replace(lengths=tuple(min(length, LONGEST) for length in case.lengths)), p)  # type: ignore[arg-type]


def _cases(names: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow, id=name) for name in names]


def test_forward(emulated: None) -> None:
    problem = _shortened(QUICK)
    gpu_dropout.check_forward(QUICK, problem, Call(problem).run())


@pytest.mark.parametrize("name", _cases(CASES))
def test_both_passes(name: str, emulated: None) -> None:
    problem = _shortened(name)
    call = Call(problem)
    gpu_dropout.check_forward(name, problem, call.run())
    gpu.check(name, problem, call.gradients(deterministic=False))


@pytest.mark.parametrize("name", _cases(gpu_dropout.DETERMINISTIC))
def test_deterministic_gradients(name: str, emulated: None) -> None:
    problem = _shortened(name)
    gpu.check(name, problem, Call(problem).gradients(deterministic=True))


TILINGS = {
    "default": None,
    "small": (ForwardConfig(64, 32, 1, 128), BackwardConfig(32, 64, 1, 128)),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [None, Place(5, 7, 32, 48)], ids=["whole", "part"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_the_pattern_does_not_depend_on_tiles(
    tiling: str, place: Place | None, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern of both passes is equal bit by bit."""
    if TILINGS[tiling] is not None:
        forward, main = TILINGS[tiling]  # type: ignore[misc]
        monkeypatch.setattr(forward_launch, "default", lambda *_: forward)
        monkeypatch.setattr("tileattn.kernels.tilelang.backward.kernels.default", lambda _: main)
        monkeypatch.setattr(backward_backend, "default", lambda _: main)
    monkeypatch.setattr(gpu_dropout, "LENGTHS", (70, 61))
    monkeypatch.setattr(gpu_dropout, "HEADS", 2)

    torch.manual_seed(SEED)
    dropout = Dropout(0.3, draw_seed("cpu"), place)
    expected = keep_mask(dropout.seed, 0.3, 2, 2, slice(0, 70), slice(0, 61), place)
    forward_call = AttentionCall(torch.float16, 64, 64, arch=ARCH, needs_grad=True, dropout=True)
    call = BackwardCall(forward_call, (False, False, True, False))

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o, lse = forward_launch.prepare(forward_call, q.shape, k.shape, 1.0)(Inputs(q, k, v, dropout=dropout))
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> Any:
            q, k, v, o, lse = ctx.saved_tensors
            run = backward_backend.prepare_backward(call, q.shape, k.shape, 1.0)
            return None, None, run(Inputs(q, k, v, dropout=dropout), o, lse, do, None).v

    def run(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return Attend.apply(q, k, v)

    assert torch.equal(gpu_dropout.pattern_forward(run, 64, 0.3), expected)
    assert torch.equal(gpu_dropout.pattern_backward(run, 64, 0.3), expected)
    assert LENGTHS == (301, 331)
