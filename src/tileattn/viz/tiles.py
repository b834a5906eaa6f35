"""Which tiles of the score matrix a kernel computes under a mask.

For each block of ``block_M`` queries a mask gives a kernel two ranges of keys (`variant/masks.py`). ``kv_range``
contains every key that any of the queries sees: tiles of ``block_N`` keys outside it are skipped. ``full_range``
contains keys that all of the queries see: in tiles inside it the mask is not evaluated. The ranges here come from the
traced program that kernels are generated from, and are converted to tiles as in `kernels/tilelang/forward/generic.py`.
If a mask's ranges are wider than necessary, the map shows the extra tiles.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tileattn.call.facts import AttentionCall
from tileattn.call.inputs import Operands
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.kernels.tilelang.forward.config import HopperConfig
from tileattn.kernels.tilelang.forward.defaults import default
from tileattn.variant.evaluated import values_of
from tileattn.variant.expression import nodes
from tileattn.variant.key import encode, normalize
from tileattn.variant.masks import And, FunctionMask, Mask, Or
from tileattn.variant.program import Program, program
from tileattn.variant.reading import evaluate
from tileattn.variant.sparse.blocks import BlockSparse, blocks_of, for_call
from tileattn.variant.sparse.known_blocks import KnownBlocks
from tileattn.variant.sparse.neighborhood import Neighborhood
from tileattn.viz.checks import check_sizes, check_tile_count, is_integer
from tileattn.viz.style import (
    BLUE,
    LIGHT,
    MOST_LINES,
    ORANGE,
    counted,
    empty_figure,
    heading,
    integer_ticks,
    titled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Tile(IntEnum):
    """What a kernel does with a tile."""

    SKIPPED = 0
    PARTIAL = 1
    FULL = 2


# Of the tiles that a kernel visits, and of those by the mask alone (`mask_tiles.py`).
NAMES = {Tile.FULL: "full: no mask computed", Tile.PARTIAL: "partial: mask computed", Tile.SKIPPED: "skipped"}
NAMES_OF_MASKS = {Tile.FULL: "whole: no mask needed", Tile.PARTIAL: "mixed: mask needed", Tile.SKIPPED: "hidden"}
COLOURS = {Tile.FULL: BLUE, Tile.PARTIAL: ORANGE, Tile.SKIPPED: LIGHT}


@dataclass(frozen=True)
class TileMap:
    """What a kernel does with each tile of one head's scores.

    tiles: int8 (ceil(seqlen_q / block_M), ceil(seqlen_k / block_N)), values of `Tile`. name: of the mask, for a title.
    by_mask: whether these are what the mask does to tiles, from `mask_tiles`, and not the tiles that a kernel visits.
    """

    tiles: Tensor
    seqlen_q: int
    seqlen_k: int
    block_M: int
    block_N: int
    name: str
    by_mask: bool = False

    def count(self, kind: Tile) -> int:
        """The number of tiles of a kind."""
        return int((self.tiles == kind).sum())

    def share(self, kind: Tile) -> float:
        """The fraction of tiles of a kind, 0 to 1."""
        return self.count(kind) / self.tiles.numel()


def tile_map(
    mask: Mask | Any | None,
    seqlen_q: int,
    seqlen_k: int,
    block_M: int = 128,
    block_N: int = 128,
    *,
    causal: bool = False,
    b: int = 0,
    h: int = 0,
    arch: str | None = None,
) -> TileMap:
    """The tiles that a kernel visits.

    Args:
        mask, causal: as `tileattn.attention` takes them.
        seqlen_q, seqlen_k: lengths, 1 or more.
        block_M, block_N: rows of Q, and of K and V, in a tile; `kernel_tiles` returns those of a kernel.
        b, h: the batch element and the query head, from 0, for masks that depend on them.
        arch: the kernel's architecture, such as "sm_80" or "gfx942". For a block of queries that sees no key, gfx942's
            kernel visits no tile; other kernels visit one.

    Raises:
        ValueError: a size is not an integer of at least 1, there are more than 512 tiles on a side, the mask's tensors
            have no such b or h, or there is no kernel for the architecture.
    """
    check_sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_M=block_M, block_N=block_N)
    check_tile_count(seqlen_q, "block_M", block_M)
    check_tile_count(seqlen_k, "block_N", block_N)
    if arch is not None:
        _check_arch(arch)
    normalized, traced, values = variant_of(mask, causal, seqlen_q, seqlen_k, b, h)
    q_lo = torch.arange(0, seqlen_q, block_M) + seqlen_k - seqlen_q
    values |= {"q_lo": q_lo, "q_hi": (q_lo + block_M).clamp(max=seqlen_k) - 1}

    def evaluated(bounds: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        lo, hi = (torch.as_tensor(evaluate(bound, values)).expand(len(q_lo))[:, None] for bound in bounds)
        return lo.clamp(min=0), hi.clamp(max=seqlen_k)

    (kv_lo, kv_hi), (full_lo, full_hi) = evaluated(traced.kv_range), evaluated(traced.full_range)
    tile = torch.arange(-(-seqlen_k // block_N))[None]
    k_lo = tile * block_N
    first = kv_lo // block_N
    end = -(-kv_hi // block_N)
    if arch is None or not arch.startswith("gfx"):
        # These kernels wait for the load of Q inside the loop, so they visit at least one tile, even if fully masked.
        end = torch.maximum(end, first + 1)
    visited = (tile >= first) & (tile < end)
    full = visited & (k_lo >= full_lo) & (k_lo + block_N <= full_hi)
    tiles = (visited.to(torch.int8) + full.to(torch.int8)).cpu()
    return TileMap(tiles, seqlen_q, seqlen_k, block_M, block_N, described(normalized))


def variant_of(
    mask: Mask | Any | None, causal: bool, seqlen_q: int, seqlen_k: int, b: int, h: int
) -> tuple[Mask | None, Program, dict[str, Any]]:
    """A mask, its traced program, and the values of the program's symbols for one head.

    Raises:
        ValueError: the mask's tensors do not fit the lengths or have no such b or h.
    """
    normalized, _ = normalize(mask, None, causal)
    # A map is of any one batch element and head: as many as the blocks have, and query heads that share none.
    shapes = [(max(b + 1, mask.blocks.shape[0]), max(h + 1, mask.blocks.shape[1])) for mask in blocks_of(normalized)]
    most, heads = (max(sizes) for sizes in zip(*shapes)) if shapes else (1, 1)
    in_call = for_call(normalized, lambda: (most, heads, heads, seqlen_q, seqlen_k), lambda: seqlen_k - seqlen_q)
    key, operands = encode(in_call, ())
    traced = program(key)
    batch, heads = _count("b", b, "batch elements", traced, operands), _count("h", h, "heads", traced, operands)
    if normalized is not None:
        normalized.check(batch, heads, seqlen_q, seqlen_k)
    return normalized, traced, {**values_of(operands), "b": b, "h": h, "seqlen_k": seqlen_k}


def described(mask: Mask | None) -> str:
    """A mask as it is written in Python, with "..." for tensors and the names of functions."""
    if mask is None:
        return "full"
    if isinstance(mask, (And, Or)):
        operator = " & " if isinstance(mask, And) else " | "
        # `&` binds closer than `|`, as in Python.
        return operator.join(
            f"({described(side)})" if isinstance(mask, And) and isinstance(side, Or) else described(side)
            for side in (mask.x, mask.y)
        )
    if isinstance(mask, FunctionMask):
        return str(getattr(mask.fn, "__name__", "a function")).replace("<lambda>", "a function")
    if isinstance(mask, KnownBlocks):
        return described(mask.mask)
    if isinstance(mask, (BlockSparse, Neighborhood)):
        return repr(mask)
    fields = [field for field in dataclasses.fields(mask) if field.init]  # type: ignore[arg-type]
    values = ["..." if isinstance(x := getattr(mask, field.name), Tensor) else str(x) for field in fields]
    named = [f"{field.name}={x}" if field.kw_only else x for field, x in zip(fields, values)]
    return f"{type(mask).__name__}({', '.join(named)})"


def _count(letter: str, index: Any, what: str, traced: Program, operands: Operands) -> int:
    """The number of batch elements ("b") or heads ("h") of the mask's tensors; without such tensors, index + 1."""
    names = [tensor.name for tensor in traced.tensors]
    sizes = {
        operands.tensors[names.index(node.args[0])].shape[axis]
        for expr in (traced.allows, *traced.kv_range, *traced.full_range)
        for node in nodes(expr)
        if node.op == "load"
        for axis, subscript in enumerate(node.args[1:])
        if str(subscript) == letter
    }
    # If tensors disagree, the mask's own `check` raises.
    count = max(sizes, default=None)
    if not is_integer(index) or index < 0 or (count is not None and index >= count):
        accepted = "an integer of 0 or more" if count is None else f"one of the mask's {count} {what}, from 0"
        raise ValueError(f"{letter} must be {accepted}, got {index!r}")
    return int(index) + 1 if count is None else count


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")


