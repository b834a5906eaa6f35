"""What `sanitize.py --direction decode` launches: append, and plan, attention and combine of decode, at small sizes.

Sequences end at, before and behind the ends of tiles and pages; their keys are split among blocks in every way. Then
lengths and page tables are wrong: whatever a kernel is given, it must not leave the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

import tileattn
from tileattn import FixedSplit
from tileattn.call.decoding import Splits
from tileattn.testing import DecodeArguments, DecodeCase, build_decode
from tileattn.testing.decode_arguments import DecodeShape, DecodeStructure

DENSE = ((1, (1, 130, 0, 65, 300)), (3, (128, 2, 129)))  # queries of each sequence, and keys
PACKED = (((1, 70, 1, 0, 9), (257, 70, 64, 30, 129)),)  # queries, and keys
MANY = ((1, 1), (3300, 65))  # of FixedSplit(128) so many parts that groups of them are merged first
FREE: tuple[Splits, ...] = (None, 3)
BEYOND = (10**6, -(10**6))  # what is added to lengths and to entries of page tables


@dataclass(frozen=True)
class DecodeLaunches:
    """The kernels of a decode call, at all sizes and splits.

    structure: the static facts. page: tokens of a page; 0 for contiguous caches.
    """

    structure: DecodeStructure
    page: int

    @property
    def name(self) -> str:
        """What `--cases` is matched with."""
        fixed = f"-fixed{self.structure.fixed}" * bool(self.structure.fixed)
        return f"{self.structure.name}-page{self.page}{fixed}"

    @property
    def sizes(self) -> tuple[str, ...]:
        """What is run, in the order of the launches."""
        return tuple(name for name, _ in self._calls("meta"))

    def launches(self, device: str) -> Iterator[Callable[[], Sequence[Tensor]]]:
        """What is run, one for each of the sizes."""
        for _, arguments in self._calls(device):
            yield partial(_decode, arguments)

    def is_sound(self, *outputs: Tensor) -> bool:
        """Whether o and lse are finite; lse is -inf in a row without keys."""
        o, lse = outputs
        return bool(o.isfinite().all() and (lse < torch.inf).all())

    def _calls(self, device: str) -> Iterator[tuple[str, DecodeArguments]]:
        structure, found = self.structure, []
        lengths = list(PACKED) if structure.packed else [((rows,) * len(keys), keys) for rows, keys in DENSE]
        lengths += [MANY] * bool(structure.fixed)
        for number, (rows, keys) in enumerate(lengths):
            for splits in (FixedSplit(structure.fixed),) if structure.fixed else FREE:
                shape = DecodeShape(
                    f"lengths{number}", rows, keys, 8, 2, page=self.page, packed=structure.packed, splits=splits,
                    layout="own" if structure.aligned else "unaligned", behind=3 * structure.packed, slack=9,
                )  # fmt: skip
                found.append((shape.name, build_decode(DecodeCase(structure, shape), device)))
        yield from found
        name, right = found[-1]
        for beyond in BEYOND:
            yield f"{name}, lengths beyond", _without_nan(right, seqlens_k=right.seqlens_k + beyond)
            if right.cu_seqlens_q is not None:
                yield f"{name}, queries beyond", _without_nan(right, cu_seqlens_q=right.cu_seqlens_q + beyond)
            if right.page_table is not None:
                yield f"{name}, pages beyond", _without_nan(right, page_table=right.page_table + beyond)


@dataclass(frozen=True)
class AppendLaunches:
    """The kernel that appends, at some sizes; on pages, and on a contiguous cache if page is 0.

    rotary_dim: elements of a head that are rotated; 0: none, and no queries.
    """

    head_dim: int
    page: int
    packed: bool = False
    rotary_dim: int = 0
    interleaved: bool = False

    @property
    def name(self) -> str:
        """What `--cases` is matched with."""
        rotary = f"-rotary{self.rotary_dim}{'-interleaved' * self.interleaved}" * bool(self.rotary_dim)
        return f"append-d{self.head_dim}-page{self.page}{'-packed' * self.packed}{rotary}"

    @property
    def sizes(self) -> tuple[str, ...]:
        """What is run, in the order of the launches."""
        return ("right", *(f"{what} beyond by {by}" for by in BEYOND for what in ("lengths", "pages")))

    def launches(self, device: str) -> Iterator[Callable[[], Sequence[Tensor]]]:
        """What is run, one for each of the sizes."""
        for beyond, of_lengths in ((0, True), *((by, of_lengths) for by in BEYOND for of_lengths in (True, False))):
            yield partial(self._append, device, beyond, of_lengths)

    def is_sound(self, *outputs: Tensor) -> bool:
        """Whether what was written and returned is finite."""
        return all(bool(x.isfinite().all()) for x in outputs)

    def _append(self, device: str, beyond: int, of_lengths: bool) -> Sequence[Tensor]:
        counts, lengths = ((1, 70, 0, 5), (33, 70, 9, 5)) if self.packed else ((3, 3, 3), (64, 3, 1))
        dims = (2, self.head_dim)
        width = -(-max(lengths) // self.page) if self.page else 0
        shape = (len(lengths) * width, self.page) if self.page else (len(lengths), max(lengths))
        k_cache, v_cache = (torch.zeros(*shape, *dims, dtype=torch.bfloat16).to(device) for _ in range(2))
        rows = (sum(counts),) if self.packed else (len(counts), counts[0])
        k, v = (torch.randn(*rows, *dims).to(device, torch.bfloat16) for _ in range(2))
        named: dict[str, Tensor | bool] = {}
        if self.packed:
            named["cu_seqlens_q"] = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(device)
        if self.page:
            table = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
            named["page_table"] = (table if of_lengths else table + beyond).to(device)
        if self.rotary_dim:
            cos, sin = (f(torch.rand(max(lengths), self.rotary_dim // 2)).to(device) for f in (torch.cos, torch.sin))
            q = torch.randn(*rows, 4, self.head_dim).to(device, torch.bfloat16)
            named |= {"cos": cos, "sin": sin, "interleaved": self.interleaved, "q": q}
        seqlens_k = torch.tensor(lengths, dtype=torch.int32) + (beyond if of_lengths else 0)
        rotated = tileattn.append_kv(k, v, k_cache, v_cache, seqlens_k.to(device), **named, backend="tilelang")  # type: ignore[arg-type]
        with suppress(ValueError):  # what the lengths or the table were wrong with
            tileattn.check_caches()
        return (k_cache, v_cache) if rotated is None else (k_cache, v_cache, rotated)


def _without_nan(arguments: DecodeArguments, **changes: Tensor) -> DecodeArguments:
    """A call with something wrong: rows that nobody may read may be read, and hold numbers."""
    q, k_cache, v_cache = (x.nan_to_num(0.0) for x in (arguments.q, arguments.k_cache, arguments.v_cache))
    return replace(arguments, q=q, k_cache=k_cache, v_cache=v_cache, **changes)


def _decode(arguments: DecodeArguments) -> Sequence[Tensor]:
    outputs = tileattn.decode(*arguments.positional, **arguments.options, return_lse=True, backend="tilelang")
    with suppress(ValueError):  # what the lengths or the table were wrong with
        tileattn.check_caches()
    return outputs


def _launches(
    page: int, dims: int | tuple[int, int], mask: str = "none", *scores: str, **flags: bool | int
) -> DecodeLaunches:
    head_dim, head_dim_v = (dims, dims) if isinstance(dims, int) else dims
    pages = min(64, page & -page)
    return DecodeLaunches(
        DecodeStructure("bf16", head_dim, head_dim_v, pages, mask, scores, **flags),  # type: ignore[arg-type]
        page,
    )


DECODE: tuple[DecodeLaunches | AppendLaunches, ...] = (
    *(AppendLaunches(128, page, packed) for page in (0, 1, 16) for packed in (False, True)),
    *(AppendLaunches(64, 16, packed, 64, interleaved) for packed in (False, True) for interleaved in (False, True)),
    AppendLaunches(80, 3, True, 32),
    AppendLaunches(256, 0, False, 128),
    *(_launches(page, dim) for dim in (64, 128) for page in (0, 1, 16, 64)),
    *(_launches(page, 128, packed=True) for page in (0, 16)),
    *(_launches(page, 128, fixed=128) for page in (0, 16, 64)),
    _launches(3, 128),
    _launches(48, 64, packed=True),
    _launches(16, 256),
    _launches(0, 256, packed=True),
    _launches(16, (192, 128)),
    _launches(16, 128, "window_left", "softcap"),
    _launches(1, 64, "window_left", sink=True, packed=True),
    _launches(16, 64, "none", "alibi", sink=True),
    _launches(64, 128, "none", "bias_bh"),
    _launches(16, 128, "function", "user"),  # by lines of tiles, as the next two
    _launches(0, 64, "function", packed=True),
    _launches(16, 128, "function", fixed=128),
    _launches(16, 64, tree=True),
    _launches(16, 64, aligned=False),
    _launches(0, 128, aligned=False, packed=True),
)
