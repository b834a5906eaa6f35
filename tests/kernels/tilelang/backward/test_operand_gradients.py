"""What the backward kernels make of score modifications, and what PyTorch does with what they write out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tileattn import ALiBi, Bias, SoftCap, math
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.backward.operand_gradients import ADDED, AXES, BY_KEY, SPREAD, STORED, add_up, paths
from tileattn.kernels.tilelang.backward.slopes import slope_program
from tileattn.variant.derivative import float_loads
from tileattn.variant.key import encode
from tileattn.variant.program import program
from tileattn.variant.reading import evaluate

BATCH, HEADS, QUERIES, KEYS = 2, 4, 5, 7
SLOPES, SLOPES_BY_BATCH = torch.rand(HEADS), torch.rand(BATCH, HEADS)
BIAS, KEY_BIAS, TABLE = torch.rand(BATCH, HEADS, QUERIES, KEYS), torch.rand(KEYS + 3), torch.rand(3)
DISTANCES, ROWS, IDS = torch.rand(2 * KEYS - 1), torch.rand(HEADS, QUERIES), torch.arange(KEYS) % 3

ScoreMod = Callable[..., Any]
# Each with the way that each of its loads takes if the result need not be deterministic.
MODS: dict[str, tuple[ScoreMod, tuple[str, ...]]] = {
    "slopes": (ALiBi(SLOPES), (BY_KEY,)),
    "slopes by batch": (ALiBi(SLOPES_BY_BATCH), (BY_KEY,)),
    "bias": (Bias(BIAS), (STORED,)),
    "bias of one batch": (Bias(BIAS[:1]), (ADDED,)),
    "bias of one head": (Bias(BIAS[:, :1]), (ADDED,)),
    "bias of keys": (Bias(BIAS[:, :1, :1]), (BY_KEY,)),
    "keys, shifted": (lambda score, b, h, q, k: score + KEY_BIAS[k + 2], (BY_KEY,)),
    "keys, partly beyond": (lambda score, b, h, q, k: score + KEY_BIAS[k + 5], (BY_KEY,)),
    "keys, partly beyond the front": (lambda score, b, h, q, k: score + KEY_BIAS[k - 2], (BY_KEY,)),
    "rows, partly beyond the front": (lambda score, b, h, q, k: score + ROWS[h, q - 4], (ADDED,)),
    "two tensors": (lambda score, b, h, q, k: score * SLOPES[h] + KEY_BIAS[k], (BY_KEY, BY_KEY)),
    "looked up": (lambda score, b, h, q, k: score * TABLE[IDS[k]], (BY_KEY,)),
    "distances": (lambda score, b, h, q, k: score + DISTANCES[q - k + KEYS - 1], (ADDED,)),
    "rows": (lambda score, b, h, q, k: score + ROWS[h, q - (KEYS - QUERIES)], (ADDED,)),
    "twice": (lambda score, b, h, q, k: score + KEY_BIAS[k] * score + KEY_BIAS[h], (BY_KEY, BY_KEY)),
    "half the heads": (lambda score, b, h, q, k: score + SLOPES[h // 2], (BY_KEY,)),
}


def _call(mod: ScoreMod, deterministic: bool) -> tuple[BackwardCall, Any]:
    key, operands = encode(None, (mod,))
    needs = (True, True, True, False, *(tensor.is_floating_point() for tensor in operands.tensors))
    return BackwardCall(AttentionCall(torch.bfloat16, 64, 64, key), needs, deterministic=deterministic), operands


@pytest.mark.parametrize("name", MODS)
def test_ways(name: str) -> None:
    mod, ways = MODS[name]
    call, _ = _call(mod, deterministic=False)
    assert tuple(path.way for path in paths(call)) == ways
    deterministic, _ = _call(mod, deterministic=True)
    assert tuple(path.way for path in paths(deterministic)) == tuple(SPREAD if way == ADDED else way for way in ways)


def test_what_is_not_wanted_has_no_path() -> None:
    call, _ = _call(Bias(BIAS), deterministic=False)
    assert paths(BackwardCall(call.forward, (True, True, True, False, False))) == ()


@pytest.mark.parametrize("name", [name for name, (_, ways) in MODS.items() if ways != (STORED,)])
def test_what_a_workspace_holds_comes_to_its_elements(name: str) -> None:
    """The sums equal autograd's. Elements beyond the tensor, which kernels read as 0, get nothing."""
    call, operands = _call(MODS[name][0], deterministic=True)
    sizes, generator = (BATCH, HEADS, QUERIES, KEYS), torch.Generator().manual_seed(0)
    b, h, q, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    for path in paths(call):
        ds = torch.randn(sizes, dtype=torch.float64, generator=generator)
        tensor = operands.tensors[path.tensor].double().requires_grad_()
        values: dict[str, Any] = {f"t{index}": x for index, x in enumerate(operands.tensors)}
        values |= {"b": b, "h": h, "q": q + KEYS - QUERIES, "k": k}
        indices = [torch.as_tensor(evaluate(index, values)) for index in path.load.args[1:]]
        within = torch.ones(sizes, dtype=torch.bool)
        for index, size in zip(indices, tensor.shape):
            within = within & (index >= 0) & (index < size)
        read = tensor[tuple(index.clamp(0, size - 1) for index, size in zip(indices, tensor.shape))]
        (ds * torch.where(within, read, 0.0)).sum().backward()
        gradient = torch.zeros_like(tensor)
        parts = ds.sum(2) if len(AXES[path.way]) == 3 else ds
        add_up(gradient.detach(), path, parts, operands, KEYS - QUERIES, KEYS)
        torch.testing.assert_close(gradient, tensor.grad)


