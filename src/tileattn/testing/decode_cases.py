"""The conformance cases of `decode`; `cases.py` has those of `attention`, and says what a structure and a shape are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..call.decoding import FixedSplit, Splits
from .call_arguments import Structure
from .cases import has_tensors, scores_are_exact
from .decode_arguments import DecodeCase, DecodeShape, DecodeStructure

# Lengths at and around the ends of tiles and pages, 0 and 1; of one query, and of some. A sequence may have fewer keys
# than the call has queries: the first of these stand before its first key.
DENSE_LENGTHS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("ragged", 1, (300, 1, 64, 65, 0, 500, 129, 7, 128)),
    ("tiles", 1, (255, 63, 64, 65, 127, 128, 129, 257)),
    ("two", 2, (129, 2, 1, 0, 193)),
    ("long", 1, (1025,)),
    ("four", 4, (257, 5, 64, 3, 130)),
    ("sixteen", 16, (300, 16, 17, 15, 0, 145)),
    ("three", 3, (63, 1023, 66)),
    ("seven", 7, (511, 7, 8, 256)),
    ("eight", 8, (128, 8, 513)),
    ("five", 5, (321, 191, 1)),
    ("ones", 1, (1, 1, 0, 1)),
    ("six", 6, (71, 400, 192)),
    ("thirteen", 13, (13, 250, 66)),
)
# Chunks of prefill beside rows that decode, sequences without a query or without a key.
PACKED_LENGTHS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("mixed", (1, 63, 1, 0, 1, 130), (300, 63, 65, 40, 0, 257)),
    ("chunks", (65, 128, 1), (321, 128, 513)),
    ("decoding", (1,) * 7, (127, 1, 500, 64, 0, 129, 255)),
    ("drafts", (5, 1, 3, 8, 2, 16), (129, 300, 2, 64, 65, 511)),
    ("beside9", (1, 9, 1), (200, 9, 385)),
    ("early", (20, 1, 7), (5, 257, 0)),
    ("one", (33,), (399,)),
)
# Groups of 1 to 16, and of 128 query heads to a key head.
HEADS = (
    (8, 2), (4, 4), (6, 1), (14, 2), (16, 1), (9, 3), (10, 2), (128, 1), (16, 2), (33, 3), (30, 2), (4, 2), (9, 1),
    (20, 2), (12, 1), (26, 2), (14, 1), (3, 3), (8, 1),
)  # fmt: skip
PAGE_SIZES = {0: (0,), 1: (1, 3), 2: (2,), 16: (16, 48, 16), 64: (64, 256)}
LAYOUTS = ("own", "stacked", "heads_first", "in_page", "flat", "in_row")
FREE_SPLITS: tuple[Splits, ...] = (None, 1, 7, None, 64, 2, None, 3)
SCALES = (None, None, 0.3, None, -0.125)


def _structure(
    dtype: str, dims: int | tuple[int, int], pages: int = 0, mask: str = "none", *scores: str, **flags: bool | int
) -> DecodeStructure:
    head_dim, head_dim_v = (dims, dims) if isinstance(dims, int) else dims
    return DecodeStructure(dtype, head_dim, head_dim_v, pages, mask, scores, **flags)  # type: ignore[arg-type]


# The plain calls of servers, on each kind of page, one by one and packed, split anywhere and at fixed keys.
PLAIN = (
    _structure("bf16", 128, 16),
    _structure("bf16", 128),
    _structure("bf16", 64, 64),
    _structure("fp16", 128, 1),
    _structure("fp16", 64, 2),
    _structure("bf16", 128, 16, packed=True),
    _structure("fp16", 64, packed=True),
    _structure("bf16", 128, 64, fixed=128),
    _structure("fp16", 64, fixed=128),
    _structure("bf16", 128, 16, packed=True, fixed=256),
    _structure("fp16", 64, 1, fixed=128),
    _structure("fp16", 128, 64, packed=True),
    _structure("bf16", 64, 1, packed=True),
    _structure("bf16", 128, 2, packed=True, fixed=128),
)
# Every head dim, in turn contiguous and on pages.
HEAD_DIMS = (
    _structure("fp16", 16, 16),
    _structure("bf16", 24),
    _structure("fp16", 32, 64),
    _structure("bf16", 40, 1),
    _structure("fp16", 72, 16),
    _structure("bf16", 80),
    _structure("bf16", 96, 2),
    _structure("fp16", 160, 16),
    _structure("bf16", 192, 64),
    _structure("fp16", 248),
    _structure("bf16", 256, 16),
    _structure("bf16", 256, packed=True),
    _structure("fp16", 256, 64, fixed=128),
    _structure("bf16", (192, 128), 16),
    _structure("fp16", (64, 128)),
    _structure("bf16", (128, 64), 1),
    _structure("bf16", (192, 128), packed=True),
)
# Masks, modifications, sinks and trees.
VARIANTS = (
    _structure("bf16", 128, 16, sink=True),
    _structure("fp16", 64, 0, sink=True, packed=True),
    _structure("bf16", 128, 16, "window_left"),
    _structure("fp16", 64, 0, "window"),
    _structure("bf16", 64, 1, "window_left", sink=True, packed=True),
    _structure("bf16", 128, 64, "window", fixed=128),
    _structure("fp16", 128, 2, "window_left", "softcap"),
    _structure("bf16", 128, 16, "none", "softcap"),
    _structure("fp16", 64, 0, "none", "softcap", packed=True, fixed=128),
    _structure("bf16", 64, 16, "none", "alibi"),
    _structure("fp16", 128, 0, "none", "alibi_b", packed=True),
    _structure("bf16", 128, 64, "none", "bias_bh"),
    _structure("fp16", 64, 16, "none", "bias_bhk", "softcap"),
    _structure("bf16", 64, 0, "none", "bias", packed=True),
    _structure("bf16", 128, 16, "none", "user"),
    _structure("fp16", 64, 64, "function", "user_tensor"),
    _structure("bf16", 96, 16, "function_tensor", sink=True),
    _structure("fp16", 128, 0, "function_empty_rows", "user"),
    _structure("bf16", 64, 2, "function_empty_rows", packed=True),
    _structure("bf16", 128, 16, "prefix_b", causal=False),
    _structure("fp16", 64, 0, "prefix|window", causal=False, packed=True),
    _structure("bf16", 64, 64, "documents"),
    _structure("fp16", 128, 16, "documents", "alibi", causal=False, sink=True),
    _structure("bf16", 128, 0, "padding"),
    _structure("fp16", 64, 16, "padding", "bias_b", packed=True),
    _structure("bf16", 128, 16, causal=False),
    _structure("fp16", 64, 0, "none", "softcap", causal=False, sink=True),
    _structure("bf16", 128, 16, tree=True),
    _structure("fp16", 64, 0, tree=True),
    _structure("bf16", 64, 64, tree=True, packed=True),
    _structure("bf16", 128, 1, tree=True, sink=True, fixed=128),
    _structure("fp16", 128, 16, "window_left", "alibi", tree=True),
    _structure("fp16", (192, 128), 64, "window_left", "softcap", sink=True),
    _structure("bf16", 128, 16, "blocks"),
    _structure("fp16", 64, 0, "block_lists", causal=False, sink=True),
    _structure("bf16", 64, 64, "blocks_kv", packed=True),
)
# Rows that a kernel cannot copy by 16 bytes.
UNALIGNED = (
    _structure("bf16", 64, 16, aligned=False),
    _structure("fp16", 128, 0, aligned=False, packed=True),
    _structure("bf16", 40, 2, "window_left", "softcap", aligned=False),
    _structure("fp16", 64, 0, "none", "alibi", aligned=False, fixed=128),
)
# What GPU kernels may refuse.
WIDE = (
    _structure("fp32", 64, 16),
    _structure("fp64", 32, 0, "window_left", "alibi"),
    _structure("fp32", 80, 0, "none", "softcap", packed=True, sink=True),
    _structure("fp64", 64, 1, tree=True),
    _structure("fp32", 128, 64, fixed=128),
    _structure("fp32", 20, 16),
    _structure("bf16", (8, 300)),
)  # fmt: skip
# Nothing to do: no sequence, no query, no key.
EMPTY = (
    DecodeShape("none", (), (), 4, 2, slack=5),
    DecodeShape("queryless", (0, 0), (5, 64), 4, 2),
    DecodeShape("keyless", (1, 1, 1), (0, 0, 0), 4, 1, slack=40),
    DecodeShape("roomless", (2,), (0,), 4, 4),
    DecodeShape("none", (), (), 4, 2, page=16, packed=True, behind=3),
    DecodeShape("keyless", (3, 0, 40), (0, 0, 0), 4, 1, page=16, packed=True, slack=7),
    DecodeShape("queryless", (0, 0), (5, 64), 4, 2, page=16, packed=True),
)


def decode_cases(selection: str = "quick") -> list[DecodeCase]:
    """The cases, without repetition.

    Args:
        selection: "smoke": some that have every feature once. "quick": every structure with one or two shapes.
            "full": every structure of 16 bits with six shapes, for a GPU.
    """
    if selection not in ("smoke", "quick", "full"):
        raise ValueError(f'selection must be "smoke", "quick" or "full", got {selection!r}')
    each = 6 if selection == "full" else 1
    cases = _cases_of(PLAIN, max(each, 2)) + _cases_of(HEAD_DIMS, max(1, each - 1)) + _cases_of(VARIANTS, each)
    cases += _cases_of(UNALIGNED, each) + _cases_of(WIDE, 1) + _exact_scores(each) + _empty()
    marked = _with_smoke({case.id: case for case in cases}.values())
    return [case for case in marked if case.smoke or selection != "smoke"]


def _cases_of(structures: Sequence[DecodeStructure], each: int) -> list[DecodeCase]:
    """Each structure with some shapes; lengths, heads, page sizes, layouts and splits come in turn."""
    return [
        DecodeCase(structure, _shape(structure, 3 * number + 9 * turn))
        for number, structure in enumerate(structures)
        for turn in range(each)
    ]


def _shape(structure: DecodeStructure, turn: int) -> DecodeShape:
    """The shape of a structure at a turn. The numbers of lengths, heads, splits and layouts have no common factor."""
    if structure.packed:
        packings = [each for each in PACKED_LENGTHS if _suits(structure, (each[0], max(each[1]), each[2]))]
        lengths, lengths_q, lengths_k = packings[turn % len(packings)]
    else:
        dense = [each for each in DENSE_LENGTHS if _suits(structure, each)]
        lengths, rows, lengths_k = dense[turn % len(dense)]
        lengths_q = (rows,) * len(lengths_k)
    heads, kv_heads = HEADS[turn % len(HEADS)]
    sizes = PAGE_SIZES[structure.pages]
    size = sizes[turn // 2 % len(sizes)]
    layout = LAYOUTS[turn % (len(LAYOUTS) - 1)] if structure.aligned else "unaligned"
    if layout == "in_page" and not size:
        layout = "in_row"  # contiguous caches have no pages
    return DecodeShape(
        lengths,
        lengths_q,
        lengths_k,
        heads,
        kv_heads,
        page=size,
        packed=structure.packed,
        layout=layout,
        splits=FixedSplit(structure.fixed) if structure.fixed else FREE_SPLITS[turn % len(FREE_SPLITS)],
        slack=(0, 9, 130)[turn // 7 % 3],
        behind=5 * (turn // 5 % 2) if structure.packed else 0,
        shared=bool(size) and turn // 3 % 2 == 1,
        scale=SCALES[turn // 5 % len(SCALES)],
    )


def _suits(structure: DecodeStructure, lengths: tuple[str, int, tuple[int, ...]]) -> bool:
    """Whether a tensor of the variant has no dimension of 1, which is part of a kernel's code; a tree has branches."""
    _, rows, lengths_k = lengths
    if structure.tree:
        return rows > 1
    tensors = has_tensors(Structure("", 0, 0, structure.mask, structure.scores, False, True))
    return not tensors or len(lengths_k) > 1


