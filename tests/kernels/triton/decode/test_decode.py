"""The Triton decode kernels beside a float64 reference: lengths, pages, groups, head dims, variants, packed queries.

All of a cache that no sequence has is NaN, entries of the page table that nothing may follow are garbage, and o is NaN
before each call. On a CPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.triton_kernels.decode import DEVICE, Problem
from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.call import cache_status
from tileattn.call.decoding import FixedSplit, Splits
from tileattn.kernels.triton.decode import defaults
from tileattn.kernels.triton.tile_sizes import Config

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SPLITS: tuple[Splits, ...] = (None, 1, 3, FixedSplit(128))
LENGTHS = (111, 1, 0, 63, 65, 200)


@pytest.fixture(autouse=True)
def no_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No call records an error in the device's status."""
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    yield
    cache_status.check_caches()


@pytest.mark.slow_except(
    "1-3",
    "16-FixedSplit(keys=128)",
    "64-3",
    reason="each length and page size is in one of the others; 0.5 s each in Triton's interpreter",
)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 1, 3, 16, 64])
def test_lengths(page: int, splits: Splits) -> None:
    Problem([1] * 6, LENGTHS, heads=3, kv_heads=1, mask=Causal()).check("lengths", page, splits)


@pytest.mark.slow_except("0-dtype0", "16-dtype1", reason="0.5 s each in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [0, 16])
def test_dtypes(page: int, dtype: torch.dtype) -> None:
    Problem([2] * 3, (130, 1, 63), mask=Causal(), dtype=dtype).check("dtypes", page, 2)


@pytest.mark.slow(reason="1 s in Triton's interpreter")
@pytest.mark.parametrize("splits", [None, FixedSplit(512)], ids=str)
def test_a_long_sequence_beside_a_short_one(splits: Splits) -> None:
    Problem([1, 1], (1025, 17), heads=4, mask=Causal()).check("long", 64, splits)


@pytest.mark.slow_except("3-None", "0-FixedSplit(keys=128)", reason="0.5 s each in Triton's interpreter")
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 3])
def test_queries_without_keys(page: int, splits: Splits) -> None:
    """More queries than keys: under a causal mask the first rows see nothing."""
    problem = Problem([5] * 4, (0, 1, 3, 70), heads=3, kv_heads=1, mask=Causal())
    o, lse = problem.run(page, splits)
    assert not o[0].any()
    assert (lse[0] == -math.inf).all()
    assert not o[2, :2].any()
    problem.check("without keys", page, splits)


@pytest.mark.parametrize("splits", [None, 7, FixedSplit(256)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_without_capacity(packed: bool, splits: Splits) -> None:
    """Rows of no sequence, and of one without keys, are written where there is no key at all."""
    sink = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)
    problem = Problem([0 if packed else 2], [0], heads=3, kv_heads=1, mask=Causal(), sink=sink)
    problem.check("no capacity", 0, splits, tail=3 if packed else 0, packed=packed, more=0)


@pytest.mark.parametrize("q_len", [1, 7])
def test_without_a_mask(q_len: int) -> None:
    Problem([q_len] * 3, (111, 2, 0)).check("full", 16, 2)


PACKED = {"q_lens": (1, 9, 0, 1, 40, 3), "k_lens": (130, 9, 5, 0, 111, 65)}


@pytest.mark.slow_except("0-16-None", "5-0-1", reason="0.5 to 1 s each in Triton's interpreter")
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("tail", [0, 5])
def test_packed_prefill_beside_decoding(page: int, splits: Splits, tail: int) -> None:
    """Prefill chunks with more than one tile of rows beside decoding rows; rows of no sequence are NaN."""
    sink = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)
    problem = Problem(**PACKED, heads=3, kv_heads=1, mask=Causal(), sink=sink)
    problem.check("packed", page, splits, packed=True, tail=tail)


@pytest.mark.slow_except("3", reason="2 s in Triton's interpreter")
@pytest.mark.parametrize("splits", [3, FixedSplit(128)], ids=str)
def test_packed_in_small_tiles(splits: Splits) -> None:
    """Each sequence has several tiles, and the tail more than one."""
    problem = Problem(**PACKED, mask=Causal())
    with defaults.overridden(Config(16, 64, 4, 1)):
        problem.check("small tiles", 3, splits, packed=True, tail=19)


