"""`decode` and `decode_plan`: their errors, options and plans, and how they are traced.

The conformance suite checks values by the tolerance rule; here calls are compared with others, or with `attention`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tileattn
from tests.api.test_attention import message
from tileattn import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    FixedSplit,
    GlobalTokens,
    KeyPadding,
    PrefixLM,
    SlidingWindow,
    SoftCap,
    append_kv,
    decode,
    decode_plan,
)
from tileattn.runtime import prepared_decode, tables

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
LENGTHS, CAPACITY, ROWS = [5, 0, 11, 2], 11, 3
BATCH = len(LENGTHS)
LENGTHS_Q, MAX_Q, BEHIND = [1, 4, 0, 3], 5, 2  # packed: a length of 0, an upper bound, rows that belong to no sequence
TOTAL_Q = sum(LENGTHS_Q) + BEHIND
PAGE, PAGES = 3, 13
WIDTH = -(-CAPACITY // PAGE)


def random(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def contiguous() -> dict[str, Tensor]:
    """A call on a contiguous cache. Rows past the lengths are NaN."""
    k, v = random(BATCH, CAPACITY, KV_HEADS, DIM, seed=1), random(BATCH, CAPACITY, KV_HEADS, DIM_V, seed=2)
    for row, length in enumerate(LENGTHS):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    return {"q": random(BATCH, ROWS, HEADS, DIM), "k_cache": k, "v_cache": v, "seqlens_k": ints(*LENGTHS)}


def paged(page: int = PAGE, pages: int = PAGES) -> dict[str, Tensor]:
    """The same call on pages in any order; unused pages are NaN, entries past the lengths -1."""
    given = contiguous()
    order = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist())
    table = torch.full((BATCH, -(-CAPACITY // page)), -1, dtype=torch.int32)
    caches = {name: torch.full((pages, page, *given[name].shape[2:]), torch.nan) for name in ("k_cache", "v_cache")}
    for row, length in enumerate(LENGTHS):
        for index in range(-(-length // page)):
            table[row, index] = next(order)
            for name, cache in caches.items():
                tokens = given[name][row, index * page : (index + 1) * page]
                cache[table[row, index], : len(tokens)] = tokens
    return {**given, **caches, "page_table": table}


def packed() -> dict[str, Any]:
    """Packed queries on pages."""
    ends = ints(0, *itertools.accumulate(LENGTHS_Q))
    return {**paged(), "q": random(TOTAL_Q, HEADS, DIM), "cu_seqlens_q": ends, "max_seqlen_q": MAX_Q}


CALLS: dict[str, Callable[[], dict[str, Any]]] = {"contiguous": contiguous, "paged": paged, "packed": packed}


def assert_same(x: Any, y: Any) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# --- Refused ---


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"q": 3.0}, TypeError, ("q must be a torch.Tensor, got float",)),
        ({"q": random(BATCH, HEADS, DIM)}, ValueError, ("q must have 4 dimensions", "cu_seqlens_q", "(4, 4, 16)")),
        ({"q": random(BATCH, ROWS, DIM, HEADS).mT}, ValueError, ("q must have a contiguous last dimension",)),
        ({"q": random(BATCH, ROWS, 3, DIM)}, ValueError, ("heads of q must be a multiple", "got 3 and 2")),
        ({"q": random(BATCH, ROWS, HEADS, 8)}, ValueError, ("q and k must have one head_dim, got 8 and 16",)),
        ({"q": contiguous()["q"].half()}, TypeError, ("q, k_cache and v_cache must have one dtype", "float16")),
        ({"q": contiguous()["q"].int()}, TypeError, ("q must be float16, bfloat16, float32 or float64", "int32")),
        ({"k_cache": None}, TypeError, ("k_cache must be a torch.Tensor, got NoneType",)),
        ({"k_cache": contiguous()["k_cache"][0]}, ValueError, ("k_cache must have 4 dimensions", "(11, 2, 16)")),
        ({"k_cache": random(3, 11, 2, 16), "v_cache": random(3, 11, 2, 24)}, ValueError,
         ("k_cache must have one row per sequence, 4, got 3", "page_table=")),
        ({"k_cache": random(BATCH, 10, 2, 16)}, ValueError, ("one shape but for head_dim", "(4, 10, 2, 16)")),
        ({"k_cache": contiguous()["k_cache"].to("meta")}, ValueError, ("on one device, got cpu, meta and cpu",)),
        ({"v_cache": contiguous()["v_cache"].double()}, TypeError, ("one dtype", "torch.float32 and torch.float64")),
        ({"v_cache": random(BATCH, CAPACITY, 2, 0)}, ValueError, ("head dims must be at least 1", "0 for v")),
        ({"seqlens_k": LENGTHS}, TypeError, ("seqlens_k must be an int32 tensor (batch,), got list",)),
        ({"seqlens_k": torch.tensor(LENGTHS)}, TypeError, ("seqlens_k must be int32, got torch.int64", ".int()")),
        ({"seqlens_k": ints(1, 2, 3)}, ValueError, ("seqlens_k must have shape (batch,) = (4,), got (3,)",)),
        ({"seqlens_k": ints(1, 2, 3, 4)[:, None]}, ValueError, ("seqlens_k must have shape (batch,) = (4,)", "(4, 1)")),
        ({"seqlens_k": ints(*range(8))[::2]}, ValueError, ("seqlens_k must be contiguous",)),
        ({"seqlens_k": ints(*LENGTHS).to("meta")}, ValueError, ("seqlens_k must be on q's device cpu, got meta",)),
        ({"seqlens_k": ints(5, 0, 12, 2)}, ValueError, ("seqlens_k must lie in 0 .. 11", "got 12 (sequence 2)")),
        ({"seqlens_k": ints(5, -1, 11, 2)}, ValueError, ("seqlens_k must lie in 0 .. 11", "got -1 (sequence 1)")),
        ({"max_seqlen_q": 3}, ValueError, ("max_seqlen_q is for packed queries", "cu_seqlens_q")),
        ({"causal": 1}, TypeError, ("causal must be True or False, got 1",)),
        ({"return_lse": "yes"}, TypeError, ("return_lse must be True or False, got 'yes'",)),
        ({"sink": random(3)}, ValueError, ("sink must have shape (heads,) = (4,), got (3,)",)),
        ({"scale": float("inf")}, ValueError, ("scale must be a finite number or None",)),
        ({"scale": True}, TypeError, ("scale must be a finite number or None",)),
        ({"splits": 0}, ValueError, ("splits must lie in 1 .. 256, got 0",)),
        ({"splits": 257}, ValueError, ("splits must lie in 1 .. 256, got 257",)),
        ({"splits": True}, TypeError, ("splits must be None, an int or a tileattn.FixedSplit, got True",)),
        ({"splits": 2.0}, TypeError, ("splits must be None, an int or a tileattn.FixedSplit, got 2.0",)),
        ({"plan": 3}, TypeError, ("plan must be what tileattn.decode_plan returned, or None, got int",)),
        ({"backend": "cuda"}, ValueError, ("backend must be one of",)),
        ({"backend": "mma"}, NotImplementedError, ("backend='mma' does not run", "it does not decode")),
        ({"mask": Causal}, TypeError, ("mask must be a tileattn mask", "the class Causal")),
        ({"mask": PrefixLM(ints(1, 2))}, ValueError, ("prefix must have shape (4,), got (2,)",)),
        ({"mask": Documents(ints(*[0] * 10))}, ValueError, ("Documents: ids", "(4, 11)")),
        ({"mask": KeyPadding(torch.ones(4, 12, dtype=torch.bool))}, ValueError, ("padding", "(4, 11)", "(4, 12)")),
        ({"score_mod": ALiBi(random(3))}, ValueError, ("ALiBi: slopes", "(4,)", "got (3,)")),
        ({"score_mod": Bias(random(1, 1, 2, 11))}, ValueError, ("Bias: tensor", "(4, 4, 3, 11)", "(1, 1, 2, 11)")),
        ({"score_mod": Bias(random(1, 1, 3, 10))}, ValueError, ("Bias: tensor", "got (1, 1, 3, 10)")),
        ({"tree_mask": torch.ones(4, 3, 3)}, TypeError, ("tree_mask must be a bool tensor", "torch.float32")),
        ({"tree_mask": torch.ones(4, 3, 2).bool()}, ValueError, ("(4 or 1, 3, 3), got (4, 3, 2)",)),
        ({"tree_mask": torch.ones(1, 3, 3, device="meta").bool()}, ValueError, ("tree_mask must be on q's device",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        decode(**(contiguous() | changes))
    if "plan" not in changes and "must lie in 0 .. 11" not in says[0]:  # a plan reads no values
        with pytest.raises(error, match=message(*says)):
            decode_plan(**(contiguous() | changes))


def test_unknown_keywords() -> None:
    for name, instead in (("caual", "causal="), ("softcap", "score_mod="), ("block_table", "page_table=;?$")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; use {instead}"):
            decode(**contiguous(), **{name: 3})
    for name in ("out", "plan"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            decode_plan(**contiguous(), **{name: None})


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"page_table": 3}, TypeError, ("page_table must be an int32 tensor (batch, pages_per_sequence), got int",)),
        ({"page_table": paged()["page_table"].long()}, TypeError, ("page_table must be int32, got torch.int64",)),
        ({"page_table": paged()["page_table"][1:]}, ValueError, ("(4, pages_per_sequence), got (3, 4)",)),
        ({"page_table": paged()["page_table"][0]}, ValueError, ("page_table must have shape", "got (4,)")),
        ({"page_table": paged()["page_table"].T.contiguous().T}, ValueError, ("a contiguous last dimension",)),
        ({"page_table": paged()["page_table"].to("meta")}, ValueError, ("page_table must be on q's device cpu",)),
        ({"k_cache": random(PAGES, 0, 2, DIM), "v_cache": random(PAGES, 0, 2, DIM_V)}, ValueError,
         ("pages must have at least one token",)),
        ({"seqlens_k": ints(5, 0, 13, 2)}, ValueError, ("seqlens_k must lie in 0 .. 12", "got 13 (sequence 2)")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_pages(changes: dict[str, Any], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        decode(**(paged() | changes))


@pytest.mark.parametrize("entry", [-1, PAGES, 2**31 - 1])
@pytest.mark.parametrize("splits", [None, FixedSplit(128)], ids=["free", "fixed"])
def test_entries_within_the_length_must_name_pages(entry: int, splits: Any) -> None:
    given = paged()
    given["page_table"][2, 3] = entry
    with pytest.raises(ValueError, match=message("page_table must name pages in 0 .. 12", f"got {entry} at [2, 3]")):
        decode(**given, splits=splits)
    given["seqlens_k"] = ints(5, 0, 9, 2)  # which the entry lies behind
    assert not decode(**given, splits=splits).isnan().any()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"q": contiguous()["q"]}, ValueError, ("q must have 3 dimensions, (total_q, heads, head_dim)",)),
        ({"cu_seqlens_q": LENGTHS_Q}, TypeError, ("cu_seqlens_q must be an int32 tensor (sequences + 1,), got list",)),
        ({"cu_seqlens_q": ints(0, 1, 5)}, ValueError, ("seqlens_k must have shape (batch,) = (2,), got (4,)",)),
        ({"cu_seqlens_q": ints(1, 1, 5, 5, 8)}, ValueError, ("cu_seqlens_q must start at 0, got 1",)),
        ({"cu_seqlens_q": ints(0, 4, 1, 5, 8)}, ValueError, ("cu_seqlens_q must not decrease, got 1 after 4",)),
        ({"cu_seqlens_q": ints(0, 1, 5, 6, 11)}, ValueError, ("cu_seqlens_q must be at most total_q = 10, got 11",)),
        ({"max_seqlen_q": None}, TypeError, ("max_seqlen_q must be given with cu_seqlens_q",)),
        ({"max_seqlen_q": 3}, ValueError, ("max_seqlen_q must be at least the longest length, got 3",)),
        ({"max_seqlen_q": -1}, ValueError, ("max_seqlen_q must be at least 0, got -1",)),
        ({"max_seqlen_q": 4.0}, TypeError, ("max_seqlen_q must be an int that the host knows, got float",)),
        ({"tree_mask": torch.ones(4, 4, 4).bool()}, ValueError, ("max_seqlen_q", "(4 or 1, 5, 5), got (4, 4, 4)")),
        ({"score_mod": Bias(random(1, 1, 4, 12))}, ValueError, ("Bias: tensor", "(4, 4, 5, 12)")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_packed_queries(changes: dict[str, Any], error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        decode(**(packed() | changes))


def test_what_is_not_there_yet_says_so() -> None:
    given = contiguous()
    with pytest.raises(NotImplementedError, match=message("v_cache is None", "(MLA)", "not taken yet")):
        decode(**(given | {"v_cache": None}))
    for names in (["q"], ["k_cache", "v_cache"], ["q", "k_cache", "v_cache"]):
        fp8 = {name: given[name].to(torch.float8_e4m3fn) for name in names}
        with pytest.raises(NotImplementedError, match=message(names[0], "float8_e4m3fn", "does not take yet")):
            decode(**(given | fp8))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sink", "bias", "slopes"])
def test_gradients_raise(name: str) -> None:
    given: dict[str, Any] = contiguous() | {"sink": random(HEADS)}
    leaf = random(1, 1, 1, CAPACITY) if name == "bias" else random(HEADS) if name == "slopes" else given[name]
    leaf.requires_grad_()
    if name in ("bias", "slopes"):
        given["score_mod"] = Bias(leaf) if name == "bias" else ALiBi(leaf)
    if name != "sink":
        del given["sink"]
    with pytest.raises(NotImplementedError, match=message("decode has no gradients", "requires grad", "no_grad")):
        decode(**given)
    with torch.no_grad():
        o = decode(**given)  # the same call, prepared or not
    assert not o.requires_grad
    with pytest.raises(NotImplementedError, match="decode has no gradients"):
        decode(**given)


# --- Splits ---


@pytest.mark.parametrize("name", ["vmap", "jvp", "grad"])
def test_torch_func_is_refused(name: str) -> None:
    given = contiguous()
    cache, lengths = given.pop("k_cache"), given.pop("seqlens_k")

    def attend(q: Tensor) -> Any:
        return decode(q, cache, cache, lengths)

    def append(k: Tensor) -> Any:
        return append_kv(k, k, cache, cache.clone(), lengths)

    function: Any
    for function, x in ((attend, given["q"]), (append, random(BATCH, 1, KV_HEADS, DIM))):
        called = {
            "vmap": lambda function=function, x=x: torch.func.vmap(function)(x[None]),
            "jvp": lambda function=function, x=x: torch.func.jvp(function, (x,), (x,)),
            "grad": lambda function=function, x=x: torch.func.grad(function)(x),
        }[name]
        with pytest.raises(NotImplementedError, match=message("is not transformed by torch.func")):
            called()


@pytest.mark.parametrize("keys", [0, -128, 64, 129, 1000, 2**31])
def test_fixed_splits_are_multiples_of_128(keys: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"at most 2^30, got {keys}")):
        FixedSplit(keys)


@pytest.mark.parametrize("keys", [None, 128.0, True, "128"])
def test_fixed_splits_are_ints(keys: Any) -> None:
    with pytest.raises(TypeError, match="keys must be an int"):
        FixedSplit(keys)


def test_numbers_may_be_numpys() -> None:
    assert FixedSplit(np.int64(256)) == FixedSplit(256)
    given = contiguous()
    assert_same(decode(**given, splits=np.int32(3), scale=np.float32(0.25)), decode(**given, splits=3, scale=0.25))


@pytest.mark.parametrize("splits", [1, 2, 3, 64, 256, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_splits_change_the_order_of_sums_alone(name: str, splits: Any) -> None:
    given = CALLS[name]()
    double = {key: x.double() if x.is_floating_point() else x for key, x in given.items() if isinstance(x, Tensor)}
    o, lse = decode(**(given | double), splits=splits, return_lse=True)
    expected_o, expected_lse = decode(**(given | double), return_lse=True)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(lse, expected_lse)


# --- Layouts of the call ---


@pytest.mark.parametrize("page", [1, 3, 16, 300])
def test_pages_hold_what_a_contiguous_cache_does(page: int) -> None:
    for options in ({}, {"mask": SlidingWindow(4, 0)}, {"splits": FixedSplit(128)}):
        x, y = (decode(**call, return_lse=True, **options) for call in (contiguous(), paged(page, 20)))  # type: ignore[arg-type]
        torch.testing.assert_close(x, y)


def test_a_packed_sequence_is_a_call_by_itself() -> None:
    given = packed()
    o, lse = decode(**given, return_lse=True)
    assert o.shape == (TOTAL_Q, HEADS, DIM_V)
    assert lse.shape == (HEADS, TOTAL_Q)
    end = sum(LENGTHS_Q)
    assert not o[end:].any()
    assert (lse[:, end:] == -torch.inf).all()
    for row, length in enumerate(LENGTHS_Q):
        rows = slice(sum(LENGTHS_Q[:row]), sum(LENGTHS_Q[: row + 1]))
        own = {name: given[name][row : row + 1] for name in ("seqlens_k", "page_table")}
        alone = {"k_cache": given["k_cache"], "v_cache": given["v_cache"], **own}
        expected = decode(given["q"][None, rows], **alone, return_lse=True)
        assert_same(o[rows], expected[0][0])
        assert_same(lse[:, rows], expected[1][0])
        assert length == rows.stop - rows.start


def test_rows_without_keys() -> None:
    """A length of 0, and under causal the first rows of a sequence with fewer keys than queries."""
    sink = random(HEADS)
    for options, lse_of_nothing in (({}, torch.full((HEADS,), -torch.inf)), ({"sink": sink}, sink)):
        o, lse = decode(**contiguous(), return_lse=True, **options)
        for row, query in ((1, 0), (1, 1), (1, 2), (3, 0)):
            assert not o[row, query].any()
            assert_same(lse[row, :, query], lse_of_nothing)
        assert (lse[3, :, 1:] > -torch.inf).all()
    _, lse = decode(**contiguous(), causal=False, return_lse=True)
    assert (lse[3] > -torch.inf).all()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("name", CALLS)
def test_empty_sizes(name: str) -> None:
    given = CALLS[name]()
    if name == "packed":
        no_queries = {"q": given["q"][:0], "cu_seqlens_q": ints(0, 0, 0, 0, 0)}
        nothing = {"q": given["q"][:0], "cu_seqlens_q": ints(0), "max_seqlen_q": 0}
    else:
        no_queries, nothing = {"q": given["q"][:, :0]}, {"q": given["q"][:0]}
    assert decode(**(given | no_queries)).numel() == 0
    no_sequences = {key: given[key][:0] for key in ("seqlens_k", "page_table") if key in given}
    no_caches = {} if "page_table" in given else {key: given[key][:0] for key in ("k_cache", "v_cache")}
    assert decode(**(given | nothing | no_sequences | no_caches)).numel() == 0
    if name == "contiguous":
        no_capacity = {key: given[key][:, :0] for key in ("k_cache", "v_cache")}
        o, lse = decode(**(given | no_capacity | {"seqlens_k": ints(0, 0, 0, 0)}), return_lse=True)
        assert not o.any()
        assert (lse == -torch.inf).all()


def test_caches_may_be_views_of_one_buffer() -> None:
    given = paged()
    buffer = torch.full((PAGES, 2, PAGE + 2, KV_HEADS, DIM + DIM_V + 8), torch.nan)
    buffer[:, 0, 1 : PAGE + 1, :, :DIM] = given["k_cache"]
    buffer[:, 1, :PAGE, :, 8 : DIM_V + 8] = given["v_cache"]
    wide = torch.full((BATCH, 9), 77, dtype=torch.int32)
    wide[:, :WIDTH] = given["page_table"]
    views = {"k_cache": buffer[:, 0, 1 : PAGE + 1, :, :DIM], "v_cache": buffer[:, 1, :PAGE, :, 8 : DIM_V + 8]}
    assert_same(decode(**(given | views | {"page_table": wide[:, :WIDTH]})), decode(**given))


# --- Variants ---


def test_positions_are_those_of_the_sequence() -> None:
    """Row i of a sequence stands at seqlens_k - q_len + i, and b is the sequence's number."""
    given = contiguous()
    first = given["seqlens_k"] - ROWS
    own = torch.zeros(BATCH, HEADS, ROWS, CAPACITY)
    for b, h, i, k in itertools.product(range(BATCH), range(HEADS), range(ROWS), range(CAPACITY)):
        own[b, h, i, k] = 0.3 * b + 0.1 * h - 0.01 * (k - (int(first[b]) + i))
    by_function = decode(**given, score_mod=lambda s, b, h, q, k: s + 0.3 * b + 0.1 * h - 0.01 * (k - q))
    torch.testing.assert_close(decode(**given, score_mod=Bias(own)), by_function)
    torch.testing.assert_close(decode(**given, mask=lambda b, h, q, k: k >= q - 4 - b, causal=True), _by_loop(given))


