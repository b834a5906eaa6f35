"""The oracle (float64) and eager PyTorch (the inputs' own dtype): the two sides of the tolerance rule.

Both run the standard attention of `standard.py`, independent of `tileattn.reference`, of every backend and of the
masks' tile ranges. Only `Mask.allows` and the score modifications, as functions on tensors, are shared.

The four public functions have 11 positional arguments: those of a call, in the order of `Arguments.positional`, and
dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..call.fp8 import FP8, accumulator
from ..variant.masks import Mask
from ..variant.scores import ScoreMod
from ..variant.tracing.eager import with_captures
from .standard import (
    Attended,
    AttentionInputs,
    attend,
    folded,
    multiplies_fp8,
    natural,
    random_signs,
    reverse,
    scores_product,
    scores_product_in_fp8,
    shuffled,
    times,
    weighted_sum,
    weighted_sum_in_fp8,
)


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[Callable[..., Tensor]] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Standard attention in float64 on the quantised inputs. Differentiable.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any floating-point dtype and strides.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        mask: The keys that a query sees; None: all.
        score_mods: Functions (score, b, h, q, k) -> score, applied in order to the scaled score.
        sink: (heads,), joins the denominator of the softmax.
        scale: Factor of the inner product; None: 1 / sqrt(head_dim).
        q_descale: (batch, kv_heads), factor of the elements of q, for fp8; None: 1.
        k_descale: The same for k.
        v_descale: The same for v.
        dropout: (batch, heads, seqlen_q, seqlen_k), factor of each probability after the softmax: 0 or 1 / (1 - p);
            None: 1. See :func:`tileattn.testing.dropout_mask`.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), float64. A row without keys has o = 0
        and lse = -inf, or lse = sink.
    """
    descales = (q_descale, k_descale, v_descale)
    exact = _exactly(AttentionInputs(q, k, v, mask, score_mods, sink, scale, descales, dropout))
    return exact.o, exact.lse


def _exactly(inputs: AttentionInputs) -> Attended:
    score_mods = [_on_doubles(mod) for mod in inputs.score_mods]
    # The sums are not in their natural order, which is eager's: in float64 its error would seem to be 0.
    return attend(inputs._replace(score_mods=score_mods), torch.float64, reverse)


