"""The keys that runs of queries see under masks that read tensors, beside every pair; and what is kept of them.

The oracle evaluates the mask on each pair of positions: no bounds, no tiles.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tileattn import (
    BlockSparse,
    Documents,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    KeyPadding,
    Mask,
    PrefixLM,
    SlidingWindow,
)
from tileattn.masks import Causal
from tileattn.math import load
from tileattn.parallel.sharding import visible
from tileattn.parallel.sharding.contents import Ask, Kept, ask_of, is_settled
from tileattn.parallel.sharding.layout import Layout, Run, Span, sequence_layout
from tileattn.parallel.sharding.ranges import areas, key_ranges
from tileattn.parallel.sharding.visible import BLOCK
from tileattn.variant.key import encode
from tileattn.variant.sparse.blocks import for_call
from tileattn.variant.sparse.known_blocks import known_blocks

SEQLEN, BATCH, HEADS = 900, 2, 3
LAYOUT = sequence_layout("contiguous", SEQLEN, 2)
RUNS = [Run(0, *each) for each in ((0, 1), (5, 300), (301, 500), (740, SEQLEN))]


class Case(NamedTuple):
    """A mask, those of its tensors that a test may write to, and whether the keys it sees are blocks without a hole."""

    mask: Mask
    tensors: tuple[Tensor, ...] = ()
    is_tight: bool = True


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=random(seed))


def ids() -> Case:
    table = integers(0, 9, SEQLEN).sort().values
    return Case(FunctionMask(lambda b, h, q, k: table[q] == table[k]), (table,))


def by_query() -> Case:
    left = integers(0, 300, SEQLEN)
    return Case(FunctionMask(lambda b, h, q, k: (k <= q) & (q - k <= left[q])), (left,), is_tight=False)


def by_head_and_batch() -> Case:
    width = integers(1, 400, BATCH, HEADS)
    return Case(FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < width[b, h])), (width,))


def of_batch() -> Case:
    table = integers(0, 5, BATCH, SEQLEN).sort().values
    return Case(FunctionMask(lambda b, h, q, k: (k <= q) & (table[b, q] == table[b, k])), (table,))


def floats() -> Case:
    place = torch.linspace(0.0, 13.0, SEQLEN) + torch.rand(SEQLEN, generator=random(1)) / 10
    return Case(FunctionMask(lambda b, h, q, k: abs(place[q] - place[k]) < 1.5), (place,), is_tight=False)


def conditions() -> Case:
    keep = torch.zeros(SEQLEN, dtype=torch.bool)
    keep[200:450] = True
    return Case(FunctionMask(lambda b, h, q, k: keep[k] & (k <= q)), (keep,))


def scalar() -> Case:
    width = torch.tensor(150)
    return Case(FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < width)), (width,))


def indirect() -> Case:
    group, partner = integers(0, 7, SEQLEN).sort().values, torch.tensor([0, 2, 1, 4, 3, 6, 5])
    return Case(FunctionMask(lambda b, h, q, k: partner[group[q]] == group[k]), (partner,), is_tight=False)


def matrix() -> Case:
    seen = torch.rand(SEQLEN, SEQLEN, generator=random(2)) < 0.001
    return Case(FunctionMask(lambda b, h, q, k: seen[q, k] & (q - k < 200) & (k - q < 100)), (seen,), is_tight=False)


def nothing() -> Case:
    table = torch.full((SEQLEN,), -1)
    return Case(FunctionMask(lambda b, h, q, k: table[q] == k), (table,))


def either() -> Case:
    tokens = torch.zeros(1, SEQLEN, dtype=torch.bool)
    tokens[0, [310, 420]] = True
    return Case(SlidingWindow(100, 0) | GlobalTokens(tokens), (tokens,), is_tight=False)


def two_functions() -> Case:
    table, odd = integers(0, 6, SEQLEN).sort().values, torch.zeros(2, dtype=torch.bool)
    return Case(
        FunctionMask(lambda b, h, q, k: table[q] == table[k]) | FunctionMask(lambda b, h, q, k: odd[k % 2] & (k == q)),
        (table, odd),
        is_tight=False,
    )


def documents_and_function() -> Case:
    far, numbers = torch.tensor([120]), integers(0, 4, SEQLEN).sort().values
    return Case(Documents(numbers) & FunctionMask(lambda b, h, q, k: q - k < far[0]), (far,), is_tight=False)


def images() -> Case:
    numbers = integers(0, 6, BATCH, SEQLEN).sort().values
    return Case(ImageTextDocuments(numbers, torch.where(torch.arange(SEQLEN) % 400 < 150, 0, -1).expand(BATCH, -1)))


def prefix() -> Case:
    length = torch.tensor([40, 700])
    return Case(PrefixLM(length), (length,))


def block_sparse() -> Case:
    blocks = torch.rand(1, HEADS, 8, 8, generator=random(3)) < 0.05
    return Case(in_call(BlockSparse(blocks, 128)))  # whose bounds are those of a call


def lists_of_blocks() -> Case:
    return Case(in_call(BlockSparse(integers(-1, 3, BATCH, 1, 8, 2), 128)))


def made_blocks() -> Case:
    table = integers(0, 9, SEQLEN, seed=5).sort().values
    mask = FunctionMask(lambda b, h, q, k: table[q] == table[k])
    return Case(known_blocks(mask, 1, 1, SEQLEN, SEQLEN, (128, 128), torch.device("cpu")))


def in_call(mask: Mask) -> Any:
    return for_call(mask, lambda: (BATCH, HEADS, HEADS, SEQLEN, SEQLEN), lambda: 0)


CASES: list[Callable[[], Case]] = [
    ids, by_query, by_head_and_batch, of_batch, floats, conditions, scalar, indirect, matrix, nothing, either,
    two_functions, documents_and_function, images, prefix, block_sparse, lists_of_blocks, made_blocks,
]  # fmt: skip
every_case = pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)


def exact(mask: Mask, run: Run, length: int = SEQLEN, b: Any = None) -> Span | None:
    """The first key that a query of the run sees in a head of a batch element, and the end of the last one."""
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1) if b is None else b, torch.arange(HEADS).view(-1, 1, 1)
    q, k = torch.arange(run.start, run.stop)[:, None], torch.arange(length)
    every = torch.as_tensor(mask.allows(b, h, q, k))
    every = every.expand(*every.shape[:-2], len(q), length)
    found = every.reshape(-1, length).any(0).nonzero()
    return (int(found.min()), int(found.max()) + 1) if len(found) else None


def check_none_is_left_out(case: Case, found: list[Span], is_tight: bool = False) -> None:
    for run, (start, stop) in zip(RUNS, found, strict=True):
        seen = exact(case.mask, run)
        if seen is None:
            assert (start, stop) == (run.start, run.start + 1) or not is_tight  # one key, which the mask hides
            continue
        assert 0 <= start <= seen[0] < seen[1] <= stop <= SEQLEN
        assert not is_tight or (start > seen[0] - BLOCK and stop < seen[1] + BLOCK)


def ranges(case: Case, ask: Ask = Ask.NOW) -> list[Span]:
    return key_ranges(case.mask, LAYOUT, RUNS, BATCH, HEADS, ask)


@every_case
def test_no_key_that_is_seen_is_left_out(make: Callable[[], Case]) -> None:
    case = make()
    check_none_is_left_out(case, ranges(case), case.is_tight)
    assert ranges(case) != [(0, SEQLEN)] * len(RUNS)


@every_case
def test_tensors_that_are_written_in_place(make: Callable[[], Case]) -> None:
    """What is asked now sees what they now hold; what lasts holds for all that they may hold."""
    case = make()
    lasting = ranges(case, Ask.LASTING)
    for tensor in case.tensors:
        if tensor.dtype == torch.bool:
            tensor.copy_(torch.rand(tensor.shape, generator=random(7)) < 0.3)
        else:
            tensor.copy_(integers(0, 400, *tensor.shape, seed=7))
    for found in (ranges(case), ranges(case, Ask.RANGES), lasting):
        check_none_is_left_out(case, found)
    assert ranges(case, Ask.LASTING) == lasting


def test_documents_of_a_plan_have_tables_of_their_own() -> None:
    """The batch element is the document's number."""
    width = torch.tensor([10, 300, 50])
    mask = FunctionMask(lambda b, h, q, k: (k <= q) & (q - k < width[b]))
    layout = Layout("documents", (0, 200, 900, 1200), ((Run(0, 0, 200), Run(1, 0, 700)), (Run(2, 0, 300),)))
    runs = [Run(0, 150, 200), Run(1, 600, 700), Run(2, 250, 300)]
    for run, (start, stop) in zip(runs, key_ranges(mask, layout, runs, 1, HEADS)):
        seen = exact(mask, run, layout.length(run.sequence), run.sequence)
        assert seen is not None
        assert seen[0] - BLOCK < start <= seen[0]
        assert seen[1] <= stop <= layout.length(run.sequence)