def _by_loop(given: dict[str, Tensor]) -> Tensor:
    rows = []
    for b, length in enumerate(LENGTHS):
        q, k, v = given["q"][b : b + 1], given["k_cache"][b : b + 1, :length], given["v_cache"][b : b + 1, :length]
        rows.append(tileattn.attention(q, k, v, causal=True, mask=SlidingWindow(4 + b, 0)))
    return torch.cat(rows)


@pytest.mark.parametrize("name", CALLS)
def test_a_tree_that_is_a_chain_is_causal(name: str) -> None:
    given = CALLS[name]()
    rows = MAX_Q if name == "packed" else ROWS
    chain = torch.ones(rows, rows, dtype=torch.bool).tril()
    for tree in (chain[None], chain.expand(BATCH, -1, -1)):
        torch.testing.assert_close(decode(**given, tree_mask=tree, return_lse=True), decode(**given, return_lse=True))
    windowed = decode(**given, tree_mask=chain[None], mask=SlidingWindow(2, 0))
    torch.testing.assert_close(windowed, decode(**given, mask=SlidingWindow(2, 0)))


def test_a_tree_shows_what_it_has() -> None:
    """Two branches of one root: each sees the root, itself and all keys before."""
    given = contiguous()
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]]).expand(BATCH, -1, -1).clone()
    tree[2, 0, 0] = False
    o, lse = decode(**given, tree_mask=tree, causal=True, return_lse=True)
    for b, length in enumerate(LENGTHS):
        allowed = torch.ones(ROWS, length, dtype=torch.bool)
        for i, j in itertools.product(range(ROWS), range(ROWS)):
            if length - ROWS + j >= 0:
                allowed[i, length - ROWS + j] = tree[b, i, j]
        q, k, v = given["q"][b : b + 1], given["k_cache"][b : b + 1, :length], given["v_cache"][b : b + 1, :length]
        bias = torch.zeros(1, 1, ROWS, length).masked_fill(~allowed, -torch.inf)
        expected = tileattn.attention(q, k, v, score_mod=Bias(bias), return_lse=True)
        torch.testing.assert_close((o[b : b + 1], lse[b : b + 1]), expected)


