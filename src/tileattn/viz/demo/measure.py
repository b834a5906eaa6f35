"""Runs a call by each chosen implementation: error by the oracle and the tolerance rule of the tests, time, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tileattn import Bias
from tileattn.measure import memory, rounds, timing
from tileattn.measure.profiling import current
from tileattn.testing import (
    assert_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    oracle_attention,
    oracle_gradients,
)
from tileattn.testing.numerics import row_error
from tileattn.viz.demo.call import Call, Tensors
from tileattn.viz.demo.implementations import IMPLEMENTATIONS, OWN, Refused

# Shorter than the benchmark's measurements, so that the page answers soon.
EFFORT = timing.Effort(warmup_ms=5.0, measure_ms=20.0, rounds=2)
# Scores whose rows are compared with float64, the last rows first: a fraction of a second.
SCORES_CHECKED = {"cpu": 2**21, "cuda": 2**28}


@dataclass
class Measured:
    """One implementation's measurements. backward_ms: forward and backward together; None without gradients."""

    name: str
    label: str
    error: float
    peak_bytes: int
    samples_ms: list[float] = field(default_factory=list)
    backward_samples_ms: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Of the forward pass: the median."""
        return median(self.samples_ms)

    @property
    def backward_ms(self) -> float | None:
        """Of forward and backward together: the median."""
        return median(self.backward_samples_ms) if self.backward_samples_ms else None


@dataclass(frozen=True)
class Answer:
    """The result of a run. notes: what was checked, and which implementations are missing, with the reasons."""

    rows: list[Measured]
    notes: list[str]


def run(call: Call, device: torch.device) -> Answer:
    """Measures a call.

    Raises:
        RuntimeError: tileattn failed, or its error exceeds the tolerance; the message gives the reason.
    """
    with current(device):  # gradio calls this function in another thread, which has its own current device
        given = call.tensors(device)
        check = _Check(call, given)
        rows, calls, notes = [], [], [check.text]
        for name in call.implementations:
            label = IMPLEMENTATIONS[name].label
            try:
                forward, held = IMPLEMENTATIONS[name].prepare(call, given)
                error = check.error(name, forward)
                rows.append(Measured(name, label, error, held + memory.peak_bytes(_whole(given, forward), device)))
                calls.append(forward)
            except Refused as refused:
                notes.append(f"{label} is missing: {refused}")
            except Exception as failure:
                reason = (str(failure).strip().splitlines() or [""])[0]
                if name == OWN:
                    raise RuntimeError(f"{type(failure).__name__}: {reason}") from failure
                notes.append(f"{label} failed: {type(failure).__name__}: {reason}")
        for number in range(EFFORT.rounds):
            for i in rounds.order(len(rows), number):
                with torch.no_grad():
                    rows[i].samples_ms += timing.sample_ms(calls[i], device, EFFORT)
                if call.gradients:
                    rows[i].backward_samples_ms += timing.sample_ms(_whole(given, calls[i]), device, EFFORT)
        return Answer(rows, notes)


def _whole(given: Tensors, forward: Callable[[], Tensor]) -> Callable[[], object]:
    """All that the call asks for: the forward pass, and with gradients the backward pass."""
    if given.do is None:
        return forward
    return lambda: torch.autograd.grad(forward(), list(given.leaves().values()), given.do)


class _Check:
    """The expected output of the last query rows, or the expected gradients, in float64 and by eager PyTorch."""

    def __init__(self, call: Call, given: Tensors) -> None:
        self.given = given
        left = max(1, SCORES_CHECKED[given.q.device.type] // (call.batch * call.heads * call.seqlen_k))
        self.rows = call.seqlen_q if call.gradients else min(left, call.seqlen_q)
        which = "all query rows" if self.rows == call.seqlen_q else f"the last {self.rows} query rows"
        outputs = "o and the gradients of q, k and v" if call.gradients else "o"
        self.text = f"Error: the worst row of {outputs} against float64, over {which}."
        if OWN in call.implementations:
            self.text += (
                " tileattn's is within the tolerance of the tests: twice the error of plain PyTorch in this dtype, "
                "plus one rounding."
            )
        with torch.no_grad():
            last = self._last()
            self.exact, self.eager = oracle_attention(*last)[0], eager_attention(*last)[0]
        if given.do is not None:
            of_call = (given.q, given.k, given.v, given.mask, given.score_mods, given.sink)
            self.eager_gradients = eager_gradients(given.leaves(), given.do, None, *of_call)
            q, k, v = (x.detach().double().requires_grad_() for x in (given.q, given.k, given.v))
            sink = None if given.sink is None else given.sink.double()
            leaves = {"dq": q, "dk": k, "dv": v}
            self.exact_gradients, self.sizes = oracle_gradients(
                leaves, given.do, None, q, k, v, given.mask, given.score_mods, sink
            )

    def _last(self) -> tuple[Any, ...]:
        """The arguments of the oracle for the last rows. Positions are aligned at the end, so they stay the same."""
        given = self.given
        inputs = given.inputs()
        mods = [
            dataclasses.replace(mod, tensor=mod.tensor[:, :, -self.rows :]) if isinstance(mod, Bias) else mod
            for mod in given.score_mods
        ]
        q = inputs["q"][:, -self.rows :]
        descales = [inputs[name] for name in inputs if name.endswith("descale")]
        return (q, inputs["k"], inputs["v"], given.mask, mods, given.sink, None, *descales)

    def error(self, name: str, forward: Callable[[], Tensor]) -> float:
        """The largest relative error of a row. tileattn's must keep the tolerance rule, all others must be finite."""
        given = self.given
        with torch.set_grad_enabled(given.do is not None):
            o = forward()
        got = o.detach()[:, -self.rows :]
        errors = [row_error(got, self.exact).worst_row]
        if name == OWN:
            assert_accurate("o", got, self.exact, self.eager)
        if given.do is not None:
            leaves = given.leaves()
            gradients = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), given.do)))
            if name == OWN:
                assert_gradients_accurate(
                    OWN, gradients, self.exact_gradients, self.eager_gradients, self.sizes, given.q.dtype
                )
            errors += [
                row_error(gradients[which], exact, gradient=True, size=self.sizes[which]).worst_row
                for which, exact in self.exact_gradients.items()
            ]
        worst = max(errors)
        if not worst < float("inf") or any(error != error for error in errors):
            raise RuntimeError("the output is not finite")
        return worst
