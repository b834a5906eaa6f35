"""The cases of the benchmark: the shape of a measurement, its FLOPs, and the named suites."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tileattn.bench import variants

# How the sequences of a packed case are drawn: see `lengths_of`. "" is a dense case.
PACKINGS = ("", "uniform", "skewed")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}

DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}
# The matrix products of a direction: how many are head_dim deep or wide, and how many head_dim_v. The forward has QK^T
# and PV. The backward has QK^T again, dQ = dS K and dK = dS^T Q; and dP = dO V^T and dV = P^T dO.
PRODUCTS = {"fwd": (1, 1), "bwd": (3, 2), "fwdbwd": (4, 3)}


@dataclass(frozen=True)
class Case:
    """One measurement: sizes, variant (a name of `tileattn.bench.variants`) and dtype (a key of `DTYPES`).

    packing: One of `PACKINGS`. In a packed case `batch` is the number of sequences, and seqlen_q and seqlen_k are their
    mean length, so that it has as many tokens as the dense case.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    variant: str = "full"
    dtype: str = "bf16"
    packing: str = ""

    def __post_init__(self) -> None:
        for field in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "variant", variants.parse(self.variant).name)
        if self.packing not in PACKINGS:
            raise ValueError(f"packing must be one of {', '.join(PACKINGS[1:])} or '', got {self.packing!r}")
        if self.packing:
            self._check_packed()

    def _check_packed(self) -> None:
        if self.seqlen_q != self.seqlen_k:
            raise ValueError(f"packed cases have as many keys as queries, got {self.seqlen_q} and {self.seqlen_k}")
        if self.dtype == "fp8" or self.terms.bias is not None or self.terms.documents is not None:
            raise ValueError(f"packed cases have no fp8, no bias and no documents, got {self.dtype} {self.variant}")

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a packed case's sequences."""
        return lengths_of(self.packing, self.batch, self.seqlen_q)

    @cached_property
    def terms(self) -> variants.Variant:
        """The parsed variant."""
        return variants.parse(self.variant)

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of q, k and v before quantisation: bfloat16 for fp8, else the case's."""
        return torch.bfloat16 if self.dtype == "fp8" else DTYPES[self.dtype]

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after its own position, by a causal mask or a causal window."""
        return self.terms.causal or (self.terms.window is not None and self.terms.window[1] == 0)

    @property
    def name(self) -> str:
        """The name as papers write it: "D128 causal (4,4096,32/8)" is (batch, seqlen, heads/kv_heads)."""
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"D{dim} {self.variant} ({self.batch},{seqlen},{heads})" + f" {self.packing}" * bool(self.packing)

    def visible_pairs(self) -> float:
        """(query, key) pairs that the mask lets through, per batch and head; of packed sequences, the mean.

        A square causal mask counts as exactly half of all pairs, as in the FlashAttention papers and in flash-attn's
        benchmarks, so that figures are comparable. Every other mask is counted pair by pair.
        """
        if self.packing:
            return sum(self.of_sequence(length).visible_pairs() for length in self.lengths) / self.batch
        pairs = self.seqlen_q * self.seqlen_k
        if self.terms.causal and self.seqlen_q == self.seqlen_k and not _narrower(self.terms):
            return pairs / 2
        if not self.terms.masked:
            return pairs
        q_pos = torch.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q
        lo, hi = self.terms.key_range(q_pos, self.seqlen_k)
        return int((hi - lo).clamp(min=0).sum())

    def of_sequence(self, length: int) -> Case:
        """One sequence of a packed case, as a dense case."""
        return replace(self, batch=1, seqlen_q=length, seqlen_k=length, packing="")

    def flops(self, direction: str = "fwd") -> float:
        """Two FLOPs per multiply-add of the matrix products, for each visible pair; a direction is a key of `PRODUCTS`.

        Forward: `2 * batch * heads * (head_dim + head_dim_v)` per pair. Backward: `2 * batch * heads * (3 * head_dim +
        2 * head_dim_v)`, which is FlashAttention's 2.5 times the forward where the two are equal. Where they differ,
        flash-attn's scripts count 2.5 times all the same: 4 % less than the products at 192/128.
        """
        of_qk, of_v = PRODUCTS[direction]
        per_pair = 2.0 * self.batch * self.heads * (of_qk * self.head_dim + of_v * self.head_dim_v)
        return per_pair * self.visible_pairs()


SPREAD = 1.0  # of the logarithm of a skewed length


def lengths_of(packing: str, sequences: int, mean: int) -> tuple[int, ...]:
    """The lengths of packed sequences, each at least 1, with the sum `sequences * mean`. Deterministic.

    "uniform": all are the mean. "skewed": drawn from a log-normal distribution, like documents and conversations: many
    are short and few are long.
    """
    if packing != "skewed":
        return (mean,) * sequences
    drawn = random.Random(0)
    weights = [drawn.lognormvariate(0.0, SPREAD) for _ in range(sequences)]
    total = sequences * mean
    lengths = [max(1, int(total * weight / sum(weights))) for weight in weights]
    lengths[weights.index(max(weights))] += total - sum(lengths)  # what rounding has left
    return tuple(lengths)


def _narrower(terms: variants.Variant) -> bool:
    """Whether a mask beside the causal one hides keys."""
    return terms.window is not None or terms.prefix is not None or terms.documents is not None


def square(batch: int, seqlen: int, heads: int, head_dim: int, variant: str, dtype: str = "bf16") -> Case:
    """A case of plain self-attention: as many keys as queries, as many key heads as query heads."""
    return Case(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, variant, dtype)


def fa_suite(dtype: str) -> list[Case]:
    """The FlashAttention papers' grid (16384 tokens, 2048 / head_dim heads), then GQA, batch 1 and 192/128."""
    cases = [
        square(16384 // seqlen, seqlen, 2048 // head_dim, head_dim, variant, dtype)
        for head_dim in (64, 128, 256)
        for variant in ("full", "causal")
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    return [
        *cases,
        replace(square(4, 4096, 32, 128, "causal", dtype), kv_heads=8),
        square(1, 4096, 16, 128, "causal", dtype),
        replace(square(4, 4096, 16, 192, "causal", dtype), head_dim_v=128),
        replace(square(2, 8192, 16, 192, "full", dtype), head_dim_v=128),
    ]


# The unmodified two, which the others are measured against, then masks, then score modifications.
VARIANTS = (
    "full",
    "causal",
    "window{short}",
    "documents{short}",
    "prefix{short}",
    "causal+softcap50",
    "causal+alibi",
    "causal+sink",
    "causal+userscore",
    "causal+bias",
    "causal+bias+dbias",
    "causal+bias-11",
    "causal+bias-bh",
    "causal+bias-b1",
)


def variants_suite(dtype: str) -> list[Case]:
    """Every mask and score modification at three shapes of 16384 tokens; windows and documents of 1024."""
    shapes = ((4, 4096, 16, 128), (1, 16384, 16, 128), (4, 4096, 32, 64))
    return [
        square(*shape, name.format(short=1024), dtype)
        for shape in shapes
        for name in VARIANTS
        # One batch element: these are the forms without a batch again; and a gradient of 8 GiB tells nothing new.
        if shape[0] > 1 or not name.endswith(("bias-bh", "bias-b1", "dbias"))
    ]


def variants_suite_cpu(dtype: str) -> list[Case]:
    """The same variants at a size that a laptop finishes in a minute; windows and documents of 256."""
    return [square(2, 1024, 4, 64, name.format(short=256), dtype) for name in VARIANTS]


def heads_suite(dtype: str) -> list[Case]:
    """Causal, (4, 4096): grouped heads beside as many ungrouped ones, and head dims between the tuned ones."""
    grouped = [
        replace(square(4, 4096, heads, 128, "causal", dtype), kv_heads=kv_heads)
        for heads, kv_heads in ((32, 32), (32, 8), (8, 8), (8, 1))
    ]
    dims = [square(4, 4096, 2048 // dim, dim, "causal", dtype) for dim in (64, 80, 96, 128, 160, 192, 256)]
    return [*grouped, *dims, replace(square(4, 4096, 16, 192, "causal", dtype), head_dim_v=128)]


def heads_suite_cpu(dtype: str) -> list[Case]:
    """The same at a size for a laptop."""
    grouped = [replace(square(1, 512, 8, 64, "causal", dtype), kv_heads=kv_heads) for kv_heads in (8, 2, 1)]
    return [*grouped, *(square(1, 512, 4, dim, "causal", dtype) for dim in (64, 80, 96, 128))]


def fp8_suite(dtype: str) -> list[Case]:
    """16384 tokens in long sequences, 2048 / head_dim heads: where the products decide, which fp8 makes faster."""
    return [
        square(16384 // seqlen, seqlen, 2048 // head_dim, head_dim, variant, dtype)
        for head_dim in (64, 128, 256)
        for variant in ("full", "causal")
        for seqlen in (4096, 8192, 16384)
    ]


def fp8_suite_cpu(dtype: str) -> list[Case]:
    """Two cases that show the error; a CPU does not multiply in fp8."""
    return [square(1, 512, 8, 64, variant, dtype) for variant in ("full", "causal")]


def varlen_suite(dtype: str) -> list[Case]:
    """Packed sequences: of one length (16384 tokens, 2048 / head_dim heads), and 64 of all lengths (65536 tokens)."""
    uniform = [
        replace(square(16384 // seqlen, seqlen, 2048 // head_dim, head_dim, variant, dtype), packing="uniform")
        for head_dim in (64, 128)
        for variant in ("full", "causal")
        for seqlen in (512, 4096)
    ]
    skewed = [
        replace(square(64, 1024, heads, head_dim, variant, dtype), kv_heads=kv_heads, packing="skewed")
        for head_dim, heads, kv_heads in ((64, 32, 8), (128, 32, 8), (128, 16, 16))
        for variant in ("full", "causal")
    ]
    return uniform + skewed


def varlen_suite_cpu(dtype: str) -> list[Case]:
    """The same at a size for a laptop."""
    shapes = (("uniform", 4, 256, 4), ("skewed", 8, 256, 2))
    return [
        replace(square(batch, seqlen, 4, 64, variant, dtype), kv_heads=kv_heads, packing=packing)
        for packing, batch, seqlen, kv_heads in shapes
        for variant in ("full", "causal")
    ]


def quick_suite(dtype: str) -> list[Case]:
    """A few minutes' worth of shapes for a GPU: D128 by length, then D64, D256, GQA, a window and a softcap."""
    by_length = [
        square(16384 // seqlen, seqlen, 16, 128, variant, dtype)
        for variant in ("full", "causal")
        for seqlen in (1024, 2048, 4096, 8192, 16384)
    ]
    return [
        *by_length,
        square(4, 4096, 32, 64, "causal", dtype),
        square(2, 8192, 8, 256, "full", dtype),
        replace(square(4, 4096, 32, 128, "causal", dtype), kv_heads=8),
        square(1, 16384, 16, 128, "window1024", dtype),
        square(4, 4096, 16, 128, "causal+softcap50", dtype),
    ]


def quick_suite_cpu(dtype: str) -> list[Case]:
    """About a minute's worth of shapes for a laptop: D64 by length, then a window and a softcap."""
    by_length = [
        square(2 if seqlen <= 512 else 1, seqlen, 8, 64, variant, dtype)
        for variant in ("full", "causal")
        for seqlen in (128, 512, 1024, 2048)
    ]
    return [*by_length, square(1, 2048, 8, 64, "window256", dtype), square(1, 1024, 8, 64, "causal+softcap50", dtype)]


SUITES: dict[str, str] = {
    "quick": "a handful of representative shapes, sized by the device (the default)",
    "fa": "the FlashAttention papers' grid: head dims 64, 128, 256; 512 to 16384 tokens; GQA and 192/128",
    "heads": "grouped heads beside ungrouped ones, and head dims between the tuned ones, sized by the device",
    "variants": "every mask and score modification, sized by the device",
    "varlen": "packed sequences: of one length, beside the dense kernel, and 64 of skewed lengths; sized by the device",
    "fp8": "float8_e4m3fn beside bfloat16 on the same values: head dims 64, 128, 256; 4096 to 16384 tokens",
}
_BUILDERS: dict[tuple[str, bool], Callable[[str], list[Case]]] = {
    ("quick", True): quick_suite,
    ("quick", False): quick_suite_cpu,
    ("fa", True): fa_suite,
    ("fa", False): fa_suite,
    ("heads", True): heads_suite,
    ("heads", False): heads_suite_cpu,
    ("variants", True): variants_suite,
    ("variants", False): variants_suite_cpu,
    ("varlen", True): varlen_suite,
    ("varlen", False): varlen_suite_cpu,
    ("fp8", True): fp8_suite,
    ("fp8", False): fp8_suite_cpu,
}


def suite(name: str, dtype: str, device_type: str, direction: str = "fwd") -> list[Case]:
    """The cases of a named suite in one dtype. `device_type` is "cuda" or "cpu": some suites are sized by it.

    Cases that ask for the gradient of a bias are left out of the forward, where they are the same as without.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not known; accepted: {', '.join(SUITES)}")
    all_cases = _BUILDERS[name, device_type == "cuda"](dtype)
    return [case for case in all_cases if direction != "fwd" or not case.terms.dbias]