def test_autocast_casts_the_queries_and_not_the_caches() -> None:
    given = contiguous()
    caches = {name: given[name].bfloat16() for name in ("k_cache", "v_cache")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = decode(**(given | caches))
        with pytest.raises(TypeError, match="one dtype"):
            decode(**given)
    assert_same(o, decode(**(given | caches | {"q": given["q"].bfloat16()})))


# --- out ---


@pytest.mark.parametrize("name", CALLS)
def test_out_is_written_and_returned(name: str) -> None:
    given = CALLS[name]()
    expected, lse = decode(**given, return_lse=True)
    for options in ({}, {}, {"splits": FixedSplit(128)}):  # the second call is prepared
        wide = torch.full((*expected.shape[:-1], DIM_V + 5), torch.nan)
        out = wide[..., 2 : DIM_V + 2]
        o, lse_too = decode(**given, out=out, return_lse=True, **options)  # type: ignore[arg-type]
        assert o is out
        torch.testing.assert_close((o, lse_too), (expected, lse))
        assert wide[..., :2].isnan().all()
        assert wide[..., DIM_V + 2 :].isnan().all()
        assert decode(**given, out=out) is out


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        (3, TypeError, ("out must be a torch.Tensor, got int",)),
        (random(BATCH, ROWS, HEADS, DIM), ValueError, ("out must have o's shape", "(4, 3, 4, 16)", "(4, 3, 4, 24)")),
        (random(BATCH, ROWS, HEADS, DIM_V).half(), TypeError, ("out must have q's dtype torch.float32",)),
        (random(BATCH, ROWS, DIM_V, HEADS).mT, ValueError, ("out must have a contiguous last dimension",)),
        (random(BATCH, ROWS, HEADS, DIM_V).to("meta"), ValueError, ("out must be on q's device cpu, got meta",)),
        (
            random(BATCH, ROWS, 1, DIM_V).expand(-1, -1, HEADS, -1),
            ValueError,
            ("out must not be expanded, got strides",),
        ),
        (random(BATCH, ROWS, HEADS, DIM_V).requires_grad_(), NotImplementedError, ("decode has no gradients",)),
    ],
    ids=["number", "shape", "dtype", "strides", "device", "expanded", "gradient"],
)
def test_wrong_out(out: Any, error: Any, says: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        decode(**contiguous(), out=out)


def test_out_must_not_share_memory_with_an_input() -> None:
    given = contiguous()
    both = random(BATCH, ROWS, 2, HEADS, DIM)
    given["v_cache"] = given["k_cache"]
    q, out = both.unbind(2)
    assert_same(
        decode(**(given | {"q": q}), out=out), decode(**(given | {"q": q}))
    )  # side by side: no memory is shared
    for name, shared in (("q", q), ("k_cache", given["k_cache"][:, 4 : 4 + ROWS].repeat_interleave(2, 2))):
        if name == "k_cache":
            given["k_cache"] = torch.cat([given["k_cache"], given["k_cache"]], 2)
            given["v_cache"], shared = given["k_cache"], given["k_cache"][:, 4 : 4 + ROWS]
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            decode(**(given | {"q": q}), out=shared)


# --- Plans ---


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_serves_calls_with_its_sizes_and_options(name: str) -> None:
    given = CALLS[name]()
    plan = decode_plan(**given)
    assert isinstance(plan, tileattn.DecodePlan)
    for layer in range(2):
        other = given | {"q": given["q"] + layer}
        for return_lse in (False, True):
            assert_same(decode(**other, plan=plan, return_lse=return_lse), decode(**other, return_lse=return_lse))


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": 2},
        {"splits": FixedSplit(128)},
        {"causal": False},
        {"mask": SlidingWindow(3, 0)},
        {"score_mod": SoftCap(3.0)},
        {"sink": random(HEADS)},
        {"q": random(BATCH, ROWS + 1, HEADS, DIM)},
        {name: x.double() for name, x in contiguous().items() if x.is_floating_point()},
        {name: x[:2] for name, x in contiguous().items()},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_plan_for_another_call_is_an_error(changes: dict[str, Any]) -> None:
    plan = decode_plan(**contiguous())
    other = contiguous() | changes
    decode(**other, plan=decode_plan(**other))
    with pytest.raises(ValueError, match=message("plan was made for another call", "made by decode_plan for [torch: ")):
        decode(**other, plan=plan)


def test_a_plan_for_a_mask_with_other_numbers_is_an_error() -> None:
    """Lines of a plan leave out what its own window hides. Numbers of scores hide nothing."""
    given = contiguous() | {"mask": SlidingWindow(5, 0) | GlobalTokens(2)}
    plan = decode_plan(**given, score_mod=SoftCap(3.0))
    decode(**given, score_mod=SoftCap(4.0), plan=plan)
    with pytest.raises(ValueError, match="plan was made for another call"):
        decode(**given | {"mask": SlidingWindow(9, 0) | GlobalTokens(2)}, score_mod=SoftCap(3.0), plan=plan)


# --- The prepared path ---


@pytest.fixture
def no_phases() -> Iterator[None]:
    prepared_decode.PHASES.clear()
    yield
    prepared_decode.PHASES.clear()


@pytest.mark.usefixtures("no_phases")
def test_plain_calls_are_prepared_once_for_all_lengths() -> None:
    for name, call in CALLS.items():
        first = decode(**call(), return_lse=True)
        count = len(prepared_decode.PHASES)
        assert_same(decode(**call(), return_lse=True), first)
        shorter = call() | {"seqlens_k": ints(4, 0, 7, 1)}
        prepared_now = decode(**shorter, return_lse=True)
        assert len(prepared_decode.PHASES) == count, name
        prepared_decode.PHASES.clear()
        assert_same(decode(**shorter, return_lse=True), prepared_now)


@pytest.mark.usefixtures("no_phases")
def test_windows_caps_and_sinks_are_prepared() -> None:
    """Their numbers are the call's own; tensors of a mask or modification are checked each time."""
    given, sink = contiguous(), random(HEADS)
    variants: list[dict[str, Any]] = [
        {"mask": SlidingWindow(2, 0)}, {"mask": SlidingWindow(4, 0)}, {"score_mod": SoftCap(2.0)}, {"sink": sink},
        {"score_mod": [SoftCap(0.5)]}, {"mask": SlidingWindow(1, None), "score_mod": SoftCap(3.0), "sink": sink + 1},
    ]  # fmt: skip
    prepared_now = [decode(**given, **options) for options in variants]
    assert len(prepared_decode.PHASES) == 4
    for options, o in zip(variants, prepared_now):
        prepared_decode.PHASES.clear()
        assert_same(decode(**given, **options), o)
    with pytest.raises(ValueError, match="sink must have shape"):
        decode(**given, sink=sink[1:])
    with pytest.raises(NotImplementedError, match="decode has no gradients"):
        decode(**given, sink=sink.clone().requires_grad_())
    before = len(prepared_decode.PHASES)
    for options in ({"score_mod": ALiBi(sink)}, {"mask": lambda b, h, q, k: k > 1}):
        decode(**given, **options)  # type: ignore[call-overload]
    assert len(prepared_decode.PHASES) == before


@pytest.mark.usefixtures("no_phases")
def test_what_is_checked_is_checked_again_where_it_changes() -> None:
    given = contiguous()
    decode(**given)
    for changes in ({"seqlens_k": given["seqlens_k"].long()}, {"causal": 1}, {"return_lse": 0}, {"splits": [1]}):
        with pytest.raises(TypeError):
            decode(**(given | changes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seqlens_k must have shape"):
        decode(**(given | {"seqlens_k": given["seqlens_k"][:3]}))
    with pytest.raises(ValueError, match="seqlens_k must lie in"):
        decode(**(given | {"seqlens_k": ints(1, 2, 3, 99)}))
    assert len(prepared_decode.PHASES) == 1


@pytest.mark.usefixtures("no_phases")
def test_prepared_calls_look_where_out_lies() -> None:
    given = contiguous()
    given["k_cache"] = given["v_cache"] = random(BATCH, CAPACITY, HEADS, DIM)
    out = torch.empty(BATCH, ROWS, HEADS, DIM)
    for _ in range(2):
        assert decode(**given, out=out) is out
    count = len(prepared_decode.PHASES)
    assert count == 1
    with pytest.raises(ValueError, match="out must not share memory with q"):
        decode(**given, out=given["q"])
    cached = given["k_cache"].view(BATCH, CAPACITY, HEADS, DIM)[:, :ROWS]
    with pytest.raises(ValueError, match="out must not share memory with k_cache"):
        decode(**given, out=cached)
    with pytest.raises(TypeError, match="out must have q's dtype"):
        decode(**given, out=out.half())
    with pytest.raises(NotImplementedError, match="decode has no gradients"):
        decode(**given, out=out.clone().requires_grad_())
    squares = out.clone().requires_grad_().square()
    loss = squares.square().sum()
    decode(**given, out=squares.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert len(prepared_decode.PHASES) == count


@pytest.mark.usefixtures("no_phases")
def test_the_table_of_phases_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST", 2)
    for rows in (1, 2, 3):
        decode(**(contiguous() | {"q": random(BATCH, rows, HEADS, DIM)}))
    assert len(prepared_decode.PHASES) == 1
