"""The conformance cases: one set of calls, each of which every backend runs or refuses.

A case has two halves:

- a **structure**: dtype, head dims, code of mask and score modifications, sink, alignment. Each needs a kernel of its
  own, which takes seconds to compile. So there are few: every mask with every score modification, and every head dim
  with each kind of mask in turn.
- a **shape**: batch, heads, lengths, memory layout, magnitude of the values, scale. Shapes need no compilation and vary
  freely.

Every structure is combined with several shapes, and every shape with many structures, in a fixed order. The values are
drawn on the CPU from a generator seeded by the case's id, so that a case is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..call.facts import AttentionCall, is_aligned
from ..call.fp8 import FP8
from ..variant.key import encode
from ..variant.program import with_alignment
from ..variant.sparse.blocks import for_tensors
from .build import build
from .call_arguments import ConformanceCase, Structure
from .shapes import Shape

HEAD_DIMS = (
    (64, 64), (128, 128), (32, 32), (192, 128), (80, 80), (256, 256), (96, 96), (40, 40),
    (160, 160), (64, 128), (16, 16), (192, 192), (72, 72), (248, 248), (24, 24),
)  # fmt: skip

# Rows and columns of the table of variants. Where a cell names several, they take turns along the row (or column).
MASK_ROWS = (
    ("none",),
    ("causal",),
    ("window",),
    ("window_left", "window_right"),
    ("prefix", "prefix_b"),
    ("documents",),
    ("causal&documents",),
    ("prefix|window",),
    ("function", "function_tensor"),
    ("function_empty_rows",),
)
SCORE_COLUMNS = (
    ((),),
    (("softcap",),),
    (("alibi",), ("alibi_b",)),
    (("bias",), ("bias_b",), ("bias_bh",), ("bias_1",), ("bias_bhk",)),
    (("user",), ("user_tensor",)),
    (("alibi", "softcap"),),
    (("bias_bh", "user"), ("bias", "user")),
    (("softcap", "bias_b"), ("softcap", "bias_1")),
)

SHAPES = (
    Shape(2, 4, 2, 111, 111, "packed"),
    Shape(2, 2, 2, 63, 63, "bhsd"),
    Shape(1, 4, 1, 128, 128, values="large", scale=0.125),
    Shape(2, 8, 2, 1, 111, "island"),
    Shape(2, 2, 2, 1025, 1025),
    Shape(3, 6, 2, 111, 128, "expanded"),
    Shape(2, 4, 4, 128, 63, "island"),
    Shape(2, 2, 2, 111, 63, "bhsd", values="negative", scale=0.125),
    Shape(2, 3, 3, 63, 1025, "bhsd"),
    Shape(1, 1, 1, 1, 1),
    Shape(2, 4, 1, 257, 257, "island", values="large", scale=0.125),
    Shape(1, 2, 1, 1025, 111, "packed", scale=0.3),
    Shape(2, 6, 3, 65, 300, "expanded", scale=0.05),
    Shape(1, 8, 1, 1, 1025, "packed"),
    Shape(2, 16, 2, 7, 500),
    Shape(3, 2, 1, 128, 128, "bhsd", values="negative", scale=0.125),
    Shape(1, 2, 2, 300, 1),
    Shape(2, 2, 2, 63, 111, "packed", scale=-0.125),
    Shape(2, 2, 1, 111, 65, scale=0.0),
)
# Nothing to do: no batch element, no query, no key.
EMPTY_SHAPES = (Shape(0, 2, 2, 63, 63), Shape(2, 2, 1, 0, 63), Shape(2, 4, 2, 63, 0))


def _table(dtypes: tuple[str, ...]) -> list[Structure]:
    """Every mask with every score modification; dtype, head dims, sink and alignment in turn."""
    structures: list[Structure] = []
    for row, masks in enumerate(MASK_ROWS):
        for column, scores in enumerate(SCORE_COLUMNS):
            count = len(structures)
            # 7 and 15 have no common factor: along a row and along a column, all head dims come.
            head_dim, head_dim_v = HEAD_DIMS[(7 * count + row) % len(HEAD_DIMS)]
            structures.append(
                Structure(
                    dtype=dtypes[(row + column) % len(dtypes)],
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    mask=masks[column % len(masks)],
                    scores=scores[row % len(scores)],
                    sink=count % 3 == 1,
                    aligned=count % 5 != 4,
                )
            )
    return structures


def _plain(dtypes: tuple[str, ...], masks: tuple[str, ...] = ("none", "causal")) -> list[Structure]:
    """Every head dim, full and causal, with nothing else."""
    return [
        Structure(dtypes[(i + j) % len(dtypes)], *dims, mask, (), sink=False, aligned=True)
        for i, mask in enumerate(masks)
        for j, dims in enumerate(HEAD_DIMS)
    ]


def has_tensors(structure: Structure) -> bool:
    """Whether a mask or modification carries a tensor. Its dimensions of size 1 are part of the kernel's code."""
    names = (structure.mask, *structure.scores)
    return any(
        part in name for name in names for part in ("_b", "documents", "padding", "block", "tensor", "alibi", "bias")
    )


