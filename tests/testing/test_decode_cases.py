"""The conformance cases of decode and their oracle: they are what they say, and can be failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tileattn import Bias, Causal, Documents, SlidingWindow
from tileattn.testing import (
    DecodeArguments,
    DecodeCase,
    assert_forward_accurate,
    build_decode,
    decode_cases,
    expected_decode,
    oracle_attention,
)
from tileattn.testing.decode_arguments import DecodeShape
from tileattn.testing.decode_build import CACHE_LAYOUTS, SPARE_PAGES, pages_of

CASES = decode_cases("quick")


def test_cases_have_distinct_ids_and_nested_selections() -> None:
    smoke, quick, full = ({case.id for case in decode_cases(name)} for name in ("smoke", "quick", "full"))
    assert smoke < quick < full
    assert set(Counter(case.id for case in decode_cases("full")).values()) == {1}
    assert len(full) > 400
    with pytest.raises(ValueError, match="selection must be"):
        decode_cases("all")


@pytest.mark.parametrize("selection", ["quick", "full"])
def test_every_feature_is_in(selection: str) -> None:
    cases = decode_cases(selection)
    shapes = [case.shape for case in cases]
    assert {shape.page for shape in shapes} >= {0, 1, 2, 3, 16, 64, 256}
    assert {shape.heads // shape.kv_heads for shape in shapes} >= {*range(1, 17), 128}
    assert {shape.layout for shape in shapes} == {*CACHE_LAYOUTS}
    assert {getattr(shape.splits, "keys", shape.splits) for shape in shapes} >= {None, 1, 7, 64, 128, 256}
    assert {shape.seqlen_q for shape in shapes if not shape.packed} >= {1, 2, 3, 4, 5, 6, 7, 8, 13, 16}
    assert {shape.values for shape in shapes} == {"normal", "large", "negative"}
    pairs = [pair for shape in shapes for pair in zip(shape.lengths_q, shape.lengths_k)]
    assert {0, 1, 63, 64, 65, 127, 128, 129, 255, 257, 1025} <= {keys for _, keys in pairs}
    assert any(rows > keys > 0 for rows, keys in pairs)
    assert any(rows == 0 < keys for rows, keys in pairs)
    assert any(shape.behind for shape in shapes)
    for packed in (False, True):
        assert any(shape.shared and shape.packed == packed for shape in shapes)
    structures = [case.structure for case in cases]
    assert {structure.head_dim for structure in structures} >= {16, 24, 64, 128, 192, 256}
    assert any(structure.head_dim != structure.head_dim_v for structure in structures)
    assert any(structure.tree and structure.packed for structure in structures)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_a_case_is_what_its_id_says(case: DecodeCase) -> None:
    """Lengths and tables; NaN in all rows that no query can see; entries behind a length that lead nowhere."""
    arguments, shape = build_decode(case), case.shape
    assert tuple(arguments.seqlens_k.tolist()) == shape.lengths_k
    capacity = arguments.k_cache.shape[1]
    if arguments.page_table is not None:
        capacity *= arguments.page_table.shape[1]
        assert arguments.k_cache.shape[1] == shape.page
    assert capacity == shape.seqlen_k >= max(shape.lengths_k, default=0)
    if arguments.cu_seqlens_q is None:
        assert arguments.q.shape[:2] == (shape.batch, shape.seqlen_q)
    else:
        ends = arguments.cu_seqlens_q.tolist()
        assert tuple(end - begin for begin, end in pairwise(ends)) == shape.lengths_q
        assert arguments.q[: ends[-1]].isfinite().all()
        assert arguments.q[ends[-1] :].isnan().all()
    for cache in (arguments.k_cache, arguments.v_cache):
        unread = torch.ones(cache.shape[:2], dtype=torch.bool)
        for number in range(shape.batch):
            unread[seen_rows(arguments, shape, number)] = False
        assert cache[~unread].isfinite().all()
        assert cache[unread].isnan().all()


def seen_rows(arguments: DecodeArguments, shape: DecodeShape, number: int) -> tuple[Tensor, Tensor]:
    """The rows and tokens of the cache that the queries of a sequence may see."""
    first = 0
    if isinstance(arguments.mask, SlidingWindow) and arguments.mask.left is not None:
        first = max(0, shape.lengths_k[number] - shape.lengths_q[number] - arguments.mask.left)
    keys = torch.arange(first, shape.lengths_k[number])
    table = arguments.page_table
    if table is None:
        return torch.full_like(keys, number), keys
    pages = table[number]
    count = -(-shape.lengths_k[number] // shape.page)
    assert ((pages[count:] < 0) | (pages[count:] >= arguments.k_cache.shape[0])).all()
    assert (pages[: first // shape.page] == -1).all()
    return pages[keys // shape.page].long(), keys % shape.page


def test_prefixes_are_shared_and_new_tokens_are_not() -> None:
    shape = DecodeShape("shared", (2, 2, 2), (80, 100, 33), 2, 1, page=16, shared=True)
    pages = pages_of(shape)
    assert pages[1][:2] == pages[0][:2]
    assert pages[2][:1] == pages[0][:1]
    alone = [page for each in pages for page in each]
    assert len(alone) - len(set(alone)) == 3
    assert max(alone) < len(set(alone)) + SPARE_PAGES
    assert not {pages[0][78 // 16], pages[0][79 // 16]} & {*pages[1], *pages[2]}


@pytest.mark.parametrize("name", CACHE_LAYOUTS)
def test_memory_layouts_hold_the_values(name: str) -> None:
    k, v = torch.randn(5, 16, 2, 24), torch.randn(5, 16, 2, 40)
    got_k, got_v = CACHE_LAYOUTS[name](k, v, torch.device("cpu"))
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert got_k.stride(3) == got_v.stride(3) == 1
    together = name in ("stacked", "in_page", "in_row", "flat")
    assert (got_k.untyped_storage().data_ptr() == got_v.untyped_storage().data_ptr()) == together


# --- The oracle ---


def small(page: int, mask: object = None, *mods: object, packed: bool = False, **named: object) -> DecodeArguments:
    """Three sequences of 3 queries; 7, 9 and 5 keys."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 3, 4, 16, generator=generator)
    k, v = (torch.randn(3, 12, 2, 16, generator=generator) for _ in range(2))
    seqlens_k, table = torch.tensor([7, 9, 5], dtype=torch.int32), None
    if page:
        order = torch.tensor([5, 0, 3, 1, 2, 4, 8, 6, 7, 11, 10, 9])[: 36 // page]
        table = order.argsort().view(3, -1).int()
        k, v = (x.reshape(-1, page, 2, 16)[order] for x in (k, v))
    if packed:
        named |= {"cu_seqlens_q": torch.tensor([0, 3, 6, 9], dtype=torch.int32), "max_seqlen_q": 3}
        q = q.flatten(0, 1)
    return DecodeArguments(q, k, v, seqlens_k, table, mask=mask, score_mods=mods, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_attention_of_each_sequence(page: int, packed: bool) -> None:
    """By the dense oracle on slices, and masks that it is given in the dense call's terms."""
    bias, ids = torch.randn(3, 4, 3, 12), torch.tensor([[0] * 4 + [1] * 8, [0] * 12, [2, 2, 1] * 4])
    arguments = small(page, Documents(ids), Bias(bias), packed=packed)
    (o, lse), _ = expected_decode(arguments)
    plain = small(0)
    for number, length in enumerate((7, 9, 5)):
        q, k, v = plain.q[number, None], plain.k_cache[number, None, :length], plain.v_cache[number, None, :length]
        mask = Causal() & Documents(ids[number, :length])
        expected, expected_lse = oracle_attention(q, k, v, mask, (Bias(bias[number, None, :, :, :length]),))
        got = o[3 * number :][:3] if packed else o[number]
        got_lse = lse[:, 3 * number :][:, :3] if packed else lse[number]
        assert torch.equal(got, expected[0])
        assert torch.equal(got_lse, expected_lse[0])


def test_a_tree_by_hand() -> None:
    """Siblings do not see each other; a sequence that is shorter than the tree has no keys before it."""
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(3, 3, 3)
    arguments = replace(small(0, tree_mask=tree), seqlens_k=torch.tensor([7, 9, 2], dtype=torch.int32))
    (o, lse), _ = expected_decode(arguments)
    seen = {0: [0, 1, 2, 3, 4, 6], 2: [1]}  # of the last query of a sequence; the third's first key stands at -1
    for number, keys in seen.items():
        q = arguments.q[number, None, 2:].double()
        k, v = (x[number, None, keys].double() for x in (arguments.k_cache, arguments.v_cache))
        expected, expected_lse = oracle_attention(q, k, v)
        torch.testing.assert_close(o[number, 2:], expected[0])
        torch.testing.assert_close(lse[number, :, 2:], expected_lse[0])
    assert (o[2, 0] == 0).all()
    assert (lse[2, :, 0] == -torch.inf).all()


def test_packed_rows_of_no_sequence_are_empty() -> None:
    arguments = small(3, packed=True, sink=torch.ones(4))
    behind = torch.full((5, 4, 16), torch.nan)
    (o, lse), (eager_o, _) = expected_decode(replace(arguments, q=torch.cat([arguments.q, behind])))
    assert (o[9:] == 0).all()
    assert (eager_o[2][9:] == 0).all()
    assert (lse[:, 9:] == -torch.inf).all()


# --- Mistakes that the rule must see, in the oracle's own results for other arguments ---


def wrong(arguments: DecodeArguments, **changes: object) -> None:
    """Fails unless a call with changed arguments fails the rule for the call as it is."""
    (o, lse), _ = expected_decode(replace(arguments, **changes))  # type: ignore[arg-type]
    got = o.to(arguments.q.dtype), lse.float()
    with pytest.raises(AssertionError, match="lse of"):
        assert_forward_accurate("wrong", got, *expected_decode(arguments))


@pytest.mark.parametrize("case", [case for case in CASES if case.shape.lengths == "ragged"][:3], ids=lambda x: x.id)
def test_mistakes_are_seen(case: DecodeCase) -> None:
    arguments = build_decode(case)
    wrong(arguments, seqlens_k=(arguments.seqlens_k - 1).clamp(min=0))
    wrong(arguments, k_cache=arguments.k_cache.roll(1, 1 if arguments.page_table is None else 0))
    wrong(arguments, scale=1.5 * (arguments.scale or case.structure.head_dim**-0.5))


def test_causal_that_is_off_by_one_is_seen() -> None:
    arguments = build_decode(next(case for case in CASES if case.shape.lengths == "four" and case.structure.causal))
    wrong(arguments, causal=False)
