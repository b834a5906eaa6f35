"""The conformance cases of packed sequences; `cases.py` has the dense ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .call_arguments import ConformanceCase, Structure
from .cases import has_tensors, scores_are_exact
from .shapes import PackedShape

# As drawn from a log-normal distribution: most are short, few are long.
_LONG_TAIL = (38, 7, 131, 3, 64, 20, 513, 1, 11, 96, 5, 26, 250, 2, 15, 47)

PACKED_SHAPES = (
    PackedShape("skewed", 4, 2, (1, 300, 0, 17, 129, 64, 3), (1, 300, 0, 17, 129, 64, 3), behind=5, slack=(0, 9)),
    PackedShape("uniform", 2, 2, (128,) * 3, (128,) * 3, layout="packed"),
    PackedShape("cross", 4, 1, (111, 0, 63, 5, 0), (65, 40, 0, 300, 0), behind=13, slack=(17, 3), layout="island"),
    PackedShape("tail", 2, 1, _LONG_TAIL, _LONG_TAIL, layout="bhsd"),
    PackedShape("decode", 8, 2, (1,) * 9, (500, 1, 64, 65, 0, 300, 129, 7, 128), behind=1, layout="island"),
    PackedShape("reversed", 3, 3, (200, 130, 257), (50, 129, 16), scale=0.3, layout="packed"),
    PackedShape("tiny", 2, 2, tuple(i % 5 for i in range(40)), tuple(i * 7 % 6 for i in range(40)), slack=(1000, 7)),
    PackedShape("two", 6, 2, (127, 129), (383, 129), behind=128, values="large", scale=0.125),
    PackedShape("negative", 4, 2, (63, 65, 1), (120, 64, 1), values="negative", scale=0.125, layout="bhsd"),
    PackedShape("one", 2, 1, (333,), (333,), behind=1, slack=(51, 51)),
    PackedShape("flipped", 2, 2, (60, 0, 100), (90, 10, 30), behind=3, scale=-0.125),
    PackedShape("constant", 2, 1, (70, 100), (30, 140), scale=0.0),
)
# Nothing to do: no sequence, or nothing in any of them.
EMPTY_SHAPES = (
    PackedShape("none", 2, 2, (), (), behind=4),
    PackedShape("empty", 2, 1, (0, 0, 0), (0, 0, 0), slack=(64, 64)),
    PackedShape("keyless", 4, 2, (3, 70), (0, 0), behind=2),
    PackedShape("queryless", 4, 2, (0, 0), (3, 70)),
)


def _structure(
    dtype: str,
    dims: int | tuple[int, int],
    mask: str = "none",
    *scores: str,
    sink: bool = False,
    aligned: bool = True,
) -> Structure:
    head_dim, head_dim_v = (dims, dims) if isinstance(dims, int) else dims
    return Structure(dtype, head_dim, head_dim_v, mask, scores, sink, aligned)


PACKED_STRUCTURES = (
    _structure("bf16", 128, "causal"),
    _structure("fp16", 64),
    _structure("bf16", 64, "causal", sink=True),
    _structure("fp16", 128, "none", sink=True),
    _structure("bf16", 128, "window", "softcap"),
    _structure("fp16", 64, "causal", "alibi_b"),
    _structure("bf16", 256, "causal"),
    _structure("fp16", (192, 128), "causal"),
    _structure("bf16", (64, 128)),
    _structure("bf16", 80, "window_left"),
    _structure("fp16", 96, "causal&documents"),
    _structure("bf16", 128, "prefix_b", "alibi", sink=True),
    _structure("bf16", 64, "documents", "user"),
    _structure("bf16", 128, "none", "bias_bh"),
    _structure("fp16", 64, "causal", "bias"),
    _structure("bf16", 64, "none", "bias_bhk", "softcap"),
    _structure("bf16", 32, "function", "user_tensor"),
    _structure("fp16", 128, "function_empty_rows", "bias_b"),
    _structure("bf16", 64, "prefix|window", sink=True),
    _structure("bf16", 40, "causal", aligned=False),
    _structure("fp16", 128, "none", "alibi", aligned=False),
    _structure("bf16", 72, "window_right", "user"),
    _structure("bf16", 256, "none", "softcap", sink=True),
    _structure("fp16", 16, "function_tensor"),
    _structure("fp32", 64, "causal", "softcap"),
    _structure("fp64", 32, "causal", "alibi"),
    _structure("fp32", 80, "window", "bias_b", sink=True),
    _structure("bf16", 128, "blocks"),
    _structure("fp16", 64, "block_lists", sink=True),
    _structure("bf16", 64, "blocks_kv", "alibi"),
    _structure("fp32", 64, "causal&blocks"),
)
# Of which some probabilities are dropped: other kernels.
DROPPED_STRUCTURES = (
    _structure("bf16", 128, "causal"),
    _structure("fp16", 64, "none", sink=True),
    _structure("bf16", 64, "window", "alibi"),
)
DROPOUT_P = 0.3


def packed_cases(selection: str = "quick") -> list[ConformanceCase]:
    """The cases of packed sequences, without repetition.

    Args:
        selection: "smoke", a dozen; "quick", every structure with one shape; "full", with six, for a GPU.
    """
    if selection not in ("smoke", "quick", "full"):
        raise ValueError(f'selection must be "smoke", "quick" or "full", got {selection!r}')
    each = 6 if selection == "full" else 1
    cases = _cases_of(PACKED_STRUCTURES, each) + _cases_of(DROPPED_STRUCTURES, min(each, 3), DROPOUT_P)
    cases += [ConformanceCase(PACKED_STRUCTURES[i], shape) for i, shape in enumerate(EMPTY_SHAPES)]
    marked = _with_smoke(cases)
    return [case for case in marked if case.smoke or selection != "smoke"]


def _cases_of(structures: Iterable[Structure], each: int, dropout_p: float = 0.0) -> list[ConformanceCase]:
    """Each structure with some shapes that suit it; all shapes come in turn."""
    cases: dict[str, ConformanceCase] = {}
    for i, structure in enumerate(structures):
        # A tensor's dimensions of size 1 are part of the kernel's code.
        suited = [shape for shape in PACKED_SHAPES if not has_tensors(structure) or shape.batch > 1]
        for j in range(each):
            shape = replace(suited[(i + 5 * j) % len(suited)], dropout_p=dropout_p)
            if not structure.aligned:
                shape = replace(shape, layout="unaligned")
            if not scores_are_exact(structure):
                shape = replace(shape, values="normal")
            case = ConformanceCase(structure, shape)
            cases[case.id] = case
    return list(cases.values())


def _with_smoke(cases: Iterable[ConformanceCase]) -> list[ConformanceCase]:
    """Marks a case as `smoke` if its shape, or one of few features, is not in a case before it."""
    met: set[object] = set()
    marked = []
    for case in cases:
        shape = case.shape
        assert isinstance(shape, PackedShape)
        features = {shape.label, case.structure.dtype, case.structure.aligned, shape.dropout_p, shape.layout}
        marked.append(replace(case, smoke=not features <= met))
        met |= features
    return marked