def scores_are_exact(structure: Structure) -> bool:
    """Whether scores that are exact before the modifications still are behind them, or saturate."""
    return structure.scores in ((), ("softcap",))


def _cases_of(structures: list[Structure], shapes_each: int) -> list[ConformanceCase]:
    """Each structure with some shapes that suit it; all shapes come in turn."""
    cases: dict[str, ConformanceCase] = {}
    for i, structure in enumerate(structures):
        suited = [shape for shape in SHAPES if not has_tensors(structure) or 1 not in _sizes(shape)]
        for j in range(shapes_each):
            case = _fitted(structure, suited[(3 * i + 5 * j) % len(suited)])
            cases[case.id] = case
    return list(cases.values())


def _sizes(shape: Shape) -> tuple[int, ...]:
    return shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k


def _fitted(structure: Structure, shape: Shape) -> ConformanceCase:
    if not structure.aligned:
        shape = replace(shape, layout="unaligned")
    if not scores_are_exact(structure):
        shape = replace(shape, values="normal")
    return ConformanceCase(structure, shape)


def _extremes() -> list[ConformanceCase]:
    """Sizes of 0, and of 1 where tensors have dimensions of them."""
    structures = [
        Structure("bf16", 64, 64, "none", (), sink=False, aligned=True),
        Structure("fp16", 128, 128, "causal", ("softcap",), sink=True, aligned=True),
    ]
    tensors = [
        Structure("bf16", 64, 64, "documents", ("alibi",), sink=True, aligned=True),
        Structure("fp16", 128, 128, "prefix_b", ("bias_bh",), sink=False, aligned=True),
    ]
    ones = [Shape(1, 1, 1, 1, 1), Shape(1, 2, 1, 1, 111, "island"), Shape(1, 1, 1, 63, 63)]
    return [ConformanceCase(structure, shape) for structure in structures for shape in EMPTY_SHAPES] + [
        ConformanceCase(structure, shape) for structure in tensors for shape in ones
    ]


