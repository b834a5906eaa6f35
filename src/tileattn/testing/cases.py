"""The conformance cases: one selection of calls that every backend runs or refuses.

A case has two halves:

- a **structure**: dtype, head dims, code of mask and score modifications, sink, alignment. A kernel is compiled for it,
  in seconds, so there are few: every mask with every score modification, every head dim with every mask kind in turn.
- a **shape**: batch, heads, lengths, memory layout, magnitude of the values, scale. They cost nothing, and vary freely.

Every structure meets several shapes, and every shape many structures, in a fixed order without randomness. Values are
drawn from a generator seeded by the case's id, on the CPU, so that a case is the same everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call.facts import AttentionCall, Packed, is_aligned
from ..call.fp8 import FP8, Descales, accumulator, output_dtype, quantize_fp8
from ..variant import math as tm
from ..variant.key import encode, restore, with_alignment
from ..variant.masks import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow
from ..variant.scores import ALiBi, Bias, SoftCap
from .shapes import PackedShape, Shape

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": FP8,
}

ScoreFn = Callable[..., Any]
AnyShape = Shape | PackedShape
DROPOUT_SEED = 5


@dataclass(frozen=True)
class Structure:
    """What a kernel is compiled for. `mask` is a name of `MASKS`, `scores` are names of `SCORES`."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    scores: tuple[str, ...]
    sink: bool
    aligned: bool

    @property
    def name(self) -> str:
        """Short and readable."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        flags = ["sink"] * self.sink + ["unaligned"] * (not self.aligned)
        return "-".join([self.dtype, dims, self.mask, *self.scores, *flags])


@dataclass(frozen=True)
class ConformanceCase:
    """One call to attention. `smoke` cases are a small subset that still meets every feature once."""

    structure: Structure
    shape: AnyShape
    smoke: bool = False

    @property
    def id(self) -> str:
        """Short, readable and unique."""
        return f"{self.structure.name}-{self.shape.name}"

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return DTYPES[self.structure.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of o."""
        return output_dtype(self.dtype)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a case's call. q, k, v are bshd views of whatever memory the case's layout has."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score_mods: tuple[ScoreFn, ...]
    sink: Tensor | None
    scale: float | None
    layout: str
    """What `attention(layout=...)` is to be told: "bhsd" where the memory is, so that it is given the original."""
    descales: Descales | None = None
    """Of an fp8 case."""
    packed: Packed | None = None
    """Of a packed case, whose tensors have one batch element."""
    dropout_p: float = 0.0
    """With the seed that the call draws after ``torch.manual_seed(DROPOUT_SEED)``."""

    @property
    def named_descales(self) -> dict[str, Tensor]:
        """As keyword arguments; none but for fp8."""
        return {} if self.descales is None else {f"{name}_descale": x for name, x in self.descales._asdict().items()}

    def leaves(self) -> dict[str, Tensor]:
        """What has a gradient, as leaves of autograd's graph, by the names of their gradients.

        These are q, k, v, the sink, and what the score modifications carry in floating point. They require grad
        from now on.
        """
        _, operands = encode(None, self.score_mods)
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dsink": self.sink}
        named |= {f"dt{i}": x for i, x in enumerate(operands.tensors) if x.dtype.is_floating_point}
        return {name: x.requires_grad_() for name, x in named.items() if x is not None}

    def double(self) -> tuple[Arguments, dict[str, Tensor]]:
        """The same call in float64, for the oracle, and its leaves."""
        found = {name: x.detach().double().requires_grad_() for name, x in self.leaves().items()}
        key, operands = encode(None, self.score_mods)
        operands.tensors = [found.get(f"dt{i}", x) for i, x in enumerate(operands.tensors)]
        _, score_mods = restore(key, operands, torch.float64)
        q, k, v = found["dq"], found["dk"], found["dv"]
        return replace(self, q=q, k=k, v=v, sink=found.get("dsink"), score_mods=score_mods), found

    @property
    def positional(self) -> tuple[Any, ...]:
        """(q, k, v, mask, score_mods, sink, scale, *descales), as the oracle, eager, and the reference take them."""
        descales = (None, None, None) if self.descales is None else self.descales
        return (self.q, self.k, self.v, self.mask, self.score_mods, self.sink, self.scale, *descales)