def _on_doubles(mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The modification with the floats of its tensors in float64, in which `slopes[h] * k` is then exact."""
    if isinstance(mod, ScoreMod):
        held = {field.name: getattr(mod, field.name) for field in dataclasses.fields(mod)}  # type: ignore[arg-type]
        same = object.__new__(type(mod))
        for name, value in held.items():
            object.__setattr__(same, name, _double(value))
        return same
    return with_captures(mod, _double)


def _double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[Callable[..., Tensor]] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    dropout: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Standard attention in the inputs' dtype, as plain PyTorch without a fused kernel computes it: three runs.

    Arguments as `oracle_attention`. Each operation rounds its result to the dtype: scores, probabilities, output. lse
    is reduced from the rounded scores in float32 or better. Differentiable.

    Only the matrix products use fp8. Scores come from PyTorch's own product of fp8 matrices where the device
    has one (:func:`fp8_product`) and stay in float32, as do sums. Probabilities ``exp(score - row's maximum)`` are
    rounded to fp8 for their product with v; the softmax's denominator is the sum before that rounding. The output is
    in bfloat16.

    The error depends on the order of summation. So there are three runs, with head_dim and keys in their own order,
    shuffled and reversed, and the rule takes the largest error.

    Returns:
        The o and the lse of the three runs.
    """
    dtype, product, weighted = q.dtype, scores_product, weighted_sum
    if q.dtype == FP8:
        dtype, weighted = accumulator(FP8), weighted_sum_in_fp8
        product = scores_product_in_fp8 if multiplies_fp8(q.device) else scores_product
    inputs = AttentionInputs(q, k, v, mask, score_mods, sink, scale, (q_descale, k_descale, v_descale), dropout)
    runs = [attend(inputs, dtype, order, product, weighted) for order in (natural, shuffled, reverse)]
    return [run.o for run in runs], [run.lse for run in runs]


def gradients(
    outputs: tuple[Tensor, Tensor], leaves: Mapping[str, Tensor], do: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """The gradients of `leaves` by autograd, given those of o and lse (None: 0).

    Args:
        outputs: o and lse, as the oracle or `attention` returned them.
        leaves: Tensors that the outputs depend on, by the names of their gradients.
        do: The gradient of o, any floating-point dtype.
        dlse: The gradient of lse, or None.

    Returns:
        A gradient for each leaf, in its shape and dtype; zeros where the outputs do not depend on it.
    """
    o, lse = outputs
    return _by_autograd([o], [do], leaves) if dlse is None else _by_autograd([o, lse], [do, dlse], leaves)


def eager_gradients(
    leaves: Mapping[str, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[Callable[..., Tensor]] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """The gradients of `eager_attention`, in the inputs' dtype: four runs, in float64 eight.

    There are two orders of summation (in float64 four, since the oracle is no more exact than eager there), each in two
    ways. One is autograd, which keeps the probabilities. The other is the formula of a backward pass that recomputes
    them (Dao et al. 2022, arXiv 2205.14135), from the rounded o and lse:

        P = exp(S - lse),  delta = rowsum(dO * O) - dlse,  dV = P^T dO,  dS = P * (dO V^T - delta)

    with dropout Z: dV = (P * Z)^T dO, dS = P * (Z * dO V^T - delta).
    S is recomputed with sums in another order than lse's. Where one key has all of a row's weight, autograd happens to
    be exact: P is 1, and two equal numbers are subtracted. The formula shows how large the roundings are.

    Args:
        leaves: The tensors whose gradients are wanted, by the names of the gradients.
        do: As for `gradients`.
        dlse: As for `gradients`.
        q: As for `eager_attention`, like the following arguments; not fp8.
        k: As there.
        v: As there.
        mask: As there.
        score_mods: As there.
        sink: As there.
        scale: As there.
        dropout: As there.
    """
    orders = (natural, shuffled, reverse, folded) if q.dtype == torch.float64 else (natural, shuffled)
    inputs = AttentionInputs(q, k, v, mask, score_mods, sink, scale, dropout=dropout)
    runs = [attend(inputs, q.dtype, order) for order in orders]
    runs_of_autograd = [gradients((run.o, run.lse), leaves, do, dlse) for run in runs]
    return runs_of_autograd + [_by_formula(x, y, leaves, do, dlse) for x, y in zip(runs, runs[1:] + runs[:1])]


def oracle_gradients(
    leaves: Mapping[str, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    score_mods: Sequence[Callable[..., Tensor]] = (),
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact gradients, and the size of the terms that each gradient sums.

    The gradients are those of `oracle_attention` by autograd. The size is, roughly, the root of the sum of the squares
    of the terms. In dS = P * (dO V^T - delta) the two inner products are replaced by the size of their terms, which do
    not cancel, and each row (query) gets one sign. So, times a rounding, this is the error of a gradient where the rows
    of dS are each off by a rounding of what they are computed from, upwards or downwards. It is estimated from four
    backward passes with random signs.

    Arguments as for `eager_gradients`; but q, k, v, sink and the leaves are float64.

    Returns:
        Two tensors for each leaf, of its shape, float64.
    """
    run = _exactly(AttentionInputs(q, k, v, mask, score_mods, sink, scale, dropout=dropout))
    return gradients((run.o, run.lse), leaves, do, dlse), _sizes(run, leaves, do, dlse)


def _sizes(
    run: Attended, leaves: Mapping[str, Tensor], do: Tensor, dlse: Tensor | None, draws: int = 4
) -> dict[str, Tensor]:
    """See `oracle_gradients`."""
    with torch.no_grad():
        do = do.transpose(1, 2).to(run.v.dtype)
        p, dp, delta = _formula(run, run, do, dlse, size=True)
        ds = p * (dp + delta[..., None])
    squares = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for signs in random_signs((draws, *run.empty.shape, 1), do.device):
        parts = _by_parts(run, p, signs * ds, signs * do, leaves)
        for name, gradient in parts.items():
            squares[name] += gradient**2 / draws
    return {name: square.sqrt() for name, square in squares.items()}


def _formula(
    run: Attended, forward: Attended, do: Tensor, dlse: Tensor | None, size: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """P, dO V^T (0 for the sink) and delta, in do's dtype; do is (batch, heads, seqlen_q, head_dim_v).

    forward: the run that o and lse are of.

    size: of the last two, the root of the sum of the squares of the terms.
    """
    p = torch.exp(run.logits - forward.lse.masked_fill(run.empty, 0.0)[..., None]).to(do.dtype)
    p = p.masked_fill(run.empty[..., None], 0.0)
    v, o, dlse = run.v, forward.o.transpose(1, 2), torch.zeros_like(forward.lse) if dlse is None else -dlse
    if size:
        dp, delta = (do**2 @ (v**2).mT).sqrt(), (do**2 * o**2).sum(dim=-1).sqrt() + dlse.abs()
    else:
        dp, delta = do @ v.mT, (do * o).sum(dim=-1) + dlse
    dp = times(dp, run.dropout)
    dp = torch.cat([dp, dp.new_zeros(*dp.shape[:3], p.shape[3] - dp.shape[3])], dim=-1)
    return p, dp, delta.to(do.dtype)


def _by_formula(
    run: Attended, forward: Attended, leaves: Mapping[str, Tensor], do: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """Autograd leads from the scores and from v back to the leaves; what lies between is written out."""
    with torch.no_grad():
        do = do.transpose(1, 2)
        p, dp, delta = _formula(run, forward, do, dlse)
        ds = p * (dp - delta[..., None])
    return _by_parts(run, p, ds, do, leaves)


def _by_parts(run: Attended, p: Tensor, ds: Tensor, do: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From dS and dV = P^T dO."""
    return _by_autograd([run.logits, run.v], [ds, times(p[..., : run.v.shape[2]], run.dropout).mT @ do], leaves)


def _by_autograd(ys: Sequence[Tensor], dys: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the leaves, given those of ys, which may be of another dtype; the graph is kept."""
    dys = [dy.to(y.dtype) for y, dy in zip(ys, dys)]
    gradients_of_leaves: Sequence[Tensor | None] = torch.autograd.grad(
        ys, list(leaves.values()), dys, allow_unused=True, retain_graph=True
    )
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), gradients_of_leaves)
    }