# Biases in memory that a kernel may copy tile by tile (tileattn.variant.tile_loads), and one that it may not.
TILE_STRUCTURES = (
    Structure("bf16", 128, 128, "causal", ("bias_tiles_bf16_b",), sink=False, aligned=True),
    Structure("bf16", 64, 64, "none", ("bias_tiles",), sink=False, aligned=True),
    Structure("fp16", 128, 128, "none", ("bias_tiles_fp16_bh",), sink=True, aligned=True),
    Structure("fp16", 128, 128, "causal", ("bias_tiles_1",), sink=False, aligned=True),
    Structure("bf16", 64, 64, "causal", ("bias_tiles_fp16_bh",), sink=False, aligned=True),
    Structure("bf16", 96, 96, "window", ("bias_tiles_bf16_b", "softcap"), sink=True, aligned=True),
    Structure("bf16", 80, 80, "causal&documents", ("alibi", "bias_tiles"), sink=False, aligned=True),
    Structure("bf16", 128, 128, "none", ("user_tiles_tensor",), sink=False, aligned=True),
    Structure("bf16", 64, 64, "function_empty_rows", ("bias", "bias_tiles_1"), sink=False, aligned=True),
    Structure("bf16", 192, 128, "causal", ("bias_tiles",), sink=False, aligned=True),
    Structure("fp16", 64, 64, "causal", ("bias_unaligned",), sink=False, aligned=True),
    Structure("bf16", 40, 40, "prefix", ("bias_tiles",), sink=False, aligned=False),
    Structure("fp8", 128, 128, "causal", ("bias_tiles_bf16_b",), sink=False, aligned=True),
    Structure("fp8", 64, 64, "none", ("bias_tiles",), sink=False, aligned=True),
)

# Beside the table, as it came later: padding skips tiles by bounds of each batch element.
PADDING_STRUCTURES = (
    Structure("bf16", 128, 128, "padding", (), sink=False, aligned=True),
    Structure("fp16", 64, 64, "causal&padding", (), sink=True, aligned=True),
    Structure("bf16", 64, 64, "padding", ("alibi", "softcap"), sink=False, aligned=True),
    Structure("fp16", 192, 128, "padding", ("bias_b",), sink=False, aligned=True),
    Structure("bf16", 40, 40, "causal&padding", ("user",), sink=False, aligned=False),
    Structure("fp32", 64, 64, "padding", (), sink=True, aligned=True),
    Structure("fp8", 128, 128, "causal&padding", (), sink=False, aligned=True),
)

# Beside the table as well: blocks of each kind, whose size is a constant of the kernel.
BLOCK_STRUCTURES = (
    Structure("bf16", 128, 128, "blocks", (), sink=False, aligned=True),
    Structure("fp16", 64, 64, "blocks_kv", (), sink=False, aligned=True),
    Structure("bf16", 64, 64, "block_lists", ("softcap",), sink=True, aligned=True),
    Structure("fp16", 128, 128, "causal&blocks", (), sink=False, aligned=True),
    Structure("bf16", 64, 64, "blocks|window", ("alibi",), sink=False, aligned=True),
    Structure("fp32", 64, 64, "blocks_kv", ("bias_bh",), sink=False, aligned=True),
    Structure("fp8", 128, 128, "causal&blocks", (), sink=False, aligned=True),
)

# Of every kind some, not all with all: masks and modifications are the same code as in 16 bits, on float32 scores.
FP8_STRUCTURES = (
    Structure("fp8", 128, 128, "none", (), sink=False, aligned=True),
    Structure("fp8", 64, 64, "causal", (), sink=False, aligned=True),
    Structure("fp8", 256, 256, "causal", (), sink=True, aligned=True),
    Structure("fp8", 64, 64, "window", ("softcap",), sink=False, aligned=True),
    Structure("fp8", 128, 128, "causal", ("alibi",), sink=True, aligned=True),
    Structure("fp8", 256, 256, "none", (), sink=False, aligned=True),
    Structure("fp8", 64, 64, "none", (), sink=True, aligned=True),
    Structure("fp8", 128, 128, "causal&documents", ("bias_bh",), sink=False, aligned=True),
    Structure("fp8", 192, 128, "causal", (), sink=False, aligned=True),
    Structure("fp8", 128, 128, "causal", (), sink=False, aligned=True),
    Structure("fp8", 256, 256, "window_left", ("softcap",), sink=False, aligned=True),
    Structure("fp8", 80, 80, "function_empty_rows", ("user",), sink=False, aligned=True),
    Structure("fp8", 96, 96, "prefix|window", (), sink=True, aligned=True),
    Structure("fp8", 64, 128, "prefix_b", ("user_tensor",), sink=False, aligned=True),
    Structure("fp8", 16, 16, "none", ("alibi", "softcap"), sink=False, aligned=True),
    # What a kernel may want otherwise: rows of 16 bytes, head dims of them.
    Structure("fp8", 128, 128, "causal", (), sink=False, aligned=False),
    Structure("fp8", 40, 40, "none", (), sink=False, aligned=False),
)  # fmt: skip