SCORES: dict[str, ScoreMod] = {
    **{name: mod for name, (mod, _) in MODS.items() if "beyond" not in name},
    "softcap": SoftCap(3.0),
    "squared": lambda score, b, h, q, k: score * score * 0.25 + math.exp(-abs(q - k)),
    "sign": lambda score, b, h, q, k: math.where(score > 0, score, 0.1 * score) / (h + 1),
    "constant": lambda score, b, h, q, k: 0.5 * k,
}


@pytest.mark.parametrize("hardware_tanh", [True, False])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_derivatives_as_they_are_emitted(name: str, capped: bool, hardware_tanh: bool) -> None:
    """They equal autograd's."""
    mods = (SCORES[name], SoftCap(2.0)) if capped else (SCORES[name],)
    key, operands = encode(None, mods)
    score = program(key).score
    loads = float_loads(score)
    emitted = slope_program(score, loads, hardware_tanh)
    sizes, scale = (BATCH, HEADS, QUERIES, KEYS), 0.3
    b, h, q, k = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    raw = torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values: dict[str, Any] = {
        f"t{index}": x.double() if x.is_floating_point() else x for index, x in enumerate(operands.tensors)
    }
    values |= {f"f{index}": x for index, x in enumerate(operands.floats)}
    values |= {"b": b, "h": h, "q": q + KEYS - QUERIES, "k": k}
    of_kernel = values | {"raw": raw, "scale": torch.tensor(scale, dtype=torch.float64)}
    for index, uniform in enumerate(emitted.uniforms):
        of_kernel[f"uniform{index}"] = evaluate(uniform, of_kernel)

    scaled = (raw * scale).requires_grad_()
    expected = torch.as_tensor(evaluate(score, values | {"score": scaled})).expand(sizes)
    got = torch.as_tensor(evaluate(emitted.score, of_kernel)).expand(sizes)
    torch.testing.assert_close(got.double(), expected.detach().double())

    def factor_of(factor: Any) -> torch.Tensor:
        kept = 1.0 if factor.kept is None else evaluate(emitted.kept[factor.kept], of_kernel)
        recomputed = 1.0 if factor.recomputed is None else evaluate(factor.recomputed, of_kernel)
        return torch.as_tensor(kept * recomputed, dtype=torch.float64).expand(sizes)

    slope = torch.autograd.grad(expected.sum(), scaled)[0] if expected.requires_grad else torch.zeros(sizes)
    torch.testing.assert_close(factor_of(emitted.slope), slope.double())
    # With respect to an element: what the expression gains if the load's value is a little more.
    for load, factor in zip(loads, emitted.loads, strict=True):
        tensor = values[load.args[0]].clone().requires_grad_()
        places = [torch.as_tensor(evaluate(index, values)).expand(sizes) for index in load.args[1:]]
        changed = evaluate(score, values | {"score": scaled.detach(), load.args[0]: tensor})
        by_path = factor_of(factor)
        others = [other for other in loads if other.args[0] == load.args[0]]
        if len(others) == 1:
            total = torch.autograd.grad(changed.expand(sizes).sum(), tensor)[0]
            sums = torch.zeros_like(total).index_put_(tuple(places), by_path, accumulate=True)
            torch.testing.assert_close(sums, total)


def test_what_depends_on_the_score_is_kept_once() -> None:
    """ALiBi's slopes do not need a tile of their own; under a cap each derivative does."""

    def kept(*mods: ScoreMod) -> tuple[int, list[int | None]]:
        score = program(encode(None, mods)[0]).score
        emitted = slope_program(score, float_loads(score), True)
        return len(emitted.kept), [factor.kept for factor in (emitted.slope, *emitted.loads)]

    assert kept(ALiBi(SLOPES)) == (0, [None, None])
    assert kept(Bias(BIAS)) == (0, [None, None])
    assert kept(Bias(BIAS), SoftCap(3.0)) == (1, [0, 0])
    assert kept(ALiBi(SLOPES), SoftCap(3.0)) == (2, [0, 1])