def _exact_scores(each: int) -> list[DecodeCase]:
    """Scores of up to a thousand, and scores far below 0, where a padded score of 0 would dominate."""
    found = []
    for number, structure in enumerate((PLAIN[0], PLAIN[1], PLAIN[3], PLAIN[8], PLAIN[5], VARIANTS[7], VARIANTS[4])):
        assert scores_are_exact(Structure("", 0, 0, structure.mask, structure.scores, False, True))
        for turn in range(min(each, 2)):
            shape = _shape(structure, 4 * number + 9 * turn)
            values = ("negative", "large")[(number + turn) % 2]
            found.append(DecodeCase(structure, replace(shape, values=values, scale=0.125)))
    return found


def _empty() -> list[DecodeCase]:
    packed, dense = (
        next(x for x in PLAIN if x.packed == packed and x.pages == pages) for packed, pages in ((True, 16), (False, 0))
    )
    sink, packed_sink = _structure("bf16", 128, 0, sink=True), _structure("fp16", 64, 16, packed=True, sink=True)
    found = [DecodeCase(packed if shape.packed else dense, shape) for shape in EMPTY]
    return [
        *found,
        DecodeCase(sink, EMPTY[2]),
        DecodeCase(packed_sink, EMPTY[4]),
        DecodeCase(packed_sink, replace(EMPTY[5], behind=9)),
    ]


def _with_smoke(cases: Iterable[DecodeCase]) -> list[DecodeCase]:
    """Marks a case as `smoke` if it has a feature that none before it has."""
    met: set[object] = set()
    marked = []
    for case in cases:
        structure, shape = case.structure, case.shape
        features: set[object] = {
            structure.dtype, structure.mask, structure.scores, structure.pages, shape.layout, shape.values,
            ("tree", structure.tree), ("sink", structure.sink), ("packed", structure.packed), shape.lengths,
            ("fixed", structure.fixed), ("aligned", structure.aligned), ("causal", structure.causal),
        }  # fmt: skip
        marked.append(replace(case, smoke=not features <= met))
        met |= features
    return marked