def kernel_tiles(
    arch: str, head_dim: int, mask: Mask | Any | None = None, *, causal: bool = False, seqlen: int = 4096
) -> tuple[int, int]:
    """block_M and block_N of an architecture's default TileLang forward kernel for bfloat16.

    The thread blocks of a cluster share their loads and visit the tiles of all of them, so block_M counts their rows
    together.

    Args:
        arch: "sm_80", "sm_90a", ...
        head_dim: of q, k and v: a multiple of 8 from 16 to 256.
        mask, causal: as `tileattn.attention` takes them.
        seqlen: the smaller of seqlen_q and seqlen_k; short and long sequences have different kernels.

    Raises:
        ValueError: there is no kernel for the architecture or head dim, or seqlen is below 1.
    """
    _check_arch(arch)
    check_sizes(seqlen=seqlen)
    if not is_integer(head_dim) or not 16 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 from 16 to 256, got {head_dim!r}")
    key, _ = encode(normalize(mask, None, causal)[0], ())
    config = default(AttentionCall(torch.bfloat16, head_dim, head_dim, key, arch=arch), seqlen)
    return config.block_M * (config.cluster if isinstance(config, HopperConfig) else 1), config.block_N


def draw_tiles(tiles: TileMap, title: str | None = None) -> Figure:
    """Draws a head's map: queries downwards, keys to the right, a colour for each kind of tile.

    Args:
        tiles: from `tile_map` or `mask_tiles`.
        title: of the figure; None: the mask's name.
    """
    # The figure's height follows the map's, which is drawn to scale unless one side is far longer.
    ratio = tiles.seqlen_q / tiles.seqlen_k
    figure = empty_figure(5.6, 1.6 + 4.6 * min(max(ratio if _to_scale(tiles) else 1.0, 0.3), 1.5))
    fill_tiles(figure.add_subplot(), tiles)
    visited = 1 - tiles.share(Tile.SKIPPED)
    lengths = f"{counted(tiles.seqlen_q, 'query', 'queries')}, {counted(tiles.seqlen_k, 'key')}"
    sizes = f"tiles of {tiles.block_M} x {tiles.block_N}; {visited:.0%} {'seen' if tiles.by_mask else 'visited'}"
    heading(figure, title or tiles.name, f"{lengths}\n{sizes}")
    names = NAMES_OF_MASKS if tiles.by_mask else NAMES
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=f"{name} ({tiles.count(kind)})") for kind, name in names.items()],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    return figure


def fill_tiles(axes: Axes, tiles: TileMap) -> None:
    """Draws a map into a panel. Tiles that extend beyond the last query or key are cut off there."""
    from matplotlib.colors import ListedColormap

    rows, columns = tiles.tiles.shape
    edges_q = [min(i * tiles.block_M, tiles.seqlen_q) for i in range(rows + 1)]
    edges_k = [min(j * tiles.block_N, tiles.seqlen_k) for j in range(columns + 1)]
    lines: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.6} if max(rows, columns) <= MOST_LINES else {}
    colours = ListedColormap([COLOURS[kind] for kind in sorted(COLOURS)])
    axes.pcolormesh(edges_k, edges_q, tiles.tiles.numpy(), cmap=colours, vmin=0, vmax=2, **lines)
    titled(axes, "", "key", "query row")
    axes.grid(False)
    integer_ticks(axes.xaxis, axes.yaxis)
    axes.margins(0)
    axes.set_xlim(0, tiles.seqlen_k)
    axes.set_ylim(tiles.seqlen_q, 0)
    if _to_scale(tiles):
        axes.set_aspect("equal")


def _to_scale(tiles: TileMap) -> bool:
    return 0.25 <= tiles.seqlen_q / tiles.seqlen_k <= 4