@pytest.mark.slow(reason="300 sequences in Triton's interpreter, 5 s")
def test_more_packed_sequences_than_are_looked_at_at_a_time() -> None:
    lengths = [number % 20 // 19 * (1 + number % 3) for number in range(300)]
    problem = Problem(lengths, [3 + number % 5 for number in range(300)], heads=2, kv_heads=1, mask=Causal())
    problem.check("many", 16, 1, packed=True, tail=2)


@pytest.mark.slow_except("1-128-1", "1-3-3", "3-10-2", reason="0.5 to 1 s each in Triton's interpreter")
@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 1), (71, 1), (10, 2), (3, 3)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_groups(heads: int, kv_heads: int, q_len: int) -> None:
    """Tiles of rows that begin within a query's heads."""
    Problem([q_len] * 2, (70, 5), heads, kv_heads, mask=Causal()).check("groups", 16, 2)


@pytest.mark.slow_except("(7, 16)", "(256, 64)", "(96, 80)", reason="0.4 s each in Triton's interpreter")
@pytest.mark.parametrize("dims", [(1, 1), (7, 16), (256, 64), (64, 256), (128, 128), (96, 80)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    problem = Problem([1] * 2, (130, 5), 4, 2, *dims, mask=Causal(), scale=dims[0] ** -0.5)
    problem.check("head dims", 16, 2)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    Problem([2] * 2, (70, 5), mask=Causal(), scale=scale).check("scale", 16, 2)


# --- Variants ---

CAPACITY = 256


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def of_heads(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Rows of a tile differ in the head."""
    return tileattn.math.where(h % 2 == 0, score / (h + 1), score - 0.01 * (q - k)) + 0.1 * b


def sees_by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((k + h) % 3 != 0)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadsWindow(Mask):
    """Head h sees h + 1 keys: ranges that differ by head."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k >= q - h)

    def kv_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Any:
        return q_lo - h, q_hi + 1

    def full_range(self, b: Any, h: Any, q_lo: Any, q_hi: Any, seqlen_k: Any) -> Any:
        return q_hi - h, q_lo + 1


def tree(batch: int, q_len: int, k_lens: Any) -> Mask:
    """Row i sees all keys before the last q_len, and of these the ones that a random tree allows."""
    ones = torch.rand(batch, q_len, q_len, generator=torch.Generator().manual_seed(3)) < 0.5
    ones = (ones | torch.eye(q_len, dtype=torch.bool)).to(DEVICE)
    begin = (torch.tensor(k_lens) - q_len).int().to(DEVICE)

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < begin[b]) | ones[b, q - begin[b], tileattn.math.maximum(k - begin[b], 0)]

    return FunctionMask(sees)


K_LENS = (200, 65, 7)
VARIANTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softcap": (Causal(), (SoftCap(2.0),)),
    "alibi": (Causal(), (ALiBi(torch.linspace(0.5, 0.01, 6).to(DEVICE)),)),
    "bias": (Causal(), (Bias(tensor(3, 6, 1, CAPACITY)),)),
    "user": (Causal(), (of_heads,)),
    "of heads": (FunctionMask(sees_by_head), ()),
    "ranges of heads": (HeadsWindow(), ()),
    "window": (SlidingWindow(70, 0), (SoftCap(2.0),)),
    "two windows": (SlidingWindow(40, 0) | PrefixLM(5), ()),
    "prefix": (PrefixLM(torch.tensor([190, 3, 0], dtype=torch.int32, device=DEVICE)), ()),
    "documents": (Causal() & Documents((torch.arange(CAPACITY, device=DEVICE) // 50)[None].expand(3, -1)), ()),
    "padding": (Causal() & KeyPadding((torch.arange(CAPACITY, device=DEVICE) % 5 != 0)[None].expand(3, -1)), ()),
    "tree": (tree(3, 4, K_LENS), ()),
}


@pytest.mark.slow_except(
    "softcap-3",
    "alibi-1",
    "bias-FixedSplit(keys=128)",
    "user-1",
    "of heads-FixedSplit(keys=128)",
    "ranges of heads-1",
    "window-1",
    "two windows-3",
    "prefix-FixedSplit(keys=128)",
    "documents-1",
    "padding-FixedSplit(keys=128)",
    "tree-1",
    reason="each variant is in one of the others; 0.5 s each in Triton's interpreter",
)
@pytest.mark.parametrize("splits", [1, 3, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, splits: Splits) -> None:
    mask, mods = VARIANTS[name]
    Problem([4] * 3, K_LENS, mask=mask, mods=mods).check(name, 16, splits)


@pytest.mark.slow_except("tree", "ranges of heads", reason="0.8 s each in Triton's interpreter")
@pytest.mark.parametrize("name", ["bias", "user", "tree", "ranges of heads"])
def test_variants_in_small_tiles(name: str) -> None:
    """Tiles of 16 rows: four queries of three heads are one; and tiles of keys that all rows see."""
    mask, mods = VARIANTS[name]
    with defaults.overridden(Config(16, 16, 4, 1)):
        Problem([4] * 3, K_LENS, mask=mask, mods=mods).check(name, 64, 2)


@pytest.mark.slow_except("1-None", "16-3", reason="0.7 s each in Triton's interpreter")
@pytest.mark.parametrize("splits", [None, 3, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("page", [0, 1, 3, 16, 64])
def test_pages_before_a_window_are_not_read(page: int, splits: Splits) -> None:
    """They hold NaN, and their entries of the table are garbage."""
    lengths, left = (200, 65, 300), 70
    problem = Problem([2] * 3, lengths, mask=SlidingWindow(left, 0))
    problem.check("window", page, splits, seen_from=[max(keys - 2 - left, 0) for keys in lengths])


@pytest.mark.slow_except("16-5", reason="1 s each in Triton's interpreter")
@pytest.mark.parametrize("splits", [None, 1, 5, FixedSplit(128)], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_sink(page: int, splits: Splits) -> None:
    """It joins once, also where there is no key at all."""
    sink = torch.tensor([0.5, -1.0, 100.0, -math.inf, 3.0, 0.0], device=DEVICE)
    problem = Problem([1] * 3, (200, 0, 3), mask=Causal(), sink=sink)
    _, lse = problem.run(page, splits)
    torch.testing.assert_close(lse[1, :, 0], sink)
    problem.check("sink", page, splits)


def test_without_lse() -> None:
    problem = Problem([1] * 2, (111, 3), mask=Causal())
    inputs = problem.inputs(16)
    call, sizes = problem.facts(inputs, 16, 2)
    from tileattn.kernels.triton.decode.backend import prepare

    o, lse = prepare(dataclasses.replace(call, return_lse=False), sizes, problem.scale, 2)(inputs, None)
    assert lse is None
    assert torch.equal(o, problem.run(16, 2)[0])


# --- NaN and infinities ---


@pytest.mark.slow_except("1", "FixedSplit(keys=128)", reason="0.8 s in Triton's interpreter")
@pytest.mark.parametrize("splits", [1, 3, FixedSplit(128)], ids=str)
def test_nan_and_infinities(splits: Splits) -> None:
    """In a key that all rows see: NaN gives NaN, +inf an infinite lse, -inf a weight of 0, as the formula does."""
    problem = Problem([1] * 4, (150, 150, 150, 150), heads=4, head_dim_v=16, mask=Causal())
    for q in problem.q:
        q[..., 3] = q[..., 3].abs() + 1
    problem.k[0][140, 1, 3] = math.nan
    problem.k[1][10, 1, 3] = math.inf
    problem.k[2][10, 1, 3] = -math.inf
    problem.v[3][140, 1] = math.inf
    o, lse = problem.run(16, splits)
    (exact_o, exact_lse), _ = problem.expected()
    for got, exact in ((o, exact_o), (lse, exact_lse)):
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert o[0, :, 2:].isnan().all()
    assert o[1, :, 2:].isnan().all()
    assert (lse[1, 2:] == math.inf).all()
    assert (o[3, :, 2:] == math.inf).all()
    assert o[:, :, :2].isfinite().all()


# --- Nothing to do ---


@pytest.mark.parametrize("page", [0, 16])
def test_no_sequences_and_no_queries(page: int) -> None:
    for q_len, k_lens in ((1, ()), (0, (5, 3))):
        problem = Problem([q_len] * len(k_lens), k_lens, mask=Causal())
        if k_lens:
            o, lse = problem.run(page)
            assert o.shape == (2, 0, 6, 12)
            assert lse.shape == (2, 6, 0)
        else:
            o, _ = problem.run(page, packed=True, tail=3)
            assert not o.any()


def test_an_empty_cache() -> None:
    o, lse = Problem([2, 2], (0, 0), mask=Causal()).run(0, more=0)
    assert not o.any()
    assert (lse == -math.inf).all()
    o, _ = Problem([2, 2], (0, 0), mask=Causal()).run(16, more=0)
    assert not o.any()
