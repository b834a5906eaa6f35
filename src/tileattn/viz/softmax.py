"""The online softmax along one row: its state after each tile of keys.

`tileattn.reference.online_softmax` explains the state: m is the largest score so far, l the sum of exp(score - m), o
the sum of exp(score - m) v. A tile that raises the maximum multiplies l and o by alpha, which is less than 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileattn.call.validation import check_arguments
from tileattn.reference import RowState
from tileattn.reference.standard import heads_first, positions, tile_scores
from tileattn.reference.tiled import masked
from tileattn.variant.key import normalize
from tileattn.variant.sparse.blocks import for_tensors
from tileattn.variant.validation import check_variant
from tileattn.viz.checks import check_element, check_sizes, check_tile_count
from tileattn.viz.style import (
    BLUE,
    GREEN,
    LIGHT,
    MOST_LINES,
    ORANGE,
    RED,
    counted,
    empty_figure,
    heading,
    integer_ticks,
    titled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SoftmaxStep:
    """The state of one row after a tile of keys.

    Attributes:
        keys: the number of keys up to the end of the tile.
        m, l: the largest score, and the sum of exp(score - m).
        alpha: exp(m before the tile - m), the factor of the old l and o; 1 if the maximum did not change, 0 for the
            first tile with a visible key.
        o: the sum of exp(score - m) v, not divided by l: (head_dim_v,).
    """

    keys: int
    m: float
    l: float
    alpha: float
    o: Tensor


def softmax_steps(scores: Tensor, v: Tensor, block_N: int) -> list[SoftmaxStep]:
    """The state of a row after each tile.

    Args:
        scores: (seqlen_k,) of one row, -inf where the mask hides a key.
        v: (seqlen_k, head_dim_v).
        block_N: keys in a tile.

    Raises:
        ValueError: the shapes do not match, block_N is below 1, or a score is NaN or +inf.
    """
    if scores.ndim != 1 or v.ndim != 2 or len(scores) != len(v) or len(v) < 1:
        raise ValueError(
            f"scores must have shape (seqlen_k,) and v (seqlen_k, head_dim_v) with at least one key, got "
            f"{tuple(scores.shape)} and {tuple(v.shape)}"
        )
    check_sizes(block_N=block_N)
    if not bool((scores < torch.inf).all()):  # a comparison with NaN is False
        raise ValueError("scores must be finite, or -inf where the mask hides a key, got NaN or +inf")
    row, values = scores.detach().double()[None], v.detach().double()
    state = RowState.empty(row, values.shape[1])
    steps = []
    for lo in range(0, len(values), block_N):
        before = state.m
        state = state.update(row[:, lo : lo + block_N], values[lo : lo + block_N])
        # Before the first visible key m stays -inf, and exp(-inf - -inf) would be NaN.
        alpha = 1.0 if bool(state.m == before) else float(torch.exp(before - state.m))
        keys = min(lo + block_N, len(values))
        steps.append(SoftmaxStep(keys, float(state.m), float(state.l), alpha, state.o[0]))
    return steps


@torch.no_grad()
def row_scores(
    q: Tensor,
    k: Tensor,
    row: int,
    *,
    mask: Any = None,
    score_mod: Any = None,
    causal: bool = False,
    scale: float | None = None,
    b: int = 0,
    h: int = 0,
) -> Tensor:
    """The inputs of one row's softmax: the scores of one query and head, (seqlen_k,), float64, -inf where masked.

    Args:
        q, k: (batch, seqlen, heads, head_dim) as `tileattn.attention` takes them.
        row: the index of the query; a negative index counts from the end.
        mask, score_mod, causal, scale: as `tileattn.attention` takes them.
        b, h: the batch element and the query head; a negative index counts from the end.

    Raises:
        ValueError: there is no such row, batch element or head, or arguments are inconsistent.
    """
    check_arguments(q, k, k, None, 0.0, "bshd", scale)
    check_element("row", row, q.shape[1], "queries")
    check_element("b", b, q.shape[0], "batch elements")
    check_element("h", h, q.shape[2], "heads")
    masks, mods = normalize(mask, score_mod, causal)
    masks = for_tensors(masks, q, k)
    check_variant(masks, mods, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    q_bh, k_bh, _ = heads_first(q.double(), k.double(), k.double())
    rows, keys = slice(row % q.shape[1], row % q.shape[1] + 1), slice(0, k.shape[1])
    scores = tile_scores(q_bh, k_bh, rows, keys, mods, scale)
    return masked(scores, masks, positions(q_bh, k_bh, rows, keys))[b, h, 0]


def draw_softmax(scores: Tensor, v: Tensor, block_N: int, title: str = "Online softmax along a row") -> Figure:
    """Draws the scores with the running maximum, alpha, l, and the norm of o before and after the division by l.

    Args:
        scores, v, block_N: as `softmax_steps` takes them; at most 512 tiles.
        title: of the figure.

    Raises:
        ValueError: there are more than 512 tiles, or `softmax_steps` raises.
    """
    check_sizes(block_N=block_N)
    check_tile_count(len(scores), "block_N", block_N)
    steps = softmax_steps(scores, v, block_N)
    figure = empty_figure(7.6, 7.4)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(2.2, 1, 1, 1.3))
    _scores(panels[0], scores.detach().double().cpu(), steps)
    with_keys = [step for step in steps if step.l > 0]
    _steps(
        panels[1], steps, [step.alpha for step in steps], "alpha = exp(m before - m): factor of the old l and o", ORANGE
    )
    panels[1].set_ylim(0, 1.1)
    _steps(panels[2], steps, [step.l for step in steps], "l = sum of exp(score - m)", BLUE)
    sizes = [float(step.o.norm()) for step in steps]
    _steps(panels[3], steps, sizes, "norm of o: relative to exp(m), and divided by l", BLUE, label="|o|")
    divided = [float(step.o.norm()) / step.l if step.l > 0 else 0.0 for step in steps]
    _steps(panels[3], steps, divided, None, GREEN, label="|o / l|", dashed=True)
    _legend(panels[3])
    panels[3].set_xlabel("keys seen", fontsize=9)
    integer_ticks(panels[3].xaxis)
    for axes in panels:
        for step in steps[:-1] if len(steps) <= MOST_LINES else ():
            axes.axvline(step.keys, color=LIGHT, linewidth=1.0, zorder=0)
        axes.set_xlim(0, len(scores))
    lse = "no key is visible"
    if with_keys:
        m, l = with_keys[-1].m, with_keys[-1].l
        lse = f"lse = m + log l = {m + torch.tensor(l).log().item():.3f}"
    grown = sum(0 < step.alpha < 1 for step in steps)
    keys = f"{counted(len(scores), 'key')} in tiles of {block_N}"
    heading(figure, title, f"{keys}; the maximum grows {counted(grown, 'time')}; at the end {lse}")
    return figure


def _scores(axes: Axes, scores: Tensor, steps: list[SoftmaxStep]) -> None:
    visible = scores.isfinite()
    keys = torch.arange(len(scores)) + 0.5
    titled(axes, "scores, and m, the running maximum", "", "score")
    axes.plot(keys[visible], scores[visible], ".", color=BLUE, markersize=4, label="score", zorder=2)
    _line(axes, steps, [step.m if step.l > 0 else float("nan") for step in steps], RED, "m")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Puts the legend beside the panel's title, where it hides no line."""
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.98))


def _steps(
    axes: Axes,
    steps: list[SoftmaxStep],
    values: list[float],
    title: str | None,
    colour: str,
    label: str = "",
    dashed: bool = False,
) -> None:
    if title is not None:
        titled(axes, title)
    _line(axes, steps, values, colour, label, dashed)
    axes.set_ylim(bottom=0)


def _line(
    axes: Axes, steps: list[SoftmaxStep], values: list[float], colour: str, label: str, dashed: bool = False
) -> None:
    """Draws a horizontal line for each tile, over the tile's keys."""
    edges = [0, *(step.keys for step in steps)]
    axes.stairs(
        values, edges, baseline=None, color=colour, linewidth=1.8, label=label, linestyle="--" if dashed else "-"
    )