# --- Memory layouts: (value on the CPU, device) -> the same values, in some memory of the device ----------------------


def _bshd(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device)


def _bhsd(x: Tensor, device: torch.device) -> Tensor:
    return x.transpose(1, 2).contiguous().to(device).transpose(1, 2)


def _packed(x: Tensor, device: torch.device) -> Tensor:
    """The middle of three tensors of a (batch, seqlen, 3, heads, dim) projection."""
    return _cut(x, device, (*x.shape[:2], 3, *x.shape[2:]), (..., 1, slice(None), slice(None)))


def _expanded(x: Tensor, device: torch.device) -> Tensor:
    """Batch elements that share memory: stride 0."""
    return x[:1].to(device).expand(x.shape) if x.shape[0] else x.to(device)


def _island(x: Tensor, device: torch.device) -> Tensor:
    """A part of every dimension of a larger tensor, NaN around it: what is read beyond the edges shows."""
    batch, seqlen, heads, dim = x.shape
    margin = max(8, 16 // x.element_size())  # rows stay aligned
    inner = (slice(1, 1 + batch), slice(8, 8 + seqlen), slice(1, 1 + heads), slice(margin, margin + dim))
    return _cut(x, device, (batch + 2, seqlen + 16, heads + 2, dim + 2 * margin), inner)


def _unaligned(x: Tensor, device: torch.device) -> Tensor:
    """Rows that begin at odd elements."""
    return _cut(x, device, (*x.shape[:3], x.shape[3] + 1), (..., slice(1, None)))


def _cut(x: Tensor, device: torch.device, shape: Iterable[int], index: tuple[Any, ...]) -> Tensor:
    """`x` as a view, by `index`, of a tensor of `shape` that is NaN elsewhere."""
    view = torch.full(tuple(shape), torch.nan, dtype=x.dtype, device=device)[index]
    return view.copy_(x)


LAYOUTS: dict[str, Callable[[Tensor, torch.device], Tensor]] = {
    "bshd": _bshd,
    "bhsd": _bhsd,
    "packed": _packed,
    "expanded": _expanded,
    "island": _island,
    "unaligned": _unaligned,
}


# --- Values, masks and score modifications ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draw:
    """Random tensors for one case: drawn on the CPU, returned on the device. For "meta" nothing is drawn."""

    generator: torch.Generator
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """float32, standard normal."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self.generator).to(self.device)

    def integers(self, count: int, *shape: int) -> Tensor:
        """int64, 0 to count - 1."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(count, shape, generator=self.generator).to(self.device)

    def queries_or_keys(self, kind: str, shape: tuple[int, ...], sign: int) -> Tensor:
        """float32 on the CPU (or "meta"), see `Shape.values`; `sign` is that of the "negative" values."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        if kind == "normal":
            return torch.randn(shape, generator=self.generator)
        if kind == "large":
            return 16.0 * (torch.randint(3, shape, generator=self.generator) - 1)
        return sign * 16.0 * torch.randint(2, shape, generator=self.generator)


def _in_fp8(draw: _Draw, exact: bool, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[list[Tensor], Descales]:
    """q, k, v (bshd, float32, on the CPU) in fp8, and descales on the device, which differ much from head to head.

    exact: by powers of two, so that q and k, small integers times 16, lose nothing; else by :func:`quantize_fp8`.
    """
    batch, _, kv_heads, _ = tensors[1].shape
    factors = [torch.rand((batch, kv_heads), generator=draw.generator).to(tensors[1].device) + 0.5 for _ in tensors]
    if exact:
        descales = [torch.exp2((8 * factor).round() - 8) for factor in factors]  # 2^-4 to 2^4
        quantized = [(x / _by_head(d, x)).to(FP8) for x, d in zip(tensors, descales)]
    else:
        *quantized, q_descale, k_descale, v_descale = quantize_fp8(
            *(x * _by_head(factor, x) for x, factor in zip(tensors, factors))
        )
        descales = [q_descale, k_descale, v_descale]
    return quantized, Descales(*(x.to(draw.device) for x in descales))


def _by_head(x: Tensor, of: Tensor) -> Tensor:
    """(batch, kv_heads) shaped to broadcast to a tensor (batch, seqlen, heads, dim)."""
    return x.repeat_interleave(of.shape[2] // x.shape[1], dim=1)[:, None, :, None]


def _window(draw: _Draw, shape: AnyShape) -> Mask:
    sizes = ((0, 0), (37, 0), (16, 50), (200, 5), (3, 300))
    return SlidingWindow(*sizes[(shape.seqlen_q + shape.seqlen_k) % len(sizes)])


def _prefix(draw: _Draw, shape: AnyShape) -> Mask:
    return PrefixLM(shape.seqlen_k // 3)


def _documents(draw: _Draw, batch: tuple[int, ...], shape: AnyShape) -> Documents:
    """About four documents to a sequence, of any lengths."""
    begins = draw.integers(max(1, shape.seqlen_k // 4), *batch, shape.seqlen_k) == 0
    return Documents(begins.cumsum(-1).to(torch.int32))


def _padding(draw: _Draw, shape: AnyShape) -> KeyPadding:
    """On the right, on the left and, in every third batch element, between; a second one has no key at all."""
    if draw.device.type == "meta":
        return KeyPadding(torch.empty((shape.batch, shape.seqlen_k), dtype=torch.bool, device="meta"))
    length = draw.integers(shape.seqlen_k + 1, shape.batch, 1)
    length[3:4] = 0
    places = torch.arange(shape.seqlen_k, device=draw.device)
    kinds = [places < length, places >= length, draw.integers(3, shape.batch, shape.seqlen_k) > 0]
    return KeyPadding(torch.stack([kinds[i % 3][i] for i in range(shape.batch)]))


def _function(draw: _Draw, shape: AnyShape) -> Mask:
    return FunctionMask(lambda b, h, q, k: ((h % 2 == 0) & (k <= q)) | (k % 3 == b % 2))


def _function_of_tensor(draw: _Draw, shape: AnyShape) -> Mask:
    keep = draw.integers(4, shape.seqlen_k)
    return FunctionMask(lambda b, h, q, k: (keep[k] > 0) & (k <= q + 5))


def _function_empty_rows(draw: _Draw, shape: AnyShape) -> Mask:
    return FunctionMask(lambda b, h, q, k: (q % 2 == 0) & (k <= q))


MASKS: dict[str, Callable[[_Draw, AnyShape], Mask | None]] = {
    "none": lambda draw, shape: None,
    "causal": lambda draw, shape: Causal(),
    "window": _window,
    "window_left": lambda draw, shape: SlidingWindow(29, None),
    "window_right": lambda draw, shape: SlidingWindow(None, 31),
    "prefix": _prefix,
    "prefix_b": lambda draw, shape: PrefixLM(draw.integers(shape.seqlen_k + 1, shape.batch).to(torch.int32)),
    "documents": lambda draw, shape: _documents(draw, (shape.batch,), shape),
    "causal&documents": lambda draw, shape: Causal() & _documents(draw, (), shape),
    "padding": _padding,
    "causal&padding": lambda draw, shape: Causal() & _padding(draw, shape),
    "prefix|window": lambda draw, shape: _prefix(draw, shape) | _window(draw, shape),
    "function": _function,
    "function_tensor": _function_of_tensor,
    "function_empty_rows": _function_empty_rows,
}


def _bias(draw: _Draw, shape: AnyShape, batch: int, heads: int, rows: int) -> ScoreFn:
    """Rows with a gap behind them: a bias has any strides, too."""
    return Bias(draw.normal(batch, heads, rows, shape.seqlen_k + 3)[..., : shape.seqlen_k])


def _rows(draw: _Draw, dtype: torch.dtype, begin: int, *shape: int) -> Tensor:
    """Standard normal, in rows of a multiple of 16 elements of memory, from element `begin` on; NaN where none is."""
    memory = torch.full((*shape[:-1], (begin + shape[-1] + 15) // 16 * 16), torch.nan, dtype=dtype, device=draw.device)
    rows = memory[..., begin : begin + shape[-1]]
    return rows.copy_(draw.normal(*shape))


def _bias_in_rows(
    draw: _Draw, shape: AnyShape, batch: int, heads: int, dtype: torch.dtype = torch.float32, begin: int = 0
) -> ScoreFn:
    """Rows that begin at multiples of 32 bytes, or, with another `begin`, one or more elements behind."""
    return Bias(_rows(draw, dtype, begin, batch, heads, shape.seqlen_q, shape.seqlen_k))


def _user_in_rows(draw: _Draw, shape: AnyShape) -> ScoreFn:
    """A modification of the user's that reads a table as a bias does."""
    table = _rows(draw, torch.float16, 0, shape.heads, shape.seqlen_q, shape.seqlen_k)

    def gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = table[h, q - (table.shape[2] - table.shape[1]), k]
        return tm.where(x > 0, tm.tanh(score), score * x)

    return gate


def _user(draw: _Draw, shape: AnyShape) -> ScoreFn:
    def shift(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + 0.125 * (h + b) + tm.where((q - k) % 3 == 0, 0.5, -0.25)

    return shift


def _user_of_tensor(draw: _Draw, shape: AnyShape) -> ScoreFn:
    table = draw.normal(shape.heads, shape.seqlen_k)

    def gate(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return tm.minimum(score, 2.0) * tm.tanh(table[h, k])

    return gate


SCORES: dict[str, Callable[[_Draw, AnyShape], ScoreFn]] = {
    "softcap": lambda draw, shape: SoftCap(2.0 if shape.seqlen_k % 2 else 30.0),
    "alibi": lambda draw, shape: ALiBi(draw.normal(shape.heads).abs() / 16),
    "alibi_b": lambda draw, shape: ALiBi(draw.normal(shape.batch, shape.heads).abs() / 16),
    "bias": lambda draw, shape: _bias(draw, shape, 1, shape.heads, shape.seqlen_q),
    "bias_1": lambda draw, shape: _bias(draw, shape, 1, 1, shape.seqlen_q),
    "bias_b": lambda draw, shape: _bias(draw, shape, shape.batch, 1, shape.seqlen_q),
    "bias_bh": lambda draw, shape: _bias(draw, shape, shape.batch, shape.heads, shape.seqlen_q),
    "bias_bhk": lambda draw, shape: _bias(draw, shape, shape.batch, shape.heads, 1),
    "bias_tiles": lambda draw, shape: _bias_in_rows(draw, shape, 1, shape.heads),
    "bias_tiles_1": lambda draw, shape: _bias_in_rows(draw, shape, 1, 1),
    "bias_tiles_bf16_b": lambda draw, shape: _bias_in_rows(draw, shape, shape.batch, 1, torch.bfloat16),
    "bias_tiles_fp16_bh": lambda draw, shape: _bias_in_rows(draw, shape, shape.batch, shape.heads, torch.float16),
    "bias_unaligned": lambda draw, shape: _bias_in_rows(draw, shape, 1, shape.heads, torch.bfloat16, 1),
    "user_tiles_tensor": _user_in_rows,
    "user": _user,
    "user_tensor": _user_of_tensor,
}


def build(case: ConformanceCase, device: torch.device | str = "cpu") -> Arguments:
    """The tensors, mask and score modifications of a case on a device, "meta" included; the same for the same id."""
    structure, shape, device = case.structure, case.shape, torch.device(device)
    draw = _Draw(torch.Generator().manual_seed(zlib.crc32(case.id.encode())), device)
    keys = (*shape.of_k, shape.kv_heads)
    q = draw.queries_or_keys(shape.values, (*shape.of_q, shape.heads, structure.head_dim), +1)
    k = draw.queries_or_keys(shape.values, (*keys, structure.head_dim), -1)
    v = draw.queries_or_keys("normal", (*keys, structure.head_dim_v), +1)
    descales = None
    if case.dtype == FP8:
        (q, k, v), descales = _in_fp8(draw, shape.values != "normal", (q, k, v))
    packed, dropout_p = None, 0.0
    if isinstance(shape, PackedShape):
        packed, dropout_p = shape.packed(device), shape.dropout_p
        for x, lengths in ((q, shape.lengths_q), (k, shape.lengths_k), (v, shape.lengths_k)):
            x[:, sum(lengths) :] = torch.nan  # rows of no sequence: whoever reads them shows it
    q, k, v = (LAYOUTS[shape.layout](x.to(case.dtype), device) for x in (q, k, v))
    return Arguments(
        q,
        k,
        v,
        mask=MASKS[structure.mask](draw, shape),
        score_mods=tuple(SCORES[name](draw, shape) for name in structure.scores),
        sink=draw.normal(shape.heads) if structure.sink else None,
        scale=shape.scale,
        layout="bhsd" if shape.layout == "bhsd" else "bshd",
        descales=descales,
        packed=packed,
        dropout_p=dropout_p,
    )


def output_gradients(case: ConformanceCase, arguments: Arguments) -> tuple[Tensor, Tensor | None]:
    """do, in the memory layout of the case, and dlse, for every third case; the same for the same id."""
    shape, device = case.shape, arguments.q.device
    seed = zlib.crc32(f"gradients of {case.id}".encode())
    generator = torch.Generator().manual_seed(seed)
    batch, rows = shape.of_q
    do = torch.randn((batch, rows, shape.heads, case.structure.head_dim_v), generator=generator)
    dlse = torch.randn((batch, shape.heads, rows), generator=generator)
    if isinstance(shape, PackedShape):
        do[:, sum(shape.lengths_q) :], dlse[..., sum(shape.lengths_q) :] = torch.nan, torch.nan
    do = LAYOUTS[shape.layout](do.to(case.out_dtype), device)
    return do, dlse.to(device, accumulator(case.dtype)) if seed % 3 == 0 else None


# --- The selection ----------------------------------------------------------------------------------------------------

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
    return any(part in name for name in names for part in ("_b", "documents", "padding", "tensor", "alibi", "bias"))


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
        selection: "smoke", a few dozen that meet every feature once; "quick", every structure with two shapes, and
            float32 and float64; "full", every structure of 16 or 8 bits with eight shapes as well, for a GPU.
    """
    half, single, double = ("bf16", "fp16"), ("fp32",), ("fp64",)
    structures = _table(half) + _plain(half)
    found = _cases_of(structures, 8 if selection == "full" else 2) + _extremes()
    found += _cases_of(list(TILE_STRUCTURES), 8 if selection == "full" else 2)
    found += _cases_of(list(PADDING_STRUCTURES), 8 if selection == "full" else 2)
    found += _cases_of(_table(single), 1) + _cases_of(_plain(single, ("causal",)), 1)
    found += _cases_of(_table(double)[::7], 1)
    found += _fp8_cases(8 if selection == "full" else 2)
    found = _with_smoke({case.id: case for case in found}.values())
    if selection not in ("smoke", "quick", "full"):
        raise ValueError(f'selection must be "smoke", "quick" or "full", got {selection!r}')
    return [case for case in found if case.smoke or selection != "smoke"]


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
    """One case for each distinct `AttentionCall` among them: what there is to compile, for an architecture.

    Every case is built on the "meta" device: nothing is computed.
    """
    calls: dict[AttentionCall, ConformanceCase] = {}
    for case in cases:
        arguments = build(case, "meta")
        q, k, v = arguments.q, arguments.k, arguments.v
        variant, operands = encode(arguments.mask, arguments.score_mods)
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