@pytest.mark.parametrize("make", [ids, by_head_and_batch, floats, either, documents_and_function, prefix, block_sparse])
def test_the_default_device_does_not_matter(make: Callable[[], Case]) -> None:
    """As after ``torch.set_default_device("cuda")``."""
    case = make()
    expected = ranges(case), areas(case.mask, LAYOUT, RUNS, BATCH, HEADS)
    with torch.device("meta"):
        assert (ranges(case), areas(case.mask, LAYOUT, RUNS, BATCH, HEADS)) == expected
        assert {each.device.type for each in (LAYOUT.tokens_of(1), LAYOUT.positions_of(1))} == {"cpu"}


def test_a_capture_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the ranges of an earlier call; of another mask object it says what is missing."""
    monkeypatch.setattr("tileattn.parallel.sharding.ranges.device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the same call once before, with the same mask object"):
        ranges(Case(Documents(torch.zeros(SEQLEN, dtype=torch.int64))), Ask.LASTING)
    assert ranges(prefix(), Ask.LASTING) == [(0, SEQLEN)] * len(RUNS)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [(0, SEQLEN)] * len(RUNS)
    monkeypatch.setattr(visible, "MOST_BLOCKS", 1000)
    assert ranges(ids()) != whole
    assert ranges(matrix()) == whole  # read by query and key together
    assert ranges(by_head_and_batch()) != whole
    monkeypatch.setattr(visible, "MOST_BLOCKS", 100)
    assert ranges(by_head_and_batch()) == whole


# --- How long answers are kept ---


def kept_by(kept: Kept, mask: Mask, ask: Ask = Ask.NOW) -> dict[Any, Any]:
    return kept.of(*encode(mask, ()), ask)


def test_what_is_kept_is_found_for_the_same_tensors_at_the_same_version() -> None:
    kept, tables = Kept(), [torch.arange(9), torch.arange(9)]

    def mask(table: Tensor, far: int = 3) -> Mask:
        return FunctionMask(lambda b, h, q, k: table[q] - k < far)

    kept_by(kept, mask(tables[0]))["found"] = True
    kept_by(kept, mask(tables[0]), Ask.LASTING)["lasts"] = True
    assert kept_by(kept, mask(tables[0])) == {"found": True}  # another function of the same text
    assert kept_by(kept, mask(tables[1])) == kept_by(kept, mask(tables[0], 4)) == {}
    tables[0][3] = 0
    assert kept_by(kept, mask(tables[0])) == {}
    assert kept_by(kept, mask(tables[0]), Ask.LASTING) == {"lasts": True}
    kept_by(kept, mask(tables[0]), Ask.RANGES)["found"] = True
    assert kept_by(kept, mask(tables[0]), Ask.RANGES) == {}
    for far in range(500):
        kept_by(kept, mask(tables[1], far))
    assert len(kept._entries) <= 128
    tables.clear()
    gc.collect()
    kept_by(kept, Causal())
    assert len(kept._entries) == 1


def test_what_may_be_asked() -> None:
    def asked(mask: Mask, capturing: bool = False) -> Ask:
        return ask_of(mask, encode(mask, ())[1].tensors, capturing)

    table, length = torch.arange(9), torch.tensor([3])
    function = FunctionMask(lambda b, h, q, k: table[q] == k)
    reads = FunctionMask(lambda b, h, q, k: load(table, q) == k) & PrefixLM(length)
    fixed = Causal() & Documents(table) & KeyPadding(torch.ones(1, 9, dtype=torch.bool))
    assert asked(Causal()) is asked(FunctionMask(lambda b, h, q, k: k <= q)) is asked(fixed) is Ask.LASTING
    assert asked(function) is asked(Documents(table) | function) is asked(PrefixLM(length)) is asked(reads) is Ask.NOW
    for mask in (function, reads, PrefixLM(length), fixed):
        assert asked(mask, capturing=True) is Ask.LASTING
    assert is_settled(fixed)
    assert is_settled(Documents(table) | function)
    assert not is_settled(reads)
    with torch.inference_mode():  # its tensors have no versions
        table, length = torch.arange(9), torch.tensor([3])
    assert asked(function) is Ask.LASTING
    assert asked(reads) is Ask.RANGES