def _fp8_cases(shapes_each: int) -> list[ConformanceCase]:
    nothing = [ConformanceCase(FP8_STRUCTURES[i], shape) for i, shape in enumerate(EMPTY_SHAPES)]
    return _cases_of(list(FP8_STRUCTURES), shapes_each) + nothing


def conformance_cases(selection: str = "quick") -> list[ConformanceCase]:
    """The cases, without repetition.

    Args:
        selection: "smoke": a few dozen cases in which every feature occurs. "quick": every structure with two shapes,
            and float32 and float64. "full": every structure of 16 or 8 bits with eight shapes, for a GPU.
    """
    half, single, double = ("bf16", "fp16"), ("fp32",), ("fp64",)
    structures = _table(half) + _plain(half)
    cases = _cases_of(structures, 8 if selection == "full" else 2) + _extremes()
    cases += _cases_of(list(TILE_STRUCTURES), 8 if selection == "full" else 2)
    cases += _cases_of(list(PADDING_STRUCTURES), 8 if selection == "full" else 2)
    cases += _cases_of(list(BLOCK_STRUCTURES), 8 if selection == "full" else 2)
    cases += _cases_of(_table(single), 1) + _cases_of(_plain(single, ("causal",)), 1)
    cases += _cases_of(_table(double)[::7], 1)
    cases += _fp8_cases(8 if selection == "full" else 2)
    cases = _with_smoke({case.id: case for case in cases}.values())
    if selection not in ("smoke", "quick", "full"):
        raise ValueError(f'selection must be "smoke", "quick" or "full", got {selection!r}')
    return [case for case in cases if case.smoke or selection != "smoke"]


def _with_smoke(cases: Iterable[ConformanceCase]) -> list[ConformanceCase]:
    """Marks a case as `smoke` if it has a feature that none before it has."""
    met: set[object] = set()
    marked = []
    for case in cases:
        structure, shape = case.structure, case.shape
        group = "MHA" if shape.heads == shape.kv_heads else "MQA" if shape.kv_heads == 1 else "GQA"
        features = {
            structure.dtype, structure.mask, structure.sink, structure.scores, shape.layout, shape.values, group,
            (structure.head_dim, structure.head_dim_v), (shape.seqlen_q, shape.seqlen_k),
        }  # fmt: skip
        if case.dtype == FP8:  # whose kernels are others: what they have in 16 bits is met again
            features = {("fp8", structure.mask), ("fp8", structure.head_dim), ("fp8", structure.aligned), group}
        marked.append(replace(case, smoke=not features <= met))
        met |= features
    return marked


def distinct_calls(cases: Iterable[ConformanceCase], arch: str = "cpu") -> dict[AttentionCall, ConformanceCase]:
    """One case for each distinct `AttentionCall` on an architecture: the kernels to compile.

    Cases are built on the "meta" device; nothing is computed.
    """
    calls: dict[AttentionCall, ConformanceCase] = {}
    for case in cases:
        arguments = build(case, "meta")
        q, k, v = arguments.q, arguments.k, arguments.v
        variant, operands = encode(for_tensors(arguments.mask, q, k), arguments.score_mods)
        call = AttentionCall(
            dtype=case.dtype,
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            variant=with_alignment(variant, operands.tensors),
            sink=arguments.sink is not None,
            aligned=all(is_aligned(x) for x in (q, k, v)),
            arch=arch,
        )
        calls.setdefault(call, case)
    return calls
