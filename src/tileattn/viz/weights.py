"""The attention weights of small inputs: the matrix that FlashAttention never stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileattn.call.validation import check_arguments
from tileattn.reference import standard_attention
from tileattn.variant.key import normalize
from tileattn.variant.sparse.blocks import for_tensors
from tileattn.variant.validation import check_variant
from tileattn.viz.checks import check_element
from tileattn.viz.style import LIGHT, SEQUENTIAL, counted, empty_figure, heading, integer_ticks, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The most tokens and heads of a picture: a larger matrix has more elements than the picture has pixels.
MOST_TOKENS = 1024
MOST_HEADS = 16


@torch.no_grad()
def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Any = None,
    score_mod: Any = None,
    causal: bool = False,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The attention weights, the softmax of the scores: (batch, heads, seqlen_q, seqlen_k), float64.

    A row sums to 1, with a sink to less than 1, and to 0 if its query sees no key.

    Args:
        q, k: (batch, seqlen, heads, head_dim) as `tileattn.attention` takes them; at most 1024 tokens.
        mask, score_mod, causal, scale, sink: as `tileattn.attention` takes them.

    Raises:
        ValueError: q or k has more than 1024 tokens, or arguments are inconsistent.
    """
    check_arguments(q, k, k, sink, 0.0, "bshd", scale)
    for name, tensor in (("q", q), ("k", k)):
        if not 1 <= tensor.shape[1] <= MOST_TOKENS:
            raise ValueError(f"{name} must have 1 to {MOST_TOKENS} tokens for a picture, got {tensor.shape[1]}")
    masks, mods = normalize(mask, score_mod, causal)
    batch, seqlen_k, kv_heads, _ = k.shape
    masks = for_tensors(masks, q, k)
    check_variant(masks, mods, batch, q.shape[2], q.shape[1], seqlen_k)
    # The value of key j is the j-th unit vector, so that the weighted sum of the values is the row of weights.
    one_hot = torch.eye(seqlen_k, dtype=torch.float64, device=k.device)[None, :, None]
    o, _ = standard_attention(
        q.double(), k.double(), one_hot.expand(batch, seqlen_k, kv_heads, seqlen_k), masks, mods, sink, scale
    )
    return o.transpose(1, 2)


def draw_weights(weights: Tensor, title: str = "Attention weights", b: int = 0) -> Figure:
    """Draws a panel per head of a batch element. Weights of exactly 0, such as those of masked keys, are grey.

    Args:
        weights: (batch, heads, seqlen_q, seqlen_k), from `attention_weights`; at most 16 heads.
        title: the figure's title.
        b: the batch element.

    Raises:
        ValueError: weights has a wrong shape, or there is no batch element b.
    """
    if weights.ndim != 4 or not 1 <= weights.shape[1] <= MOST_HEADS or 0 in weights.shape:
        raise ValueError(
            f"weights must have shape (batch, up to {MOST_HEADS} heads, seqlen_q, seqlen_k), none of them 0, got "
            f"{tuple(weights.shape)}"
        )
    check_element("b", b, len(weights), "batch elements")
    import matplotlib

    heads, seqlen_q, seqlen_k = weights.shape[1:]
    columns = min(heads, 4)
    lines = -(-heads // columns)
    figure = empty_figure(max(3.1 * columns, 5.2) + 0.9, 3.1 * lines + 0.7)
    colours = matplotlib.colormaps[SEQUENTIAL].with_extremes(bad=LIGHT)
    element = weights[b].detach().double().cpu()
    shown = element.masked_fill(element == 0, torch.nan)
    panels = []
    for head in range(heads):
        axes = figure.add_subplot(lines, columns, head + 1)
        image = axes.imshow(shown[head].numpy(), cmap=colours, vmin=0, vmax=float(element.max()), aspect="auto")
        titled(
            axes,
            f"head {head}",
            "key" if head + columns >= heads else "",
            "query" if head % columns == 0 else "",
        )
        axes.grid(False)
        integer_ticks(axes.xaxis, axes.yaxis)
        axes.set_xlim(-0.5, seqlen_k - 0.5)
        axes.set_ylim(seqlen_q - 0.5, -0.5)
        panels.append(axes)
    bar = figure.colorbar(image, ax=panels, shrink=0.85, label="weight")
    bar.outline.set_visible(False)
    sizes = f"{counted(seqlen_q, 'query', 'queries')}, {counted(seqlen_k, 'key')}"
    heading(figure, title, f"{sizes}; grey: weight 0")
    return figure
